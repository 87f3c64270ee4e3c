"""Compares rows: each question is answered with `vanilla` and with each row, back to back.

The order is reversed from question to question, so that a drift of the machine evens out. An answer that had to
compile or read a program is a warm-up: it is thrown away and given again. Whatever was recorded is not done again.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from tqdm import tqdm

from failfast_jax.bench.answer_log import ANSWER, DIFFERENCE, DIFFERENT, NEAR_TIE, AnswerLog, key_of, to_record
from failfast_jax.bench.rows import BASELINE, CORPUS, DRAFTER, THETA, VANILLA, Row, all_options
from failfast_jax.bench.run_config import RunConfig
from failfast_jax.checkpoints.hub import default_target_path, find_models
from failfast_jax.default_pair import embedded_drafter
from failfast_jax.drafters import METHODS
from failfast_jax.drafters.suffix import Corpus
from failfast_jax.engine import FailFast, Prompt, Result
from failfast_jax.errors import CheckpointError, PromptError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.models.drafter_model import AUTOREGRESSIVE
from failfast_jax.models.sharding import whole
from failfast_jax.options import flag_of
from failfast_jax.public_data.question_sets import Dataset, Question, stamp
from failfast_jax.text_stream import text_of
from failfast_jax.util.files import user_path
from failfast_jax.util.progress import progress_bar

WARM_UPS = 3
"""Maximum answers of one question and row that are thrown away because they compiled something."""
BLOCK = 6
"""Rows that are compared with one answer of `vanilla`: their programs, and its own, are kept at once."""


# -- engines: one target, and for each row the drafter that it needs --------------------------------------------------


def model_stamp(source: str | os.PathLike) -> dict[str, Any]:
    """Returns a model's name and, for files on this machine, a stamp that changes with any of them."""
    path = user_path(source)
    if not path.exists():
        return {"name": str(source), "files": None}
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    states = [(os.path.relpath(f, path), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return {"name": str(source), "files": stamp(states)}


def role_of(method: str) -> str | None:
    """Returns which drafter of the run a method uses: `drafter`, `ar_drafter` or None."""
    kinds = METHODS[method].kinds
    if not kinds:
        return None
    return "ar_drafter" if kinds == (AUTOREGRESSIVE,) else "drafter"


def find_models_of_rows(config: RunConfig, rows: Sequence[Row]) -> None:
    """Finds every model that rows need, downloading it where needed, before the first one is loaded.

    Raises:
      CheckpointError: models are missing; one line per model with its flag or row and its source.
    """
    missing = []
    roles = {role_of(row.method) for row in rows if DRAFTER not in row.options}
    wanted = {"--target": config.target}
    wanted |= {flag_of(role): getattr(config, role) for role in ("drafter", "ar_drafter") if role in roles}
    for row in rows:
        if DRAFTER in row.options:
            flag = f"--methods {row.label}:" if ":" in row.label else f"--set {row.label}:drafter"
            wanted[flag] = row.options[DRAFTER]
    for flag, source in wanted.items():
        try:
            find_models({flag: source})
        except CheckpointError as error:
            origin = (config.weights or {}).get(str(source))
            advice = f"; the weights: {origin}; or name another folder or id with {flag}" if origin else ""
            missing.append(f"{error}{advice}")
    if missing:
        raise CheckpointError(*missing)


class EnginePool:
    """Engines of a run's models that share one target and one set of compiled programs, built when a row first needs
    them."""

    def __init__(self, config: RunConfig):
        self.sources = {name: getattr(config, name) for name in ("target", "drafter", "ar_drafter")}
        self.options = {name: getattr(config, name) for name in ("dtype", "tensor_parallel", "attention")}
        self.base = FailFast.load(config.target, method=BASELINE, **self.options)
        self._built: dict[Any, FailFast] = {None: self.base}

    def identity(self) -> dict[str, Any]:
        """Returns what records must agree on: models, files, and how the engines run them."""
        stamps = {name: model_stamp(source) for name, source in self.sources.items() if source is not None}
        if "target" not in stamps:
            stamps["target"] = {"name": default_target_path().name, "files": None}
            stamps.setdefault("drafter", model_stamp(embedded_drafter() or "none"))
        return {**stamps, **self.options}

    def names(self) -> dict[str, str | None]:
        """Returns the models' names, for reports."""
        names = dict(self.sources)
        if names["target"] is None:
            shipped = embedded_drafter()
            names["target"] = default_target_path().name
            names["drafter"] = names["drafter"] or (shipped and f"the embedded {shipped.name}")
        return names

    def get(self, row: Row, config: GenerationConfig) -> FailFast:
        """Returns the engine that answers a row's requests.

        Raises:
          ValueError: its drafter is missing, unreadable or does not fit.
        """
        role = role_of(row.method)
        if role is None:
            return self.base
        source = row.options.get(DRAFTER, self.sources[role])
        if source is None and role == "ar_drafter":
            raise ValueError("needs --ar-drafter, an autoregressive model with the target's tokens")
        options: dict[str, Any] = {"method": config.method, "schedule": config.options.get("schedule")}
        # A named drafter serves all methods of its kind; these options choose among the default pair's.
        key = (tuple(options.items()) if source is None else source, row.options.get(THETA))
        options |= {name: value for name, value in row.options.items() if name == THETA}
        if key not in self._built:
            self._built[key] = FailFast.load(self.base, source, **self.options, **options)
        return self._built[key]

    @property
    def max_seq_len(self) -> int:
        """Maximum tokens of prompt and answer together, for every engine built so far."""
        return min(engine.max_seq_len for engine in self._built.values())


# -- answers ---------------------------------------------------------------------------------------------------------


class RunPlan(NamedTuple):
    """The work of a run; `common` are the options of rows that do not say otherwise."""

    config: RunConfig
    common: GenerationConfig
    rows: list[Row]
    datasets: list[Dataset]


class Turn(NamedTuple):
    """Questions (one, or a batch) answered once by `vanilla` and by each row of a block.

    Attributes:
      block: the block's name.
      reverse: whether the last row begins.
    """

    dataset: Dataset
    questions: list[Question]
    repeat: int
    block: str
    rows: list[Row]
    reverse: bool


def turns_of(ordered: Sequence[tuple[Dataset, list[Question]]], rows: Sequence[Row], repeats: int) -> Iterator[Turn]:
    """Yields all turns, in order; a block is of one batch size, and its name changes with its members."""
    by_batch = [[row for row in rows if row.batch == batch] for batch in dict.fromkeys(row.batch for row in rows)]
    blocks = [group[at : at + BLOCK] for group in by_batch for at in range(0, len(group), BLOCK)]
    for (dataset, questions), block, repeat in itertools.product(ordered, blocks, range(repeats)):
        batch = block[0].batch
        if batch > 1 and len(questions) % batch:
            count = f"{dataset.name} has {len(questions)} questions"
            raise ValueError(f"{block[0].label}: {count}, no multiple of batch {batch}; change --limit")
        if batch > 1 and any(question.follows is not None for question in questions):
            raise ValueError(f"{block[0].label}: {dataset.name} has conversations, which take batch 1")
        name = stamp([row.label for row in block])
        for index in range(0, len(questions), batch):
            together, reverse = questions[index : index + batch], bool((repeat + index // batch) % 2)
            yield Turn(dataset, together, repeat, name, block, reverse)


def missing_rows(turn: Turn, log: AnswerLog) -> list[Row]:
    """Returns the rows of a turn that have no record. `vanilla` is one of them if others need it."""
    places = [(turn.dataset.name, question.id, turn.repeat) for question in turn.questions]
    records = {row.label: [log.answers.get((*place, row.label)) for place in places] for row in turn.rows}
    missing = [row for row in turn.rows if None in records[row.label]]
    answered_here = any(record and record["block"] == turn.block for answers in records.values() for record in answers)
    if (missing or answered_here) and any((*place, BASELINE, turn.block) not in log.answers for place in places):
        missing.insert(0, VANILLA)
    return missing


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Returns the index of the first differing token; None if the lists are equal."""
    return next((index for index, (x, y) in enumerate(itertools.zip_longest(a, b)) if x != y), None)


def logit_gap(engine: FailFast, ids: list[int]) -> float:
    """Returns the difference of the target's two best logits for the token after `ids`."""
    logits = np.asarray(whole(engine.target.logits([ids])))[0, -1]
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)


def promises_equality(config: GenerationConfig) -> bool:
    """Returns whether the output is `vanilla`'s: rejection sampling has its distribution, but draws other samples."""
    return config.temperature == 0 or config.acceptance != "rejection"


class Comparison:
    """The engines of one process, and their answers to the questions of a plan.

    Attributes:
      rows: those that can run here.
      left_out: labels of the others, which are optional, with the reason.
      log: the records; `run` sets it.

    Raises:
      ValueError: a model or row that cannot be served; nothing has been answered then.
    """

    def __init__(self, plan: RunPlan):
        config = plan.config
        self.plan, self.log = plan, AnswerLog()
        self.engines = EnginePool(config)
        if config.scores and self.engines.base.tokenizer is None and any(d.scoring for d in plan.datasets):
            name = self.engines.base.target_name
            raise ValueError(f"{name} has no tokenizer, so that answers have no text: --no-scores")
        self._configs = {row.label: row.config(plan.common) for row in (VANILLA, *plan.rows)}
        self._shapes: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}
        for row in (VANILLA, *plan.rows):
            request = self._configs[row.label]
            try:  # now, so that what does not fit is reported before any work
                engine = self.engines.get(row, request)
                self._shapes[row.label] = engine.build_drafter(engine.resolve(request)).describe()
            except ValueError as error:
                if not row.optional:
                    raise ValueError(f"{row.label}: {error}") from None
                self.left_out[row.label] = str(error)
                print(f"left out: {row.label}: {error}", file=sys.stderr)
        self.rows = [row for row in plan.rows if row.label not in self.left_out]
        if not self.rows:
            raise ValueError("--methods: none of them can run here")
        self._questions = {(d.name, q.id): q for d in plan.datasets for q in d.questions}
        self._ids: dict[tuple[str, str], list[int]] = {}

    def identity(self, host: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what records must agree on; `host` is `hardware.machine`."""
        return {
            **self.engines.identity(),
            "options": all_options(self.plan.common),
            "machine": {name: host[name] for name in ("device", "processor", "cores", "jax")},
        }

    # -- prompts -----------------------------------------------------------------------------------------

    def _vanilla_ids(self, dataset: Dataset, question: Question) -> list[int]:
        """Returns the tokens of an answer of `vanilla`, which are the same in all."""
        place = dataset.name, question.id, BASELINE
        answers = self.log.answers.values()
        return next(a["output_ids"] for a in answers if (a["dataset"], a["question"], a["setting"]) == place)

    def _messages(self, dataset: Dataset, question: Question) -> Prompt:
        """Returns the prompt, after the turns that it follows and `vanilla`'s answers to them."""
        if question.follows is None:
            return question.prompt
        before = self._questions[dataset.name, question.follows]
        earlier = self._messages(dataset, before)
        turns = [{"role": "user", "content": earlier}] if isinstance(earlier, str) else list(earlier)
        answer = text_of(self.engines.base.tokenizer, self._vanilla_ids(dataset, before))
        return [*turns, {"role": "assistant", "content": answer}, {"role": "user", "content": question.prompt}]

    def encode(self, dataset: Dataset, question: Question) -> list[int]:
        """Returns the token ids of the prompt, and of the turns before it."""
        key, room = (dataset.name, question.id), self.engines.max_seq_len
        if key not in self._ids:
            where = f"{dataset.name}, question {question.id}"
            try:
                ids = self.engines.base.encode(self._messages(dataset, question))
            except PromptError as error:
                raise PromptError(f"{where}: {error}") from None
            if len(ids) >= room:
                raise PromptError(f"{where}: its {len(ids)} tokens leave no room, the models have it for {room}")
            self._ids[key] = ids
        return self._ids[key]

    def _in_order(self, dataset: Dataset) -> list[Question]:
        """Sorts by prompt length, on which programs depend; later turns come after those they follow."""

        def place(question: Question) -> tuple[int, int]:
            depth, first = 0, question
            while first.follows is not None:
                depth, first = depth + 1, self._questions[dataset.name, first.follows]
            return depth, len(self.encode(dataset, first))

        return sorted(dataset.questions, key=place)

    # -- answers -----------------------------------------------------------------------------------------

    def run(self, log: AnswerLog) -> None:
        """Answers what has no record yet.

        Raises:
          ValueError: records of other options or prompts, or a prompt that cannot be served; nothing has been answered.
        """
        self.log = log
        self._check_records()
        ordered = [(dataset, self._in_order(dataset)) for dataset in self.plan.datasets]
        turns = list(turns_of(ordered, self.rows, self.plan.config.repeats))
        missing = sum(len(missing_rows(turn, log)) * len(turn.questions) for turn in turns)
        total = sum((1 + len(turn.rows)) * len(turn.questions) for turn in turns)
        with progress_bar("bench", "answer", total=total, initial=total - missing) as bar:
            for turn in turns:
                self._answer(turn, bar)
                self._compare(turn, bar)

    def _check_records(self) -> None:
        """Raises ValueError unless labels and questions stand for the same options and prompts in records and now."""
        options = {row.label: dict(row.options) for row in self.rows}
        stamps = {}
        for record in self.log.answers.values():
            label = record["setting"]
            stamps[record["dataset"], record["question"]] = record["prompt_stamp"]
            if options.get(label, record["options"]) != record["options"]:
                raise ValueError(
                    f"{self.log.path}: {label} was answered with other options ({record['options']} there, "
                    f"{options[label]} here); name another --out"
                )
        for dataset in self.plan.datasets:
            for question in dataset.questions:
                if question.follows is None:
                    now = stamp(self.encode(dataset, question))
                    if stamps.get((dataset.name, question.id), now) != now:
                        place = f"prompt {question.id} of {dataset.name}"
                        raise ValueError(f"{self.log.path}: made with other settings ({place}); name another --out")

    def _results(self, row: Row, dataset: Dataset, questions: list[Question]) -> list[Result]:
        """Returns warm answers to questions that are asked together.

        A row's corpus holds the questions before the first one, and `vanilla`'s answers to them.
        """
        config = self._configs[row.label]
        engine = self.engines.get(row, config)
        engine.corpus = None
        if CORPUS in row.options:
            engine.corpus = Corpus(row.options[CORPUS])
            for earlier in itertools.takewhile(lambda other: other != questions[0], self._in_order(dataset)):
                engine.corpus.add(self.encode(dataset, earlier) + self._vanilla_ids(dataset, earlier))
        prompts = [self.encode(dataset, question) for question in questions]
        for _ in range(WARM_UPS + 1):
            results = engine.generate(prompts, config)
            if not results[0].stats.compiles + results[0].stats.cache_hits:
                break
        return results

    def _answer(self, turn: Turn, bar: tqdm) -> None:
        """Gives and records the answers of a turn that have no record."""
        dataset, missing = turn.dataset, missing_rows(turn, self.log)
        for position, row in enumerate([VANILLA, *turn.rows][:: -1 if turn.reverse else 1]):
            if row not in missing:
                continue
            bar.set_postfix_str(f"{dataset.name}, {row.label}")
            results = self._results(row, dataset, turn.questions)
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
                    "session": self.log.session,
                    "prompt_stamp": stamp(self.encode(dataset, question)),
                    "compared": promises_equality(self._configs[row.label]),
                    "drafter": self._shapes[row.label],
                    **to_record(result, len(results)),
                }
                self.log.append(record)
                bar.update()

    def _compare(self, turn: Turn, bar: tqdm) -> None:
        """Notes where answers of a turn leave `vanilla`'s, and how close the target's two best logits are there."""
        dataset, config = turn.dataset, self.plan.config
        for row, question in itertools.product(turn.rows, turn.questions):
            record = self.log.answers[dataset.name, question.id, turn.repeat, row.label]
            baseline = self.log.baseline_of(record)
            if baseline is None or not record["compared"] or key_of(DIFFERENCE, record) in self.log.differences:
                continue
            at = first_difference(baseline["output_ids"], record["output_ids"])
            if at is None:
                continue
            engine = self.engines.get(row, self._configs[row.label])
            gap = logit_gap(engine, self.encode(dataset, question) + baseline["output_ids"][:at])
            place = {name: record[name] for name in ("dataset", "question", "repeat", "setting")}
            self.log.append({"kind": DIFFERENCE, **place, "first_difference": at, "logit_gap": gap})
            verdict = NEAR_TIE if gap < config.near_tie and not self.plan.common.exact else DIFFERENT
            bar.write(
                f"{row.label}, {dataset.name} question {question.id}: {verdict} at token {at}, logit gap {gap:.2e}",
                file=sys.stderr,
            )


def planned_answers(log: AnswerLog, plan: RunPlan, rows: Sequence[Row]) -> pd.DataFrame:
    """Returns the answers of a log that a plan asks for, in the order of its questions, whoever answered first."""
    answers = log.frame(0.0 if plan.common.exact else plan.config.near_tie)
    order = {(d.name, q.id): at for at, (d, q) in enumerate((d, q) for d in plan.datasets for q in d.questions)}
    answers["order"] = [order.get(place, -1) for place in zip(answers.dataset, answers.question)]
    asked = answers.setting.isin([BASELINE, *(row.label for row in rows)]) & (answers.repeat < plan.config.repeats)
    return answers[asked & (answers.order >= 0)].sort_values(["order", "repeat"], kind="stable")
