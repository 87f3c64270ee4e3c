"""The method `auto`: the text, any drafter or plain steps, whichever promises most tokens a second here."""

from __future__ import annotations

import dataclasses

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.drafters.autoregressive import Autoregressive
from failfast_jax.drafters.eagle3 import EagleChain, TreeOptions
from failfast_jax.drafters.failfast import TOKEN_LENGTHS, lengths, one_pass_drafter
from failfast_jax.drafters.lookup import LONGEST_MATCH, Lookup
from failfast_jax.models.drafter_model import AUTOREGRESSIVE, BLOCK_DIFFUSION, EAGLE, FEATURE_BLOCK
from failfast_jax.options import LONGEST_DRAFT, Site, flag_of, option, require
from failfast_jax.policy.auto_choice import Auto
from failfast_jax.policy.auto_tree import AutoTree
from failfast_jax.policy.expected_tokens import MODEL_CHANCES

TREES = TreeOptions.names()


@dataclasses.dataclass(frozen=True)
class AutoOptions(TreeOptions):
    """Options of `auto`: how long drafts may be, and where they may come from. The rest is decided round by round."""

    summary = (
        "the text itself and any drafter, if there is one: each round drafts and verifies what promises most tokens a "
        "second by measured costs, or nothing (what runs where no method is named)"
    )
    kinds = (BLOCK_DIFFUSION, FEATURE_BLOCK, EAGLE, AUTOREGRESSIVE)
    needs_model = False

    spec_len: int | None = option(
        None, "tokens by which a draft of the drafter grows (as failfast; EAGLE, ar: 1)", least=1, most=LONGEST_DRAFT
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

    def check(self) -> None:
        if self.asks_for_a_tree:
            self._refuse("trees of an EAGLE drafter are drafted without it", "spec_len", "max_spec_len", "lookup_min")

    def build(self, site: Site) -> Drafter:
        chances = MODEL_CHANCES if site.chances is None else site.chances
        if site.model is None:
            require(self.lookup_min != 0, "--lookup-min 0", "needs --drafter, or nothing drafts")
            self._refuse("needs --drafter", "spec_len", *TREES)
        elif self.asks_for_a_tree:
            if site.model.kind != EAGLE:
                self._refuse(f"{site.model_name} drafts no trees by cost, only an EAGLE drafter does", *TREES)
            return AutoTree.of(None, self.tree(site), chances)
        text = None if self.lookup_min == 0 else Lookup.whole(site.platform, self.lookup_min, self.max_spec_len)
        return Auto.of(text, None if site.model is None else self._model(site), chances)

    def _refuse(self, why: str, *names: str) -> None:
        """Raises OptionError: one of these options is given."""
        for name in names:
            require((value := getattr(self, name)) is None, f"{flag_of(name)} {value}", why)

    def _model(self, site: Site) -> Drafter:
        """The drafter whose drafts grow; where they end is decided by costs."""
        if site.model.kind in (BLOCK_DIFFUSION, FEATURE_BLOCK):
            model = one_pass_drafter(site, self.spec_len, self.max_spec_len)
            return model if site.model.kind == BLOCK_DIFFUSION else model.replace(deferred=True)
        spec_len, longest = lengths(self.spec_len, self.max_spec_len, *TOKEN_LENGTHS)
        if site.model.kind == EAGLE:
            return EagleChain(model=site.model, spec_len=spec_len, max_spec_len=longest)
        return Autoregressive.of(site, spec_len=spec_len, max_spec_len=longest, seldom=True)
