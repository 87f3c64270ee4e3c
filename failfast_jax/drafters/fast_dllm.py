"""The paper's baseline `fast-dllm`: drafts of static length, several denoising passes."""

from __future__ import annotations

import dataclasses

import numpy as np

from failfast_jax.decoding.drafter import Drafter
from failfast_jax.decoding.stopping import Never
from failfast_jax.drafters.aligned import Aligned
from failfast_jax.drafters.failfast import SPEC_LEN, check_rows, small_block_of
from failfast_jax.drafters.feature_block import FeatureDenoiser
from failfast_jax.models.drafter_model import BLOCK_DIFFUSION, FEATURE_BLOCK
from failfast_jax.options import LONGEST_DRAFT, MethodOptions, Site, option


@dataclasses.dataclass(frozen=True)
class FastDllmOptions(MethodOptions):
    """Options of `fast-dllm`."""

    summary = "a block-diffusion model; static length, each pass fills the positions above --threshold and the best"
    kinds = (BLOCK_DIFFUSION, FEATURE_BLOCK)

    spec_len: int | None = option(None, "tokens drafted per round (10)", least=1, most=LONGEST_DRAFT)
    threshold: float = option(0.9, "a pass fills positions above it", least=0, most=1)
    block_size: int | None = option(None, "block of the diffusion model (as in its config)", least=2)
    small_block_size: int | None = option(None, "positions unmasked together (8)", least=1)

    def build(self, site: Site) -> Drafter:
        threshold = np.float32(self.threshold)
        if site.model.kind == FEATURE_BLOCK:
            length = self.spec_len or site.model.rows
            check_rows(site, length, "--spec-len")
            return FeatureDenoiser(model=site.model, spec_len=length, threshold=threshold)
        return Aligned(
            model=site.model,
            vocab=site.vocab,
            rule=Never(),
            threshold=threshold,
            spec_len=self.spec_len or SPEC_LEN,
            small_block=small_block_of(self.small_block_size, site),
            expand=False,
        )
