"""Compiled programs for a batch of independent requests, and the states that they pass on. Made by a `Runtime`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from failfast_jax import decoding
from failfast_jax.decoding import diffusion_decoding, draft_states
from failfast_jax.decoding.decode_state import DecodeState, Prompts, Sampling
from failfast_jax.decoding.diffusion_decoding import BlockSchedule
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.placement import StatePlacement
from failfast_jax.decoding.width_plan import Plan, prefill_parts, prefill_schedule
from failfast_jax.errors import PromptError
from failfast_jax.models.sharding import DATA, constrain
from failfast_jax.models.transformer import Decoder
from failfast_jax.policy.expected_tokens import Costs
from failfast_jax.results import Round, RowLog, TokenLogprob
from failfast_jax.runtime import row_programs
from failfast_jax.util.compilation import Compilation, Executables, Program

NO_LIMIT = 2**30

State = Any
"""`decoding.decode_state.DecodeState`, or `decoding.diffusion_decoding.DiffusionState`. Donated: use it once."""
Chunks = list[tuple[int, dict[str, Any]]]
"""Where each chunk of a prefill starts, and its static arguments."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One row's prompt, limits and sampling.

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: maximum tokens to emit.
      temperature: softmax temperature of the target; 0 is greedy.
      top_k, top_p: number and total probability of the most probable tokens to sample from; 0 and 1: all.
      seed, sequence: with a token's position they determine the random numbers, whatever the row.
      eos: stop token ids, at most `decoding.decode_state.MAX_EOS_TOKENS`.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    sequence: int = 0
    eos: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Progress:
    """Tokens and status of each row of a state."""

    ids: list[list[int]]
    """Tokens emitted so far."""
    finish: list[int]
    """RUNNING, FINISHED_EOS, FINISHED_LENGTH or FAILED, of `decoding.decode_state`."""


@dataclasses.dataclass(frozen=True)
class SessionSetup:
    """Rows of a session, and what compiles their programs and places their states."""

    executables: Executables
    placement: StatePlacement
    batch: int
    capacity: int
    """Maximum tokens of a row, prompt and output together."""


@dataclasses.dataclass(frozen=True)
class SessionProgram:
    """A pure function that returns a state, which is put in its place; what is static is bound to it."""

    name: str
    """In messages and profiles."""
    function: Callable
    placement: StatePlacement

    @property
    def __name__(self) -> str:
        return self.name.replace(" ", "_")

    def __call__(self, *args: Any) -> Any:
        return self.placement(self.function(*args))


