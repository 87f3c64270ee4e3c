"""The one number that matters: mean accepted length of drafts on held-out prompts, by the engine itself."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from failfast_jax import distributed
from failfast_jax.engine import FailFast
from failfast_jax.models.drafter_model import EAGLE, FEATURE_BLOCK
from failfast_jax.models.sharding import whole
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.confidence_scaling import Drafts
from failfast_jax.train.data import Documents


class Evaluation:
    """Answers held-out prompts with the engine, drafting one pass a round; a chain of passes with an EAGLE drafter.

    Of several processes each does so on a device of its own, lest others wait for it, and process 0's figures count.

    Args:
      objective: makes a drafter of parameters (`drafter`).
      prompts: held-out documents whose prompts are answered, in one batch.
      tokens: new tokens of each answer.
      spec_len: tokens of each draft; None: the drafter's own default.
      tokenizers: the target's and the drafter's, where their vocabularies may differ in size.

    Raises:
      OptionError, PromptError: these drafts, or answers to these prompts, cannot be.

    Attributes:
      last: the last result.
      drafts: of the last result: the confidences of each draft's tokens, and how many were accepted.
    """

    def __init__(
        self,
        target: Decoder,
        objective: Any,
        held_out: Documents,
        *,
        prompts: int,
        tokens: int,
        spec_len: int | None = None,
        tokenizers: tuple[Any, Any] | None = None,
    ):
        self.objective = objective
        # The engine runs on one device, training on all.
        self._device = jax.local_devices()[0]
        tokenizer, drafter_tokenizer = tokenizers or (None, None)
        drafter = self._drafter(objective.trainable)
        with distributed.apart():
            self.engine = FailFast(target, drafter, tokenizer=tokenizer, drafter_tokenizer=drafter_tokenizer)
        model = self.engine.drafter
        # A confidence is at most 1, so that tau 1 ends (almost) every draft after its first pass.
        method = {"method": "failfast", "tau": 1.0}
        if model.kind == EAGLE:
            method = {"method": "eagle3"}
        elif model.kind == FEATURE_BLOCK:  # tau cuts its drafts, too: a block, whole
            method = {"method": "failfast", "tau": 0.0, "max_spec_len": spec_len or model.rows}
        self.options = {**method, "max_new_tokens": tokens, "spec_len": spec_len}
        self.prompts = [prompt.tolist() for prompt, _ in held_out.pairs()[:prompts]]
        self.last: dict[str, float] | None = None
        self.drafts: Drafts = []
        with distributed.apart():  # refuses options and prompts that do not fit: better now than after the last step
            self.engine.session(self.prompts, self.engine.resolve(**self.options))

    def _drafter(self, trainable: Any) -> Any:
        drafter = self.objective.drafter(trainable)
        return jax.tree.map(lambda leaf: jax.device_put(whole(leaf), self._device), drafter)

    def __call__(self, trainable: Any) -> dict[str, float]:
        """`accepted_per_round`, `rounds`, and how often the first drafted token was accepted."""
        self.engine.drafter = self._drafter(trainable)
        with distributed.apart():
            results = self.engine.generate(self.prompts, **self.options)
        rounds = [log for result in results for log in result.rounds]
        figures = {
            "accepted_per_round": float(np.mean([log.accepted for log in rounds])),
            "first_token_accepted": float(np.mean([log.accepted > 0 for log in rounds])),
            "drafted_per_round": float(np.mean([len(log.drafted) for log in rounds])),
            "rounds": len(rounds),
        }
        self.drafts = [(log.confidence, log.accepted) for log in rounds]
        self.last = distributed.agreed(figures)
        return self.last
