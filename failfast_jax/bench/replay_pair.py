"""One target and drafter of real sizes on the device: the programs that a replay times, and its record."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from failfast_jax.bench import replay_programs
from failfast_jax.bench.replay_programs import Caches, Draws, Models, OnDevice, Schedule, Start, compiled, start_of
from failfast_jax.bench.timing import interleaved, medians
from failfast_jax.decoding.decode_state import RoundLog
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.stopping import Never
from failfast_jax.decoding.width_plan import DEFAULT_WIDTHS, Plan, buffer_length, make_plan
from failfast_jax.drafters.block_diffusion import Wide
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import Execution, execution_of
from failfast_jax.models.transformer import Decoder
from failfast_jax.public_data import acceptance_law, model_shapes
from failfast_jax.public_data.acceptance_law import CHUNK, Law, Statistics
from failfast_jax.public_data.model_shapes import CONFIGS
from failfast_jax.util import hardware
from failfast_jax.util.progress import progress_bar, waiting

LONGEST = 70
"""Longest draft of the paper's tables."""
DEFAULT_CAP = 60
"""The engine's own longest draft: a verify of 61 rows is timed beside that of the paper's 71."""


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
    """Settings of a run; see the command's flags."""

    drafter: str
    datasets: tuple[str, ...]
    rounds: int
    context: int
    dtype: str
    platform: str
    kernel: str | None
    """Attention kernel; None: the platform's."""
    seed: int
    repeats: int
    tensor_parallel: int = 1
    """Devices that share each layer."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One dataset's draws, and the passes that follow from them."""

    statistics: Statistics
    law: Law
    draws: Draws
    schedule: Schedule

    @classmethod
    def drawn(cls, target: str, dataset: str, drafter: Wide, plan: Plan, options: ReplayOptions) -> Case:
        """Draws the rounds of a dataset from its law."""
        statistics = acceptance_law.published_for(target, dataset)
        law = acceptance_law.fit(statistics)
        draws = Draws(*map(jnp.asarray, acceptance_law.draw(law, options.rounds, options.seed)))
        return cls(statistics, law, draws, replay_programs.schedule(drafter, draws, options.context, plan.widths))

    def check(self, log: RoundLog) -> None:
        """Compares the rounds with the draws.

        Raises:
          RuntimeError: a round drafted, accepted, emitted or passed otherwise.
        """
        rounds = len(self.draws.accepted)
        expected = {"draft_length": self.draws.chunks * CHUNK, "accepted": self.draws.accepted}
        expected |= {"emitted": self.draws.accepted + 1, "passes": self.draws.chunks}  # one pass per chunk
        for name, values in expected.items():
            wrong = np.flatnonzero(np.asarray(getattr(log, name))[0, :rounds] != np.asarray(values))
            if wrong.size or int(log.round) != rounds:
                place = int(wrong[0]) if wrong.size else int(log.round)
                raise RuntimeError(f"{self.statistics.dataset}: round {place} of {rounds} left the draws ({name})")


@dataclasses.dataclass(frozen=True)
class CaseReport:
    """Times of one dataset's rounds, each the mean of a round."""

    dataset: str
    passes: str
    """`wide`: as timed, one drafter pass per chunk. `paper`: computed, with the paper's number of passes."""
    statistics: Statistics
    law: dict[str, Any]
    rounds: int
    tokens: int
    drafted_per_round: float
    accepted_per_round: float
    passes_per_round: float
    round_ms: float
    floor_ms: float
    parts_ms: dict[str, float]
    vanilla: dict[str, float]
    """Times of a step of plain decoding."""

    def with_passes(self, passes: float, one_pass: dict[str, float]) -> CaseReport:
        """Returns the row with `passes` drafter passes per round; each further one costs `one_pass`."""
        more = max(passes - self.passes_per_round, 0.0)
        return dataclasses.replace(
            self,
            passes="paper",
            passes_per_round=self.passes_per_round + more,
            round_ms=self.round_ms + more * one_pass["ms"],
            floor_ms=self.floor_ms + more * one_pass["floor_ms"],
            parts_ms=self.parts_ms | {"drafter": self.parts_ms["drafter"] + more * one_pass["ms"]},
        )

    def as_record(self) -> dict[str, Any]:
        """Returns the row of `replay.json`: the fields, and the ratios that follow from them."""
        record, tokens_per_round = dataclasses.asdict(self), self.tokens / self.rounds
        vanilla = record.pop("vanilla")
        return record | {
            "over_floor": self.round_ms / self.floor_ms,
            "tokens_per_s": 1e3 * tokens_per_round / self.round_ms,
            "speedup": tokens_per_round * vanilla["ms"] / self.round_ms,
            "speedup_at_floor": tokens_per_round * vanilla["floor_ms"] / self.floor_ms,
            "papers_speedup": acceptance_law.papers_speedup(self.statistics),
        }


