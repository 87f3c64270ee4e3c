"""What a benchmark asks, and who answers: the engines of one process, or several such on a Ray cluster."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from failfast_jax.bench.engine_pool import EnginePool
from failfast_jax.bench.harness import Comparison
from failfast_jax.bench.journal import Journal
from failfast_jax.bench.rows import CORPUS, Row, all_options
from failfast_jax.bench.run_config import RunConfig
from failfast_jax.errors import OptionError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.public_data.question_sets import Dataset
from failfast_jax.text_stream import text_of
from failfast_jax.util.command_line import import_optional
from failfast_jax.util.hardware import machine
from failfast_jax.util.progress import progress_bar
from failfast_jax.util.records import Record

Place = tuple[str, str]
"""A dataset's name and a question's id."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What is to be answered.

    Attributes:
      common: options of every row that does not say otherwise.
    """

    config: RunConfig
    common: GenerationConfig
    rows: list[Row]
    datasets: list[Dataset]


class Answers:
    """The engines of one process, and what they say to a task's questions.

    Raises:
      ValueError: a model, a row or a prompt that cannot be served; nothing has been answered then.
    """

    def __init__(self, task: Task):
        self.task, config = task, task.config
        self.engines = EnginePool(
            *(config.target, config.drafter, config.ar_drafter, config.dtype),
            tensor_parallel=config.tensor_parallel,
            attention=config.attention,
        )
        if config.scores and self.engines.base.tokenizer is None and any(d.scoring for d in task.datasets):
            raise ValueError(
                f"{self.engines.base.target_name} has no tokenizer, so that answers have no text: --no-scores"
            )
        self.left_out = self._leave_out()
        self.rows = [row for row in task.rows if row.label not in self.left_out]

    def _leave_out(self) -> dict[str, str]:
        """Rows that only `all` asked for and that cannot run here, with the reason."""
        left_out = {}
        for row in self.task.rows:
            if row.optional:
                try:
                    self.engines.prepare(row, row.config(self.task.common))
                except ValueError as error:
                    left_out[row.label] = str(error).removeprefix(f"{row.label}: ")
                    print(f"left out: {row.label}: {left_out[row.label]}", file=sys.stderr)
        if len(left_out) == len(self.task.rows):
            raise ValueError("--methods: none of them can run here")
        return left_out

    def facts(self) -> dict[str, Any]:
        """What a report says of the machine and the models, and what records must agree on."""
        host = machine()
        identity = {
            **self.engines.identity(),
            "options": all_options(self.task.common),
            "machine": {name: host[name] for name in ("device", "processor", "cores", "jax")},
        }
        return {"identity": identity, "machine": host, "models": self.engines.names(), "left_out": self.left_out}

    def comparison(self, journal: Journal) -> Comparison:
        """The task's questions, with a journal."""
        task, config = self.task, self.task.config
        options = {"repeats": config.repeats, "near_tie": config.near_tie}
        return Comparison(self.engines, task.datasets, self.rows, task.common, journal, **options)

    def run(self, journal: Journal) -> None:
        """Answers what has no record."""
        self.comparison(journal).run()

    def texts(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """Answers as text."""
        return [text_of(self.engines.base.tokenizer, ids) for ids in answers]


class _Actor:
    """`Answers` in a process of its own. Started anew after a loss, it reads its models anew."""

    def __init__(self, task: Task):
        self.task = task

    @functools.cached_property
    def answers(self) -> Answers:
        return Answers(self.task)

    def facts(self) -> dict[str, Any]:
        return self.answers.facts()

    def texts(self, answers: Sequence[Sequence[int]]) -> list[str]:
        return self.answers.texts(answers)

    def said(self, places: list[Place], known: list[Record], session: int) -> list[Record]:
        """New records of these questions, whose earlier ones are `known`."""
        journal = Journal(None, {})
        journal.session = session
        for record in known:
            journal.append(record)
        self.answers.comparison(journal).run(only=places)
        return journal.records[len(known) :]


class RayAnswers:
    """Like `Answers`, by several actors of a Ray cluster (of this machine, if there is no other).

    A question and those that follow it go to one actor; Ray starts a lost actor anew and asks it again.

    Raises:
      OptionError: Ray is missing, or a row needs the questions one after the other.
      ValueError: see `Answers`.
    """

    def __init__(self, task: Task):
        ray = self.ray = import_optional("ray", "--engine ray", extra="ray")
        for row in task.rows:
            if CORPUS in row.options or row.batch > 1:
                raise OptionError(
                    f"--engine ray: {row.label}: with a corpus or in a batch, questions depend on each other; "
                    "leave --engine out"
                )
        self.task = task
        ray.init(ignore_reinit_error=True, log_to_driver=False, include_dashboard=False)
        remote = ray.remote(max_restarts=-1, max_task_retries=-1, **self._place())(_Actor)
        self.actors = [remote.remote(task) for _ in range(task.config.actors)]
        self._facts = self._get(self.actors[0].facts.remote())
        self.left_out = self._facts["left_out"]
        self.rows = [row for row in task.rows if row.label not in self.left_out]

    def _place(self) -> dict[str, Any]:
        """What an actor takes of the cluster: its devices, so that none are shared."""
        there, devices = self.ray.cluster_resources(), self.task.config.tensor_parallel or 1
        if "TPU" in there:
            return {"resources": {"TPU": devices}}
        if "GPU" in there:
            return {"num_gpus": devices}
        return {"num_cpus": 1}

    def _get(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def facts(self) -> dict[str, Any]:
        """See `Answers.facts`: of the first actor."""
        return self._facts

    def run(self, journal: Journal) -> None:
        """Answers what has no record; each actor gets the next questions when it has answered."""
        waiting = list(self._asked(journal))
        idle, busy = list(self.actors), {}
        with progress_bar("bench", "question", total=len(waiting)) as bar:
            while waiting or busy:
                while waiting and idle:
                    actor, (places, known) = idle.pop(), waiting.pop(0)
                    busy[actor.said.remote(places, known, journal.session)] = actor
                [done], _ = self.ray.wait(list(busy))
                for record in self._get(done):
                    journal.append(record)
                idle.append(busy.pop(done))
                bar.update()

    def _asked(self, journal: Journal) -> Iterator[tuple[list[Place], list[Record]]]:
        """Questions that belong together, with the records that there are of them."""
        known = defaultdict(list)
        for record in journal.records:
            known[record.get("dataset"), record.get("question")].append(record)
        for dataset in self.task.datasets:
            first = {}
            for question in dataset.questions:
                first[question.id] = question.id if question.follows is None else first[question.follows]
            for begin in dict.fromkeys(first.values()):
                places = [(dataset.name, each) for each, root in first.items() if root == begin]
                yield places, [record for place in places for record in known[place]]

    def texts(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """Answers as text."""
        return self._get(self.actors[0].texts.remote(answers))


ENGINES = {"local": Answers, "ray": RayAnswers}
