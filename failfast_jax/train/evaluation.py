"""The number that matters: mean accepted length of drafts on held-out prompts, measured by the engine itself."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from failfast_jax.engine import FailFast
from failfast_jax.models.drafter_model import FEATURE_BLOCK
from failfast_jax.models.sharding import whole
from failfast_jax.models.transformer import Decoder
from failfast_jax.policy.confidence_scaling import Drafts
from failfast_jax.train.documents import Documents
from failfast_jax.train.train_config import TrainConfig
from failfast_jax.train.trainer import Objective
from failfast_jax.util import processes


class Evaluation:
    """Answers held-out prompts with the engine, drafting one pass per round.

    Each of several processes does so on one of its own devices, lest others wait for it; process 0's figures count.

    Args:
      objective: converts parameters to a drafter (`drafter`).
      config: the number of prompts, which are answered in one batch, and the lengths of answers and drafts.

    Raises:
      OptionError, PromptError: these drafts, or answers to these prompts, are impossible.

    Attributes:
      last: the last result.
      drafts: of the last result, the confidences of each draft's tokens, and how many were accepted.
    """

    def __init__(self, target: Decoder, objective: Objective, held_out: Documents, config: TrainConfig):
        self.objective = objective
        # The engine runs on one device, training on all.
        self._device = jax.local_devices()[0]
        self.prompts = [prompt.tolist() for prompt, _ in held_out.pairs()[: config.eval_prompts]]
        self.last: dict[str, float] | None = None
        self.drafts: Drafts = []
        drafter, spec_len = self._drafter(objective.trainable), config.eval_spec_len
        # A confidence is at most 1, so that tau 1 ends (almost) every draft after its first pass.
        cut = {"tau": 1.0}
        if drafter.kind == FEATURE_BLOCK:  # a block, or its first tokens
            cut = {"tau": 0.0, "max_spec_len": spec_len or drafter.max_block_draft}
        self.options = {"method": "failfast", **cut, "max_new_tokens": config.eval_tokens, "spec_len": spec_len}
        tokenizer, drafter_tokenizer = objective.tokenizers
        with processes.as_single_process():
            self.engine = FailFast(target, drafter, tokenizer=tokenizer, drafter_tokenizer=drafter_tokenizer)
            # Refuses options and prompts that do not fit: now and not after the last step.
            self.engine.session(self.prompts, self.engine.resolve(**self.options))

    def _drafter(self, trainable: Any) -> Any:
        drafter = self.objective.drafter(trainable)
        return jax.tree.map(lambda leaf: jax.device_put(whole(leaf), self._device), drafter)

    def __call__(self, trainable: Any) -> dict[str, float]:
        """Returns `accepted_per_round`, `drafted_per_round`, `rounds`, and the share of accepted first tokens."""
        self.engine.drafter = self._drafter(trainable)
        with processes.as_single_process():
            results = self.engine.generate(self.prompts, **self.options)
        rounds = [log for result in results for log in result.rounds]
        figures = {
            "accepted_per_round": float(np.mean([log.accepted for log in rounds])),
            "first_token_accepted": float(np.mean([log.accepted > 0 for log in rounds])),
            "drafted_per_round": float(np.mean([len(log.drafted) for log in rounds])),
            "rounds": len(rounds),
        }
        self.drafts = [(log.confidence, log.accepted) for log in rounds]
        self.last = processes.broadcast_from_primary(figures)
        return self.last
