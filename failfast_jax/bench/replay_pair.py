"""One target and drafter of real sizes on the device, and every program of theirs that a replay times."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from failfast_jax.bench.replay_programs import (
    Caches,
    Draws,
    Models,
    OnDevice,
    Schedule,
    Start,
    compiled,
    on_every_device,
    pass_program,
    replay_program,
    schedule,
    start_of,
    vanilla_program,
    verify_program,
)
from failfast_jax.bench.timing import interleaved, medians
from failfast_jax.decoding.decode_state import RoundLog
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.stopping import Never
from failfast_jax.decoding.width_plan import DEFAULT_WIDTHS, Plan, buffer_length, make_plan
from failfast_jax.drafters.wide import Wide
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import Execution, execution_of
from failfast_jax.models.transformer import Decoder
from failfast_jax.public_data.acceptance_law import (
    CHUNK,
    Law,
    Statistics,
    draw,
    extra_passes,
    fit,
    papers_speedup,
    published_for,
)
from failfast_jax.public_data.model_shapes import (
    CONFIGS,
    abstract_caches,
    abstract_model,
    check_memory,
    device_reads,
    hollow,
    random_arrays,
    spread_shapes,
)
from failfast_jax.util import hardware
from failfast_jax.util.progress import progress_bar, waiting

LONGEST = 70
"""Longest draft of the paper's tables."""
DEFAULT_CAP = 60
"""The engine's own cap: a verify of 61 rows is timed beside that of the paper's 71."""


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
    """What a run measures; see the command's options."""

    drafter: str
    datasets: tuple[str, ...]
    passes: tuple[str, ...]
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
    """One replay of a target: draws, and what is known about them beforehand."""

    statistics: Statistics
    law: Law
    passes: str
    """`wide`: as many as the schedule needs. `paper`: the published number."""
    draws: Draws
    schedule: Schedule

    def check(self, log: RoundLog) -> None:
        """Whether the rounds did what was drawn.

        Raises:
          RuntimeError: a round drafted, accepted, emitted or passed otherwise.
        """
        rounds = len(self.draws.accepted)
        expected = {
            "draft_length": self.draws.chunks * CHUNK,
            "accepted": self.draws.accepted,
            "emitted": self.draws.accepted + 1,
            "passes": self.schedule.passes,
        }
        for name, values in expected.items():
            wrong = np.flatnonzero(np.asarray(getattr(log, name))[0, :rounds] != np.asarray(values))
            if wrong.size or int(log.round) != rounds:
                at = int(wrong[0]) if wrong.size else int(log.round)
                raise RuntimeError(
                    f"{self.statistics.dataset}, {self.passes}: round {at} of {rounds} left the draws ({name})"
                )


def make_cases(target: str, drafter: Wide, plan: Plan, options: ReplayOptions) -> list[Case]:
    """One case a dataset and kind of passes; both kinds of a dataset have the same draws."""
    cases = []
    for dataset in options.datasets:
        statistics = published_for(target, dataset)
        law = fit(statistics)
        chunks, accepted = draw(law, options.rounds, options.seed)
        for passes in options.passes:
            extra = np.zeros_like(chunks)
            if passes == "paper":
                extra = extra_passes(chunks, statistics.drafter_passes)
            draws = Draws(chunks=jnp.asarray(chunks), accepted=jnp.asarray(accepted), extra=jnp.asarray(extra))
            planned = schedule(drafter, draws, options.context, plan.widths)
            cases.append(Case(statistics, law, passes, draws, planned))
    return cases


def abstract_pair(
    target: ModelConfig, drafter: ModelConfig, options: ReplayOptions, mesh: Mesh | None = None, whole: bool = False
) -> Models:
    """A target, and a `wide` drafter around its model, of shapes.

    Args:
      mesh: devices that they are spread over.
      whole: every device of the mesh has all of both.
    """

    def model(config: ModelConfig, is_drafter: bool) -> Decoder:
        execution = Execution(kernel=options.kernel, mesh=mesh)
        if mesh is not None and not whole:
            execution = execution_of(config, mesh, drafter=is_drafter, kernel=options.kernel)
        return spread_shapes(abstract_model(config, options.dtype), execution)

    sizes = {"vocab": target.vocab_size, "spec_len": CHUNK, "max_spec_len": LONGEST}
    wide = Wide(model=model(drafter, True), rule=Never(), **sizes)
    everywhere = None if mesh is None else NamedSharding(mesh, P())

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or everywhere)

    return jax.tree.map(shape, Models(model(target, False), wide))


