"""A target, a drafter model and devices, with all programs compiled for them: token ids in, token ids out.

    runtime = Runtime(target, drafter_model)
    vocab = target.config.vocab_size
    drafter = Wide(model=drafter_model, vocab=vocab, rule=BelowThreshold(0.45), spec_len=10, max_spec_len=60)
    session = runtime.session(drafter, batch=4, capacity=runtime.capacity(200, 256, drafter.max_draft))
    state = session.prefill([Request(prompt=ids, max_new_tokens=256, sequence=row) for row, ids in enumerate(prompts)])
    while RUNNING in (progress := session.read(state)).finish:
        state = session.advance(state, rounds=4)
    answers = progress.ids

A `Session` holds the programs for one drafter, plan, batch and capacity. Its rows are independent requests: the text of
a row depends on its request alone, and `Session.insert` puts another request in its place.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.exact_widths import WidthCheck
from failfast_jax.decoding.placement import StatePlacement
from failfast_jax.decoding.width_plan import DEFAULT_WIDTHS, Plan, Widths, make_plan
from failfast_jax.errors import OptionError, PromptTooLong
from failfast_jax.models import sharding
from failfast_jax.models.transformer import Decoder
from failfast_jax.policy.cost_book import CostBook
from failfast_jax.results import RowLog
from failfast_jax.runtime.program_store import ProgramStore
from failfast_jax.runtime.session import DiffusionSession, DraftSession, Progress, Request, Session, SessionSetup
from failfast_jax.util.compilation import Executables

__all__ = ["DiffusionSession", "DraftSession", "Progress", "Request", "RowLog", "Runtime", "Session"]

logger = logging.getLogger("failfast_jax")

SMALLEST_CAPACITY = 256


class Runtime:
    """A target and a drafter model, on one device or spread over several, with all programs compiled for them.

    Args:
      target: an autoregressive model; for `diffusion_session` a block-diffusion model.
      drafter_model: the model that this runtime's drafters draft with, if any.
      max_seq_len: maximum tokens of prompt and output together; None: the models' context.
      programs: a store of compiled programs to share with another runtime.
      costs: a file with the costs of rounds; None: they are measured when first needed.
      widths: the widths to choose from; None: the platform's, `decoding.width_plan.DEFAULT_WIDTHS`.

    Attributes:
      platform: `cpu`, `gpu` or `tpu`, which decides widths and defaults; the target's (`Execution.platform`).
      programs: the store; `programs.seconds` is the time spent on compiling.
      costs: measured costs of rounds, for drafters that decide by them.

    Raises:
      OptionError: `max_seq_len` exceeds the models' context.
    """

    def __init__(
        self,
        target: Decoder,
        drafter_model: Any = None,
        max_seq_len: int | None = None,
        *,
        programs: Executables | None = None,
        costs: str | os.PathLike | None = None,
        widths: Widths | None = None,
    ):
        self.target, self.drafter_model = target, drafter_model
        self.platform = target.execution.platform
        context = target.config.max_position_embeddings
        if drafter_model is not None and drafter_model.context is not None:
            context = min(context, drafter_model.context)
        if max_seq_len is not None and not 2 <= max_seq_len <= context:
            raise OptionError(f"--max-seq-len {max_seq_len}: must be between 2 and the context of {context}")
        self.max_seq_len = max_seq_len or context
        self.programs, self.costs = programs or Executables(store=ProgramStore()), CostBook(costs)
        self.widths = widths or DEFAULT_WIDTHS[self.platform]
        self._width_check = WidthCheck(target, self.widths)

    mesh = property(lambda runtime: runtime.target.execution.mesh)
    """The devices that the models are spread over; None: one device."""

    def plan(self, drafter: Drafter, exact: bool = False, batch: int = 1) -> Plan:
        """Returns the static widths, in rows, of every pass for a drafter.

        Args:
          exact: widths whose rows are bit-identical for `batch` sequences together; the first time a self-check of some
            seconds may measure them.
        """
        identical = self._width_check.widths(drafter, batch) if exact and self.platform == "cpu" else ()
        return make_plan(drafter, platform=self.platform, exact=exact, interchangeable=identical, widths=self.widths)

    def capacity(self, prompt_tokens: int, max_new_tokens: int, longest_draft: int = 0) -> int:
        """Returns the capacity of a row: a bucket that holds `prompt_tokens`, `max_new_tokens` and a draft of
        `longest_draft` tokens, at most `max_seq_len`. Requests of one bucket share programs.

        Example: 200 + 256 + 60 tokens -> 1024; 5 + 64 -> 256, the smallest.

        Raises:
          PromptTooLong: the prompt alone is.
        """
        if prompt_tokens >= self.max_seq_len:
            raise PromptTooLong(
                f"the prompt of {prompt_tokens} tokens does not fit: prompt and output together may have "
                f"{self.max_seq_len} tokens; shorten it, or raise --max-seq-len up to the model's context"
            )
        wanted = prompt_tokens + max_new_tokens
        if wanted > self.max_seq_len:
            logger.warning(
                "prompt (%d) and max_new_tokens (%d) exceed the capacity of %d tokens: output may end early",
                prompt_tokens,
                max_new_tokens,
                self.max_seq_len,
            )
        bucket = 1 << (wanted + longest_draft).bit_length()
        return min(max(SMALLEST_CAPACITY, bucket), self.max_seq_len)

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
        """Returns the programs that decode `batch` requests of up to `capacity` tokens (prompt included) by drafts.

        They compile side by side in other threads; the first call of each waits for it. Until `costs.price` measures
        them, all widths cost the same for a drafter that decides by costs.

        Args:
          drafter: built for `drafter_model` if it has a model.
          batch: rows; a multiple of the data-parallel groups.
          plan: None: that of `plan` for this drafter, without `exact`.
          decodes: False for a session that prefills rows for another one: its loop is compiled only if it is used.
          logprobs: keep the log-probability of each emitted token, and of this number of most probable ones at its
            place, for `DraftSession.logprobs`; None: keep none, at no cost.

        Raises:
          OptionError: the batch does not divide over the data-parallel groups.
        """
        plan = plan or self.plan(drafter, batch=batch)
        session = DraftSession(self._setup(batch, capacity), self.target, drafter, plan, logprobs)
        if decodes:
            session.compile_loop()
        return session

    def diffusion_session(
        self, model: Decoder | None = None, *, batch: int = 1, capacity: int, **options: Any
    ) -> DiffusionSession:
        """Returns the programs of a block-diffusion model that writes without a target (method `dllm`).

        Args:
          model: None: the target; or its weights under another block size.
          batch: rows; a multiple of the data-parallel groups.
          capacity: tokens of a row, see `capacity`.
          options: those of `DiffusionSession`.
        """
        session = DiffusionSession(self._setup(batch, capacity), model or self.target, **options)
        session.compile_loop()
        return session

    def _setup(self, batch: int, capacity: int) -> SessionSetup:
        drafter = None  # on one device, whatever the drafter: programs without one are shared
        if self.mesh is not None:
            sharding.check_batch(batch, self.mesh)
            drafter = self.drafter_model and self.drafter_model.execution
        return SessionSetup(self.programs, StatePlacement(self.target.execution, drafter), batch, capacity)
