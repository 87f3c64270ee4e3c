"""Cost of a round at real sizes, with the paper's acceptance imposed.

The models have the shapes of Qwen2.5 and Fast-dLLM v2 and random weights, so their drafts mean nothing. The length of
each draft and of its accepted part are drawn beforehand, from a law fitted to the paper's statistics
(`acceptance_law`), and imposed on the real compiled round: the drafter's own expansion with a stopping rule that ends
at the drawn length, the target's own verify, and picks overwritten so that exactly the drawn number of tokens agrees.
Every pass of every model is executed; nothing leaves the device inside the loop. `vanilla`, verifies and drafter passes
are timed in turn with it, from the same context on.

The result is the engine's speed *if* drafts are accepted as in the paper. It is no measurement of a drafter.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from failfast_jax.checkpoints.checkpoint import DTYPES
from failfast_jax.decoding import decode_round
from failfast_jax.decoding.decode_state import DecodeState, Draft, Prompts, RoundLog, Verified
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.picking import argmax
from failfast_jax.decoding.placement import StatePlacement
from failfast_jax.decoding.stopping import Never, StopRule
from failfast_jax.decoding.width_plan import DEFAULT_WIDTHS, Plan, buffer_length, make_plan
from failfast_jax.drafters.block_diffusion import BlockState, Wide
from failfast_jax.errors import OptionError
from failfast_jax.kernels.kernel_table import KERNELS
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.sharding import Execution, constrain, execution_of, make_mesh, put
from failfast_jax.models.transformer import Decoder
from failfast_jax.options import CommandOptions, add_flags_of, option
from failfast_jax.public_data import acceptance_law, model_shapes
from failfast_jax.public_data.acceptance_law import CHUNK, DATASETS, Statistics
from failfast_jax.public_data.model_shapes import CONFIGS, DRAFTERS, TARGETS
from failfast_jax.util import hardware, processes
from failfast_jax.util.files import sole_writer, user_path, write_atomically, write_json
from failfast_jax.util.progress import progress_bar, waiting
from failfast_jax.util.records import markdown

NOTICE = (
    "Replay: random weights, acceptance injected from the paper's statistics, every model pass executed. "
    "This measures the engine, not a drafter."
)
MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the second is the old name
MEMORY_FRACTION = "0.95"
"""Share of a GPU's memory that JAX may take; its default of 0.75 is too little for 32B on 80 GB."""
SPARE_BYTES = 2**28
"""Left free for programs and the runtime."""
LONGEST = 70
"""Longest draft of the paper's tables."""
DEFAULT_CAP = 60
"""The engine's own longest draft: a verify of 61 rows is timed beside that of the paper's 71."""


# -- programs --------------------------------------------------------------------------------------------------------

Caches = tuple[KVCache, ...]
"""The target's cache, then the drafter's."""


class Models(NamedTuple):
    """A pair. Every program takes it, its caches, a prompt, and the number of steps or the draws."""

    target: Decoder
    drafter: Wide


class Draws(NamedTuple):
    """Lengths that are imposed on each round: chunks of the draft, and drafted tokens that agree."""

    chunks: Int[Array, " R"]
    accepted: Int[Array, " R"]


@flax.struct.dataclass
class AtLength(StopRule):
    """Stops at a length, whatever the confidences."""

    length: Int[Array, ""]

    def stops(self, draft, memory):
        return draft.drafted >= self.length


def compiled(function: Callable, **static: Any) -> Callable:
    """Returns a program of this module with the engine's compiler options; it reuses the memory of its caches."""
    options = hardware.compiler_options(jax.devices()[0])
    return jax.jit(functools.partial(function, **static), donate_argnums=1, compiler_options=options)


def placed(models: Models, caches: Caches, result: Any) -> tuple[Caches, Any]:
    """Constrains a program's results: caches lie like their models' heads, so that the next program takes them as they
    are; the rest is whole on every device."""
    executions = models.target.execution, models.drafter.model.execution
    caches = tuple(constrain(cache, each, P(each.batch, each.heads)) for cache, each in zip(caches, executions))
    return caches, constrain(result, models.target.execution, P())


