"""The rounds of an answer, for people: accepted, rejected and target tokens in a terminal, as SVG and as HTML."""

from __future__ import annotations

import functools
import itertools
import json
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from failfast_jax.results import Result, Round, fate
from failfast_jax.text_stream import UNFINISHED, text_of
from failfast_jax.util.files import write_atomically

TERMINAL = "-"
ACCEPTED, REJECTED, TARGET = "accepted", "rejected", "target"
KINDS = {ACCEPTED: "drafted and accepted", TARGET: "the target's own", REJECTED: "rejected"}
_RESET = "\033[0m"
_COLOURS = {ACCEPTED: ("\033[32m", _RESET), TARGET: ("\033[34m", _RESET), REJECTED: ("\033[9;31m", _RESET)}
_BRACKETS = {ACCEPTED: ("⟦", "⟧"), TARGET: ("", ""), REJECTED: ("⟪", "⟫")}
"""Marks around tokens of each kind, in a terminal and elsewhere: text rarely holds such brackets."""
_LEVELS = "▁▂▃▄▅▆▇█"
_WIDE = 64
"""Characters of a line in the terminal."""

Part = tuple[str, str, float | None]
"""Kind, text and confidence of a token."""


@functools.cache
def _template(name: str) -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "assets")
    return jinja2.Environment(loader=loader, autoescape=True).get_template(name)


def spans(rounds: Sequence[Round]) -> Iterator[list[tuple[str, int, float | None]]]:
    """Per round, `(kind, token id, confidence or None)` in reading order: the accepted tokens, the target's own tokens
    instead of or after them, and the rejected ones."""
    for entry in rounds:
        kept = min(entry.accepted, len(entry.emitted))
        row = [(ACCEPTED, token, c) for token, c in zip(entry.drafted[:kept], entry.confidence)]
        row += [(TARGET, token, None) for token in entry.emitted[kept:]]
        rejected = zip(entry.drafted[entry.accepted :], entry.confidence[entry.accepted :])
        yield row + [(REJECTED, token, c) for token, c in rejected]


