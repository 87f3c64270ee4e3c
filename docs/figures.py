"""Draws the pictures of the pages from answers that it has written for them: `python docs/figures.py`.

`expansion.svg` is of the tiny random pair of the tests, whose drafts show how Algorithm 1 goes and nothing about
quality; `rounds.svg` and `economics.svg` are of the default pair, with what `auto` chose on this machine. A minute on
two cores.
"""

from __future__ import annotations

import html
from pathlib import Path

from failfast_jax import FailFast, Result, enable_compile_cache
from failfast_jax.answer_trace import ACCEPTED, REJECTED, TARGET, spans, write_trace
from failfast_jax.results import Round

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "tests" / "fixtures" / "golden"
TAU, CHUNK = 0.45, 10
CHUNK_COLOURS = ("#4a7fb5", "#7fb069")
FILLS = {ACCEPTED: "#d7f0d9", REJECTED: "#f6e3e3", TARGET: "#dfe8fb"}
STROKES = {ACCEPTED: "#5aa469", REJECTED: "#c88", TARGET: "#3366cc"}
QUESTION = "Write a Python function that adds two numbers, and then one that multiplies them."
LONGER = "Write a Python class for a bank account, with tests."


def svg(width: float, height: float, marks: list[str]) -> str:
    """A picture on white, so that it can be read on any page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(marks)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, **style: str) -> str:
    """Words at a place."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{html.escape(words)}</text>'


def expansion(rounds: list[Round]) -> str:
    """Confidences of some drafts, chunk by chunk, above a line at tau."""
    left, high, gap, bar = 60, 70, 34, 9
    marks, longest = [], max(len(entry.drafted) for entry in rounds)
    for row, entry in enumerate(rounds):
        floor = 24 + row * (high + gap) + high
        for place, confidence in enumerate(entry.confidence):
            colour = CHUNK_COLOURS[place // CHUNK % 2] if confidence >= TAU else "#cc3333"
            at = left + place * (bar + 2)
            top = high * confidence
            marks.append(f'<rect x="{at}" y="{floor - top:.1f}" width="{bar}" height="{top:.1f}" fill="{colour}"/>')
        line = floor - high * TAU
        end = left + longest * (bar + 2)
        marks.append(f'<path d="M{left - 4} {line:.1f}H{end}" stroke="#555" stroke-dasharray="4 3"/>')
        marks.append(text(8, line + 4, f"tau {TAU}"))
        chunks = -(-len(entry.drafted) // CHUNK)
        said = f"{len(entry.drafted)} tokens; chunks: {chunks}, drafter passes: {entry.passes}"
        marks.append(text(left, floor + 14, said, fill="#555"))
    return svg(left + longest * (bar + 2) + 16, 24 + len(rounds) * (high + gap), marks)


def acceptance(result: Result, engine: FailFast) -> str:
    """A line for each round: what of its draft was accepted, what the target wrote itself, what was dropped."""
    marks, widest, y = [], 0.0, 30.0
    for number, row in enumerate(spans(result.rounds), 1):
        marks.append(text(8, y + 13, str(number), fill="#888"))
        x = 34.0
        for kind, token, _ in row:
            words = engine.tokenizer.decode([token]).replace("\n", "↵")
            wide = 8 + 6.6 * max(len(words), 1)
            marks.append(
                f'<rect x="{x:.1f}" y="{y:.0f}" width="{wide:.1f}" height="18" rx="3" fill="{FILLS[kind]}" '
                f'stroke="{STROKES[kind]}"/>'
            )
            struck = {"text_decoration": "line-through", "fill": "#a66"} if kind == REJECTED else {}
            marks.append(text(x + 4, y + 13, words, font_family="monospace", **{"xml:space": "preserve"}, **struck))
            x += wide + 3
        widest, y = max(widest, x), y + 23
    legend = [(ACCEPTED, "drafted and accepted"), (TARGET, "the target's own"), (REJECTED, "drafted and rejected")]
    for place, (kind, words) in enumerate(legend):
        at = 34 + 160 * place
        marks.append(
            f'<rect x="{at}" y="8" width="12" height="12" rx="2" fill="{FILLS[kind]}" stroke="{STROKES[kind]}"/>'
        )
        marks.append(text(at + 18, 18, words))
    return svg(max(widest + 8, 540), y + 6, marks)


def main(folder: Path = HERE, longest: int = 256) -> None:
    """Writes the pictures into a folder; `longest`: most tokens of an answer."""
    tiny = FailFast.load(GOLDEN / "qwen2_target_160", GOLDEN / "fast_dllm_v2_untied")
    drafts = tiny.generate([[7, 12, 100, 5]], method="failfast", tau=TAU, spec_len=CHUNK, max_new_tokens=24)[0].rounds
    # One of each length, the longest first.
    kinds = {len(entry.drafted): entry for entry in drafts}
    shown = [kinds[length] for length in sorted(kinds, reverse=True)]
    (folder / "expansion.svg").write_text(expansion(shown[:4]), encoding="utf-8")
    enable_compile_cache()
    engine = FailFast.load()
    answer = engine.generate(QUESTION, max_new_tokens=64)[0]
    (folder / "rounds.svg").write_text(acceptance(answer, engine), encoding="utf-8")
    engine.time_rounds = True
    chosen = engine.generate(LONGER, max_new_tokens=longest)[0]
    write_trace(chosen, folder / "economics.svg", engine.tokenizer)


if __name__ == "__main__":
    main()
