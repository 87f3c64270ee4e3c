"""`python -m failfast_jax.bench.replay`: what a round costs at real sizes, with the paper's acceptance injected.

The models have the shapes of Qwen2.5 and Fast-dLLM v2 and random weights, so their drafts mean nothing. How long
each draft grows and how much of it the target accepts is therefore drawn beforehand, from a law fitted to the
paper's statistics (`bench.published`), and imposed on the real compiled round: the drafter's own expansion with
a stopping rule that ends at the drawn length, the target's own verify, and picks overwritten so that exactly the
drawn number of tokens agrees. Every pass of every model is executed; nothing leaves the device inside the loop.
`vanilla` is timed in turn with it, from the same context on.

The result says how fast the engine is *if* drafts are accepted as the paper says. It says nothing about a drafter.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from failfast_jax.bench import published
from failfast_jax.bench.device import (
    MisfitError,
    abstract_caches,
    abstract_model,
    bandwidth,
    check_memory,
    nbytes,
    random_arrays,
)
from failfast_jax.bench.figures import figure_class
from failfast_jax.bench.limits import PASSES, cache_bytes, memory_limit, papers_speedup, pass_bytes, weight_bytes
from failfast_jax.bench.published import CHUNK, DATASETS, Law, Statistics, draw, extra_passes, fit, published_for
from failfast_jax.bench.replay_round import (
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
from failfast_jax.bench.shapes import DRAFTERS, SHAPES, TARGETS
from failfast_jax.compilation import enable_compile_cache
from failfast_jax.decoding import Drafter, round
from failfast_jax.decoding.state import RoundLog
from failfast_jax.drafters.wide import Wide
from failfast_jax.models.attention import KERNELS
from failfast_jax.models.cache import round_up
from failfast_jax.models.config import ModelConfig
from failfast_jax.models.sharding import Execution
from failfast_jax.platforms import machine

NOTICE = (
    "Replay: random weights, acceptance injected from the paper's statistics, every model pass executed. "
    "This measures the engine, not a drafter."
)
LONGEST = 70
"""Longest draft of the paper's tables."""
DEFAULT_CAP = 60
"""The engine's own cap: a verify of 61 rows is timed beside that of the paper's 71."""
REAL = ("qwen2.5-32b", "qwen2.5-14b", "qwen2.5-7b")
MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the second is the old name
MEMORY_FRACTION = "0.95"
"""Share of a GPU's memory that JAX may take; its default of 0.75 is too little for 32B on 80 GB."""


@dataclasses.dataclass(frozen=True)
class Settings:
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


def make_cases(target: str, drafter: Wide, plan: round.Plan, settings: Settings) -> list[Case]:
    """One case a dataset and kind of passes; both kinds of a dataset have the same draws."""
    cases = []
    for dataset in settings.datasets:
        statistics = published_for(target, dataset)
        law = fit(statistics)
        chunks, accepted = draw(law, settings.rounds, settings.seed)
        for passes in settings.passes:
            extra = np.zeros_like(chunks)
            if passes == "paper":
                extra = extra_passes(chunks, statistics.drafter_passes)
            planned = schedule(
                *(chunks, accepted, extra),
                context=settings.context,
                block=drafter.block,
                window=drafter.window,
                widths=plan.widths,
            )
            draws = Draws(chunks=chunks, accepted=accepted, extra=extra)
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


