"""The loop of every comparison: each question answered with `vanilla` and with each variant, back to back.

The order is reversed from question to question, so that a drift of the machine evens out. An answer that had to
compile or read a program is a warm-up: it is thrown away and given again. Whatever was recorded is not done again.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

from tqdm import tqdm

from failfast_jax.bench.datasets import Dataset, Question, stamp
from failfast_jax.bench.engine_pool import EnginePool
from failfast_jax.bench.journal import ANSWER, DIFFERENCE, Journal, Record, key_of
from failfast_jax.bench.variants import BASELINE, CORPUS, VANILLA, Variant
from failfast_jax.bench.verdicts import DIFFERENT, NEAR_TIE, first_difference, logit_gap
from failfast_jax.config import GenerationConfig
from failfast_jax.decoding.drafter import Wrapper
from failfast_jax.drafters.aligned import Aligned
from failfast_jax.drafters.autoregressive import Autoregressive
from failfast_jax.drafters.suffix import Corpus
from failfast_jax.engine import FailFast, Prompt, Result
from failfast_jax.errors import PromptError
from failfast_jax.progress import progress_bar
from failfast_jax.text import text_of

WARM_UPS = 3
"""Most answers of one question and variant that are thrown away because they compiled something."""
BLOCK = 6
"""Variants that are compared with one answer of `vanilla`: their programs, and its own, are kept at once."""


def to_record(result: Result) -> Record:
    """What is kept of an answer: enough for every table, figure and trajectory. Rounds of `vanilla` are one token each
    and are left out."""
    kept = ("decode_s", "prefill_s", "rounds", "drafted", "accepted", "drafter_passes", "target_passes")
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
        **{name: getattr(result.stats, name) for name in kept},
        "prompt_tokens": len(result.prompt_ids),
        "tokens": len(result.output_ids),
        "finish_reason": result.finish_reason,
        "output_ids": result.output_ids,
        "detail": [] if result.method == BASELINE else detail,
    }


def shape_of(drafter: Any) -> dict[str, Any]:
    """What counting a round's passes as the released code does takes to know of a drafter."""
    while isinstance(drafter, Wrapper):
        drafter = drafter.model
    if isinstance(drafter, Aligned):
        own = {"block": drafter.block, "shift": drafter.shift, "grows": drafter.expand}
        return {"kind": "aligned", "spec_len": drafter.spec_len, **own}
    if isinstance(drafter, Autoregressive):
        return {"kind": "ar", "spec_len": drafter.spec_len, "grows": drafter.max_spec_len is not None}
    return {"kind": "other"}


def blocks(variants: Sequence[Variant]) -> list[tuple[str, list[Variant]]]:
    """Variants that run together, with a name that changes with their members."""
    parts = [list(variants[at : at + BLOCK]) for at in range(0, len(variants), BLOCK)]
    return [(stamp([variant.label for variant in part]), part) for part in parts or [[]]]


@dataclasses.dataclass(frozen=True)
class Turn:
    """A question answered once by `vanilla` and by each variant of a block.

    Attributes:
      number: of the question, in the order in which they are asked, from 1.
      block: the block's name.
      reverse: whether the last variant begins.
    """

    dataset: Dataset
    question: Question
    number: int
    repeat: int
    block: str
    variants: list[Variant]
    reverse: bool


def answer(engine: FailFast, prompt: list[int], config: GenerationConfig) -> Result:
    """A warm answer: one that neither compiled a program nor read one from the cache."""
    for _ in range(WARM_UPS):
        result = engine.generate([prompt], config)[0]
        if not result.stats.compiles + result.stats.cache_hits:
            return result
    return engine.generate([prompt], config)[0]


def promises_equality(config: GenerationConfig) -> bool:
    """Whether a request's output is `vanilla`'s: rejection sampling has its distribution, but draws other samples."""
    return config.temperature == 0 or config.acceptance != "rejection"