def begin(target: Decoder, drafter: Drafter, caches: Caches, prompt: Prompts, capacity: int, plan: Plan) -> DecodeState:
    """Returns a state whose prompt is committed and cached; `caches` hold anything."""
    limit = jnp.full_like(prompt.length, capacity)
    state = decode_round.init_state(target, drafter, prompt, limit, capacity=capacity, plan=plan)
    state = state.replace(target=caches[0])
    if isinstance(drafter, Wide):
        state = state.replace(drafter=BlockState(cache=caches[1], cached=drafter.whole_blocks(prompt.length)))
    model = getattr(drafter, "model", None)
    return StatePlacement(target.execution, model and model.execution)(state)


def force_acceptance(proposal: Draft, verified: Verified, accepted: Int[Array, ""], vocab: int) -> Verified:
    """Overwrites picks so that exactly the first `accepted` agree with the draft; the rest stays the target's.

    Draft 3 4 5, picks 9 4 7 8, accepted 1: the picks become 3 5 7 8 (4 would agree at the second place, so it is
    changed to the next token).
    """
    # Nothing may tell XLA that some of the target's picks are not looked at.
    picks = jax.lax.optimization_barrier(verified.picks)
    drafted = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    columns = jnp.arange(picks.shape[1])
    other = jnp.where(picks == drafted, (picks + 1) % vocab, picks)
    picks = jnp.where(columns < accepted, drafted, jnp.where(columns == accepted, other, picks))
    return verified.replace(picks=picks, accepted=jnp.full_like(verified.accepted, accepted))


def replay_program(
    models: Models, caches: Caches, prompt: Prompts, draws: Draws, *, capacity: int, plan: Plan
) -> tuple[Caches, RoundLog]:
    """Runs all rounds in one loop, as `decode_round.generate` does, with the drawn lengths."""
    target = models.target

    def step(state: DecodeState) -> DecodeState:
        index = state.log.round
        drafter = models.drafter.replace(rule=AtLength(draws.chunks[index] * models.drafter.spec_len))
        proposal, state = decode_round.draft(drafter, state)
        verified, state = decode_round.verify(target, drafter, state, proposal, plan=plan)
        verified = force_acceptance(proposal, verified, draws.accepted[index], target.config.vocab_size)
        return decode_round.commit(drafter, state, proposal, verified)

    state = begin(*models, caches, prompt, capacity, plan)
    state = decode_round.loop(step, state, draws.accepted.shape[0], until_any=False)
    return placed(models, (state.target, state.drafter.cache), state.log)


def plain_program(
    models: Models, caches: Caches, prompt: Prompts, steps: Int[Array, ""], *, capacity: int, plan: Plan
) -> tuple[Caches, RoundLog]:
    """Decodes plainly: the engine's own loop around the drafter that proposes nothing.

    Each step verifies as many rows as the plan's narrowest width: with a plan of one width it times that verify.
    """
    state = begin(models.target, Drafter(), caches, prompt, capacity, plan)
    state = decode_round.generate(models.target, Drafter(), state, steps, plan=plan)
    return placed(models, (state.target, caches[1]), state.log)


def pass_program(
    models: Models, caches: Caches, prompt: Prompts, steps: Int[Array, ""], *, width: int
) -> tuple[Caches, Int[Array, "B W"]]:
    """Runs `steps` drafter passes over a window of `width` rows that begins where a round's first pass begins."""
    drafter = models.drafter
    start = drafter.whole_blocks(prompt.length)
    chunk = slice(0, drafter.spec_len)

    def one_pass(_, carry):
        cache, tokens = carry
        hidden, cache, _ = drafter.model.window(tokens, cache, start, jnp.max(start) + width)
        proposed, confidence = argmax(drafter.logits(hidden[:, chunk]), True, drafter.model.execution)
        # The proposal changes the next pass's tokens, so that no pass can be left out.
        return cache, tokens.at[:, chunk].set(jnp.where(confidence >= 0, proposed, tokens[:, chunk]))

    window = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (len(start), width))
    cache, window = jax.lax.fori_loop(0, steps, one_pass, (caches[1], window))
    return placed(models, (caches[0], cache), window)


