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

from failfast_jax import decoding
from failfast_jax.decoding.decode_state import DecodeState, Draft, Prompts, Sampling, Verified
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.placement import StatePlacement
from failfast_jax.decoding.width_plan import Plan, prefill_parts, prefill_schedule
from failfast_jax.errors import PromptError
from failfast_jax.models.sharding import DATA
from failfast_jax.models.transformer import Decoder
from failfast_jax.policy.expected_tokens import Costs
from failfast_jax.results import RowLog, TokenLogprob
from failfast_jax.runtime import row_programs
from failfast_jax.util import numerics
from failfast_jax.util.compilation import Compilation, Executables, Program

NO_LIMIT = 2**30

State = Any
"""`decoding.decode_state.DecodeState`, or `decoding.diffusion_decoding.DiffusionState`. Donated: use it once."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One row's prompt, limits and sampling.

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: maximum tokens to emit.
      temperature: of the target's softmax; 0 is greedy.
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
    """Rows of a session, and what compiles and places them.

    Attributes:
      executables: the store that compiles programs.
      placement: see `Runtime.placement`.
      batch: rows.
      capacity: maximum tokens of a row, prompt and output together.
    """

    executables: Executables
    placement: StatePlacement
    batch: int
    capacity: int


@dataclasses.dataclass(frozen=True)
class SessionProgram:
    """A pure function that returns a state, alone or last; the state is put in its place.

    Attributes:
      name: the program's name in messages and profiles.
      function: the function; what is static is bound to it.
      placement: see `Runtime.placement`.
    """

    name: str
    function: Callable
    placement: StatePlacement

    @property
    def __name__(self) -> str:
        return self.name.replace(" ", "_")

    def __call__(self, *args: Any) -> Any:
        result = self.function(*args)
        if isinstance(result, tuple):
            return *result[:-1], self.placement(result[-1])
        return self.placement(result)


@dataclasses.dataclass(frozen=True)
class SessionPrograms:
    """The functions of one way of decoding. Static arguments are bound, but for those of a chunk.

    Attributes:
      start: `(*models, *inputs) -> state`, with empty caches; see `Session._inputs`.
      prefill: `(*models, state, start, **chunk) -> state`; see `Session._chunks`.
      advance: `(*models, state, ..., most, until_any) -> state`; see `Session._loop_args`.
    """

    start: Callable
    prefill: Callable
    advance: Callable


class Session:
    """Compiled programs for a batch of rows; made by a `Runtime`.

    Args:
      setup: rows, their capacity, and the store of programs.
      models: first arguments of every program: the target and the drafter, or the model that writes.
      programs: the functions to compile.

    Attributes:
      batch, capacity, placement: see `SessionSetup`.
      shapes: a state of shapes, with their places.
      stream_rounds: rounds (of `dllm`: passes) of a slice of a stream.
      unit: steps of the loop, in messages.
    """

    stream_rounds, unit = 4, "rounds"

    def __init__(self, setup: SessionSetup, models: tuple[Any, ...], programs: SessionPrograms):
        self.batch, self.capacity, self.placement = setup.batch, setup.capacity, setup.placement
        self.models, self._executables, self._programs = models, setup.executables, programs
        [self._starting] = self._compile((self._start, (*models, *self._inputs(self._any_requests(self.batch)))))
        self.shapes = self.placement.placed(self._starting.shapes)
        self._loop: Compilation | None = None

    def _inputs(self, requests: Sequence[Request]) -> tuple[Any, ...]:
        """Arguments of `SessionPrograms.start` after the models, checked."""
        raise NotImplementedError

    def _chunks(self, prompt_tokens: int, begin: int = 0) -> list[tuple[int, dict[str, Any]]]:
        """The prefill from position `begin` on: where each chunk starts, and its static arguments."""
        raise NotImplementedError

    def _loop_args(self, state: State, most: int, until_any: bool) -> tuple:
        return *self.models, state, np.int32(most), np.bool_(until_any)

    def _view(self, state: State) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Token ids, start and end of each row's output in them, and why it ended."""
        raise NotImplementedError

    def rounds(self, state: State) -> list[RowLog]:
        """Each row's rounds so far. One host wait."""
        raise NotImplementedError

    def start(self, requests: Sequence[Request]) -> State:
        """Returns a state with the prompts committed and empty caches, for `prefill` or for timing.

        Raises:
          ValueError: not `batch` requests, a prompt longer than the capacity, or too many stop tokens.
        """
        if len(requests) != self.batch:
            raise ValueError(f"{len(requests)} requests for {self.batch} rows")
        return self._starting(*self.models, *self._inputs(requests))

    def prepare(self, prompt_tokens: int) -> None:
        """Compiles what prefilling prompts of up to that many tokens needs, and waits for it."""
        self._wait_for(self._chunks(prompt_tokens))

    def _wait_for(self, chunks: list[tuple[int, dict[str, Any]]]) -> None:
        for compilation in (self._starting, *self._compile_chunks(chunks)):
            compilation.wait()

    def compile_loop(self) -> Compilation:
        """Starts to compile the loop over rounds, unless that was done; it compiles while the host goes on."""
        if self._loop is None:
            advance = self._placed(self._programs.advance, f"the loop over {self.unit}")
            args = self._loop_args(self.shapes, NO_LIMIT, False)
            [self._loop] = self._compile((advance, args), donate=(len(self.models),))
        return self._loop

    def wait(self) -> None:
        """Waits until the loop over rounds is compiled, too."""
        self.compile_loop().wait()

    def prefill(self, requests: Sequence[Request]) -> State:
        """Returns a state with the prompts in the caches, one request per row. The loop may still be compiling.

        Raises:
          ValueError: see `start`.
        """
        *_, state = self.prefill_in_chunks(requests)
        return state

    def prefill_in_chunks(self, requests: Sequence[Request]) -> Iterator[State]:
        """Prefills chunk by chunk, for callers with other work in between. Only the last state may be kept."""
        chunks = self._chunks(max(len(request.prompt) for request in requests))
        compilations = self._compile_chunks(chunks)
        return self._prefilling(self.start(requests), compilations, chunks)

    def chunks_of(self, prompt_tokens: int, begin: int = 0) -> int:
        """Returns the number of chunks that a prompt's prefill takes from position `begin` on."""
        return len(self._chunks(prompt_tokens, begin))

    def _prefilling(self, state: State, compilations: list[Compilation], chunks: list[tuple]) -> Iterator[State]:
        yield state
        for compilation, (at, _) in zip(compilations, chunks):
            state = compilation(*self.models, state, np.int32(at))
            yield state

    def insert(self, state: State, row: int, single: State) -> State:
        """Puts a request into a row, whatever was there. No host wait; only the first call compiles.

        Args:
          state: of this session; donated.
          single: state of a session with batch `groups` and otherwise equal, whose first row is taken.

        Raises:
          ValueError: no such row, or a state of another capacity or drafter.
        """
        by_row = self._leaves_by_row
        if not 0 <= row < self.batch:
            raise ValueError(f"row {row}: there are {self.batch}")
        if not row_programs.fits(single, self.shapes, by_row=by_row, rows=self.groups):
            raise ValueError(f"a row is taken from a session with batch {self.groups}, the same drafter and capacity")
        return self._new_state(row_programs.insert, state, single, np.int32(row), donate=0, by_row=by_row)

    def take(self, state: State, row: int) -> State:
        """Returns a state of a session with batch `groups`, each of whose rows is a copy of a row. Does not donate."""
        static = {"by_row": self._leaves_by_row, "copies": self.groups}
        return self._new_state(row_programs.take, state, np.int32(row), **static)

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

    def _fetch(self, tree: Any) -> Any:
        """Copies arrays to this host; with several processes each one gets the whole batch."""
        if not all(leaf.is_fully_addressable or leaf.is_fully_replicated for leaf in jax.tree.leaves(tree)):
            tree = self._run(functools.partial(row_programs.everywhere, mesh=self._mesh), tree)
        return jax.device_get(tree)

    def _run(self, function: Callable, *args: Any, donate: int | None = None) -> Any:
        [program] = self._compile((function, args), donate=() if donate is None else (donate,))
        return program(*args)

    def _placed(self, function: Callable, name: str, **static: Any) -> SessionProgram:
        return SessionProgram(name, functools.partial(function, **static), self.placement)

    def _new_state(self, function: Callable, *args: Any, donate: int | None = None, **static: Any) -> Any:
        """Runs a function that returns a state, alone or last."""
        return self._run(self._placed(function, function.__name__, **static), *args, donate=donate)

    @property
    def groups(self) -> int:
        """Groups of devices that share the batch: rows of the smallest session, which prefills single requests."""
        return 1 if self._mesh is None else self._mesh.shape[DATA]

    @property
    def _mesh(self) -> jax.sharding.Mesh | None:
        return self.models[0].execution.mesh

    @property
    def _start(self) -> SessionProgram:
        return self._placed(self._programs.start, "the start")

    @staticmethod
    def _any_requests(batch: int) -> list[Request]:
        return [Request(prompt=(0,), max_new_tokens=NO_LIMIT)] * batch

    def start_endless(self, prompt: Sequence[int]) -> State:
        """Returns the `start` of rows that all have this prompt and never reach a limit: for timing."""
        return self.start([Request(prompt, NO_LIMIT)] * self.batch)

    def _compile(self, *programs: tuple[Callable, tuple], donate: tuple[int, ...] = ()) -> list[Compilation]:
        return self._executables.start(*(Program(function, args, donate) for function, args in programs))

    def _compile_chunks(self, chunks: list[tuple[int, dict[str, Any]]]) -> list[Compilation]:
        args = (*self.models, self.shapes, np.int32(0))
        programs = [self._placed(self._programs.prefill, "prefill", **static) for _, static in chunks]
        return self._compile(*((program, args) for program in programs), donate=(len(self.models),))

    @functools.cached_property
    def _leaves_by_row(self) -> tuple[bool, ...]:
        """True for the leaves of the state that grow with the batch, and so hold a value per row."""

        @numerics.defaults()
        def lengths(groups: int) -> list[tuple[int, ...]]:
            inputs = self._inputs(self._any_requests(groups * self.groups))
            return [leaf.shape[:1] for leaf in jax.tree.leaves(jax.eval_shape(self._start, *self.models, *inputs))]

        return tuple(single != double for single, double in zip(lengths(1), lengths(2)))

    def _prompts(self, requests: Sequence[Request]) -> Prompts:
        # Prompts [5, 6] and [7] with capacity 4: tokens [[5, 6, 0, 0], [7, 0, 0, 0]], lengths [2, 1].
        tokens = np.zeros((len(requests), self.capacity), np.int32)
        for row, request in enumerate(requests):
            if not 1 <= len(request.prompt) <= self.capacity:
                raise PromptError(f"a prompt of {len(request.prompt)} tokens: must have 1 to {self.capacity}")
            tokens[row, : len(request.prompt)] = request.prompt

        def column(name: str, dtype: Any) -> np.ndarray:
            return np.asarray([getattr(request, name) for request in requests], dtype)

        return Prompts(
            tokens=tokens,
            length=np.asarray([len(request.prompt) for request in requests], np.int32),
            eos=np.asarray([decoding.stop_tokens(tuple(request.eos))[0] for request in requests], np.int32),
            sampling=Sampling(
                temperature=column("temperature", np.float32),
                top_k=column("top_k", np.int32),
                top_p=column("top_p", np.float32),
                seed=column("seed", np.uint32),
                sequence=column("sequence", np.int32),
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
        programs = SessionPrograms(
            start=functools.partial(decoding.init_state, capacity=setup.capacity, plan=plan, logprobs=logprobs),
            prefill=decoding.prefill_chunk,
            advance=functools.partial(decoding.generate, plan=plan),
        )
        super().__init__(setup, (target, self.drafter), programs)

    @functools.cached_property
    def key(self) -> str:
        """Names the session's programs, in every process: all that is compiled, by kinds and shapes."""
        leaves, structure = jax.tree.flatten((self.models, self.plan))
        shapes = [(np.shape(leaf), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves]
        kept = () if self.kept is None else (self.kept,)
        named = repr((structure, shapes, self.batch, self.capacity, jax.__version__, *kept))
        return hashlib.sha256(named.encode()).hexdigest()[:16]

    def with_costs(self, costs: Costs) -> DraftSession:
        """Returns the same programs, with a drafter that decides by these costs. Nothing is compiled.

        Raises:
          ValueError: the drafter decides nothing by costs.
        """
        if not self.drafter.shape.uses_costs:
            raise ValueError(f"{type(self.drafter).__name__} decides nothing by costs")
        other = copy.copy(self)
        other.drafter = self.drafter.with_costs(costs)
        other.models = (self.models[0], other.drafter)
        return other

    def _inputs(self, requests):
        return self._prompts(requests), np.asarray([request.max_new_tokens for request in requests], np.int32)

    def _chunks(self, prompt_tokens, begin=0):
        return prefill_schedule(prompt_tokens, self.drafter, self.plan, self.shapes.tokens.shape[1], begin)

    def _view(self, state):
        return state.tokens, state.prompt_length, state.length, state.finish

    def rounds(self, state):
        log, tokens, begin, end, _ = self._fetch((state.log, *self._view(state)))
        outputs = [tokens[row, begin[row] : end[row]].tolist() for row in range(self.batch)]
        return [row_programs.row_log(log, row, output) for row, output in enumerate(outputs)]

    def rounds_of(self, state: DecodeState, row: int) -> RowLog:
        """Returns one row's rounds so far. One host wait."""
        log, tokens, begin, end = self._fetch(self._run(row_programs.log_of, state, np.int32(row)))
        return row_programs.row_log(log, 0, tokens[0, begin[0] : end[0]].tolist())

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
        chunks = self._chunks(len(request.prompt), begin)
        compilations = self._compile_chunks(chunks)
        state = self._new_state(row_programs.graft, self.start([request] * self.batch), old, donate=1)
        return self._prefilling(state, compilations, chunks)

    # A round in its three parts, for timing and for experiments. Each donates the state.

    def draft(self, state: DecodeState) -> tuple[Draft, DecodeState]:
        """Returns the drafter's proposal, and the state."""
        return self._new_state(decoding.draft, self.drafter, state, donate=1)

    def verify(self, state: DecodeState, proposal: Draft) -> tuple[Verified, DecodeState]:
        """Returns the target's tokens along a proposal, which any code may have made, and the state."""
        return self._new_state(decoding.verify, *self.models, state, proposal, donate=2, plan=self.plan)

    def commit(self, state: DecodeState, proposal: Draft, verified: Verified) -> DecodeState:
        """Returns the state after the round."""
        return self._new_state(decoding.commit, self.drafter, state, proposal, verified, donate=1)
