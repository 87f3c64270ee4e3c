"""One target and drafter of real sizes on the device, and every program of theirs that a replay times."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from failfast_jax.bench.limits import PASSES, memory_limit, papers_speedup
from failfast_jax.bench.public_models import (
    CONFIGS,
    abstract_caches,
    abstract_model,
    cache_bytes,
    check_memory,
    nbytes,
    pass_bytes,
    random_arrays,
    weight_bytes,
)
from failfast_jax.bench.published import CHUNK, Law, Statistics, draw, extra_passes, fit, published_for
from failfast_jax.bench.replay_programs import (
    Caches,
    Draws,
    Schedule,
    Start,
    pass_program,
    replay_program,
    schedule,
    vanilla_program,
    verify_program,
)
from failfast_jax.decoding import round
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.plan import ACCELERATOR_ROWS, Plan, buffer_length, make_plan
from failfast_jax.decoding.state import RoundLog
from failfast_jax.decoding.stopping import Never
from failfast_jax.drafters.wide import Wide
from failfast_jax.models.cache import round_up
from failfast_jax.models.config import ModelConfig
from failfast_jax.models.sharding import Execution

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
    copy_mib: int


# -- cases ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One replay of a target: draws, and what is known about them beforehand."""

    statistics: Statistics
    law: Law
    passes: str
    """`wide`: as many as the schedule needs. `paper`: the published number."""
    draws: Draws
    schedule: Schedule

    @property
    def name(self) -> str:
        return f"{self.statistics.dataset}, {self.passes}"


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


def hollow(config: ModelConfig) -> ModelConfig:
    """A model that costs next to nothing: a round around two of these is bookkeeping."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    vocab = min(config.vocab_size, 512)
    mask = vocab - 1 if config.is_diffusion else None
    return dataclasses.replace(config, head_dim=16, vocab_size=vocab, mask_token_id=mask, tie_embeddings=True, **sizes)


# -- measuring ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Timed:
    """A compiled program that threads the caches through, and the seconds of its calls."""

    run: Callable[[Caches], tuple[Caches, Any]]
    seconds: list[float] = dataclasses.field(default_factory=list)
    result: Any = None

    def __call__(self, caches: Caches) -> Caches:
        start = time.perf_counter()
        caches, self.result = self.run(caches)
        jax.block_until_ready((caches, self.result))
        self.seconds.append(time.perf_counter() - start)
        return caches

    @property
    def median(self) -> float:
        """Of all calls but the first."""
        return float(np.median(self.seconds[1:]))


Key = tuple[str | int, ...]
"""Name of a program or of a timing: `("vanilla",)`, `("replay", "wide")`, `("verify", 72)`, `("pass", 32)`."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of `models`, the caches, a `Start` and one thing more: steps, or draws."""

    function: Callable
    models: tuple[str, ...]
    static: dict[str, Any]

    def compile(self, models: dict[str, Any], caches: Caches, start: Start, last: Any) -> Any:
        """The executable for arrays or shapes; it reuses the caches' memory."""
        function = jax.jit(functools.partial(self.function, **self.static), donate_argnums=len(self.models))
        return function.lower(*(models[name] for name in self.models), caches, start, last).compile()


def check_log(case: Case, log: RoundLog) -> None:
    """Whether the rounds did what was drawn.

    Raises:
      RuntimeError: a round drafted, accepted, emitted or passed otherwise.
    """
    rounds = len(case.draws.accepted)
    expected = {
        "draft_length": case.draws.chunks * CHUNK,
        "accepted": case.draws.accepted,
        "emitted": case.draws.accepted + 1,
        "passes": case.schedule.passes,
    }
    for name, values in expected.items():
        found = np.asarray(getattr(log, name))[0, :rounds]
        wrong = np.flatnonzero(found != values)
        if wrong.size or int(log.round) != rounds:
            at = int(wrong[0]) if wrong.size else int(log.round)
            raise RuntimeError(f"{case.name}: round {at} of {rounds} left the draws ({name})")


