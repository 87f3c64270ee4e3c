"""A target, a drafter model and devices, with everything compiled for them: token ids in, token ids out.

    runtime = Runtime(target, drafter_model)
    vocab = target.config.vocab_size
    drafter = Wide(model=drafter_model, vocab=vocab, rule=BelowThreshold(0.45), spec_len=10, max_spec_len=60)
    session = runtime.session(drafter, batch=4, capacity=runtime.capacity(200, 256, drafter.max_draft))
    state = session.prefill([Request(prompt=ids, max_new_tokens=256, sequence=row) for row, ids in enumerate(prompts)])
    while RUNNING in (progress := session.read(state)).finish:
        state = session.advance(state, rounds=4)
    answers = progress.ids

A `Session` holds the programs for one drafter, plan, batch and capacity. Its rows are independent requests: what a row
says depends on its own request alone, and `Session.insert` puts another request in its place. Programs of one's own on
the same models come from `Runtime.compile`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.exact_widths import WidthCheck
from failfast_jax.decoding.placement import StatePlacement
from failfast_jax.decoding.width_plan import Plan, make_plan
from failfast_jax.errors import OptionError, PromptTooLong
from failfast_jax.models import sharding
from failfast_jax.models.transformer import Decoder
from failfast_jax.policy.cost_book import CostBook
from failfast_jax.results import RowLog
from failfast_jax.runtime.diffusion_session import DiffusionSession
from failfast_jax.runtime.session import DraftSession, Progress, Request, Session
from failfast_jax.util.compilation import Executables

__all__ = ["DiffusionSession", "DraftSession", "Progress", "Request", "RowLog", "Runtime", "Session"]

logger = logging.getLogger("failfast_jax")

SMALLEST_CAPACITY = 256


class Runtime:
    """A target, a drafter model and devices, with everything compiled for them.

    Args:
      target: an autoregressive model; for `diffusion_session` a block-diffusion model.
      drafter_model: the model that drafters built for this runtime draft with, if any.
      mesh: devices to spread both over (see `models.sharding.make_mesh`). None: the models stay where they are, on
        one device or spread already.
      max_seq_len: most tokens of prompt and output together; None: the models' context.
      programs: a store of compiled programs to share with another runtime.
      costs: a file that says what rounds cost; None: they are measured when first needed.

    Attributes:
      platform: `cpu`, `gpu` or `tpu`: whose widths and defaults are taken; the target's (`Execution.platform`).
      programs: the store; `programs.seconds` is the time spent on compiling.
      costs: what rounds cost here, for drafters that decide by it.
      width_check: what is known of the target's widths under `exact`; runtimes of one target may share it.

    Raises:
      OptionError: `max_seq_len` exceeds the models' context, or the target cannot be spread over the mesh.
    """

    def __init__(
        self,
        target: Decoder,
        drafter_model: Any = None,
        mesh: Mesh | None = None,
        max_seq_len: int | None = None,
        *,
        programs: Executables | None = None,
        costs: str | os.PathLike | None = None,
    ):
        if mesh is not None:
            target = target.spread(mesh, drafter=False)
            drafter_model = drafter_model and drafter_model.spread(mesh)
        self.target, self.drafter_model = target, drafter_model
        self.platform = target.execution.platform
        context = target.config.max_position_embeddings
        if drafter_model is not None and drafter_model.context is not None:
            context = min(context, drafter_model.context)
        if max_seq_len is not None and not 2 <= max_seq_len <= context:
            raise OptionError(f"--max-seq-len {max_seq_len}: must be between 2 and the context of {context}")
        self.max_seq_len = max_seq_len or context
        self.programs = programs or Executables()
        self.costs = CostBook(costs)
        self.width_check = WidthCheck(target)

    @property
    def mesh(self) -> Mesh | None:
        """The devices that the models are spread over; None: one device."""
        return self.target.execution.mesh

    def placement(self, batch: int) -> StatePlacement:
        """Called inside a program with a state of that batch, it keeps the state's arrays where they are.

        Programs of one's own that return a state must end with it.

        Raises:
          OptionError: the batch does not divide over the data-parallel groups.
        """
        if self.mesh is None:
            return StatePlacement(self.target)  # whatever the drafter: programs without one are shared
        sharding.check_batch(batch, self.mesh)
        return StatePlacement(self.target, self.drafter_model)

    def plan(self, drafter: Drafter, exact: bool = False, batch: int = 1) -> Plan:
        """Static widths, in rows, of every pass for a drafter.

        Args:
          drafter: what will draft.
          exact: widths whose rows are bit-identical; a self-check of some seconds may find them, the first time.
          batch: sequences that are decoded together, for that check.
        """
        if not exact or self.platform != "cpu":
            return make_plan(drafter, platform=self.platform, exact=exact)
        widths = self.width_check.widths(drafter, batch)
        return make_plan(drafter, platform=self.platform, exact=True, interchangeable=widths)

    def capacity(self, prompt_tokens: int, max_new_tokens: int, longest_draft: int = 0) -> int:
        """Tokens to make room for: a bucket that holds prompt, output and a draft, at most `max_seq_len`. Requests of
        one bucket share programs.

        Args:
          prompt_tokens: of the longest prompt.
          max_new_tokens: most tokens of an answer.
          longest_draft: the drafter's `max_draft`.

        Raises:
          PromptTooLong: the prompt alone is.
        """
        if prompt_tokens >= self.max_seq_len:
            raise PromptTooLong(
                f"the prompt of {prompt_tokens} tokens does not fit: prompt and output together may have "
                f"{self.max_seq_len} tokens"
            )
        wanted = prompt_tokens + max_new_tokens
        if wanted > self.max_seq_len:
            logger.warning(
                "prompt (%d) and max_new_tokens (%d) exceed the %d tokens there is room for: output may end early",
                prompt_tokens,
                max_new_tokens,
                self.max_seq_len,
            )
        bucket = 1 << (wanted + longest_draft).bit_length()
        return min(max(SMALLEST_CAPACITY, bucket), self.max_seq_len)

    def compile(self, function: Callable, *args: Any, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
        """A function compiled for the types of `args` (arrays or shape structs), from the store if it is there.

        Programs are told apart by the function, all that is bound to it, the structure of the arguments (models and
        drafters with all their static fields) and the type and place of every array.

        Args:
          function: without a closure; what else it needs is bound with `functools.partial`, or is a field of the
            frozen dataclass that it is.
          donate: arguments whose memory the result may take.

        Raises:
          TypeError: the function closes over variables, or is bound to something that cannot be compared.
        """
        return self.programs.compile(function, *args, donate=donate)

    def session(
        self,
        drafter: Drafter,
        *,
        batch: int = 1,
        capacity: int,
        plan: Plan | None = None,
        decodes: bool = True,
        logprobs: int | None = None,
    ) -> DraftSession:
        """The programs that decode `batch` requests of up to `capacity` tokens, prompt included, with a drafter.

        They compile side by side in other threads; the first call of each waits for it. A drafter that decides by costs
        takes all widths to cost the same until `costs.price` tells the session what they do.

        Args:
          drafter: what drafts: built for `drafter_model`, where it has a model.
          batch: rows; a multiple of the data-parallel groups.
          capacity: tokens of a row, see `capacity`.
          plan: None: that of `plan` for this drafter, without `exact`.
          decodes: False for a session that prefills rows for another one: its loop is compiled only if it is used.
          logprobs: keep the log-probability of each emitted token, and of so many most probable ones at its place, for
            `DraftSession.logprobs`; None: keep none, at no cost.

        Raises:
          OptionError: see `placement`.
        """
        plan, place = plan or self.plan(drafter, batch=batch), self.placement(batch)
        return DraftSession(self.programs, place, self.target, drafter, batch, capacity, plan, decodes, logprobs)

    def diffusion_session(
        self,
        model: Decoder | None = None,
        *,
        batch: int = 1,
        capacity: int,
        threshold: float = 1.0,
        small_block: int = 8,
        block_cache: bool = False,
        released_length: bool = False,
        graph: np.ndarray | None = None,
    ) -> DiffusionSession:
        """Likewise for a block-diffusion model that writes on its own (method `dllm`).

        Args:
          model: None: the target; or its weights under another block size.
          batch: rows; a multiple of the data-parallel groups.
          capacity: tokens of a row, see `capacity`.
          threshold: see `decoding.diffusion_decoding.step`, as for the next two.
          small_block: divides the block size.
          block_cache: whether passes may run over the small block alone.
          released_length: see `decoding.diffusion_decoding.blocks_to_write`.
          graph: draft states to run beside the block, see `decoding.draft_states`; None: plain decoding.
        """
        return DiffusionSession(
            self.programs,
            self.placement(batch),
            model or self.target,
            batch,
            capacity,
            threshold,
            graph,
            released_length,
            small_block=small_block,
            block_cache=block_cache,
        )
