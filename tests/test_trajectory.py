"""Pages that show how an answer came about: its text whole, each token with its fate, nothing from elsewhere."""

from __future__ import annotations

import re

import pytest
from checkpoint_files import default_target

from failfast_jax import trajectory
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.results import Result, Round, Stats

TEXT = 'if n < 2:\n    return "日本語 é 🎉"\n'


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(default_target())


def result_of(ids: list[int], drafts: list[tuple[int, list[int]]]) -> Result:
    """An answer whose rounds drafted these tokens, so many of which were accepted."""
    rounds, at = [], 0
    for accepted, drafted in drafts:
        emitted = ids[at : at + accepted + 1]
        rounds.append(Round(drafted, [0.5] * len(drafted), accepted, emitted, passes=1, expected=1.5, seconds=0.01))
        at += len(emitted)
    counts = dict.fromkeys(("drafted", "accepted", "drafter_passes", "target_passes"), 1)
    times = {"load_s": 0.0, "compile_s": 0.0, "prefill_s": 0.0, "decode_s": 1.0, "tokens_per_s": float(len(ids))}
    stats = Stats(rounds=len(rounds), **counts, **times, compiles=0, cache_hits=0, host_syncs=1)
    return Result([1], ids, None, "length", "lookup", stats, rounds)


@pytest.fixture(scope="module")
def result(tokenizer):
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    drafts = [(2, [*ids[:2], 5, 6])]
    drafts += [(0, []) for _ in ids[3:]]
    return result_of(ids, drafts)


def test_pieces_are_the_text(tokenizer, result):
    """Tokens may end inside a character: what a reader sees is whole, in one place."""
    pieces = trajectory.pieces(result.output_ids, tokenizer)
    assert "".join(pieces) == TEXT and not any("\ufffd" in piece for piece in pieces)
    assert trajectory.pieces([3, 4]) == ["3 ", "4 "]


def test_a_page_holds_the_text_and_every_fate(tokenizer, result):
    page = trajectory.page({"a <method>": result, "other": result}, tokenizer)
    sections = re.findall(r'<p class="answer">(.*?)</p>', page, re.S)
    assert len(sections) == 2 and "<h2>a &lt;method&gt;</h2>" in page
    kinds = re.findall(r'<span class="(\w+)" title="([^"]*)">', sections[0])
    assert [kind for kind, _ in kinds[:5]] == ["accepted", "accepted", "target", "rejected", "rejected"]
    assert kinds[0][1].startswith("confidence 0.500; round 1: 2 of 4 drafted accepted")
    assert "expected 1.50 tokens in 10.0 ms" in kinds[0][1]
    kept = re.sub(r'<span class="rejected".*?</span>', "", sections[0], flags=re.S)
    assert re.sub(r"<[^>]*>", "", kept).replace("&lt;", "<").replace("&quot;", '"') == TEXT
    assert "prefers-color-scheme: dark" in page and not re.search(r"(src|href)=", page)  # works offline
    assert page.count('class="chart"') == 2 and "round 1: 2 of 4 accepted, tokens 1 to 3" in page


def test_traces_by_name(tmp_path, tokenizer, result, capsys):
    from pathlib import Path

    for name, begins in (("a.html", "<!doctype"), ("a.svg", "<svg"), ("a.jsonl", '{"round": 1')):
        trajectory.write_trace(result, tmp_path / name, tokenizer)
        assert (tmp_path / name).read_text().startswith(begins)
    trajectory.write_trace(result, Path("-"), tokenizer)
    said = capsys.readouterr().err  # no terminal: no colours
    assert said.startswith("   1   2/4") and "\033" not in said


def test_rounds_without_drafts_share_a_line_of_the_terminal():
    lines = trajectory.to_terminal(result_of([*range(3, 12)], [(1, [3]), (0, []), (0, []), (0, []), (0, [7])]).rounds)
    plain = [re.sub("\033\\[[0-9;]*m", "", line) for line in lines.splitlines()]
    assert plain == ["   1   1/1   3 4 ", " 2-4   0/0   5 6 7 ", "   5   0/1   8 7 "]