class Bench:
    """One target and drafter on the device, with every program that is timed on them.

    The constructor compiles from shapes first and allocates only what is known to fit.

    Raises (from the constructor):
      MisfitError: the device's memory cannot hold them.
    """

    def __init__(self, target: str, settings: Settings, bar: tqdm):
        self.settings, self.bar = settings, bar
        self.configs = {"model": SHAPES[target], "drafter": SHAPES[settings.drafter]}
        models = self._models(self.configs)
        drafter = models["drafter"]
        self.plan = round.make_plan(drafter, platform=settings.platform)
        self.cases = make_cases(target, drafter, self.plan, settings)
        self.steps = {"vanilla": self.cases[0].schedule.tokens, "part": max(settings.rounds // 2, 2)}
        capacity = settings.context + max(case.schedule.tokens for case in self.cases) + LONGEST + 1
        self.length = round.buffer_length(capacity, drafter, self.plan)
        caches = abstract_caches(self.configs.values(), self.length, settings.dtype)

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
        # The drafter's tau gets some value, too: the drawn lengths decide, and nothing looks at it.
        self.models, self.caches = random_arrays((models, caches), settings.seed)
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
        shapes = {name: abstract_model(config, self.settings.dtype) for name, config in configs.items()}
        for shape in shapes.values():
            shape.execution = Execution(kernel=self.settings.kernel)
        drafter = Wide(
            model=shapes["drafter"],
            vocab=configs["model"].vocab_size,
            tau=jnp.zeros(()),
            spec_len=CHUNK,
            max_spec_len=LONGEST,
        )
        models = {"model": shapes["model"], "drafter": drafter}
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), models)

    def _start(self, configs: dict[str, ModelConfig]) -> Start:
        """A random context, and the engine's settings for greedy decoding without stop tokens."""
        rng = np.random.default_rng(self.settings.seed)
        vocab = min(config.vocab_size for config in configs.values())
        tokens = rng.integers(0, vocab, (1, self.settings.context))
        eos = jnp.asarray(round.pad_eos(()), jnp.int32)
        return Start(jnp.asarray(tokens, jnp.int32), round.greedy_sampling(1), eos)

    def _programs(self, drafter: Wide, capacity: int) -> dict[Key, Program]:
        """Everything that is compiled for the pair."""
        room = {"capacity": capacity}
        plain = round.make_plan(Drafter(), platform=self.settings.platform)
        programs: dict[Key, Program] = {("vanilla",): Program(vanilla_program, ("model",), room | {"plan": plain})}
        for passes in self.settings.passes:
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
        if self.settings.platform != "cpu":
            widths.add(round_up(DEFAULT_CAP + 1, round.ACCELERATOR_ROWS))
        return tuple(sorted(widths))

    def _timed(self, executable: Any, program: Program, last: Any) -> Timed:
        models, start = [self.models[name] for name in program.models], self._start(self.configs)
        return Timed(lambda caches: executable(*models, caches, start, last))

    def _bookkeeping(self, capacity: int) -> Timed:
        """The first case's rounds around hollow models, which have caches of their own."""
        configs = {name: hollow(config) for name, config in self.configs.items()}
        caches = abstract_caches(configs.values(), self.length, self.settings.dtype)
        models, caches = random_arrays((self._models(configs), caches), self.settings.seed)
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
        for _ in range(self.settings.repeats + 1):
            for name, timed in self.timed.items():
                self.bar.set_postfix_str("timing " + " ".join(map(str, name)))
                self.caches = timed(self.caches)
                self.bar.update()
        for index, case in enumerate(self.cases):
            check_log(case, self.timed["replay", index].result)

    def report(self, name: str, speed: dict[str, float]) -> dict[str, Any]:
        """Everything that is known about the target after `measure`."""
        rate, itemsize = speed["copy"], jnp.dtype(self.settings.dtype).itemsize
        target, drafter = self.configs["model"], self.configs["drafter"]
        context, steps = self.settings.context, self.steps["vanilla"]

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
            "bookkeeping_ms": 1e3 * self.timed["bookkeeping",].median / self.settings.rounds,
        }
        return record | {"cases": [self._case(index, record, rate, itemsize) for index in range(len(self.cases))]}

    def _case(self, index: int, record: dict[str, Any], rate: float, itemsize: int) -> dict[str, Any]:
        case, timed, rounds = self.cases[index], self.timed["replay", index], self.settings.rounds
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
                "seed": self.settings.seed,
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