class Comparison:
    """Variants over datasets, with one journal.

    Args:
      common: options of every variant that does not say otherwise.

    Raises:
      ValueError: a variant whose options or drafter do not fit, or a prompt that cannot be served. Nothing has
        been answered then.
    """

    def __init__(
        self,
        engines: EnginePool,
        datasets: Sequence[Dataset],
        variants: Sequence[Variant],
        common: GenerationConfig,
        journal: Journal,
        *,
        repeats: int = 1,
        near_tie: float = 1e-3,
    ):
        self.engines, self.datasets, self.variants, self.common = engines, datasets, variants, common
        self.journal, self.repeats, self.near_tie = journal, repeats, near_tie
        self.configs = {s.label: s.config(common) for s in (VANILLA, *variants)}
        for variant in variants:
            engines.prepare(variant, self.configs[variant.label])
        self._questions = {(d.name, q.id): q for d in datasets for q in d.questions}
        self._ids: dict[tuple[str, str], list[int]] = {}
        self._warm: set[tuple] = set()
        self._idle_since = time.perf_counter()
        """When the engine's last work ended: what follows is the harness's."""
        self._check_options()
        self._check_prompts()

    def engine(self, variant: Variant) -> FailFast:
        """The engine that answers for a variant."""
        return self.engines.get(variant, self.configs[variant.label])

    def _check_options(self) -> None:
        """A label stands for the same options in records and now."""
        options = {variant.label: dict(variant.options) for variant in self.variants}
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

    def engine_for(self, variant: Variant, dataset: Dataset, question: Question) -> FailFast:
        """The variant's engine. If the variant has a corpus, it holds the questions before and `vanilla`'s answers."""
        engine = self.engine(variant)
        engine.corpus = None
        if CORPUS in variant.options:
            engine.corpus = Corpus(variant.options[CORPUS])
            for other in self._in_order(dataset):
                if other == question:
                    break
                engine.corpus.add(self.encode(dataset, other) + self._said(dataset, other))
        return engine

    def answer(self, variant: Variant, dataset: Dataset, question: Question) -> Result:
        """A warm answer; see `answer`."""
        engine, config = self.engine_for(variant, dataset, question), self.configs[variant.label]
        prompt = self.encode(dataset, question)
        bucket = (variant.label, (len(prompt) + config.max_new_tokens).bit_length())
        if bucket not in self._warm:
            next(engine.stream([prompt], config))  # compiles everything, and stops after one round
            self._warm.add(bucket)
        return answer(engine, prompt, config)

    def _shape(self, variant: Variant) -> dict[str, Any]:
        engine, config = self.engine(variant), self.configs[variant.label]
        return shape_of(engine.build_drafter(engine.resolve(config)))

    def _idle(self) -> float:
        """Seconds of the harness since the engine's last work."""
        return time.perf_counter() - self._idle_since

    def _pending(self, turn: Turn) -> list[Variant]:
        """Variants of a turn that have no record. `vanilla` is one of them if others need it."""
        place = (turn.dataset.name, turn.question.id, turn.repeat)
        done = {v.label: self.journal.answers.get((*place, v.label)) for v in turn.variants}
        pending = [v for v in turn.variants if done[v.label] is None]
        answered_here = any(record["block"] == turn.block for record in done.values() if record is not None)
        needed = not turn.variants or pending or answered_here
        if needed and (*place, BASELINE, turn.block) not in self.journal.answers:
            pending.insert(0, VANILLA)
        return pending

    def run(self, only: Collection[tuple[str, str]] | None = None) -> None:
        """Answers what has no record yet: all questions, or `only` these, each a dataset's name and an id."""
        turns = [
            Turn(dataset, question, index + 1, repeat, block, part, reverse=bool((repeat + index) % 2))
            for dataset in self.datasets
            for block, part in blocks(self.variants)
            for repeat in range(self.repeats)
            for index, question in enumerate(self._in_order(dataset))
            if only is None or (dataset.name, question.id) in only
        ]
        missing = sum(len(self._pending(turn)) for turn in turns)
        total = sum(1 + len(turn.variants) for turn in turns)
        with progress_bar("bench", "answer", total=total, initial=total - missing) as bar:
            for turn in turns:
                self._answer_all(turn, bar)
                self._compare(turn, bar)

    def _answer_all(self, turn: Turn, bar: tqdm) -> None:
        """Gives and records the answers of a turn that have no record."""
        dataset, question = turn.dataset, turn.question
        pending = self._pending(turn)
        ids = self.encode(dataset, question) if pending else []
        order = [VANILLA, *turn.variants][:: -1 if turn.reverse else 1]
        for position, variant in enumerate(order):
            if variant not in pending:
                continue
            bar.set_postfix_str(f"{dataset.name} {turn.number} of {len(dataset.questions)}, {variant.label}")
            harness_s = self._idle()
            result = self.answer(variant, dataset, question)
            self._idle_since = time.perf_counter()
            record = {
                "kind": ANSWER,
                "dataset": dataset.name,
                "question": question.id,
                "place": dataset.questions.index(question),
                "repeat": turn.repeat,
                "setting": variant.label,
                "options": dict(variant.options),
                "block": turn.block,
                "position": position,
                "session": self.journal.session,
                "prompt_stamp": stamp(ids),
                "compared": promises_equality(self.configs[variant.label]),
                "harness_s": harness_s,
                "drafter": self._shape(variant),
                **to_record(result),
            }
            self.journal.append(record)
            bar.update()

    def _compare(self, turn: Turn, bar: tqdm) -> None:
        """Notes where answers of a turn leave `vanilla`'s, and how close the target's two best logits are there."""
        dataset, question = turn.dataset, turn.question
        for variant in turn.variants:
            record = self.journal.answers[dataset.name, question.id, turn.repeat, variant.label]
            baseline = self.journal.baseline_of(record)
            noted = key_of(DIFFERENCE, record) in self.journal.lines[DIFFERENCE]
            if noted or baseline is None or not record["compared"]:
                continue
            at = first_difference(baseline["output_ids"], record["output_ids"])
            if at is None:
                continue
            engine, ids = self.engine(variant), self.encode(dataset, question)
            harness_s = self._idle()
            gap = logit_gap(engine, ids + baseline["output_ids"][:at])
            self._idle_since = time.perf_counter() - harness_s
            place = {name: record[name] for name in ("dataset", "question", "repeat", "setting")}
            self.journal.append({"kind": DIFFERENCE, **place, "first_difference": at, "logit_gap": gap})
            verdict = NEAR_TIE if gap < self.near_tie and not self.common.exact else DIFFERENT
            bar.write(
                f"{variant.label}, {dataset.name} question {question.id}: {verdict} at token {at}, logit gap {gap:.2e}",
                file=sys.stderr,
            )

    def records(self) -> list[Record]:
        """See `asked_records`."""
        asked = self.journal, self.datasets, self.variants, self.common
        return asked_records(*asked, repeats=self.repeats, near_tie=self.near_tie)


def asked_records(
    journal: Journal,
    datasets: Sequence[Dataset],
    variants: Sequence[Variant],
    common: GenerationConfig,
    *,
    repeats: int,
    near_tie: float,
) -> list[Record]:
    """The answers that a comparison asked for, with verdicts, in the order of the questions, whoever was first to
    answer; records of other runs in the journal are left out."""
    labels = {BASELINE, *(variant.label for variant in variants)}
    order = {(d.name, q.id): at for at, (d, q) in enumerate((d, q) for d in datasets for q in d.questions)}
    wanted = [
        record
        for record in journal.judged(near_tie, common.exact)
        if record["setting"] in labels
        and (record["dataset"], record["question"]) in order
        and record["repeat"] < repeats
    ]
    return sorted(wanted, key=lambda record: (order[record["dataset"], record["question"]], record["repeat"]))