# -- measurements ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ReplayOptions(CommandOptions):
    """The command's flags."""

    target: str | None = option(None, "default: qwen2.5-7b, on a CPU tiny", choices=TARGETS)
    drafter: str = option("fast-dllm-v2-1.5b", "drafter", choices=DRAFTERS)
    dataset: str = option(
        ",".join(DATASETS).lower(),
        "datasets of the statistics, comma-separated; vanilla runs as many tokens as the first",
    )
    rounds: int = option(128, "timed rounds", least=2)
    context: int = option(1024, "committed tokens at the beginning", least=2)
    dtype: str = option("bfloat16", "weights and caches", choices=tuple(DTYPES))
    platform: str | None = option(None, "plan widths as there (default: as here)", choices=("cpu", "gpu", "tpu"))
    tensor_parallel: int = option(1, "devices that share each layer", least=1)
    kernel: str | None = option(None, "attention kernel (default: the platform's)", choices=KERNELS)
    seed: int = option(0, "seed of weights and draws")
    repeats: int = option(3, "timed runs; medians are reported", least=1)

    @property
    def datasets(self) -> list[str]:
        """The names in `dataset`, as the paper spells them; raises ValueError for an unknown one."""
        return list(dict.fromkeys(acceptance_law.published_for("", name).dataset for name in self.dataset.split(",")))


class Case(NamedTuple):
    """The rounds of one dataset: the paper's statistics, and lengths drawn from the law that they follow."""

    statistics: Statistics
    draws: Draws

    @classmethod
    def drawn(cls, target: str, dataset: str, rounds: int, seed: int) -> Case:
        """Draws the rounds of a dataset from its law."""
        statistics = acceptance_law.published_for(target, dataset)
        drawn = acceptance_law.draw(acceptance_law.fit(statistics), rounds, seed)
        return cls(statistics, Draws(*map(jnp.asarray, drawn)))

    @property
    def tokens(self) -> int:
        """Emitted tokens: the accepted ones and one per round."""
        return int(self.draws.accepted.sum()) + len(self.draws.accepted)

    def bytes_of_a_round(
        self, context: int, target_bytes: Callable[[float], float], drafter_bytes: Callable[[float], float]
    ) -> float:
        """Returns the mean bytes that a round's passes have to read, given those of a pass by its live positions.

        With a context of 40, drafts of 10 and 20 tokens, 10 and 3 of them accepted: rounds begin at 40 and 51, verifies
        see 50 and 71 positions, and the three drafter passes 50, 61 and 71 (without the masks up to a block's end).
        """
        chunks, accepted = (np.asarray(lengths) for lengths in (self.draws.chunks, self.draws.accepted))
        begins = context + np.cumsum(accepted + 1) - (accepted + 1)
        passes = np.concatenate([begin + CHUNK * np.arange(1, n + 1) for begin, n in zip(begins, chunks)])
        verifies = target_bytes(float((begins + CHUNK * chunks).mean())) * len(chunks)
        return (verifies + drafter_bytes(passes.mean()) * len(passes)) / len(chunks)


@dataclasses.dataclass
class TimedProgram:
    """A compiled function, and what its runs measured."""

    label: str
    run: Callable[[Models, Caches, Prompts, Any], tuple[Caches, Any]]
    steps: int
    """Tokens, rounds or passes per run."""
    case: Case | None = None
    """Its draws are the function's last argument; None: `steps` is."""
    seconds: list[float] = dataclasses.field(default_factory=list)
    """Per run; the first one warms up."""
    result: Any = None
    """The last run's log, or its window of tokens."""


