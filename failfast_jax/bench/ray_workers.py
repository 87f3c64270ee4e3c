"""Answers of several engines on a Ray cluster; they carry nothing but records."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from failfast_jax.bench.answer_log import AnswerLog
from failfast_jax.bench.comparison import Comparison, Place, RunPlan
from failfast_jax.bench.rows import CORPUS
from failfast_jax.errors import OptionError
from failfast_jax.util.command_line import import_optional
from failfast_jax.util.progress import progress_bar
from failfast_jax.util.records import Record


class _Actor:
    """A comparison in a process of its own. Started anew after a loss, it reads its models anew."""

    def __init__(self, plan: RunPlan):
        self.plan = plan

    @functools.cached_property
    def comparison(self) -> Comparison:
        return Comparison(self.plan)

    def facts(self) -> dict[str, Any]:
        return self.comparison.facts

    def texts(self, answers: Sequence[Sequence[int]]) -> list[str]:
        return self.comparison.texts(answers)

    def new_records(self, places: list[Place], known: list[Record], session: int) -> list[Record]:
        """Answers these questions, whose earlier records are `known`."""
        log = AnswerLog.of(known)
        log.session = session
        self.comparison.run(log, only=places)
        return log.records[len(known) :]


class RayComparison:
    """Like `Comparison`, by several actors of a Ray cluster (of this machine, if there is no other).

    A question and those that follow it go to one actor; Ray starts a lost actor anew and asks it again.

    Raises:
      OptionError: Ray is missing, or a row needs the questions one after the other.
      ValueError: see `Comparison`.
    """

    def __init__(self, plan: RunPlan):
        ray = self.ray = import_optional("ray", "--engine ray", extra="ray")
        for row in plan.rows:
            if CORPUS in row.options or row.batch > 1:
                raise OptionError(
                    f"--engine ray: {row.label}: with a corpus or in a batch, questions depend on each other; "
                    "use --engine local"
                )
        self.plan = plan
        ray.init(ignore_reinit_error=True, log_to_driver=False, include_dashboard=False)
        remote = ray.remote(max_restarts=-1, max_task_retries=-1, **self._resources())(_Actor)
        self.actors = [remote.remote(plan) for _ in range(plan.config.actors)]
        self.facts = self._get(self.actors[0].facts.remote())
        self.left_out = self.facts["left_out"]
        self.rows = [row for row in plan.rows if row.label not in self.left_out]

    def _resources(self) -> dict[str, Any]:
        """Returns what an actor takes of the cluster: its devices, so that none are shared."""
        cluster, devices = self.ray.cluster_resources(), self.plan.config.tensor_parallel
        if "TPU" in cluster:
            return {"resources": {"TPU": devices}}
        return {"num_gpus": devices} if "GPU" in cluster else {"num_cpus": 1}

    def _get(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def texts(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """Returns answers as text."""
        return self._get(self.actors[0].texts.remote(answers))

    def run(self, log: AnswerLog) -> None:
        """Answers what has no record; each actor gets the next questions when it has answered."""
        waiting = list(self._conversations(log))
        idle, busy = list(self.actors), {}
        with progress_bar("bench", "question", total=len(waiting)) as bar:
            while waiting or busy:
                while waiting and idle:
                    actor, (places, known) = idle.pop(), waiting.pop(0)
                    busy[actor.new_records.remote(places, known, log.session)] = actor
                [done], _ = self.ray.wait(list(busy))
                for record in self._get(done):
                    log.append(record)
                idle.append(busy.pop(done))
                bar.update()

    def _conversations(self, log: AnswerLog) -> Iterator[tuple[list[Place], list[Record]]]:
        """Yields questions that belong together, with their records."""
        known = defaultdict(list)
        for record in log.records:
            known[record.get("dataset"), record.get("question")].append(record)
        for dataset in self.plan.datasets:
            first = {}
            for question in dataset.questions:
                first[question.id] = question.id if question.follows is None else first[question.follows]
            for begin in dict.fromkeys(first.values()):
                places = [(dataset.name, each) for each, root in first.items() if root == begin]
                yield places, [record for place in places for record in known[place]]
