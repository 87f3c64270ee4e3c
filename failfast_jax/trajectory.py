"""How an answer came about: accepted, rejected and target tokens, for the terminal and as HTML."""

from __future__ import annotations

import html
import itertools
import json
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from failfast_jax.files import write_atomically
from failfast_jax.results import Result, Round, fate
from failfast_jax.text import UNFINISHED, text_of

TERMINAL = "-"
ACCEPTED, REJECTED, TARGET = "accepted", "rejected", "target"

FATES = {ACCEPTED: "drafted and accepted", TARGET: "the target's own", REJECTED: "rejected"}
_RESET = "\033[0m"
_COLOURS = {ACCEPTED: ("\033[32m", _RESET), TARGET: ("\033[34m", _RESET), REJECTED: ("\033[9;31m", _RESET)}
_BRACKETS = {ACCEPTED: ("⟦", "⟧"), TARGET: ("", ""), REJECTED: ("⟪", "⟫")}
"""What stands around tokens by fate, on a terminal and elsewhere: text rarely holds such brackets."""
_LEVELS = "▁▂▃▄▅▆▇█"
_WIDE = 64
"""Characters of a line on the terminal."""
_PIECE = 24
"""Rounds of a piece of the page's strip: what fits the width of a phone."""
_STYLE = """:root { color-scheme: light dark; --fg: #222; --bg: #fff; --dim: #667; --line: #ccd; --ok: #cdeacf;
  --own: #d6e4fb; --bad: #b3322b; --bar: #57a868; --mine: #8fb3f0; --ask: #36c; --hot: #c33; }
@media (prefers-color-scheme: dark) { :root { --fg: #dde; --bg: #15171c; --dim: #99a; --line: #334; --ok: #1f4a2a;
  --own: #1f355f; --bad: #f08a80; --bar: #4c9a5e; --mine: #4a70b8; --ask: #7aa5ff; --hot: #ff7b72; } }
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
.free { fill: none; stroke: var(--dim); stroke-width: .6; }
.kept { fill: var(--bar); } .lost { fill: var(--line); } .asked { fill: var(--ask); } .hoped { fill: var(--hot); }
.own { fill: var(--mine); }"""


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
    if tokenizer is None:
        return lambda token: f"{token} "
    return lambda token: text_of(tokenizer, [token], skip_special_tokens=False)


def pieces(ids: Sequence[int], tokenizer: Any = None) -> list[str]:
    """The text that each token of an answer adds. Characters of several tokens stand with the last of them."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    out, done = [], ""
    for end in range(1, len(ids) + 1):
        whole = text_of(tokenizer, ids[:end], skip_special_tokens=False)
        if end < len(ids):
            whole = whole.rstrip(UNFINISHED)
        new = whole[len(done) :] if whole.startswith(done) else ""
        out.append(new)
        done += new
    return out


Part = tuple[str, str, float | None]
"""A token's fate, text and confidence."""


def _told(rounds: Sequence[Round], ids: Sequence[int], tokenizer: Any) -> Iterator[list[Part]]:
    """As `spans`; instead of its id the text that a token adds to the answer `ids`, or has by itself if rejected."""
    decode, texts = _decoder(tokenizer), iter(pieces(ids, tokenizer))
    for row in spans(rounds):
        yield [(kind, decode(token) if kind == REJECTED else next(texts, ""), c) for kind, token, c in row]


def to_terminal(rounds: Sequence[Round], tokenizer: Any = None, colours: bool = True) -> str:
    """The page for a terminal: the answer, each token marked with its fate; a strip of draft lengths; and round by
    round what was emitted and what was rejected. Rounds in a row that had no draft are one line.

    Args:
      tokenizer: None: ids are shown.
      colours: marks are ANSI escapes; False: brackets.
    """
    marks = _COLOURS if colours else _BRACKETS
    told = list(_told(rounds, [token for entry in rounds for token in entry.emitted], tokenizer))
    legend = "  ".join(_marked([(kind, said, None)], marks) for kind, said in FATES.items())
    answer = _marked((part for row in told for part in row if part[0] != REJECTED), marks)
    heading = "Round, accepted/drafted, tokens expected (where that was weighed):"
    return "\n".join([legend, "", answer, "", *_bars(rounds), "", heading, *_lines(rounds, told, marks)])


def _marked(row: Iterable[Part], marks: Mapping[str, tuple[str, str]]) -> str:
    """The text of tokens, those of one fate in a row between the marks of that fate."""
    out = []
    for kind, run in itertools.groupby(row, operator.itemgetter(0)):
        before, behind = marks[kind]
        out.append(f"{before}{''.join(text for _, text, _ in run)}{behind}")
    return "".join(out)