class ReplayedPair:
    """One target and drafter on the device, with every program that is timed on them.

    The constructor compiles from shapes first and allocates only what is known to fit.

    Raises (from the constructor):
      MisfitError: the device's memory cannot hold them.
    """

    def __init__(self, target: str, options: ReplayOptions, bar: tqdm):
        self.options, self.bar = options, bar
        self.configs = {"model": CONFIGS[target], "drafter": CONFIGS[options.drafter]}
        models = self._models(self.configs)
        drafter = models["drafter"]
        self.plan = make_plan(drafter, platform=options.platform)
        self.cases = make_cases(target, drafter, self.plan, options)
        self.steps = {"vanilla": self.cases[0].schedule.tokens, "part": max(options.rounds // 2, 2)}
        capacity = options.context + max(case.schedule.tokens for case in self.cases) + LONGEST + 1
        self.length = buffer_length(capacity, drafter, self.plan)
        caches = abstract_caches(self.configs.values(), self.length, options.dtype)

        logits = 4 * self.configs["model"].vocab_size * self.plan.widths[-1]
        check_memory(nbytes((models, caches)) + logits, "weights, caches and logits")
        start = time.perf_counter()
        programs, executables = self._programs(drafter, capacity), {}
        for name, program in programs.items():
            bar.set_postfix_str("compiling " + " ".join(map(str, name)))
            last = self.cases[0].draws if name[0] == "replay" else np.int32(0)
            executables[name] = program.compile(models, caches, self._start(self.configs), last)
        self.compile_s = time.perf_counter() - start
        analyses = [executable.memory_analysis() for executable in executables.values()]
        self.needed = nbytes((models, caches)) + max((a.temp_size_in_bytes for a in analyses if a), default=0)
        check_memory(self.needed, "weights, caches and the largest program's temporaries")

        bar.set_postfix_str("making weights")
        self.models, self.caches = random_arrays((models, caches), options.seed)
        jax.block_until_ready((self.models, self.caches))
        counts = {kind: np.int32(count) for kind, count in self.steps.items()}
        self.timed = {("vanilla",): self._timed(executables["vanilla",], programs["vanilla",], counts["vanilla"])}
        for index, case in enumerate(self.cases):
            name = ("replay", case.passes)
            self.timed["replay", index] = self._timed(executables[name], programs[name], jax.device_put(case.draws))
        for name in programs:
            if name[0] in ("verify", "pass"):
                self.timed[name] = self._timed(executables[name], programs[name], counts["part"])
        self.timed["bookkeeping",] = self._bookkeeping(capacity)

    def _models(self, configs: dict[str, ModelConfig]) -> dict[str, Any]:
        """Shapes of the target and of the drafter around its model."""
        shapes = {name: abstract_model(config, self.options.dtype) for name, config in configs.items()}
        for shape in shapes.values():
            shape.execution = Execution(kernel=self.options.kernel)
        drafter = Wide(
            model=shapes["drafter"],
            vocab=configs["model"].vocab_size,
            rule=Never(),
            spec_len=CHUNK,
            max_spec_len=LONGEST,
        )
        models = {"model": shapes["model"], "drafter": drafter}
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), models)

    def _start(self, configs: dict[str, ModelConfig]) -> Start:
        """A random context, and the engine's settings for greedy decoding without stop tokens."""
        rng = np.random.default_rng(self.options.seed)
        vocab = min(config.vocab_size for config in configs.values())
        tokens = rng.integers(0, vocab, (1, self.options.context))
        eos = jnp.asarray(round.stop_tokens(()))
        return Start(jnp.asarray(tokens, jnp.int32), round.greedy_sampling(1), eos)

    def _programs(self, drafter: Wide, capacity: int) -> dict[Key, Program]:
        """Everything that is compiled for the pair."""
        room = {"capacity": capacity}
        plain = make_plan(Drafter(), platform=self.options.platform)
        programs: dict[Key, Program] = {("vanilla",): Program(vanilla_program, ("model",), room | {"plan": plain})}
        for passes in self.options.passes:
            static = room | {"plan": self.plan, "extra": passes == "paper"}
            programs["replay", passes] = Program(replay_program, ("model", "drafter"), static)
        for width in self.verify_widths:
            programs["verify", width] = Program(verify_program, ("model",), room | {"width": width})
        for width in range(drafter.block, drafter.window + 1, drafter.block):
            programs["pass", width] = Program(pass_program, ("drafter",), {"width": width})
        return programs

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """Those of the rounds and, where widths are not a ladder, the one that serves a draft of 60."""
        widths = set(self.plan.widths)
        if self.options.platform != "cpu":
            widths.add(round_up(DEFAULT_CAP + 1, ACCELERATOR_ROWS))
        return tuple(sorted(widths))

    def _timed(self, executable: Any, program: Program, last: Any) -> Timed:
        models, start = [self.models[name] for name in program.models], self._start(self.configs)
        return Timed(lambda caches: executable(*models, caches, start, last))

    def _bookkeeping(self, capacity: int) -> Timed:
        """The first case's rounds around hollow models, which have caches of their own."""
        configs = {name: hollow(config) for name, config in self.configs.items()}
        caches = abstract_caches(configs.values(), self.length, self.options.dtype)
        models, caches = random_arrays((self._models(configs), caches), self.options.seed)
        own = list(caches)
        static = {"capacity": capacity, "plan": self.plan, "extra": False}
        program = Program(replay_program, ("model", "drafter"), static)
        start, draws = self._start(configs), jax.device_put(self.cases[0].draws)
        executable = program.compile(models, tuple(own), start, draws)

        def run(caches: Caches) -> tuple[Caches, RoundLog]:
            own[:], log = executable(models["model"], models["drafter"], tuple(own), start, draws)
            return caches, log

        return Timed(run)

    def measure(self) -> None:
        """Runs everything in turn, once to warm up and then `repeats` times, and checks the replays' logs."""
        for _ in range(self.options.repeats + 1):
            for name, timed in self.timed.items():
                self.bar.set_postfix_str("timing " + " ".join(map(str, name)))
                self.caches = timed(self.caches)
                self.bar.update()
        for index, case in enumerate(self.cases):
            check_log(case, self.timed["replay", index].result)

    def report(self, name: str, speed: dict[str, float]) -> dict[str, Any]:
        """Everything that is known about the target after `measure`."""
        rate, itemsize = speed["copy"], jnp.dtype(self.options.dtype).itemsize
        target, drafter = self.configs["model"], self.configs["drafter"]
        context, steps = self.options.context, self.steps["vanilla"]

        def timing(seconds: float, moved: float) -> dict[str, float]:
            return {"ms": 1e3 * seconds, "floor_ms": 1e3 * moved / rate, "over_floor": seconds * rate / moved}

        def part(kind: str, width: int, config: ModelConfig, live: int) -> dict[str, float]:
            return timing(self.timed[kind, width].median / self.steps["part"], pass_bytes(config, live, itemsize))

        runs = self.timed["vanilla",]
        vanilla = timing(runs.median / steps, pass_bytes(target, context + (steps - 1) / 2, itemsize))
        verify = {width: part("verify", width, target, context + width - 1) for width in self.verify_widths}
        for found in verify.values():
            found["over_vanilla"] = found["ms"] / vanilla["ms"]
        begin = (context - 1) // drafter.block_size * drafter.block_size
        widths = [key[1] for key in self.timed if key[0] == "pass"]
        record = {
            "target": name,
            "kernel": self.models["model"].execution.resolved(self.models["model"].dtype, target.head_dim),
            "bandwidth_bytes_per_s": speed,
            "weight_bytes": {"target": weight_bytes(target, itemsize), "drafter": weight_bytes(drafter, itemsize)},
            "cache_bytes_per_position": {
                "target": cache_bytes(target, 1, itemsize),
                "drafter": cache_bytes(drafter, 1, itemsize),
            },
            "needed_bytes": self.needed,
            "compile_s": self.compile_s,
            "verify_widths": list(self.plan.widths),
            "vanilla": {"steps": steps, **vanilla, "tokens_per_s": 1e3 / vanilla["ms"], "runs_s": runs.seconds[1:]},
            "verify": verify,
            "drafter_pass": {width: part("pass", width, drafter, begin + width) for width in widths},
            "bookkeeping_ms": 1e3 * self.timed["bookkeeping",].median / self.options.rounds,
        }
        return record | {"cases": [self._case(index, record, rate, itemsize) for index in range(len(self.cases))]}

    def _case(self, index: int, record: dict[str, Any], rate: float, itemsize: int) -> dict[str, Any]:
        case, timed, rounds = self.cases[index], self.timed["replay", index], self.options.rounds
        target, drafter = self.configs["model"], self.configs["drafter"]
        statistics, planned = case.statistics, case.schedule
        floor = planned.bytes_moved(target, drafter, itemsize) / rate
        by_target, by_drafter = planned.counts()
        parts = {
            "drafter": sum(n * record["drafter_pass"][width]["ms"] for width, n in by_drafter.items()) / rounds,
            "verify": sum(n * record["verify"][width]["ms"] for width, n in by_target.items()) / rounds,
            "bookkeeping": record["bookkeeping_ms"],
        }
        round_ms = 1e3 * timed.median / rounds
        spent = sum(planned.passes) / rounds
        accepted = statistics.mean_accepted
        return {
            "dataset": statistics.dataset,
            "passes": case.passes,
            "statistics": dataclasses.asdict(statistics),
            "law": {
                **dataclasses.asdict(case.law),
                "means": dict(zip(("drafted", "accepted"), case.law.means())),
                "seed": self.options.seed,
                "chunks": case.draws.chunks.tolist(),
                "accepted": case.draws.accepted.tolist(),
                "extra_passes": case.draws.extra.tolist(),
            },
            "rounds": rounds,
            "tokens": planned.tokens,
            "drafted_per_round": float(np.mean(case.draws.chunks)) * CHUNK,
            "accepted_per_round": float(np.mean(case.draws.accepted)),
            "passes_per_round": spent,
            "passes_by_width": dict(by_drafter),
            "round_ms": round_ms,
            "floor_ms": 1e3 * floor / rounds,
            "over_floor": timed.median / floor,
            "parts_ms": parts | {"rest": round_ms - sum(parts.values())},
            "runs_s": timed.seconds[1:],
            "tokens_per_s": planned.tokens / timed.median,
            "speedup": planned.tokens * record["vanilla"]["ms"] / (1e3 * timed.median),
            "speedup_at_floor": planned.tokens * record["vanilla"]["floor_ms"] / (1e3 * floor),
            "memory_limit": memory_limit(target, drafter, accepted, spent),
            f"memory_limit_{PASSES}_passes": memory_limit(target, drafter, accepted, PASSES),
            "papers_speedup": papers_speedup(statistics),
        }
