"""How an answer came about: accepted, rejected and target tokens, for the terminal and as HTML."""

from __future__ import annotations

import html
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from failfast_jax.files import write_atomically
from failfast_jax.results import Result, Round, fate

TERMINAL = "-"
ACCEPTED, REJECTED, TARGET = "accepted", "rejected", "target"

_ANSI = {ACCEPTED: "\033[32m", REJECTED: "\033[9;31m", TARGET: "\033[1;34m"}
_RESET = "\033[0m"
_STYLE = """:root { color-scheme: light dark; --fg: #222; --bg: #fff; --dim: #667; --line: #ccd; --ok: #cdeacf;
  --own: #d6e4fb; --bad: #b3322b; --bar: #57a868; --ask: #36c; --hot: #c33; }
@media (prefers-color-scheme: dark) { :root { --fg: #dde; --bg: #15171c; --dim: #99a; --line: #334; --ok: #1f4a2a;
  --own: #1f355f; --bad: #f08a80; --bar: #4c9a5e; --ask: #7aa5ff; --hot: #ff7b72; } }
body { font: 16px/1.6 system-ui, sans-serif; margin: 0 auto; padding: 1em; max-width: 110em; color: var(--fg);
  background: var(--bg); }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30em), 1fr)); gap: 2em; }
section { min-width: 0; max-width: 60em; } h1 { font-size: 1.3em; } h2 { font-size: 1.1em; margin-bottom: 0; }
.answer { white-space: pre-wrap; overflow-wrap: anywhere; }
.accepted { background: var(--ok); } .target { background: var(--own); border-radius: 2px; }
.rejected { color: var(--bad); text-decoration: line-through; opacity: .75; display: none; }
body:has(#drafts:checked) .rejected, .legend .rejected { display: inline; }
small, figcaption, .legend { color: var(--dim); font-size: .85em; } figure { margin: 1em 0; }
.chart { width: 100%; height: 7em; display: block; border-bottom: 1px solid var(--line); }
.scroll { overflow-x: auto; } .free { fill: none; stroke: var(--dim); stroke-width: .6; }
.kept { fill: var(--bar); } .lost { fill: var(--line); } .asked { fill: var(--ask); } .hoped { fill: var(--hot); }"""


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
    """One line a round, coloured with ANSI escapes; rounds without drafts, one after the other, share a line."""
    decode = _decoder(tokenizer)
    lines, begin = [], 1
    for drafted, group in itertools.groupby(zip(rounds, spans(rounds)), key=lambda found: bool(found[0].drafted)):
        together = list(group)
        for run in [[one] for one in together] if drafted else [together]:
            row = [span for _, spans_of in run for span in spans_of]
            text = "".join(f"{_ANSI[kind]}{decode(token)}{_RESET}" for kind, token, _ in row).replace("\n", "\\n")
            entry, last = run[0][0], begin + len(run) - 1
            numbers = f"{begin:4d}" if last == begin else f"{begin}-{last}".rjust(4)
            lines.append(f"{numbers} {entry.accepted:3d}/{len(entry.drafted):<3d} {text}")
            begin = last + 1
    return "\n".join(lines)