def pieces(ids: Sequence[int], tokenizer: Any = None) -> list[str]:
    """The text that each token of an answer adds. Characters of several tokens stand with the last of them."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    parts, done = [], ""
    for end in range(1, len(ids) + 1):
        text = text_of(tokenizer, ids[:end], skip_special_tokens=False)
        if end < len(ids):
            text = text.rstrip(UNFINISHED)
        parts.append(text[len(done) :] if text.startswith(done) else "")
        done += parts[-1]
    return parts


def _texts(rounds: Sequence[Round], ids: Sequence[int], tokenizer: Any) -> list[list[Part]]:
    """As `spans`, with texts instead of ids: the part of the answer `ids`, or the text of a rejected token alone."""
    parts = iter(pieces(ids, tokenizer))

    def text(kind: str, token: int) -> str:
        return next(parts, "") if kind != REJECTED else "".join(pieces([token], tokenizer))

    return [[(kind, text(kind, token), confidence) for kind, token, confidence in row] for row in spans(rounds)]


def to_terminal(rounds: Sequence[Round], tokenizer: Any = None, colours: bool = True) -> str:
    """The rounds for a terminal: the answer, each token marked with its kind; a strip of draft lengths; and per round
    the emitted and the rejected tokens. Consecutive rounds without a draft are one line.

    Args:
      tokenizer: None: ids are shown.
      colours: marks are ANSI escapes; False: brackets.
    """
    marks = _COLOURS if colours else _BRACKETS
    texts = _texts(rounds, [token for entry in rounds for token in entry.emitted], tokenizer)
    legend = "  ".join(_marked([(kind, name, None)], marks) for kind, name in KINDS.items())
    answer = _marked((part for row in texts for part in row if part[0] != REJECTED), marks)
    heading = "Round, accepted/drafted, tokens expected (if known):"
    return "\n".join([legend, "", answer, "", *_bars(rounds), "", heading, *_lines(rounds, texts, marks)])


def _marked(row: Iterable[Part], marks: Mapping[str, tuple[str, str]]) -> str:
    """The text of tokens, with the marks of their kind around each run of one kind."""
    runs = itertools.groupby(row, operator.itemgetter(0))
    return "".join(f"{marks[kind][0]}{''.join(text for _, text, _ in run)}{marks[kind][1]}" for kind, run in runs)


def _lines(rounds: Sequence[Round], texts: Sequence[list[Part]], marks: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """One line per round, or per run of rounds without a draft."""
    for drafted, run in itertools.groupby(range(len(rounds)), lambda index: bool(rounds[index].drafted)):
        if drafted:
            for index in run:
                entry = rounds[index]
                counts = f"{index + 1:4d} {entry.accepted:3d}/{len(entry.drafted):<3d}"
                expected = "" if entry.expected is None else f"{entry.expected:4.1f} "
                yield f"{counts} {expected}{_marked(texts[index], marks)}".replace("\n", "↵")
            continue
        first, *others = run
        numbers = f"{first + 1:4d}" + (f" to {others[-1] + 1}" if others else "")
        text = "".join(text for index in (first, *others) for _, text, _ in texts[index]).replace("\n", "↵")
        text = text if len(text) <= _WIDE else f"{text[: _WIDE - 1]}…"
        yield f"{numbers}, no draft: {_marked([(TARGET, text, None)], marks)}"


def _bars(rounds: Sequence[Round]) -> list[str]:
    """A heading, and draft lengths as a strip of characters."""
    longest = max((len(entry.drafted) for entry in rounds), default=0)
    if not longest:
        return ["No round had a draft"]
    bars = "".join(_LEVELS[-(-8 * len(entry.drafted) // longest) - 1] if entry.drafted else "·" for entry in rounds)
    heading = f"Draft lengths, one bar per round ({_LEVELS[-1]} {longest} tokens, · no draft):"
    return [heading, *(bars[at : at + _WIDE] for at in range(0, len(bars), _WIDE))]


def _tallest(rounds: Sequence[Round]) -> int:
    """Most rows of a round."""
    return max((max(len(entry.drafted) + 1, len(entry.emitted)) for entry in rounds), default=1)


def strip(rounds: Sequence[Round]) -> str:
    """An SVG of the rounds from left to right: verified rows, accepted and own tokens, expected tokens, passes."""
    return str(_template("rounds_svg.html").module.strip(rounds, _tallest(rounds)))


def _title(number: int, entry: Round) -> str:
    """A round in a line, which hovering shows."""
    text = f"round {number}: {entry.accepted} of {len(entry.drafted)} drafted accepted, {entry.passes} drafter passes"
    if entry.expected is not None:
        took = "" if entry.took is None else f", took {1e3 * entry.took:.1f} ms"
        text += f"; expected {entry.expected:.2f} tokens in {1e3 * entry.seconds:.1f} ms{took}"
    return text


def _section(label: str, result: Result, tokenizer: Any) -> dict[str, Any]:
    stats, rounds = result.stats, result.rounds
    titles = [_title(number, entry) for number, entry in enumerate(rounds, 1)]
    return {
        "label": label,
        "counts": f"{len(result.output_ids)} tokens, {fate(stats.rounds, stats.drafted, stats.accepted)}, "
        f"{stats.drafter_passes} drafter passes, {stats.tokens_per_s:.1f} tokens/s",
        "rounds": rounds,
        "tokens": sum(len(entry.emitted) for entry in rounds),
        "longest": max((len(entry.drafted) for entry in rounds), default=0),
        "tallest": _tallest(rounds),
        "texts": list(zip(titles, _texts(rounds, result.output_ids, tokenizer))),
    }


def page(results: Mapping[str, Result], tokenizer: Any = None) -> str:
    """A self-contained HTML page: answers as text, by label, side by side if there is room. Hovering over a token shows
    its round, its confidence, and the round's expected tokens and time."""
    sections = [_section(label, result, tokenizer) for label, result in results.items()]
    return _template("trace.html").render(kinds=KINDS, sections=sections) + "\n"


def write_trace(result: Result, path: Path, tokenizer: Any = None) -> None:
    """Writes `path`: a page if it ends in .html, the `strip` if in .svg, else one JSON object per round. The path `-`
    is stderr, with the view for a terminal."""
    if str(path) == TERMINAL:
        print(to_terminal(result.rounds, tokenizer, colours=sys.stderr.isatty()), file=sys.stderr)
        return
    if path.suffix.lower() == ".svg":
        content = strip(result.rounds) + "\n"
    elif path.suffix.lower() in (".html", ".htm"):
        content = page({result.method: result}, tokenizer)
    else:
        rows = ({"round": number, **entry.to_dict()} for number, entry in enumerate(result.rounds, 1))
        content = "".join(json.dumps(row) + "\n" for row in rows)
    write_atomically(path, content)