def abstract_pair(
    target: ModelConfig, drafter: ModelConfig, options: ReplayOptions, mesh: Mesh | None = None, whole: bool = False
) -> Models:
    """Returns the shapes of a target and of a `wide` drafter around its model.

    Args:
      mesh: devices that they are spread over.
      whole: every device of the mesh has all of both.
    """

    def model(config: ModelConfig, is_drafter: bool) -> Decoder:
        execution = Execution(kernel=options.kernel, mesh=mesh)
        if mesh is not None and not whole:
            execution = execution_of(config, mesh, drafter=is_drafter, kernel=options.kernel)
        return model_shapes.spread_shapes(model_shapes.abstract_model(config, options.dtype), execution)

    sizes = {"vocab": target.vocab_size, "spec_len": CHUNK, "max_spec_len": LONGEST}
    wide = Wide(model=model(drafter, True), rule=Never(), **sizes)
    everywhere = None if mesh is None else NamedSharding(mesh, P())

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or everywhere)

    return jax.tree.map(shape, Models(model(target, False), wide))


class ReplayedPair:
    """One target and drafter, and the programs that are timed on them. Nothing is allocated before `measure`.

    Raises:
      OptionError: the target cannot be spread over the mesh.

    Attributes:
      programs: compiled functions with their last argument (steps or draws), by name: `vanilla`, `replay MATH`,
        `verify 72` (rows), `pass 32` (rows), `bookkeeping`.
      seconds: medians by name, once measured.
    """

    def __init__(self, name: str, options: ReplayOptions, mesh: Mesh | None = None):
        self.name, self.options, self.mesh = name, options, mesh
        self.configs = CONFIGS[name], CONFIGS[options.drafter]
        self.models = abstract_pair(*self.configs, options, mesh)
        drafter = self.models.drafter
        self.plan = make_plan(drafter, platform=options.platform)
        self.cases = [Case.drawn(name, dataset, drafter, self.plan, options) for dataset in options.datasets]
        self.capacity = options.context + max(case.schedule.tokens for case in self.cases) + LONGEST + 1
        self.length = buffer_length(self.capacity, drafter, self.plan)
        self.steps, self.part_steps = self.cases[0].schedule.tokens, max(options.rounds // 2, 2)
        verify = {*self.plan.widths}
        if options.platform != "cpu":  # an accelerator verifies any draft in one width
            verify.add(DEFAULT_WIDTHS[options.platform].ladder(DEFAULT_CAP + 1)[-1])
        self.verify_widths = sorted(verify)
        self.pass_widths = list(range(drafter.block, drafter.window + 1, drafter.block))
        self.programs = self._programs()
        self.seconds: dict[str, float] = {}

    def _programs(self) -> dict[str, tuple[Callable, Any]]:
        part, plain = np.int32(self.part_steps), make_plan(Drafter(), platform=self.options.platform)
        replay = compiled(replay_programs.replay_program, capacity=self.capacity, plan=self.plan)
        vanilla = compiled(replay_programs.vanilla_program, capacity=self.capacity, plan=plain)
        programs = {"vanilla": (vanilla, np.int32(self.steps))}
        programs |= {f"replay {case.statistics.dataset}": (replay, case.draws) for case in self.cases}
        programs["bookkeeping"] = replay, self.cases[0].draws
        for width in self.verify_widths:
            program = compiled(replay_programs.verify_program, capacity=self.capacity, width=width)
            programs[f"verify {width}"] = program, part
        for width in self.pass_widths:
            programs[f"pass {width}"] = compiled(replay_programs.pass_program, width=width), part
        return programs

    def shapes(self, models: Models) -> tuple[Models, Caches, Start]:
        """Returns the programs' arguments: shapes of models and caches, and a random context."""
        rng, pair = np.random.default_rng(self.options.seed), (models.target, models.drafter.model)
        start = start_of(rng.integers(0, min(model.config.vocab_size for model in pair), self.options.context))
        return models, model_shapes.abstract_caches(pair, self.length, self.options.dtype), start

    def _fill(self, models: Models) -> OnDevice:
        models, caches, start = self.shapes(models)
        filled = jax.block_until_ready(model_shapes.random_arrays((models, caches), self.options.seed))
        return OnDevice(*filled, start, self.mesh)

    def needed_bytes(self) -> int:
        """Bytes of weights, caches and logits on each device."""
        models, caches, _ = self.shapes(self.models)
        parts = self.models.target.execution.parts(self.models.target.execution.vocab)
        logits = 4 * self.configs[0].vocab_size * self.plan.widths[-1] // parts
        return hardware.bytes_on_a_device((models, caches)) + logits

    def measure(self) -> None:
        """Runs all programs in turn, once to warm up and then `repeats` times, and checks the replays' logs.

        Raises:
          MisfitError: the device's memory cannot hold the pair.
        """
        model_shapes.check_memory(self.needed_bytes(), "weights, caches and logits")
        with waiting(f"random weights of {self.name} and {self.options.drafter}"):
            real = self._fill(self.models)
        default_kernel = dataclasses.replace(self.options, kernel=None)  # the heads are too small for most kernels
        minimal = map(model_shapes.minimal_model, self.configs)
        small = self._fill(abstract_pair(*minimal, default_kernel, self.mesh, whole=True))
        put = functools.partial(replay_programs.on_every_device, mesh=self.mesh)
        programs = {name: (run, put(last)) for name, (run, last) in self.programs.items()}
        results = {}
        turns = len(self.programs) * (self.options.repeats + 1)
        with progress_bar(f"replay {self.name}", "run", total=turns) as bar:

            def run(name: str) -> None:
                bar.set_postfix_str(name)
                results[name] = (small if name == "bookkeeping" else real).run(*programs[name])
                bar.update()

            actions = {name: functools.partial(run, name) for name in self.programs}
            self.seconds = medians(interleaved(actions, self.options.repeats))
        for case in self.cases:
            case.check(results[f"replay {case.statistics.dataset}"])

    def report(self, speed: dict[str, float]) -> dict[str, Any]:
        """Returns the target's record after `measure`.

        Args:
          speed: `hardware.bandwidth`.
        """
        target, drafter = map(model_shapes.device_reads, (self.models.target, self.models.drafter.model))
        context, block = self.options.context, self.models.drafter.block
        first = (context - 1) // block * block

        def timed(name: str, steps: int, nbytes: float) -> dict[str, float]:
            seconds, floor = self.seconds[name] / steps, nbytes / speed["copy"]
            return {"ms": 1e3 * seconds, "floor_ms": 1e3 * floor, "over_floor": seconds / floor}

        vanilla = timed("vanilla", self.steps, target(context + (self.steps - 1) / 2))
        part = self.part_steps
        record = {
            "target": self.name,
            "kernel": self.models.target.execution.resolved(jnp.dtype(self.options.dtype), self.configs[0].head_dim),
            "bandwidth_bytes_per_s": speed,
            "needed_bytes": self.needed_bytes(),
            "vanilla": {"steps": self.steps, **vanilla, "tokens_per_s": 1e3 / vanilla["ms"]},
            "verify": {w: timed(f"verify {w}", part, target(context + w - 1)) for w in self.verify_widths},
            "drafter_pass": {w: timed(f"pass {w}", part, drafter(first + w)) for w in self.pass_widths},
            "bookkeeping_ms": 1e3 * self.seconds["bookkeeping"] / self.options.rounds,
        }
        rows = []
        for case in self.cases:
            floor = case.schedule.bytes_moved(target, drafter) / speed["copy"]
            row = self._case_report(case, record, floor)
            rows += [row, row.with_passes(case.statistics.drafter_passes, record["drafter_pass"][block])]
        return record | {"cases": [row.as_record() for row in rows]}

    def _case_report(self, case: Case, record: dict[str, Any], floor: float) -> CaseReport:
        rounds, planned = self.options.rounds, case.schedule
        round_ms = 1e3 * self.seconds[f"replay {case.statistics.dataset}"] / rounds

        def spent(passes: list[tuple[int, int]], times: dict[int, dict[str, float]]) -> float:
            return sum(count * times[width]["ms"] for width, count in Counter(w for w, _ in passes).items()) / rounds

        parts = {
            "drafter": spent(planned.drafter, record["drafter_pass"]),
            "verify": spent(planned.target, record["verify"]),
            "bookkeeping": record["bookkeeping_ms"],
        }
        drawn = {"chunks": case.draws.chunks.tolist(), "accepted": case.draws.accepted.tolist()}
        return CaseReport(
            dataset=case.statistics.dataset,
            passes="wide",
            statistics=case.statistics,
            law={**dataclasses.asdict(case.law), "seed": self.options.seed, **drawn},
            rounds=rounds,
            tokens=planned.tokens,
            drafted_per_round=float(np.mean(case.draws.chunks)) * CHUNK,
            accepted_per_round=float(np.mean(case.draws.accepted)),
            passes_per_round=len(planned.drafter) / rounds,
            round_ms=round_ms,
            floor_ms=1e3 * floor / rounds,
            parts_ms=parts | {"rest": round_ms - sum(parts.values())},
            vanilla=record["vanilla"],
        )
