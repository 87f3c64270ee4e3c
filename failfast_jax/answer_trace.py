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

from failfast_jax.results import Result, Round, acceptance_summary
from failfast_jax.text_stream import TextStream, special_tokens
from failfast_jax.util.files import write_atomically

TERMINAL = "-"
ACCEPTED, REJECTED, TARGET = "accepted", "rejected", "target"
KINDS = {ACCEPTED: "drafted and accepted", TARGET: "the target's own", REJECTED: "rejected"}
_RESET = "\033[0m"
_COLOURS = {ACCEPTED: ("\033[32m", _RESET), TARGET: ("\033[34m", _RESET), REJECTED: ("\033[9;31m", _RESET)}
_BRACKETS = {ACCEPTED: ("⟦", "⟧"), TARGET: ("", ""), REJECTED: ("⟪", "⟫")}
"""Marks around tokens of each kind, in a terminal and elsewhere: text rarely holds such brackets."""

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
    """The text that each token of an answer adds; special tokens by their names. Characters of several tokens stand
    with the last of them."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    stream, names = TextStream(tokenizer), special_tokens(tokenizer)
    return [stream.add([token], last=end == len(ids)) + names.get(token, "") for end, token in enumerate(ids, 1)]


def _texts(rounds: Sequence[Round], ids: Sequence[int], tokenizer: Any) -> list[list[Part]]:
    """As `spans`, with texts instead of ids: the part of the answer `ids`, or the text of a rejected token alone."""
    parts = iter(pieces(ids, tokenizer))

    def text(kind: str, token: int) -> str:
        return next(parts, "") if kind != REJECTED else "".join(pieces([token], tokenizer))

    return [[(kind, text(kind, token), confidence) for kind, token, confidence in row] for row in spans(rounds)]


def to_terminal(rounds: Sequence[Round], tokenizer: Any = None, colours: bool = True) -> str:
    """The rounds for a terminal: the answer, each token marked with its kind; and the emitted and the rejected tokens
    of each round that had a draft.

    Args:
      tokenizer: None: ids are shown.
      colours: marks are ANSI escapes; False: brackets.
    """
    marks = _COLOURS if colours else _BRACKETS

    def marked(row: Iterable[Part]) -> str:
        """The text of tokens, with the marks of their kind around each run of one kind."""
        runs = itertools.groupby(row, operator.itemgetter(0))
        return "".join(f"{marks[kind][0]}{''.join(text for _, text, _ in run)}{marks[kind][1]}" for kind, run in runs)

    texts = _texts(rounds, [token for entry in rounds for token in entry.emitted], tokenizer)
    legend = "  ".join(marked([(kind, name, None)]) for kind, name in KINDS.items())
    answer = marked(part for row in texts for part in row if part[0] != REJECTED)
    lines = [f"Rounds with a draft: accepted/drafted{', tokens expected' if _has_forecast(rounds) else ''}:"]
    for number, (entry, row) in enumerate(zip(rounds, texts), 1):
        if entry.drafted:
            expected = "" if entry.expected is None else f"{entry.expected:4.1f} "
            counts = f"{number:4d} {entry.accepted:3d}/{len(entry.drafted):<3d} {expected}"
            lines.append(f"{counts}{marked(row)}".replace("\n", "↵"))
    return "\n".join([legend, "", answer, "", *lines])


def _tallest(rounds: Sequence[Round]) -> int:
    """Maximum rows of a round."""
    return max((max(len(entry.drafted) + 1, len(entry.emitted)) for entry in rounds), default=1)


def _has_forecast(rounds: Sequence[Round]) -> bool:
    """True if any round has expected tokens, as with `auto`."""
    return any(entry.expected is not None for entry in rounds)


def strip(rounds: Sequence[Round]) -> str:
    """An SVG of the rounds from left to right: verified rows, accepted and own tokens; with `auto` those expected."""
    return str(_template("rounds_svg.html").module.strip(rounds, _tallest(rounds)))


def page(results: Mapping[str, Result], tokenizer: Any = None) -> str:
    """A self-contained HTML page: answers as text, by label, side by side if there is room. Hovering over a token shows
    its round, its confidence, and the round's expected tokens and time."""
    sections = [
        {
            "label": label,
            "result": result,
            "fate": acceptance_summary(result.stats.rounds, result.stats.drafted, result.stats.accepted),
            "longest": max((len(entry.drafted) for entry in result.rounds), default=0),
            "tallest": _tallest(result.rounds),
            "has_forecast": _has_forecast(result.rounds),
            "texts": _texts(result.rounds, result.output_ids, tokenizer),
        }
        for label, result in results.items()
    ]
    return _template("trace.html").render(kinds=KINDS, sections=sections) + "\n"


def write_trace(result: Result, path: Path, tokenizer: Any = None, label: str | None = None) -> None:
    """Writes `path`: a page if it ends in .html, the `strip` if in .svg, else one JSON object per round. The path `-`
    is stderr, with the view for a terminal. `label` is the page's heading; default: the method."""
    if str(path) == TERMINAL:
        print(to_terminal(result.rounds, tokenizer, colours=sys.stderr.isatty()), file=sys.stderr)
        return
    if path.suffix.lower() == ".svg":
        content = strip(result.rounds) + "\n"
    elif path.suffix.lower() in (".html", ".htm"):
        content = page({label or result.method: result}, tokenizer)
    else:
        rows = ({"round": number, **entry.to_dict()} for number, entry in enumerate(result.rounds, 1))
        content = "".join(json.dumps(row) + "\n" for row in rows)
    write_atomically(path, content)