def replay_target(name: str, settings: Settings) -> dict[str, Any]:
    """The record of one target: what was measured, or why it was skipped."""
    with tqdm(desc=f"replay {name}", unit="run", file=sys.stderr) as bar:
        try:
            speed = bandwidth(settings.copy_mib * 2**20)
            bench = Bench(name, settings, bar)
            bar.reset(total=len(bench.timed) * (settings.repeats + 1))
            bench.measure()
            record = bench.report(name, speed)
        except MisfitError as error:
            record = {"target": name, "skipped": str(error)}
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            record = {"target": name, "skipped": f"out of memory: {str(error).splitlines()[0]}"}
    # Widths are keys: as in a file that was read back.
    return json.loads(json.dumps(record))


# -- what is shown -----------------------------------------------------------------------------------------


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *map(list, rows)])


def report(summary: dict[str, Any]) -> str:
    """All tables as Markdown."""
    done = [record for record in summary["targets"] if "skipped" not in record]
    skipped = [record for record in summary["targets"] if "skipped" in record]
    settings, host = summary["settings"], summary["machine"]
    parts = [
        f"**{NOTICE}**",
        f"{host['device']}, JAX {host['jax']}, {host['date']}; drafter {settings['drafter']}, {settings['dtype']}, "
        f"batch 1, context {settings['context']}, {settings['rounds']} rounds, seed {settings['seed']}, attention "
        f"kernel {settings['kernel'] or 'as the platform has it'}. The floor is "
        "what has to be read (weights, live cache) at the measured bandwidth of a copy.",
    ]
    rows = []
    for record in done:
        vanilla = record["vanilla"]
        rows.append([record["target"], "vanilla step", f"{vanilla['ms']:.3f}", f"{vanilla['over_floor']:.2f}", "1.00"])
        for width, found in record["verify"].items():
            rows.append(
                [
                    *(record["target"], f"verify, {width} rows", f"{found['ms']:.3f}"),
                    *(f"{found['over_floor']:.2f}", f"{found['over_vanilla']:.2f}"),
                ]
            )
        for label, values in (
            *((f"drafter pass, {width} rows", found) for width, found in record["drafter_pass"].items()),
            ("bookkeeping of a round", {"ms": record["bookkeeping_ms"]}),
        ):
            over = f"{values['over_floor']:.2f}" if "over_floor" in values else "-"
            share = f"{values['ms'] / vanilla['ms']:.2f}"
            rows.append([record["target"], label, f"{values['ms']:.3f}", over, share])
    if rows:
        parts.append(_table(("target", "replay: parts", "ms", "over floor", "vanilla steps"), rows))
    head = (
        *("target", "replay of", "accepted / drafted", "drafter passes", "round ms", "over floor"),
        *("drafter / verify / bookkeeping / rest ms", "speedup (replay)", "at the floor", "paper's"),
    )
    rows = []
    for record in done:
        for case in record["cases"]:
            of = case["statistics"]
            source = "" if of["same_target"] else f" ({of['target']}'s)"
            rows.append(
                [
                    *(record["target"], f"{case['dataset']}{source}, passes: {case['passes']}"),
                    f"{case['accepted_per_round']:.2f} / {case['drafted_per_round']:.1f}",
                    *(f"{case['passes_per_round']:.2f}", f"{case['round_ms']:.3f}", f"{case['over_floor']:.2f}"),
                    " / ".join(f"{case['parts_ms'][p]:.3f}" for p in ("drafter", "verify", "bookkeeping", "rest")),
                    *(f"{case['speedup']:.2f}", f"{case['speedup_at_floor']:.2f}", f"{case['papers_speedup']:.2f}"),
                ]
            )
    rows += [[r["target"], f"skipped: {r['skipped']}", *["-"] * (len(head) - 2)] for r in skipped]
    parts.append(_table(head, rows))
    return "\n\n".join(parts)