def pieces(ids: Sequence[int], tokenizer: Any = None) -> list[str]:
    """The text that each token of an answer adds. Characters of several tokens stand with the last of them."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    out, done = [], ""
    for end in range(1, len(ids) + 1):
        whole = tokenizer.decode(ids[:end])
        if end < len(ids):
            whole = whole.rstrip("\ufffd")
        new = whole[len(done) :] if whole.startswith(done) else ""
        out.append(new)
        done += new
    return out


def strip(rounds: Sequence[Round]) -> str:
    """The rounds from left to right as an SVG: rows that were verified (outlined), tokens that were emitted (filled),
    under `--policy auto` how many were expected (a dot), and below which rounds asked a model (a tick)."""
    wide, high, step, left = 9, 8, 3, 8
    tallest = max((max(len(entry.drafted) + 1, len(entry.emitted)) for entry in rounds), default=1)
    floor = high * tallest + 6
    marks = []
    for number, entry in enumerate(rounds):
        at = left + number * (wide + step)

        def box(rows: int, style: str, at: int = at) -> str:
            return f'<rect x="{at}" y="{floor - high * rows}" width="{wide}" height="{high * rows}" {style}/>'

        marks.append(box(len(entry.emitted), 'class="kept" fill="#7cc48a"'))
        marks.append(box(len(entry.drafted) + 1, 'class="free" fill="none" stroke="#667"'))
        if entry.expected is not None:
            middle, height = at + wide / 2, floor - high * entry.expected
            marks.append(f'<circle cx="{middle}" cy="{height:.1f}" r="2.5" class="hoped" fill="#c33"/>')
        if entry.passes:
            marks.append(f'<rect x="{at}" y="{floor + 4}" width="{wide}" height="3" class="asked" fill="#36c"/>')
    size = f'width="{2 * left + len(rounds) * (wide + step)}" height="{floor + 10}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(marks)}</svg>'


def along(rounds: Sequence[Round]) -> str:
    """Along the answer, token by token, an SVG as wide as its place: how long the draft of each round was, and how much
    of it was accepted. Wide, filled bars are easy regions, narrow grey ones hard regions."""
    total = max(sum(len(entry.emitted) for entry in rounds), 1)
    tallest = max((len(entry.drafted) for entry in rounds), default=0) or 1
    marks, at = [], 0
    for number, entry in enumerate(rounds, 1):
        width = len(entry.emitted)
        said = f"round {number}: {entry.accepted} of {len(entry.drafted)} accepted, tokens {at + 1} to {at + width}"
        bars = "".join(
            f'<rect x="{at}" y="{tallest - rows}" width="{width}" height="{rows}" class="{kind}"/>'
            for rows, kind in ((len(entry.drafted), "lost"), (entry.accepted, "kept"))
            if rows
        )
        marks.append(f"<g><title>{said}</title>{bars}</g>" if bars else "")
        at += width
    box = f'viewBox="0 0 {total} {tallest}" preserveAspectRatio="none"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" {box}>{"".join(marks)}</svg>'


def _said_of(number: int, entry: Round) -> str:
    """A round in a line: what hovering shows."""
    text = f"round {number}: {entry.accepted} of {len(entry.drafted)} drafted accepted, {entry.passes} drafter passes"
    if entry.expected is not None:
        took = "" if entry.took is None else f", took {1e3 * entry.took:.1f} ms"
        text += f"; expected {entry.expected:.2f} tokens in {1e3 * entry.seconds:.1f} ms{took}"
    return text


def _answer(result: Result, tokenizer: Any) -> str:
    """The answer, each token in the colour of its fate, rejected drafts behind the tokens that took their place."""
    decode, texts, out = _decoder(tokenizer), iter(pieces(result.output_ids, tokenizer)), []
    for number, (entry, row) in enumerate(zip(result.rounds, spans(result.rounds)), 1):
        said = _said_of(number, entry)
        for kind, token, confidence in row:
            text = decode(token) if kind == REJECTED else next(texts, "")
            sure = "" if confidence is None else f"confidence {confidence:.3f}; "
            title = html.escape(sure + said, quote=True)
            out.append(f'<span class="{kind}" title="{title}">{html.escape(text)}</span>')
    return "".join(out)


def _section(label: str, result: Result, tokenizer: Any) -> str:
    stats = result.stats
    counts = (
        f"{len(result.output_ids)} tokens, {fate(stats.rounds, stats.drafted, stats.accepted)}, "
        f"{stats.drafter_passes} drafter passes, {stats.tokens_per_s:.1f} tokens/s"
    )
    return (
        f"<section><h2>{html.escape(label)}</h2><small>{counts}</small>"
        f"<figure>{along(result.rounds)}<figcaption>Along the answer: drafted (grey) and accepted (green)</figcaption>"
        f'</figure><p class="answer">{_answer(result, tokenizer)}</p>'
        f'<figure><div class="scroll">{strip(result.rounds)}</div><figcaption>Round by round: rows verified (outline), '
        "tokens emitted (filled), expected (dot), a model asked (tick)</figcaption></figure></section>"
    )


def page(results: Mapping[str, Result], tokenizer: Any = None) -> str:
    """A self-contained HTML page: answers as text, by label, side by side where there is room. Hovering a token shows
    its round, its confidence, and what the round was expected to bring and what it took."""
    sections = "".join(_section(label, result, tokenizer) for label, result in results.items())
    legend = "".join(
        f'<span class="{kind}">{text}</span> '
        for kind, text in ((ACCEPTED, "drafted and accepted"), (TARGET, "the target's own"), (REJECTED, "rejected"))
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>FailFast trajectory</title>'
        f"<style>{_STYLE}</style><body><h1>How the answer came about</h1>"
        f'<p class="legend">{legend} <label><input type="checkbox" id="drafts"> show rejected drafts</label></p>'
        f"<main>{sections}</main></body></html>\n"
    )


def write_trace(result: Result, path: Path, tokenizer: Any = None) -> None:
    """Writes `path`: a page if it ends in .html, the `strip` if in .svg, else one JSON object a round. The path `-` is
    stderr, with the view for a terminal."""
    if str(path) == TERMINAL:
        text = to_terminal(result.rounds, tokenizer)
        print(text if sys.stderr.isatty() else re.sub("\033\\[[0-9;]*m", "", text), file=sys.stderr)
        return
    if path.suffix.lower() == ".svg":
        write_atomically(path, strip(result.rounds) + "\n")
        return
    if path.suffix.lower() in (".html", ".htm"):
        write_atomically(path, page({result.method: result}, tokenizer))
        return
    rows = ({"round": number, **entry.to_dict()} for number, entry in enumerate(result.rounds, 1))
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
