"""The loop of every comparison: each question answered with `vanilla` and with each row, back to back.

The order is reversed from question to question, so that a drift of the machine evens out. An answer that had to
compile or read a program is a warm-up: it is thrown away and given again. Whatever was recorded is not done again.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

from tqdm import tqdm

from failfast_jax.bench.engine_pool import EnginePool
from failfast_jax.bench.journal import ANSWER, DIFFERENCE, Journal, Record, key_of
from failfast_jax.bench.rows import BASELINE, CORPUS, VANILLA, Row
from failfast_jax.bench.verdicts import DIFFERENT, NEAR_TIE, first_difference, logit_gap
from failfast_jax.drafters.suffix import Corpus
from failfast_jax.engine import FailFast, Prompt, Result
from failfast_jax.errors import PromptError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.public_data.question_sets import Dataset, Question, stamp
from failfast_jax.text_stream import text_of
from failfast_jax.util.progress import progress_bar

WARM_UPS = 3
"""Most answers of one question and row that are thrown away because they compiled something."""
BLOCK = 6
"""Rows that are compared with one answer of `vanilla`: their programs, and its own, are kept at once."""


def to_record(result: Result, batch: int = 1) -> Record:
    """Record of an answer: enough for every table, figure and trajectory. Rounds of `vanilla` are one token each and
    are left out. An answer of a batch has an equal share of its time."""
    counts = ("rounds", "drafted", "accepted", "drafter_passes", "target_passes")
    detail = [
        {
            "drafted": len(entry.drafted),
            "ids": entry.drafted,
            "accepted": entry.accepted,
            "emitted": len(entry.emitted),
            "passes": entry.passes,
            # Rounded: float32 has no tenths, and 0.7 belongs to the bin that starts there.
            "confidence": [round(value, 6) for value in entry.confidence],
            **({"nodes": len(entry.tree["tokens"])} if entry.tree else {}),
        }
        for entry in result.rounds
    ]
    return {
        "method": result.method,
        **{name: getattr(result.stats, name) / batch for name in ("decode_s", "prefill_s")},
        **{name: getattr(result.stats, name) for name in counts},
        "prompt_tokens": len(result.prompt_ids),
        "tokens": len(result.output_ids),
        "finish_reason": result.finish_reason,
        "output_ids": result.output_ids,
        "detail": [] if result.method == BASELINE else detail,
    }


def blocks(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that run together, all of one batch size, with a name that changes with their members."""
    by_batch = [[v for v in rows if v.batch == batch] for batch in dict.fromkeys(v.batch for v in rows)]
    parts = [group[at : at + BLOCK] for group in by_batch for at in range(0, len(group), BLOCK)]
    return [(stamp([row.label for row in part]), part) for part in parts or [[]]]


@dataclasses.dataclass(frozen=True)
class Turn:
    """Questions (one, or a batch) answered once by `vanilla` and by each row of a block.

    Attributes:
      number: of the first question, in the order in which they are asked, from 1.
      block: the block's name.
      reverse: whether the last row begins.
    """

    dataset: Dataset
    questions: list[Question]
    number: int
    repeat: int
    block: str
    rows: list[Row]
    reverse: bool


def warm_answers(engine: FailFast, prompts: list[list[int]], config: GenerationConfig) -> list[Result]:
    """Answers that neither compiled a program nor read one from the cache."""
    for _ in range(WARM_UPS):
        results = engine.generate(prompts, config)
        if not results[0].stats.compiles + results[0].stats.cache_hits:
            return results
    return engine.generate(prompts, config)


def promises_equality(config: GenerationConfig) -> bool:
    """Whether a request's output is `vanilla`'s: rejection sampling has its distribution, but draws other samples."""
    return config.temperature == 0 or config.acceptance != "rejection"