def plot(summary: dict[str, Any], folder: Path) -> None:
    """Writes `replay.png` and `replay.svg`: where a round's time goes, and speedups beside limit and paper."""
    bars = [(r["target"], case) for r in summary["targets"] if "skipped" not in r for case in r["cases"]]
    if not bars:
        return
    figure = figure_class()(figsize=(13, 2.4 + 0.5 * len(bars)), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(f"Replay: injected acceptance, random weights ({summary['machine']['device']})")
    places = list(range(len(bars), 0, -1))
    colours = {"drafter": "#e0912f", "verify": "#1f5fa8", "bookkeeping": "#7a7a7a", "rest": "#c9ced6"}
    begun = np.zeros(len(bars))
    for part, colour in colours.items():
        values = np.maximum([case["parts_ms"][part] for _, case in bars], 0)
        left.barh(places, values, left=begun, color=colour, label=part, height=0.6)
        begun += values
    mark = {"linestyle": "none", "color": "black", "markersize": 14, "markeredgewidth": 2}
    left.plot([case["floor_ms"] for _, case in bars], places, marker="|", label="memory floor", **mark)
    whole = [case["round_ms"] for _, case in bars]
    left.plot(whole, places, marker="|", label="measured round", **mark | {"color": "#b3261e"})
    left.set(xlabel="ms a round, each part timed apart", title="where a round's time goes")
    right.barh(places, [case["speedup"] for _, case in bars], color="#1f5fa8", height=0.6, label="replay")
    right.plot([case["speedup_at_floor"] for _, case in bars], places, marker="|", label="at the memory floor", **mark)
    paper = [case["papers_speedup"] for _, case in bars]
    right.plot(paper, places, "D", color="#e0912f", label="the paper's own (modelled latencies)")
    right.set(xlabel="speedup over vanilla in the same run", title="speedup")
    for axis, side in ((left, "left"), (right, "right")):
        axis.set_yticks(places, [f"{target} {case['dataset']}\npasses: {case['passes']}" for target, case in bars])
        axis.tick_params(axis="y", labelsize=8)
        axis.set_xlim(left=0)
        handles, labels = axis.get_legend_handles_labels()
        figure.legend(handles, labels, fontsize=8, ncols=3, loc=f"outside lower {side}")
    figure.savefig(folder / "replay.png", dpi=120)
    figure.savefig(folder / "replay.svg")


# -- the run -----------------------------------------------------------------------------------------------


def earlier(path: Path, stamp: dict[str, Any]) -> dict[str, Any] | None:
    """A target's record from an earlier run with the same settings.

    Raises:
      ValueError: the file was made with other settings, or is no record.
    """
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        other = [key for key in {**stamp, **found["stamp"]} if found["stamp"].get(key) != stamp.get(key)]
        record = found["record"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a record of this benchmark ({error!r}); name another --out") from None
    if other:
        raise ValueError(f"{path}: made with other settings ({', '.join(other)}); name another --out")
    return None if "skipped" in record else record


def check(args: argparse.Namespace) -> Settings:
    """The settings that the options ask for.

    Raises:
      ValueError: an option out of its range.
    """
    for name, least in (("rounds", 2), ("context", 2), ("repeats", 1), ("copy_mib", 1), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    datasets = tuple(published_for("", name).dataset for name in args.dataset.split(","))
    passes = tuple(args.passes.split(","))
    for name in passes:
        if name not in ("wide", "paper"):
            raise ValueError(f"--passes {name}: must be wide, paper, or both with a comma")
    return Settings(
        drafter=args.drafter,
        datasets=tuple(dict.fromkeys(datasets)),
        passes=tuple(dict.fromkeys(passes)),
        rounds=args.rounds,
        context=args.context,
        dtype=args.dtype,
        platform=args.platform or jax.default_backend(),
        kernel=args.kernel,
        seed=args.seed,
        repeats=args.repeats,
        copy_mib=args.copy_mib or (256 if jax.default_backend() == "cpu" else 1024),
    )


def check_room(name: str, settings: Settings) -> None:
    """Raises ValueError if the longest replay would leave the positions that the models know."""
    longest = max(published_for(name, dataset).mean_accepted + 1 for dataset in settings.datasets)
    needed = settings.context + int(settings.rounds * longest) + LONGEST
    room = min(SHAPES[name].max_position_embeddings, SHAPES[settings.drafter].max_position_embeddings)
    if needed > room:
        raise ValueError(
            f"--context {settings.context} and --rounds {settings.rounds}: about {needed} positions, {name} has {room}"
        )


def run(args: argparse.Namespace) -> int:
    if args.out is not None:
        figure_class()  # before hours of measuring
    if not any(name in os.environ for name in MEMORY_VARIABLES):  # read when JAX first meets the device
        os.environ[MEMORY_VARIABLES[0]] = MEMORY_FRACTION
    settings = check(args)
    on_cpu = jax.default_backend() == "cpu"
    names = [args.target] if args.target else [*REAL, *(["tiny"] if on_cpu else [])]
    for name in names:
        check_room(name, settings)
    enable_compile_cache()
    host = machine()
    stamp = {**dataclasses.asdict(settings), **{k: host[k] for k in ("device", "processor", "jax")}}
    stamp = json.loads(json.dumps(stamp))
    records = {}
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        records = {name: earlier(args.out / f"{name}.json", stamp) for name in names}
    for name in names:
        if records.get(name) is None:
            if on_cpu and not args.target and name in REAL:
                reason = f"hours on a CPU; --target {name} runs it all the same"
                records[name] = {"target": name, "skipped": reason}
            else:
                records[name] = replay_target(name, settings)
                gc.collect()
            if args.out is not None:
                text = json.dumps({"stamp": stamp, "record": records[name]}, indent=1)
                unfinished = args.out / f"{name}.tmp"
                unfinished.write_text(text + "\n", encoding="utf-8")
                unfinished.replace(args.out / f"{name}.json")
    summary = {
        "what": NOTICE,
        "machine": host,
        "settings": dataclasses.asdict(settings),
        "law": inspect.cleandoc(published.__doc__),
        "targets": [records[name] for name in names],
    }
    text = report(summary)
    print(text)
    if args.out is not None:
        (args.out / "replay.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        (args.out / "replay.md").write_text(text + "\n", encoding="utf-8")
        plot(summary, args.out)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; exit status 2 for bad input. A target that does not fit is skipped, and said so."""
    parser = argparse.ArgumentParser(
        prog="python -m failfast_jax.bench.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", choices=TARGETS, help=f"default: {', '.join(REAL)}, each if the device holds it")
    parser.add_argument("--drafter", choices=DRAFTERS, default="fast-dllm-v2-1.5b")
    parser.add_argument(
        "--dataset",
        default=",".join(DATASETS).lower(),
        help="whose statistics, comma-separated (default: all); vanilla runs as many tokens as the first emits",
    )
    parser.add_argument(
        "--passes",
        default="wide,paper",
        help="wide: as many drafter passes as our schedule needs; paper: the paper's 3.0 to 3.6 a round",
    )
    parser.add_argument("--rounds", metavar="n", type=int, default=128)
    parser.add_argument("--context", metavar="n", type=int, default=1024, help="committed tokens at the beginning")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="plan widths as there (default: as here)")
    parser.add_argument("--kernel", choices=KERNELS, help="of attention (default: the platform's)")
    parser.add_argument("--seed", metavar="n", type=int, default=0, help="of weights and draws")
    parser.add_argument("--repeats", metavar="n", type=int, default=3, help="timed runs; medians are reported")
    parser.add_argument("--copy-mib", metavar="n", type=int, help="array for the bandwidth (256 on CPU, else 1024)")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, help="JSON, table and plot; an interrupted run continues from it"
    )
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