def abstract_pair(options: ReplayOptions, mesh: Mesh | None = None) -> Models:
    """Returns the shapes of a target and of a `wide` drafter, spread over the devices of a mesh.

    Raises:
      OptionError: the target cannot be spread over the mesh.
    """

    def model(name: str) -> Any:
        execution, config = Execution(kernel=options.kernel), CONFIGS[name]
        if mesh is not None:
            execution = execution_of(config, mesh, drafter=config.is_diffusion, kernel=options.kernel)
        return model_shapes.spread_shapes(model_shapes.abstract_model(config, options.dtype), execution)

    sizes = {"vocab": CONFIGS[options.target].vocab_size, "spec_len": CHUNK, "max_spec_len": LONGEST}
    everywhere = None if mesh is None else NamedSharding(mesh, P())

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or everywhere)

    return jax.tree.map(shape, Models(model(options.target), Wide(model=model(options.drafter), rule=Never(), **sizes)))


class ReplayedPair:
    """One target and drafter, and the programs that are timed on them: `vanilla`, of as many tokens as the first replay
    emits, `verifies` and drafter `passes` by rows, and `replays`, one per dataset. Only `measure` allocates memory."""

    def __init__(self, options: ReplayOptions, mesh: Mesh | None = None):
        self.options, self.mesh = options, mesh
        self.models = abstract_pair(options, mesh)
        platform, drafter = options.platform or jax.default_backend(), self.models.drafter
        self.plan = make_plan(drafter, platform=platform)
        cases = [Case.drawn(options.target, name, options.rounds, options.seed) for name in options.datasets]
        self.capacity = options.context + max(case.tokens for case in cases) + LONGEST + 1
        widths, steps = {*self.plan.widths}, max(options.rounds // 2, 2)
        if platform != "cpu":  # an accelerator verifies any draft in one width
            widths.add(DEFAULT_WIDTHS[platform].ladder(DEFAULT_CAP + 1)[-1])
        plain = functools.partial(compiled, plain_program, capacity=self.capacity)
        self.vanilla = TimedProgram("vanilla", plain(plan=make_plan(Drafter(), platform=platform)), cases[0].tokens)
        self.verifies = {
            rows: TimedProgram(f"verify {rows}", plain(plan=Plan((rows,), (rows,), (rows,))), steps)
            for rows in sorted(widths)
        }
        self.passes = {
            rows: TimedProgram(f"pass {rows}", compiled(pass_program, width=rows), steps)
            for rows in range(drafter.block, drafter.window + 1, drafter.block)
        }
        run = compiled(replay_program, capacity=self.capacity, plan=self.plan)
        self.replays = [TimedProgram(f"replay {case.statistics.dataset}", run, options.rounds, case) for case in cases]

    def shapes(self) -> tuple[Models, Caches, Prompts]:
        """Returns the programs' arguments: shapes of models and caches, and a random context without stop tokens."""
        pair = self.models.target, self.models.drafter.model
        vocab = min(model.config.vocab_size for model in pair)
        tokens = np.random.default_rng(self.options.seed).integers(0, vocab, (1, self.options.context))
        length, stop = jnp.asarray([tokens.size], jnp.int32), jnp.asarray(decode_round.stop_tokens(()))
        prompt = Prompts(jnp.asarray(tokens, jnp.int32), length, stop, decode_round.greedy_sampling(1))
        positions = buffer_length(self.capacity, self.models.drafter, self.plan)
        caches = tuple(model_shapes.abstract_cache(model, positions, self.options.dtype) for model in pair)
        return self.models, caches, prompt

    def needed_bytes(self) -> int:
        """Returns the bytes of weights, caches and logits on each device."""
        target = self.models.target
        models, caches, _ = self.shapes()
        logits = 4 * target.config.vocab_size * self.plan.widths[-1] // target.execution.parts(target.execution.vocab)
        return hardware.bytes_on_a_device((models, caches)) + logits

    def _everywhere(self, tree: Any) -> Any:
        """Puts small arrays whole on each device of the mesh; without one on the first device."""
        if self.mesh is None:
            return jax.device_put(tree, jax.devices()[0])
        return jax.tree.map(lambda leaf: put(np.asarray(leaf), NamedSharding(self.mesh, P())), tree)

    def measure(self) -> None:
        """Runs all programs in turn, once to warm up and then `repeats` times.

        Raises:
          OptionError: in all processes, if a device's memory cannot hold the pair.
        """
        needed, free = self.needed_bytes(), hardware.free_memory()
        if processes.where_false(needed + SPARE_BYTES <= free):
            sizes = f"{needed / 1e9:.1f} GB, the device has {free / 1e9:.1f} GB free"
            raise OptionError(f"--target {self.options.target}: weights, caches and logits need {sizes}")
        models, caches, prompt = self.shapes()
        with waiting(f"random weights of {self.options.target} and {self.options.drafter}"):
            models, caches = jax.block_until_ready(model_shapes.random_arrays((models, caches), self.options.seed))
        # All in the same place from the first run on: what moved would be compiled for again.
        if self.mesh is None:
            models, caches = self._everywhere((models, caches))
        prompt = self._everywhere(prompt)
        programs = [self.vanilla, *self.verifies.values(), *self.passes.values(), *self.replays]
        last_arguments = [np.int32(each.steps) if each.case is None else each.case.draws for each in programs]
        runs = list(zip(programs, map(self._everywhere, last_arguments)))
        turns = self.options.repeats + 1
        with progress_bar(f"replay {self.options.target}", "run", total=turns * len(runs)) as bar:
            for turn in range(turns):
                # A machine's speed drifts by more than most differences: every other turn in reversed order.
                for program, last_argument in runs[:: -1 if turn % 2 else 1]:
                    bar.set_postfix_str(program.label)
                    start = time.perf_counter()
                    caches, program.result = jax.block_until_ready(program.run(models, caches, prompt, last_argument))
                    program.seconds.append(time.perf_counter() - start)
                    bar.update()

    def report(self, speed: dict[str, float]) -> dict[str, Any]:
        """Returns the target's record after `measure`.

        Args:
          speed: bytes per second, as `hardware.bandwidth` returns them.
        """
        pair = self.models.target, self.models.drafter.model
        target_bytes, drafter_bytes = (model_shapes.device_reads(model) for model in pair)
        context, block = self.options.context, self.models.drafter.block
        dtype, head_dim = jnp.dtype(self.options.dtype), self.models.target.config.head_dim
        first = (context - 1) // block * block

        def step_times(program: TimedProgram, nbytes: float) -> dict[str, float]:
            seconds = float(np.median(program.seconds[1:])) / program.steps
            floor = nbytes / speed["copy"]
            return {"ms": 1e3 * seconds, "floor_ms": 1e3 * floor, "over_floor": seconds / floor}

        def plain_times(program: TimedProgram, rows: int = 1) -> dict[str, float]:
            return step_times(program, target_bytes(context + (program.steps - 1) / 2 + rows - 1))

        vanilla, cases = plain_times(self.vanilla), []
        passes = {str(rows): step_times(each, drafter_bytes(first + rows)) for rows, each in self.passes.items()}
        for program in self.replays:
            case, tokens = program.case, program.case.tokens / program.steps
            times = step_times(program, case.bytes_of_a_round(context, target_bytes, drafter_bytes))
            figures = {
                "dataset": case.statistics.dataset,
                "statistics": dataclasses.asdict(case.statistics),
                "tokens": case.tokens,
                "drafted_per_round": CHUNK * float(case.draws.chunks.mean()),
                "accepted_per_round": float(case.draws.accepted.mean()),
                "speedup": tokens * vanilla["ms"] / times["ms"],
                "speedup_at_floor": tokens * vanilla["floor_ms"] / times["floor_ms"],
                "papers_speedup": acceptance_law.papers_speedup(case.statistics),
            }
            cases.append(figures | times)
        return {
            "target": self.options.target,
            "kernel": self.models.target.execution.resolved(dtype, head_dim),
            "bandwidth_bytes_per_s": speed,
            "needed_bytes": self.needed_bytes(),
            "vanilla": {"steps": self.vanilla.steps, **vanilla, "tokens_per_s": 1e3 / vanilla["ms"]},
            "verify": {str(rows): plain_times(each, rows) for rows, each in self.verifies.items()},
            "drafter_pass": passes,
            "cases": cases,
        }


def replay_target(options: ReplayOptions) -> dict[str, Any]:
    """Returns the measurements of the options' target.

    Raises:
      OptionError: there are too few devices, the target cannot be spread over them, or their memory cannot hold it.
    """
    single = options.tensor_parallel == 1 and processes.is_single_process()
    mesh = None if single else make_mesh(options.tensor_parallel, config=lambda: CONFIGS[options.target])
    pair = ReplayedPair(options, mesh)
    speed = hardware.bandwidth(2**28 if jax.default_backend() == "cpu" else 2**30)
    pair.measure()
    return pair.report(speed)


def work(args: argparse.Namespace) -> int:
    """Runs the benchmark.

    Raises:
      ValueError: an option out of its range, or a pair that the device cannot hold.
    """
    if not any(name in os.environ for name in MEMORY_VARIABLES):  # read when JAX first meets the device
        os.environ[MEMORY_VARIABLES[0]] = MEMORY_FRACTION
    args.target = args.target or ("tiny" if jax.default_backend() == "cpu" else "qwen2.5-7b")
    options, out = ReplayOptions.given(args), args.out and processes.output_folder(args.out)
    with contextlib.nullcontext() if out is None else sole_writer(out):
        summary = {"what": NOTICE, "machine": hardware.machine(), "settings": dataclasses.asdict(options)}
        summary["targets"] = [replay_target(options)]
        text = replay_tables(summary)
        print(text)
        if out is not None:
            write_json(out / "replay.json", summary)
            write_atomically(out / "replay.md", text + "\n")
    return 0


def replay_tables(summary: dict[str, Any]) -> str:
    """Formats the record as Markdown: times of the parts, and of the rounds."""
    settings, host = summary["settings"], summary["machine"]
    header = (
        f"{host['device']}, JAX {host['jax']}, {host['date']}; drafter {settings['drafter']}, {settings['dtype']}, "
        f"tensor-parallel {settings['tensor_parallel']}, batch 1, context {settings['context']}, "
        f"{settings['rounds']} rounds, seed {settings['seed']}, attention kernel {settings['kernel'] or 'by default'}. "
        "The floor is what a device has to read (weights, live cache) at the measured bandwidth of a copy."
    )
    [record] = summary["targets"]
    step_times = {"vanilla step": record["vanilla"]}
    step_times |= {f"verify, {rows} rows": times for rows, times in record["verify"].items()}
    step_times |= {f"drafter pass, {rows} rows": times for rows, times in record["drafter_pass"].items()}
    parts, rounds = [], []
    for label, times in step_times.items():
        ratios = times["over_floor"], times["ms"] / record["vanilla"]["ms"]
        parts.append([record["target"], label, f"{times['ms']:.3f}", *(f"{ratio:.2f}" for ratio in ratios)])
    for case in record["cases"]:
        source = "" if case["statistics"]["same_target"] else f" ({case['statistics']['target']}'s)"
        lengths = f"{case['accepted_per_round']:.2f} / {case['drafted_per_round']:.1f}"
        ratios = (case[name] for name in ("over_floor", "speedup", "speedup_at_floor", "papers_speedup"))
        figures = f"{case['ms']:.3f}", *(f"{ratio:.2f}" for ratio in ratios)
        rounds.append([record["target"], f"{case['dataset']}{source}", lengths, *figures])
    head = ["target", "replay of", "accepted / drafted", "round ms", "over floor", "speedup (replay)", "at the floor"]
    parts_table = markdown(["target", "replay: parts", "ms", "over floor", "vanilla steps"], parts)
    return "\n\n".join([f"**{NOTICE}**", header, parts_table, markdown([*head, "paper's"], rounds)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add_flags_of(parser, ReplayOptions)
    processes.add_flag(parser)
    parser.add_argument("--out", metavar="FOLDER", type=user_path, help="JSON and tables")
