"""The method `auto`: the text, any drafter or plain steps, whichever promises most tokens a second here."""

from __future__ import annotations

import dataclasses

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.drafters.lookup import LONGEST_MATCH, Lookup, usual_length
from failfast_jax.drafters.model_methods import growing
from failfast_jax.models.drafter_model import AUTOREGRESSIVE, BLOCK_DIFFUSION, EAGLE, FEATURE_BLOCK
from failfast_jax.options import LONGEST_DRAFT, MethodOptions, Site, option, require
from failfast_jax.policy.auto_choice import Auto
from failfast_jax.policy.expected_tokens import MODEL_CHANCES

KINDS = (BLOCK_DIFFUSION, FEATURE_BLOCK, EAGLE, AUTOREGRESSIVE)


@dataclasses.dataclass(frozen=True)
class AutoOptions(MethodOptions):
    """Options of `auto`: how long drafts may be, and where they may come from. The rest is decided round by round."""

    summary = (
        "the text itself and any drafter, if there is one: each round drafts and verifies what promises most tokens a "
        "second by measured costs, or nothing (what runs where no method is named)"
    )
    kinds = KINDS
    needs_model = False

    spec_len: int | None = option(
        None,
        "tokens by which a draft of the drafter grows (as failfast; EAGLE, ar: 1)",
        least=1,
        most=LONGEST_DRAFT,
        kinds=KINDS,
    )
    max_spec_len: int | None = option(
        None,
        "longest draft, of the drafter (as failfast; EAGLE, ar: 20) and of the text (15 on CPU, 63 elsewhere)",
        least=1,
        most=LONGEST_DRAFT,
    )
    lookup_min: int | None = option(
        None, "shortest match that the text drafts from; 0: only the drafter drafts (1)", least=0, most=LONGEST_MATCH
    )

    def build(self, site: Site) -> Drafter:
        require(site.model is not None or self.lookup_min != 0, "--lookup-min 0", "needs --drafter, or nothing drafts")
        # As long as it can be, whatever matched: costs decide how much of it is verified.
        longest = self.max_spec_len or usual_length(site.platform)
        text = Lookup(min_match=self.lookup_min or 1, max_spec_len=longest, shortest=longest)
        text = None if self.lookup_min == 0 else text
        model = None if site.model is None else growing(site, self.spec_len, self.max_spec_len, seldom=True)
        return Auto.of(text, model, MODEL_CHANCES if site.chances is None else site.chances)
