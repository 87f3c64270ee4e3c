"""The method `vanilla`: no drafts, one token a pass, in the same loop."""

from __future__ import annotations

import dataclasses

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.options import MethodOptions, Site


@dataclasses.dataclass(frozen=True)
class VanillaOptions(MethodOptions):
    """`vanilla` has none."""

    summary = "nothing: one token a pass, the same loop"

    def build(self, site: Site) -> Drafter:
        return Drafter()