class Comparison:
    """Rows over datasets, with one journal.

    Args:
      common: options of every row that does not say otherwise.

    Raises:
      ValueError: a row whose options or drafter do not fit, or a prompt that cannot be served. Nothing has
        been answered then.
    """

    def __init__(
        self,
        engines: EnginePool,
        datasets: Sequence[Dataset],
        rows: Sequence[Row],
        common: GenerationConfig,
        journal: Journal,
        *,
        repeats: int = 1,
        near_tie: float = 1e-3,
    ):
        self.engines, self.datasets, self.rows, self.common = engines, datasets, rows, common
        self.journal, self.repeats, self.near_tie = journal, repeats, near_tie
        self.configs = {s.label: s.config(common) for s in (VANILLA, *rows)}
        for row in rows:
            engines.prepare(row, self.configs[row.label])
        self._questions = {(d.name, q.id): q for d in datasets for q in d.questions}
        self._ids: dict[tuple[str, str], list[int]] = {}
        self._warm: set[tuple] = set()
        self._idle_since = time.perf_counter()
        """When the engine's last work ended: what follows is the harness's."""
        self._check_options()
        self._check_prompts()

    def engine(self, row: Row) -> FailFast:
        """The engine that answers for a row."""
        return self.engines.get(row, self.configs[row.label])

    def _check_options(self) -> None:
        """A label stands for the same options in records and now."""
        options = {row.label: dict(row.options) for row in self.rows}
        for record in self.journal.answers.values():
            label = record["setting"]
            if options.get(label, record["options"]) != record["options"]:
                raise ValueError(
                    f"{self.journal.path}: {label} was answered with other options ({record['options']} there, "
                    f"{options[label]} here); name another --out"
                )

    # -- prompts -----------------------------------------------------------------------------------------

    def _check_prompts(self) -> None:
        stamps = {(a["dataset"], a["question"]): a["prompt_stamp"] for a in self.journal.answers.values()}
        for dataset in self.datasets:
            for question in dataset.questions:
                if question.follows is None:
                    own = stamp(self.encode(dataset, question))
                    if stamps.get((dataset.name, question.id), own) != own:
                        raise ValueError(
                            f"{self.journal.path}: made with other settings (prompt {question.id} of {dataset.name}); "
                            "name another --out"
                        )

    def _said(self, dataset: Dataset, question: Question) -> list[int]:
        """`vanilla`'s answer, of which all have the same tokens."""
        place = dataset.name, question.id, BASELINE
        answers = self.journal.answers.values()
        return next(a["output_ids"] for a in answers if (a["dataset"], a["question"], a["setting"]) == place)

    def messages(self, dataset: Dataset, question: Question) -> Prompt:
        """The prompt, behind the turns that it follows and `vanilla`'s answers to them."""
        if question.follows is None:
            return question.prompt
        before = self._questions[dataset.name, question.follows]
        earlier = self.messages(dataset, before)
        turns = [{"role": "user", "content": earlier}] if isinstance(earlier, str) else list(earlier)
        answer = text_of(self.engines.base.tokenizer, self._said(dataset, before))
        return [*turns, {"role": "assistant", "content": answer}, {"role": "user", "content": question.prompt}]

    def encode(self, dataset: Dataset, question: Question) -> list[int]:
        """Token ids of the prompt, and of the turns before it.

        Raises:
          PromptError: there is no room for them.
        """
        key, room = (dataset.name, question.id), self.engines.max_seq_len
        if key not in self._ids:
            where = f"{dataset.name}, question {question.id}"
            try:
                ids = self.engines.base.encode(self.messages(dataset, question))
            except PromptError as error:
                raise PromptError(f"{where}: {error}") from None
            if len(ids) >= room:
                raise PromptError(f"{where}: its {len(ids)} tokens leave no room, the models have it for {room}")
            self._ids[key] = ids
        return self._ids[key]

    def _in_order(self, dataset: Dataset) -> list[Question]:
        """By prompt length: programs depend on it, and few stay in memory. Later turns after those they follow."""

        def place(question: Question) -> tuple[int, int]:
            depth, first = 0, question
            while first.follows is not None:
                depth, first = depth + 1, self._questions[dataset.name, first.follows]
            return depth, len(self.encode(dataset, first))

        return sorted(dataset.questions, key=place)

    # -- answers -----------------------------------------------------------------------------------------

    def engine_for(self, row: Row, dataset: Dataset, first: Question) -> FailFast:
        """The row's engine. If the row has a corpus, it holds the questions before `first` and `vanilla`'s
        answers to them."""
        engine = self.engine(row)
        engine.corpus = None
        if CORPUS in row.options:
            engine.corpus = Corpus(row.options[CORPUS])
            for other in self._in_order(dataset):
                if other == first:
                    break
                engine.corpus.add(self.encode(dataset, other) + self._said(dataset, other))
        return engine

    def answer(self, row: Row, dataset: Dataset, questions: list[Question]) -> list[Result]:
        """Warm answers to questions that are asked together."""
        engine, config = self.engine_for(row, dataset, questions[0]), self.configs[row.label]
        prompts = [self.encode(dataset, question) for question in questions]
        longest = max(map(len, prompts)) + config.max_new_tokens
        bucket = (row.label, len(prompts), longest.bit_length())
        if bucket not in self._warm:
            next(engine.stream(prompts, config))  # compiles everything, and stops after one round
            self._warm.add(bucket)
        return warm_answers(engine, prompts, config)

    def _shape(self, row: Row) -> dict[str, Any]:
        engine, config = self.engine(row), self.configs[row.label]
        return engine.build_drafter(engine.resolve(config)).describe()

    def _idle(self) -> float:
        """Seconds of the harness since the engine's last work."""
        return time.perf_counter() - self._idle_since

    def _pending(self, turn: Turn) -> list[Row]:
        """Rows of a turn that have no record. `vanilla` is one of them if others need it."""
        places = [(turn.dataset.name, question.id, turn.repeat) for question in turn.questions]
        done = {v.label: [self.journal.answers.get((*place, v.label)) for place in places] for v in turn.rows}
        pending = [v for v in turn.rows if None in done[v.label]]
        answered_here = any(record and record["block"] == turn.block for records in done.values() for record in records)
        needed = not turn.rows or pending or answered_here
        if needed and any((*place, BASELINE, turn.block) not in self.journal.answers for place in places):
            pending.insert(0, VANILLA)
        return pending

    def _turns(self) -> list[Turn]:
        """All turns, in order; a batch has questions of one turn of their conversations."""
        turns = []
        for dataset in self.datasets:
            ordered = self._in_order(dataset)
            for (block, part), repeat in itertools.product(blocks(self.rows), range(self.repeats)):
                batch = part[0].batch if part else 1
                if batch > 1 and len(ordered) % batch:
                    raise ValueError(
                        f"{part[0].label}: {dataset.name} has {len(ordered)} questions, no multiple of batch {batch}; "
                        "change --limit"
                    )
                for index in range(0, len(ordered), batch):
                    reverse = bool((repeat + index // batch) % 2)
                    together = ordered[index : index + batch]
                    if batch > 1 and any(question.follows is not None for question in together):
                        raise ValueError(f"{part[0].label}: {dataset.name} has conversations, which take batch 1")
                    turns.append(Turn(dataset, together, index + 1, repeat, block, part, reverse))
        return turns

    def run(self, only: Collection[tuple[str, str]] | None = None) -> None:
        """Answers what has no record yet: all questions, or `only` these, each a dataset's name and an id."""
        turns = [t for t in self._turns() if only is None or (t.dataset.name, t.questions[0].id) in only]
        missing = sum(len(self._pending(turn)) * len(turn.questions) for turn in turns)
        total = sum((1 + len(turn.rows)) * len(turn.questions) for turn in turns)
        with progress_bar("bench", "answer", total=total, initial=total - missing) as bar:
            for turn in turns:
                self._answer_all(turn, bar)
                self._compare(turn, bar)

    def _answer_all(self, turn: Turn, bar: tqdm) -> None:
        """Gives and records the answers of a turn that have no record."""
        dataset, pending = turn.dataset, self._pending(turn)
        order = [VANILLA, *turn.rows][:: -1 if turn.reverse else 1]
        for position, row in enumerate(order):
            if row not in pending:
                continue
            bar.set_postfix_str(f"{dataset.name} {turn.number} of {len(dataset.questions)}, {row.label}")
            harness_s = self._idle()
            results = self.answer(row, dataset, turn.questions)
            self._idle_since = time.perf_counter()
            for question, result in zip(turn.questions, results):
                record = {
                    "kind": ANSWER,
                    "dataset": dataset.name,
                    "question": question.id,
                    "place": dataset.questions.index(question),
                    "repeat": turn.repeat,
                    "setting": row.label,
                    "options": dict(row.options),
                    "block": turn.block,
                    "position": position,
                    "session": self.journal.session,
                    "prompt_stamp": stamp(self.encode(dataset, question)),
                    "compared": promises_equality(self.configs[row.label]),
                    "harness_s": harness_s / len(results),
                    "drafter": self._shape(row),
                    **to_record(result, len(results)),
                }
                self.journal.append(record)
                bar.update()

    def _compare(self, turn: Turn, bar: tqdm) -> None:
        """Notes where answers of a turn leave `vanilla`'s, and how close the target's two best logits are there."""
        dataset = turn.dataset
        for row, question in itertools.product(turn.rows, turn.questions):
            record = self.journal.answers[dataset.name, question.id, turn.repeat, row.label]
            baseline = self.journal.baseline_of(record)
            noted = key_of(DIFFERENCE, record) in self.journal.lines[DIFFERENCE]
            if noted or baseline is None or not record["compared"]:
                continue
            at = first_difference(baseline["output_ids"], record["output_ids"])
            if at is None:
                continue
            engine, ids = self.engine(row), self.encode(dataset, question)
            harness_s = self._idle()
            gap = logit_gap(engine, ids + baseline["output_ids"][:at])
            self._idle_since = time.perf_counter() - harness_s
            place = {name: record[name] for name in ("dataset", "question", "repeat", "setting")}
            self.journal.append({"kind": DIFFERENCE, **place, "first_difference": at, "logit_gap": gap})
            verdict = NEAR_TIE if gap < self.near_tie and not self.common.exact else DIFFERENT
            bar.write(
                f"{row.label}, {dataset.name} question {question.id}: {verdict} at token {at}, logit gap {gap:.2e}",
                file=sys.stderr,
            )

    def records(self) -> list[Record]:
        """See `asked_records`."""
        asked = self.journal, self.datasets, self.rows, self.common
        return asked_records(*asked, repeats=self.repeats, near_tie=self.near_tie)


def asked_records(
    journal: Journal,
    datasets: Sequence[Dataset],
    rows: Sequence[Row],
    common: GenerationConfig,
    *,
    repeats: int,
    near_tie: float,
) -> list[Record]:
    """The answers that a comparison asked for, with verdicts, in the order of the questions, whoever was first to
    answer; records of other runs in the journal are left out."""
    labels = {BASELINE, *(row.label for row in rows)}
    order = {(d.name, q.id): at for at, (d, q) in enumerate((d, q) for d in datasets for q in d.questions)}
    wanted = [
        record
        for record in journal.judged(near_tie, common.exact)
        if record["setting"] in labels
        and (record["dataset"], record["question"]) in order
        and record["repeat"] < repeats
    ]
    return sorted(wanted, key=lambda record: (order[record["dataset"], record["question"]], record["repeat"]))
