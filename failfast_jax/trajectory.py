"""How an answer came about: accepted, rejected and target tokens, for the terminal and as HTML."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from failfast_jax.results import Result, Round

ACCEPTED, REJECTED, TARGET = "accepted", "rejected", "target"

_ANSI = {ACCEPTED: "\033[32m", REJECTED: "\033[9;31m", TARGET: "\033[1;34m"}
_RESET = "\033[0m"
_STYLE = """body { font: 15px/1.6 sans-serif; max-width: 60em; margin: 2em auto; color: #222; background: #fff; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid #ccc; padding-left: 1em; }
.accepted { background: #d7f0d9; } .rejected { color: #a33; text-decoration: line-through; opacity: 0.6; }
.target { outline: 1px solid #36c; background: #dfe8fb; } small { color: #666; }"""


def spans(rounds: Sequence[Round]) -> Iterator[list[tuple[str, int, float | None]]]:
    """Per round, `(kind, token id, confidence or None)` in reading order: what was accepted, what the
    target put instead or on top, and what was rejected for it."""
    for entry in rounds:
        kept = min(entry.accepted, len(entry.emitted))
        row = [(ACCEPTED, token, c) for token, c in zip(entry.drafted[:kept], entry.confidence)]
        row += [(TARGET, token, None) for token in entry.emitted[kept:]]
        rejected = zip(entry.drafted[entry.accepted :], entry.confidence[entry.accepted :])
        yield row + [(REJECTED, token, c) for token, c in rejected]


def _decoder(tokenizer: Any) -> Callable[[int], str]:
    return (lambda token: f"{token} ") if tokenizer is None else (lambda token: tokenizer.decode([token]))


def to_terminal(rounds: Sequence[Round], tokenizer: Any = None) -> str:
    """One line a round, coloured with ANSI escapes."""
    decode = _decoder(tokenizer)
    lines = []
    for number, (entry, row) in enumerate(zip(rounds, spans(rounds)), 1):
        text = "".join(f"{_ANSI[kind]}{decode(token)}{_RESET}" for kind, token, _ in row).replace("\n", "\\n")
        lines.append(f"{number:4d} {entry.accepted:3d}/{len(entry.drafted):<3d} {text}")
    return "\n".join(lines)


def strip(result: Result) -> str:
    """The rounds from left to right as an SVG: rows that were verified (outlined), tokens that were emitted (filled),
    under `--policy auto` how many were expected (a dot), and below which rounds asked a model (a tick)."""
    wide, high, step, left = 9, 8, 3, 8
    tallest = max((max(len(entry.drafted) + 1, len(entry.emitted)) for entry in result.rounds), default=1)
    floor = high * tallest + 6
    marks = []
    for number, entry in enumerate(result.rounds):
        at = left + number * (wide + step)

        def box(rows: int, style: str, at: int = at) -> str:
            return f'<rect x="{at}" y="{floor - high * rows}" width="{wide}" height="{high * rows}" {style}/>'

        marks.append(box(len(entry.emitted), 'fill="#7cc48a"'))
        marks.append(box(len(entry.drafted) + 1, 'fill="none" stroke="#667"'))
        if entry.expected is not None:
            marks.append(f'<circle cx="{at + wide / 2}" cy="{floor - high * entry.expected:.1f}" r="2.5" fill="#c33"/>')
        if entry.passes:
            marks.append(f'<rect x="{at}" y="{floor + 4}" width="{wide}" height="3" fill="#36c"/>')
    size = f'width="{2 * left + len(result.rounds) * (wide + step)}" height="{floor + 10}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(marks)}</svg>'


def to_html(result: Result, tokenizer: Any = None) -> str:
    """A self-contained page; hovering a drafted token shows its confidence."""
    decode = _decoder(tokenizer)
    stats = result.stats
    body = []
    for number, (entry, row) in enumerate(zip(result.rounds, spans(result.rounds)), 1):
        tokens = "".join(
            f'<span class="{kind}"{"" if c is None else f" title={chr(34)}confidence {c:.3f}{chr(34)}"}>'
            f"{html.escape(decode(token))}</span>"
            for kind, token, c in row
        )
        passes = f"{entry.passes} drafter passes"
        if entry.expected is not None:
            took = "" if entry.took is None else f", took {1e3 * entry.took:.1f}"
            passes += f", expected {entry.expected:.2f} tokens in {1e3 * entry.seconds:.1f} ms{took}"
        body.append(f"<pre><small>{number}: {entry.accepted}/{len(entry.drafted)}, {passes}</small>\n{tokens}</pre>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>FailFast trajectory</title>'
        f"<style>{_STYLE}</style><body><h1>{html.escape(result.method)}</h1>"
        f"<p>{len(result.output_ids)} tokens in {stats.rounds} rounds, {stats.accepted} of {stats.drafted} drafted "
        f"tokens accepted.</p>{strip(result)}<p>"
        f'<span class="accepted">accepted</span> <span class="target">the target\'s own</span> '
        f'<span class="rejected">rejected</span></p>{"".join(body)}</body></html>\n'
    )


def write_trace(result: Result, path: Path, tokenizer: Any = None) -> None:
    """Writes `path`: a page if it ends in .html, the `strip` if in .svg, else one JSON object a round."""
    if path.suffix.lower() == ".svg":
        path.write_text(strip(result) + "\n", encoding="utf-8")
        return
    if path.suffix.lower() in (".html", ".htm"):
        path.write_text(to_html(result, tokenizer), encoding="utf-8")
        return
    rows = ({"round": number, **entry.to_dict()} for number, entry in enumerate(result.rounds, 1))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