Key = tuple[str | int, ...]
"""What is timed: `("vanilla",)`, `("replay", 0)` (a case), `("verify", 72)`, `("pass", 32)`, `("bookkeeping",)`."""


class ReplayedPair:
    """One target and drafter, with every program that is timed on them. Nothing is allocated before `measure`.

    Raises:
      OptionError: the target cannot be spread over the mesh.

    Attributes:
      programs: by what is timed, a compiled function of models, caches, start and steps or draws, and the latter.
      seconds: medians, once measured.
    """

    def __init__(self, name: str, options: ReplayOptions, mesh: Mesh | None = None):
        self.name, self.options, self.mesh = name, options, mesh
        self.configs = CONFIGS[name], CONFIGS[options.drafter]
        self.models = abstract_pair(*self.configs, options, mesh)
        drafter = self.models.drafter
        self.plan = make_plan(drafter, platform=options.platform)
        self.cases = make_cases(name, drafter, self.plan, options)
        self.capacity = options.context + max(case.schedule.tokens for case in self.cases) + LONGEST + 1
        self.length = buffer_length(self.capacity, drafter, self.plan)
        self.steps = {"vanilla": self.cases[0].schedule.tokens, "part": max(options.rounds // 2, 2)}
        self.verify_widths, self.pass_widths = self._widths(drafter)
        self.programs = self._programs()
        self.seconds: dict[Key, float] = {}

    def _widths(self, drafter: Wide) -> tuple[list[int], list[int]]:
        """Of verifies: those of the rounds and, where widths are not a ladder, the one for a draft of 60. Of passes."""
        verify = set(self.plan.widths)
        if self.options.platform != "cpu":
            verify.add(DEFAULT_WIDTHS[self.options.platform].ladder(DEFAULT_CAP + 1)[-1])
        return sorted(verify), list(range(drafter.block, drafter.window + 1, drafter.block))

    def _programs(self) -> dict[Key, tuple[Callable, Any]]:
        room, part = {"capacity": self.capacity}, np.int32(self.steps["part"])
        plain = make_plan(Drafter(), platform=self.options.platform)
        programs: dict[Key, tuple[Callable, Any]] = {
            ("vanilla",): (compiled(vanilla_program, **room, plan=plain), np.int32(self.steps["vanilla"]))
        }
        replays = {
            passes: compiled(replay_program, **room, plan=self.plan, extra=passes == "paper")
            for passes in ("wide", "paper")
        }
        programs |= {("replay", at): (replays[case.passes], case.draws) for at, case in enumerate(self.cases)}
        programs["bookkeeping",] = replays["wide"], self.cases[0].draws
        for width in self.verify_widths:
            programs["verify", width] = compiled(verify_program, **room, width=width), part
        for width in self.pass_widths:
            programs["pass", width] = compiled(pass_program, width=width), part
        return programs

    def shapes(self, models: Models) -> tuple[Models, Caches, Start]:
        """What the programs take: shapes of models and caches, and a random context to begin with."""
        rng, pair = np.random.default_rng(self.options.seed), (models.target, models.drafter.model)
        start = start_of(rng.integers(0, min(model.config.vocab_size for model in pair), self.options.context))
        return models, abstract_caches(pair, self.length, self.options.dtype), start

    def _fill(self, models: Models) -> OnDevice:
        models, caches, start = self.shapes(models)
        filled = jax.block_until_ready(random_arrays((models, caches), self.options.seed))
        return OnDevice(*filled, start, self.mesh)

    def needed_bytes(self) -> int:
        """Of weights, caches and logits, on each device."""
        models, caches, _ = self.shapes(self.models)
        parts = self.models.target.execution.parts(self.models.target.execution.vocab)
        logits = 4 * self.configs[0].vocab_size * self.plan.widths[-1] // parts
        return hardware.bytes_on_a_device((models, caches)) + logits

    def measure(self) -> None:
        """Runs everything in turn, once to warm up and then `repeats` times, and checks the replays' logs.

        Raises:
          MisfitError: the device's memory cannot hold the pair.
        """
        check_memory(self.needed_bytes(), "weights, caches and logits")
        with waiting(f"random weights of {self.name} and {self.options.drafter}"):
            real = self._fill(self.models)
        as_usual = dataclasses.replace(self.options, kernel=None)  # the heads are too small for most kernels
        small = self._fill(abstract_pair(*map(hollow, self.configs), as_usual, self.mesh, whole=True))
        programs = {key: (run, on_every_device(last, self.mesh)) for key, (run, last) in self.programs.items()}
        results = {}
        turns = len(self.programs) * (self.options.repeats + 1)
        with progress_bar(f"replay {self.name}", "run", total=turns) as bar:

            def run(key: Key) -> None:
                bar.set_postfix_str(" ".join(map(str, key)))
                results[key] = (small if key == ("bookkeeping",) else real).run(*programs[key])
                bar.update()

            acts = {key: functools.partial(run, key) for key in self.programs}
            self.seconds = medians(interleaved(acts, self.options.repeats))
        for at, case in enumerate(self.cases):
            case.check(results["replay", at])

    # -- the report ----------------------------------------------------------------------------------------

    def report(self, speed: dict[str, float]) -> dict[str, Any]:
        """Everything that is known about the target after `measure`; `speed`: `platforms.bandwidth`."""
        (target, drafter), context, steps = self._reads(), self.options.context, self.steps["vanilla"]

        def timing(key: Key, repeats: int, reads: Callable[[float], float], live: float) -> dict[str, float]:
            seconds, floor = self.seconds[key] / repeats, reads(live) / speed["copy"]
            return {"ms": 1e3 * seconds, "floor_ms": 1e3 * floor, "over_floor": seconds / floor}

        block = self.models.drafter.block
        part, begin = self.steps["part"], (context - 1) // block * block
        vanilla = timing(("vanilla",), steps, target, context + (steps - 1) / 2)
        execution, dtype = self.models.target.execution, jnp.dtype(self.options.dtype)
        record = {
            "target": self.name,
            "kernel": execution.resolved(dtype, self.configs[0].head_dim),
            "bandwidth_bytes_per_s": speed,
            "needed_bytes": self.needed_bytes(),
            "vanilla": {"steps": steps, **vanilla, "tokens_per_s": 1e3 / vanilla["ms"]},
            "verify": {w: timing(("verify", w), part, target, context + w - 1) for w in self.verify_widths},
            "drafter_pass": {w: timing(("pass", w), part, drafter, begin + w) for w in self.pass_widths},
            "bookkeeping_ms": 1e3 * self.seconds["bookkeeping",] / self.options.rounds,
        }
        cases = [self._case(at, record) for at in range(len(self.cases))]
        return record | {"cases": cases}

    def _reads(self) -> tuple[Callable[[float], float], Callable[[float], float]]:
        """Bytes that a pass of each model has to read on a device, by live positions."""
        return device_reads(self.models.target), device_reads(self.models.drafter.model)

    def _case(self, index: int, record: dict[str, Any]) -> dict[str, Any]:
        case, rounds, seconds = self.cases[index], self.options.rounds, self.seconds["replay", index]
        planned, vanilla = case.schedule, record["vanilla"]
        floor = planned.bytes_moved(*self._reads()) / record["bandwidth_bytes_per_s"]["copy"]
        by_target, by_drafter = planned.counts()
        parts = {
            "drafter": sum(n * record["drafter_pass"][width]["ms"] for width, n in by_drafter.items()) / rounds,
            "verify": sum(n * record["verify"][width]["ms"] for width, n in by_target.items()) / rounds,
            "bookkeeping": record["bookkeeping_ms"],
        }
        round_ms = 1e3 * seconds / rounds
        drawn = {field.name: getattr(case.draws, field.name).tolist() for field in dataclasses.fields(case.draws)}
        return {
            "dataset": case.statistics.dataset,
            "passes": case.passes,
            "statistics": dataclasses.asdict(case.statistics),
            "law": {**dataclasses.asdict(case.law), "seed": self.options.seed, **drawn},
            "rounds": rounds,
            "tokens": planned.tokens,
            "drafted_per_round": float(np.mean(case.draws.chunks)) * CHUNK,
            "accepted_per_round": float(np.mean(case.draws.accepted)),
            "passes_per_round": sum(planned.passes) / rounds,
            "round_ms": round_ms,
            "floor_ms": 1e3 * floor / rounds,
            "over_floor": seconds / floor,
            "parts_ms": parts | {"rest": round_ms - sum(parts.values())},
            "tokens_per_s": planned.tokens / seconds,
            "speedup": planned.tokens * vanilla["ms"] / (1e3 * seconds),
            "speedup_at_floor": planned.tokens * vanilla["floor_ms"] / (1e3 * floor),
            "papers_speedup": papers_speedup(case.statistics),
        }