def _lines(rounds: Sequence[Round], told: Sequence[list[Part]], marks: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """The rounds, a line each, or a line for some in a row that had no draft."""
    for drafted, run in itertools.groupby(range(len(rounds)), lambda index: bool(rounds[index].drafted)):
        if drafted:
            for index in run:
                entry = rounds[index]
                hoped = "" if entry.expected is None else f"{entry.expected:4.1f} "
                line = (
                    f"{index + 1:4d} {entry.accepted:3d}/{len(entry.drafted):<3d} {hoped}{_marked(told[index], marks)}"
                )
                yield line.replace("\n", "↵")
            continue
        first, *others = run
        which = f"{first + 1:4d}" + (f" to {others[-1] + 1}" if others else "")
        text = "".join(text for index in (first, *others) for _, text, _ in told[index]).replace("\n", "↵")
        text = text if len(text) <= _WIDE else f"{text[: _WIDE - 1]}…"
        yield f"{which}, no draft: {_marked([(TARGET, text, None)], marks)}"


def _bars(rounds: Sequence[Round]) -> list[str]:
    """A strip of draft lengths in characters, and before it what it is."""
    longest = max((len(entry.drafted) for entry in rounds), default=0)
    if not longest:
        return ["No round had a draft"]
    bars = "".join(_LEVELS[-(-8 * len(entry.drafted) // longest) - 1] if entry.drafted else "·" for entry in rounds)
    said = f"Draft lengths, a bar a round ({_LEVELS[-1]} {longest} tokens, · no draft):"
    return [said, *(bars[at : at + _WIDE] for at in range(0, len(bars), _WIDE))]


def strip(rounds: Sequence[Round], tallest: int | None = None) -> str:
    """The rounds from left to right as an SVG: rows that were verified (outlined), tokens that were emitted (filled,
    accepted ones below the target's own), under `--policy auto` how many were expected (a dot), and below which rounds
    asked a model (a tick).

    Args:
      tallest: rows of the highest round that there is room for; None: of these.
    """
    wide, high, step, left = 9, 8, 3, 2
    floor = high * (tallest or _tallest(rounds)) + 6
    marks = []
    for number, entry in enumerate(rounds):
        at = left + number * (wide + step)

        def box(rows: int, style: str, at: int = at) -> str:
            return f'<rect x="{at}" y="{floor - high * rows}" width="{wide}" height="{high * rows}" {style}/>'

        marks.append(box(len(entry.emitted), 'class="own" fill="#8fb3f0"'))
        marks.append(box(min(entry.accepted, len(entry.emitted)), 'class="kept" fill="#7cc48a"'))
        marks.append(box(len(entry.drafted) + 1, 'class="free" fill="none" stroke="#667"'))
        if entry.expected is not None:
            middle, height = at + wide / 2, floor - high * entry.expected
            marks.append(f'<circle cx="{middle}" cy="{height:.1f}" r="2.5" class="hoped" fill="#c33"/>')
        if entry.passes:
            marks.append(f'<rect x="{at}" y="{floor + 4}" width="{wide}" height="3" class="asked" fill="#36c"/>')
    size = f'width="{2 * left + len(rounds) * (wide + step)}" height="{floor + 10}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(marks)}</svg>'


def _tallest(rounds: Sequence[Round]) -> int:
    return max((max(len(entry.drafted) + 1, len(entry.emitted)) for entry in rounds), default=1)


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
    out, told = [], _told(result.rounds, result.output_ids, tokenizer)
    for number, (entry, row) in enumerate(zip(result.rounds, told), 1):
        said = _said_of(number, entry)
        for kind, text, confidence in row:
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
    rounds, tallest = result.rounds, _tallest(result.rounds)
    # Pieces side by side wrap where the page is narrow.
    pieces_of_strip = " ".join(strip(rounds[at : at + _PIECE], tallest) for at in range(0, len(rounds), _PIECE))
    return (
        f"<section><h2>{html.escape(label)}</h2><small>{counts}</small>"
        f"<figure>{along(result.rounds)}<figcaption>Along the answer: drafted (grey) and accepted (green)</figcaption>"
        f'</figure><p class="answer">{_answer(result, tokenizer)}</p>'
        f"<figure>{pieces_of_strip}<figcaption>Round by round: rows verified (outline), accepted (green) and the "
        "target's own tokens (blue), tokens expected (dot), a model asked (tick)</figcaption></figure></section>"
    )


def page(results: Mapping[str, Result], tokenizer: Any = None) -> str:
    """A self-contained HTML page: answers as text, by label, side by side where there is room. Hovering a token shows
    its round, its confidence, and what the round was expected to bring and what it took."""
    sections = "".join(_section(label, result, tokenizer) for label, result in results.items())
    legend = "".join(f'<span class="{kind}">{text}</span> ' for kind, text in FATES.items())
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
        print(to_terminal(result.rounds, tokenizer, colours=sys.stderr.isatty()), file=sys.stderr)
        return
    if path.suffix.lower() == ".svg":
        write_atomically(path, strip(result.rounds) + "\n")
        return
    if path.suffix.lower() in (".html", ".htm"):
        write_atomically(path, page({result.method: result}, tokenizer))
        return
    rows = ({"round": number, **entry.to_dict()} for number, entry in enumerate(result.rounds, 1))
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
