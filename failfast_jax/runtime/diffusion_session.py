"""The session of a block-diffusion model that writes without a target (method `dllm`). Made by a `Runtime`."""

from __future__ import annotations

import functools

import numpy as np

from failfast_jax.decoding import diffusion_decoding, draft_states
from failfast_jax.decoding.diffusion_decoding import BlockSchedule
from failfast_jax.errors import PromptError
from failfast_jax.models.transformer import Decoder
from failfast_jax.results import Round, RowLog
from failfast_jax.runtime.session import Session, SessionPrograms, SessionSetup


class DiffusionSession(Session):
    """A block-diffusion model that writes on its own.

    Args:
      threshold: confidence from which on a pass keeps a token.
      graph: draft states that every pass runs beside the block, see `decoding.draft_states`; None: none.
      released_length: see `diffusion_decoding.blocks_to_write`.
      schedule: static settings of the passes.
    """

    stream_rounds, unit = 8, "passes"

    def __init__(
        self,
        setup: SessionSetup,
        model: Decoder,
        schedule: BlockSchedule,
        threshold: float,
        graph: np.ndarray | None = None,
        released_length: bool = False,
    ):
        self.config, self.block, self.released_length = model.config, model.config.block_size, released_length
        self.threshold, self.small_block = np.float32(threshold), schedule.small_block
        self.graph = None if graph is None else draft_states.padded(graph, self.block)
        static = {"states": None if graph is None else len(self.graph), "small_block": schedule.small_block}
        programs = SessionPrograms(
            start=functools.partial(diffusion_decoding.init_state, capacity=setup.capacity, **static),
            prefill=diffusion_decoding.prefill_chunk,
            advance=functools.partial(advance, schedule=schedule),
        )
        super().__init__(setup, (model,), programs)

    def _inputs(self, requests):
        count = functools.partial(
            diffusion_decoding.blocks_to_write, self.config, capacity=self.capacity, released=self.released_length
        )
        blocks, limits = zip(*(count(len(request.prompt), request.max_new_tokens) for request in requests))
        if not all(blocks):
            raise PromptError(f"no whole block of {self.block} fits after the prompt within {self.capacity} tokens")
        return self._prompts(requests), np.asarray(blocks, np.int32), np.asarray(limits, np.int32)

    def _chunks(self, prompt_tokens, begin=0):
        if begin:
            raise ValueError(f"a prefill from position {begin} on: a block-diffusion model begins at 0")
        width, starts = diffusion_decoding.prefill_starts(prompt_tokens, self.config, self.shapes.text.shape[1])
        return [(at, {"width": width}) for at in starts]

    def _loop_args(self, state, most, until_any):
        return *self.models, state, self.threshold, self.graph, np.int32(most), np.bool_(until_any)

    def _view(self, state):
        return state.text, state.prompt_length, state.end, state.finish

    def rounds(self, state):
        """Each row's blocks so far: with a token shift, a block emits its tokens and the next block's first one."""
        counts = state.block_passes, state.block_adopted
        passes, adopted, text, begin, end, _ = self._fetch((*counts, *self._view(state)))
        return [
            self._blocks(passes[row], adopted[row], text[row], int(begin[row]), int(end[row]))
            for row in range(self.batch)
        ]

    def _blocks(self, passes: np.ndarray, adopted: np.ndarray, text: np.ndarray, begin: int, end: int) -> RowLog:
        first_end = (begin // self.block + 1) * self.block + self.config.token_shift
        blocks, at = [], begin
        while at < end:
            stop = min(first_end + len(blocks) * self.block, end)
            spared = None if self.graph is None else int(adopted[len(blocks)])
            blocks.append(Round([], [], 0, text[at:stop].tolist(), int(passes[len(blocks)]), adopted=spared))
            at = stop
        prefill = int(begin >= self.block)
        return RowLog(blocks, 0, sum(entry.passes for entry in blocks) + prefill)


def advance(model, state, threshold, graph, most, until_any, *, schedule):
    """Runs passes; see `diffusion_decoding.generate`, and for `graph` `draft_states.step`."""
    step = diffusion_decoding.step if graph is None else functools.partial(draft_states.step, graph=graph)
    return diffusion_decoding.generate(model, state, threshold, most, until_any, schedule=schedule, step=step)