class Session:
    """Compiled programs for a batch of rows: base of both kinds of sessions.

    Subclasses have `_inputs(requests)`, the checked inputs of `start`; `chunks`; `rounds`; and `_view(state)`: token
    ids, start and end of each row's output in them, and why it ended.

    Args:
      setup: rows, and what compiles and places them.
      models: first arguments of every program: the target and the drafter, or the model that writes.
      start: `(*models, *inputs) -> state`, with empty caches.
      prefill: `(*models, state, start, **chunk) -> state`; see `Chunks`.
      advance: `(*models, state, *settings, most, until_any) -> state`, with these `settings`.

    Attributes:
      batch, capacity: see `SessionSetup`.
      shapes: a state of shapes, with their places.
      stream_rounds: rounds (of `dllm`: passes) of a slice of a stream.
      unit: steps of the loop, in messages.
    """

    stream_rounds, unit = 4, "rounds"

    def __init__(
        self,
        setup: SessionSetup,
        models: tuple[Any, ...],
        *,
        start: Callable,
        prefill: Callable,
        advance: Callable,
        settings: tuple[Any, ...] = (),
    ):
        self.batch, self.capacity, self.placement = setup.batch, setup.capacity, setup.placement
        self.models, self._executables, self._settings = models, setup.executables, settings
        self._prefill, self._advance = prefill, advance
        inputs = self._inputs([Request(prompt=(0,), max_new_tokens=NO_LIMIT)] * self.batch)
        [self._starting] = setup.executables.start(Program(self._placed(start, "the start"), (*models, *inputs)))
        self.shapes = self.placement.placed(self._starting.shapes)
        self._loop: Compilation | None = None

    def start(self, requests: Sequence[Request]) -> State:
        """Returns a state with the prompts committed and empty caches, for `prefill` or for timing.

        Raises:
          ValueError: not `batch` requests, a prompt longer than the capacity, or too many stop tokens.
        """
        if len(requests) != self.batch:
            raise ValueError(f"{len(requests)} requests for {self.batch} rows")
        return self._starting(*self.models, *self._inputs(requests))

    def start_endless(self, prompt: Sequence[int]) -> State:
        """Returns the `start` of rows that all have this prompt and never reach a limit: for timing."""
        return self.start([Request(prompt, NO_LIMIT)] * self.batch)

    def prepare(self, prompt_tokens: int) -> None:
        """Compiles what prefilling prompts of up to that many tokens needs, and waits for it."""
        self._wait_for(self.chunks(prompt_tokens))

    def _wait_for(self, chunks: Chunks) -> None:
        for compilation in (self._starting, *self._compile_chunks(chunks)):
            compilation.wait()

    def compile_loop(self) -> Compilation:
        """Starts to compile the loop over rounds, unless that was done; it compiles while the host goes on."""
        if self._loop is None:
            advance = self._placed(self._advance, f"the loop over {self.unit}")
            args = self._loop_args(self.shapes, NO_LIMIT, False)
            [self._loop] = self._executables.start(Program(advance, args, donate=(len(self.models),)))
        return self._loop

    def _loop_args(self, state: State, most: int, until_any: bool) -> tuple:
        return *self.models, state, *self._settings, np.int32(most), np.bool_(until_any)

    def wait(self) -> None:
        """Waits until the loop over rounds is compiled, too."""
        self.compile_loop().wait()

    def prefill(self, requests: Sequence[Request]) -> State:
        """Returns a state with the prompts in the caches, one request per row, or raises like `start`. The loop may
        still be compiling."""
        *_, state = self.prefill_in_chunks(requests)
        return state

    def prefill_in_chunks(self, requests: Sequence[Request]) -> Iterator[State]:
        """Prefills chunk by chunk, for callers with other work in between. Only the last state may be kept."""
        chunks = self.chunks(max(len(request.prompt) for request in requests))
        compilations = self._compile_chunks(chunks)
        return self._prefilling(self.start(requests), compilations, chunks)

    def _compile_chunks(self, chunks: Chunks) -> list[Compilation]:
        args, donate = (*self.models, self.shapes, np.int32(0)), (len(self.models),)
        functions = [self._placed(self._prefill, "prefill", **static) for _, static in chunks]
        return self._executables.start(*(Program(function, args, donate) for function in functions))

    def _prefilling(self, state: State, compilations: list[Compilation], chunks: Chunks) -> Iterator[State]:
        yield state
        for compilation, (at, _) in zip(compilations, chunks):
            state = compilation(*self.models, state, np.int32(at))
            yield state

    def insert(self, state: State, row: int, single: State) -> State:
        """Puts a request into a row, whatever was there. No host wait; only the first call compiles.

        Args:
          state: a state of this session; donated.
          single: state of a session with the same drafter and capacity, whose first row is taken.

        Raises:
          ValueError: no such row.
        """
        if not 0 <= row < self.batch:
            raise ValueError(f"row {row}: there are {self.batch}")
        return self._new_state(row_programs.insert, state, single, np.int32(row), donate=0)

    def take(self, state: State, row: int) -> State:
        """Returns a state of a session with batch `groups`, each of whose rows is a copy of a row. Does not donate."""
        return self._new_state(row_programs.take, state, np.int32(row), copies=self.groups)

    def end(self, state: State, rows: Collection[int]) -> State:
        """Ends rows that are still running; their tokens stay. Donates the state."""
        return self._new_state(row_programs.end, state, np.isin(np.arange(self.batch), list(rows)), donate=0)

    def advance(self, state: State, rounds: int | None = None, *, until_any: bool = False) -> State:
        """Decodes until every row has finished, or for at most that many rounds (of `dllm`: passes).

        Donates the state, and does not wait for the result.

        Args:
          until_any: end as soon as one of the rows that are still running has finished.
        """
        most = NO_LIMIT if rounds is None else rounds
        return self.compile_loop()(*self._loop_args(state, most, until_any))

    def read(self, state: State) -> Progress:
        """Reads the tokens and the status of all rows. One host wait."""
        ids, begin, end, finish = self._fetch(self._view(state))
        return Progress([ids[row, begin[row] : end[row]].tolist() for row in range(self.batch)], finish.tolist())

    @property
    def groups(self) -> int:
        """Groups of devices that share the batch: rows of the smallest session, which prefills single requests."""
        return self.models[0].execution.parts(DATA)

    def _fetch(self, tree: Any) -> Any:
        """Copies arrays to this host; with several processes each one gets the whole batch."""
        if not all(leaf.is_fully_addressable or leaf.is_fully_replicated for leaf in jax.tree.leaves(tree)):
            tree = self._run(functools.partial(constrain, execution=self.models[0].execution, spec=P()), tree)
        return jax.device_get(tree)

    def _new_state(self, function: Callable, *args: Any, donate: int | None = None, **static: Any) -> State:
        return self._run(self._placed(function, function.__name__, **static), *args, donate=donate)

    def _run(self, function: Callable, *args: Any, donate: int | None = None) -> Any:
        [program] = self._executables.start(Program(function, args, () if donate is None else (donate,)))
        return program(*args)

    def _placed(self, function: Callable, name: str, **static: Any) -> SessionProgram:
        return SessionProgram(name, functools.partial(function, **static), self.placement)

    def _prompts(self, requests: Sequence[Request]) -> Prompts:
        # Prompts [5, 6] and [7] with capacity 4: tokens [[5, 6, 0, 0], [7, 0, 0, 0]], lengths [2, 1].
        tokens = np.zeros((len(requests), self.capacity), np.int32)
        for row, request in enumerate(requests):
            if not 1 <= len(request.prompt) <= self.capacity:
                raise PromptError(f"a prompt of {len(request.prompt)} tokens: must have 1 to {self.capacity}")
            tokens[row, : len(request.prompt)] = request.prompt

        columns = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32}
        columns |= {"seed": np.uint32, "sequence": np.int32}
        return Prompts(
            tokens=tokens,
            length=np.asarray([len(request.prompt) for request in requests], np.int32),
            eos=np.asarray([decoding.stop_tokens(tuple(request.eos))[0] for request in requests], np.int32),
            sampling=Sampling(
                **{name: np.asarray([getattr(each, name) for each in requests], columns[name]) for name in columns}
            ),
        )


