"""Accepted tokens, confidence and drafts that grow, from records: what the paper says of them in Sec. 3 and 4."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from failfast_jax.bench.paper.released_passes import fresh_lengths
from failfast_jax.bench.plots import auroc
from failfast_jax.util.records import Record

RESAMPLED = 2000
"""Draws of the bootstrap."""
COLUMNS = {
    "answers": "{:.0f}",
    "drafted a round": "{:.1f}",
    "accepted a round": "{:.2f}",
    "from": "{:.2f}",
    "to": "{:.2f}",
    "AUROC": "{:.3f}",
    "extended rounds, %": "{:.1f}",
    "drafted in them": "{:.1f}",
    "accepted in them": "{:.2f}",
    "of these a lookup has, %": "{:.0f}",
    "accepted in their first chunk": "{:.2f}",
    "accepted in others' first chunk": "{:.2f}",
    "tokens in easy runs over 10, %": "{:.0f}",
}


def interval(rounds: pd.DataFrame) -> tuple[float, float]:
    """95 % interval of the mean of `accepted` over rounds: questions are drawn anew, each with all its rounds."""
    questions = rounds.groupby("question").accepted.agg(["sum", "size"]).to_numpy()
    drawn = np.random.default_rng(0).integers(len(questions), size=(RESAMPLED, len(questions)))
    accepted, count = questions[drawn].sum(1).T
    low, high = np.quantile(accepted / count, [0.025, 0.975])
    return low, high


def looked_up(text: Sequence[int], begin: int, count: int) -> Sequence[int]:
    """At most `count` tokens that followed the latest earlier place of the two tokens before `begin`."""
    last = text[begin - 2 : begin]
    places = (place for place in range(begin - 3, -1, -1) if text[place : place + 2] == last)
    place = next(places, begin)
    return text[place + 2 : min(place + 2 + count, begin)]


def rounds_of_answer(record: Record) -> Iterator[Record]:
    """Yields a record of each draft of an answer.

    question: its name.
    drafted: tokens.
    accepted: of them, and emitted.
    in_first_chunk: the accepted ones of the first chunk.
    extended: whether the drafter itself made more than a chunk.
    had: accepted tokens of an extended draft that a lookup of two tokens would have had.
    """
    text, begin = record["prompt_ids"] + record["output_ids"], record["prompt_tokens"]
    grows, chunk = record["drafter"].get("grows", False), record["drafter"].get("spec_len", 0)
    for entry, fresh in zip(record["detail"], fresh_lengths(record)):
        accepted = min(entry["accepted"], entry["emitted"])
        is_extended = grows and fresh > chunk
        if entry["drafted"]:
            had = 0
            for token, guess in zip(text[begin : begin + accepted], looked_up(text, begin, accepted)):
                if not is_extended or token != guess:
                    break
                had += 1
            figures = {"drafted": entry["drafted"], "accepted": accepted, "in_first_chunk": min(accepted, chunk)}
            yield {"question": record["question"], **figures, "extended": is_extended, "had": had}
        begin += entry["emitted"]


def easy_tokens(record: Record) -> list[bool]:
    """Returns for each token of an answer whether it was an accepted draft token, or the bonus after a whole draft."""
    tokens: list[bool] = []
    for entry in record["detail"]:
        accepted = min(entry["accepted"], entry["emitted"])
        tokens += [True] * accepted
        # The target's own token: easy where all of a draft was right.
        tokens += [0 < entry["drafted"] <= entry["accepted"]] * (entry["emitted"] - accepted)
    return tokens


def easy_share(records: Sequence[Record], cutoffs: Sequence[int]) -> list[float]:
    """Returns the share of tokens in runs of more than so many easy tokens, per cutoff."""
    answers = [easy_tokens(record) for record in records]
    runs = [sum(run) for tokens in answers for easy, run in itertools.groupby(tokens) if easy]
    total = max(sum(map(len, answers)), 1)
    return [sum(run for run in runs if run > cutoff) / total for cutoff in cutoffs]


def extension_table(answers: pd.DataFrame) -> str:
    """Markdown with a line for each dataset and row that drafts; sums over all rounds with a draft.

    `from` and `to` are the `interval` of the accepted tokens. AUROC is over drafted tokens up to and including the
    first rejected one: the others were never judged. Where a first chunk has many accepted tokens, the confidence that
    extended the draft knew an easy place.

    Args:
      answers: see `AnswerLog.frame`.
    """
    lines = []
    for (dataset, setting), group in answers.groupby(["dataset", "setting"], sort=False):
        records = group.to_dict("records")
        rounds = pd.DataFrame([line for record in records for line in rounds_of_answer(record)])
        if not len(rounds):
            continue
        judged = pd.DataFrame(
            [
                (confidence, place < entry["accepted"])
                for record in records
                for entry in record["detail"]
                for place, confidence in enumerate(entry["confidence"][: entry["accepted"] + 1])
            ],
            columns=["confidence", "right"],
        )
        grown, others = rounds[rounds.extended], rounds[~rounds.extended]
        figures = [
            len(records),
            rounds.drafted.mean(),
            rounds.accepted.mean(),
            *interval(rounds),
            auroc(judged.confidence, judged.right),
            100 * rounds.extended.mean(),
            grown.drafted.mean(),
            grown.accepted.mean(),
            100 * grown.had.sum() / grown.accepted.sum() if grown.accepted.sum() else float("nan"),
            grown.in_first_chunk.mean(),
            others.in_first_chunk.mean() if len(grown) else float("nan"),
            100 * easy_share(records, [10])[0],
        ]
        shown = ("-" if pd.isna(value) else form.format(value) for form, value in zip(COLUMNS.values(), figures))
        lines.append((dataset, setting, *shown))
    if not lines:
        return "No row drafts."
    return pd.DataFrame(lines, columns=["dataset", "row", *COLUMNS]).to_markdown(index=False, disable_numparse=True)
