"""Pages that show the rounds of an answer: its text whole, each token with its kind, nothing from elsewhere."""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path

import pytest
from checkpoint_files import default_target

from failfast_jax import answer_trace
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.results import Result, Round, Stats

TEXT = 'if n < 2:\n    return "日本語 é 🎉"\n'


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(default_target())


def result_of(ids: list[int], drafts: list[tuple[int, list[int]]]) -> Result:
    """An answer whose rounds drafted these tokens, of which so many were accepted."""
    rounds, at = [], 0
    for accepted, drafted in drafts:
        emitted = ids[at : at + accepted + 1]
        rounds.append(Round(drafted, [0.5] * len(drafted), accepted, emitted, passes=1, expected=1.5, seconds=0.01))
        at += len(emitted)
    needed = [field.name for field in dataclasses.fields(Stats) if field.default is dataclasses.MISSING]
    stats = Stats(**{name: 1 for name in needed} | {"rounds": len(rounds)})
    return Result([1], ids, None, "length", "lookup", stats, rounds)


@pytest.fixture(scope="module")
def result(tokenizer):
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    return result_of(ids, [(2, [*ids[:2], 5, 6]), *[(0, []) for _ in ids[3:]]])


def test_pieces_are_the_text(tokenizer, result):
    """Tokens may end inside a character: readers see it whole, in one place. Special tokens have their names."""
    pieces = answer_trace.pieces(result.output_ids, tokenizer)
    assert "".join(pieces) == TEXT and not any("\ufffd" in piece for piece in pieces)
    assert answer_trace.pieces([3, 4]) == ["3 ", "4 "]
    assert answer_trace.pieces([tokenizer.convert_tokens_to_ids("<|im_end|>")], tokenizer) == ["<|im_end|>"]


def test_a_page_holds_the_text_and_every_kind(tokenizer, result):
    page = answer_trace.page({"a <method>": result, "other": result}, tokenizer)
    sections = re.findall(r'<p class="answer">(.*?)</p>', page, re.S)
    assert len(sections) == 2 and "<h2>a &lt;method&gt;</h2>" in page
    spans = re.findall(r'<span class="(\w+)" title="([^"]*)">', sections[0])
    assert [kind for kind, _ in spans[:5]] == ["accepted", "accepted", "target", "rejected", "rejected"]
    assert spans[0][1].split("; ") == [
        "confidence 0.500",
        "round 1: 2 of 4 drafted accepted, 1 drafter passes",
        "expected 1.50 tokens in 10.0 ms",
    ]
    kept = re.sub(r'<span class="rejected".*?</span>', "", sections[0], flags=re.S)
    assert html.unescape(re.sub(r"<[^>]*>", "", kept)) == TEXT
    assert "prefers-color-scheme: dark" in page and not re.search(r"(src|href)=", page)  # works offline
    assert page.count('class="chart"') == 2 and "round 1: 2 of 4 accepted, tokens 1 to 3" in page


def test_marks_of_auto_stand_where_something_was_expected(tokenizer, result):
    """Methods without a policy show rounds and nothing else."""
    rounds = [dataclasses.replace(entry, expected=None, seconds=None) for entry in result.rounds]
    for shown, is_marked in ((result, True), (dataclasses.replace(result, rounds=rounds), False)):
        page, terminal = answer_trace.page({"x": shown}, tokenizer), answer_trace.to_terminal(shown.rounds, tokenizer)
        marks = (
            "tokens expected (dot), a model asked (tick)" in page,
            'class="asked"' in page,
            'class="hoped"' in page,
        )
        assert marks == (is_marked,) * 3 and ("expected" in terminal) == is_marked


def test_traces_by_name(tmp_path, tokenizer, result, capsys):
    for name, begins in (("a.html", "<!doctype"), ("a.svg", "<svg"), ("a.jsonl", '{"round": 1')):
        answer_trace.write_trace(result, tmp_path / name, tokenizer)
        assert (tmp_path / name).read_text().startswith(begins)
    answer_trace.write_trace(result, Path("-"), tokenizer)
    # No terminal: no colours.
    assert capsys.readouterr().err == answer_trace.to_terminal(result.rounds, tokenizer, colours=False) + "\n"


def test_the_view_for_a_terminal(tokenizer, result):
    """The answer with its kinds in colours or brackets, and the rounds that had a draft."""
    plain = answer_trace.to_terminal(result.rounds, tokenizer, colours=False)
    _, answer, rounds = plain.split("\n\n")
    assert answer + "\n" == TEXT.replace("if n", "⟦if n⟧") and "\033" not in plain
    rejected = tokenizer.decode([5]) + tokenizer.decode([6])
    assert rounds.splitlines()[2:] == [f"   1   2/4    1.5 ⟦if n⟧ <⟪{rejected}⟫"]
    coloured = answer_trace.to_terminal(result.rounds, tokenizer)
    assert "\033[32mif n\033[0m\033[34m <" in coloured and f"\033[9;31m{rejected}\033[0m" in coloured
    assert answer_trace.to_terminal([])


def test_strips_have_the_colours_of_the_text_and_fit_the_page():
    picture = answer_trace.strip(result_of([1, 2, 3, 4], [(2, [1, 2, 9]), (0, [])]).rounds)
    heights = {kind: re.findall(rf'height="(\d+)" class="{kind}"', picture) for kind in ("kept", "own")}
    assert heights == {"kept": ["16", "0"], "own": ["24", "8"]}
    page = answer_trace.page({"m": result_of(list(range(100)), [(0, []) for _ in range(100)])})
    assert page.count("<svg") == 1 + 5 and max(map(int, re.findall(r'width="(\d+)" height="\d+">', page))) < 390 - 32