class DraftSession(Session):
    """Drafts that a target verifies.

    Attributes:
      drafter: it drafts, and knows the widths of the plan.
      plan: widths of every pass.
      kept: number of log-probabilities per token, see `Runtime.session`; None: none are kept.
    """

    def __init__(self, setup: SessionSetup, target: Decoder, drafter: Drafter, plan: Plan, logprobs: int | None = None):
        self.drafter, self.plan, self.kept = drafter.planned(plan.widths), plan, logprobs
        # A prompt's widths are no part of the loop: with `--exact` and without, it is one program.
        rounds_plan = dataclasses.replace(plan, prefill_widths=(), drafter_prefill_widths=())
        super().__init__(
            setup,
            (target, self.drafter),
            start=functools.partial(decoding.init_state, capacity=setup.capacity, plan=plan, logprobs=logprobs),
            prefill=decoding.prefill_chunk,
            advance=functools.partial(decoding.generate, plan=rounds_plan),
        )

    @functools.cached_property
    def key(self) -> str:
        """Names the session's programs, in every process: all that is compiled, by kinds and shapes."""
        leaves, structure = jax.tree.flatten((self.models, self.plan))
        shapes = [(np.shape(leaf), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves]
        kept = () if self.kept is None else (self.kept,)
        named = repr((structure, shapes, self.batch, self.capacity, jax.__version__, *kept))
        return hashlib.sha256(named.encode()).hexdigest()[:16]

    def with_costs(self, costs: Costs) -> DraftSession:
        """Returns the same programs, with a drafter that decides by these costs. Nothing is compiled."""
        other = copy.copy(self)
        other.drafter = self.drafter.with_costs(costs)
        other.models = (self.models[0], other.drafter)
        return other

    def _inputs(self, requests):
        return self._prompts(requests), np.asarray([request.max_new_tokens for request in requests], np.int32)

    def chunks(self, prompt_tokens: int, begin: int = 0) -> Chunks:
        """Returns the chunks of a prompt's prefill from position `begin` on."""
        return prefill_schedule(prompt_tokens, self.drafter, self.plan, self.shapes.tokens.shape[1], begin)

    def _view(self, state):
        return state.tokens, state.prompt_length, state.length, state.finish

    def rounds(self, state: DecodeState) -> list[RowLog]:
        """Each row's rounds so far. One host wait."""
        return self._rounds((state.log, *self._view(state)))

    def rounds_of(self, state: DecodeState, row: int) -> RowLog:
        """Returns one row's rounds so far. One host wait."""
        return self._rounds(self._run(row_programs.take, (state.log, *self._view(state)), np.int32(row)))[0]

    def _rounds(self, parts: tuple[Any, ...]) -> list[RowLog]:
        log, tokens, begin, end, _ = self._fetch(parts)
        return [row_programs.row_log(log, row, ids[begin[row] : end[row]].tolist()) for row, ids in enumerate(tokens)]

    def logprobs(self, state: DecodeState, begin: Mapping[int, int]) -> dict[int, list[TokenLogprob]]:
        """Returns log-probabilities of emitted tokens, by row, from each row's `begin`-th token on. One host wait."""
        logprobs, starts, ends = self._fetch((state.logprobs, state.prompt_length, state.length))
        return {
            row: row_programs.logprobs_of(logprobs, row, int(starts[row]) + at, int(ends[row]))
            for row, at in begin.items()
        }

    # Prompts that go on from what a row has cached.

    def prepare_any(self) -> None:
        """Compiles what prefilling any prompt needs, from any position on, and waits for it."""
        buffer, parts = self.shapes.tokens.shape[1], prefill_parts(self.drafter, self.plan)
        static = [{"width": width, "parts": models} for widths, models in parts for width in widths if width <= buffer]
        self._wait_for([(0, chunk) for chunk in static])

    def shared(self, old: DecodeState, common: int, prompt_tokens: int) -> int:
        """Returns the positions that need no prefill in a prompt whose first `common` tokens are those of a row.

        One host wait.

        Args:
          old: the row's state, see `take`.
        """
        held = self._run(row_programs.held, self.drafter, old)
        # The last position of what is common was followed by another token, and one chunk at least is prefilled.
        most = min(int(held[0]), common - 1, prompt_tokens - 2)
        multiple = self.drafter.shape.chunk_multiple
        return max(most, 0) // multiple * multiple

    def prefill_onto(self, old: DecodeState, request: Request, begin: int) -> Iterator[State]:
        """Like `prefill_in_chunks`, for a prompt whose first `begin` positions (see `shared`) are in the caches of
        `old`, which is donated."""
        chunks = self.chunks(len(request.prompt), begin)
        compilations = self._compile_chunks(chunks)
        state = self._new_state(row_programs.graft, self.start([request] * self.batch), old, donate=1)
        return self._prefilling(state, compilations, chunks)


class DiffusionSession(Session):
    """A block-diffusion model that writes on its own.

    Args:
      threshold: confidence above which a pass fills a position.
      graph: draft states that every pass runs beside the block, see `decoding.draft_states`; None: none.
      released_length: see `diffusion_decoding.blocks_to_write`.
      schedule: fields of `diffusion_decoding.BlockSchedule`.
    """

    stream_rounds, unit = 8, "passes"

    def __init__(
        self,
        setup: SessionSetup,
        model: Decoder,
        *,
        threshold: float = 1.0,
        graph: np.ndarray | None = None,
        released_length: bool = False,
        **schedule: Any,
    ):
        passes = BlockSchedule(**schedule)
        self.config, self.block, self.released_length = model.config, model.config.block_size, released_length
        self.threshold, self.small_block = np.float32(threshold), passes.small_block
        self.graph = None if graph is None else draft_states.padded(graph, self.block)
        static = {"states": None if graph is None else len(self.graph), "small_block": passes.small_block}
        super().__init__(
            setup,
            (model,),
            start=functools.partial(diffusion_decoding.init_state, capacity=setup.capacity, **static),
            prefill=diffusion_decoding.prefill_chunk,
            advance=functools.partial(draft_states.generate, schedule=passes),
            settings=(self.threshold, self.graph),
        )

    def _inputs(self, requests):
        count = functools.partial(
            diffusion_decoding.blocks_to_write, self.config, capacity=self.capacity, released=self.released_length
        )
        blocks, limits = zip(*(count(len(request.prompt), request.max_new_tokens) for request in requests))
        if not all(blocks):
            raise PromptError(f"no whole block of {self.block} fits after the prompt within {self.capacity} tokens")
        return self._prompts(requests), np.asarray(blocks, np.int32), np.asarray(limits, np.int32)

    def chunks(self, prompt_tokens, begin=0):
        del begin  # always 0: see `prefill_onto`
        width, starts = diffusion_decoding.prefill_starts(prompt_tokens, self.config, self.shapes.text.shape[1])
        return [(at, {"width": width}) for at in starts]

    def _view(self, state):
        return state.text, state.prompt_length, state.end, state.finish

    def rounds(self, state):
        """Each row's blocks so far: with a token shift, a block emits its tokens and the next block's first one."""
        passes, adopted, *view = self._fetch((state.block_passes, state.block_adopted, *self._view(state)))
        logs = []
        for passes_of, adopted_of, text, begin, end, _ in zip(passes, adopted, *view):
            first_end = (begin // self.block + 1) * self.block + self.config.token_shift
            stops = [begin, *range(first_end, end, self.block), end] if end > begin else []
            blocks = [
                Round([], [], 0, text[at:stop].tolist(), int(count), adopted=None if self.graph is None else int(saved))
                for at, stop, count, saved in zip(stops, stops[1:], passes_of, adopted_of)
            ]
            logs.append(RowLog(blocks, 0, sum(entry.passes for entry in blocks) + int(begin >= self.block)))
        return logs
