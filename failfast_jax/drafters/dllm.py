"""Method `dllm`: a block-diffusion model without a target, and Spiffy (`decoding.draft_states`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from failfast_jax.checkpoints import draft_graph
from failfast_jax.checkpoints.draft_graph import DraftGraph
from failfast_jax.decoding.diffusion_decoding import RANKS
from failfast_jax.models.transformer import Decoder
from failfast_jax.options import MethodOptions, option, require

MOST_STATES = 64
"""Draft states of `--spiffy`: each is a copy of the block in every pass."""


def small_block_of(requested: int | None, model: Decoder) -> int:
    """Returns the positions that are unmasked together; OptionError: they do not divide the block."""
    small, block = requested or 8, model.config.block_size
    require(block % small == 0, f"--small-block-size {small}", f"must divide the block size {block}")
    return small


@dataclasses.dataclass(frozen=True)
class ScheduleOptions(MethodOptions):
    """Options of `dllm` that decide what a pass fills.

    They are those of `train spiffy`, too, which calibrates for them.
    """

    summary = "block diffusion on its own (--target names the model); not lossless against anything"
    top_p = 0.95
    threshold: float | None = option(
        None, "a pass fills positions above it, and the best (1; SDAR: 0.85)", least=0, most=1
    )
    block_size: int | None = option(None, "block of the diffusion model (as in its config)", least=2)
    small_block_size: int | None = option(None, "Fast-dLLM v2: positions unmasked together (8)", least=1)
    block_cache: bool = option(False, "Fast-dLLM v2: cache inside the block")
    steps: int | None = option(None, "SDAR: denoising passes per block; only its size is served", least=1)

    def schedule_for(self, model: Decoder) -> dict[str, Any]:
        """The threshold for a model, its own or the model family's, and the static arguments of `step`.

        Raises:
          OptionError: an option of the other family, or one that does not fit the block size.
        """
        block, shift = model.config.block_size, model.config.token_shift
        usual = 1.0 if shift else 0.85
        threshold = {"threshold": usual if self.threshold is None else self.threshold}
        if shift:
            require(self.steps is None, f"--steps {self.steps}", "Fast-dLLM v2 fills by --threshold alone")
            small = small_block_of(self.small_block_size, model)
            return threshold | {"small_block": small, "block_cache": self.block_cache}
        flag = f"--small-block-size {self.small_block_size}"
        require(self.small_block_size is None, flag, "SDAR models unmask a block as a whole")
        require(not self.block_cache, "--block-cache", "SDAR models have no small blocks to cache for")
        # With fewer steps the release fills positions by a top-k that also ranks filled ones, as -inf: it overwrites
        # some of them, and torch leaves open which.
        require(self.steps in (None, block), f"--steps {self.steps}", f"must be the block size {block}, or be left out")
        return threshold | {"small_block": block, "block_cache": False}


@dataclasses.dataclass(frozen=True)
class DllmOptions(ScheduleOptions):
    """Options of `dllm`."""

    released_length: bool = option(
        False, "write whole blocks, as many as the model's own code does, whatever --max-new-tokens cuts off"
    )
    spiffy: int | None = option(
        None, "draft states run beside the block: the same text in fewer passes (none)", least=0, most=MOST_STATES
    )
    spiffy_graph: str | None = option(None, "where --spiffy finds them (spiffy.json beside the model)")

    def __post_init__(self) -> None:
        if self.spiffy_graph is not None:
            require(self.spiffy is not None, f"--spiffy-graph {self.spiffy_graph}", "needs --spiffy")

    def read_graph(self, model_name: str) -> DraftGraph:
        """The draft graph of a model's folder or file, or `--spiffy-graph`'s; OptionError, ConfigError: there is none,
        or it is damaged."""
        return draft_graph.read(self.spiffy_graph or draft_graph.default_file(model_name), model_name, RANKS)

    def states_for(self, model: Decoder, model_name: str, small_block: int) -> np.ndarray | None:
        """Returns the draft states of `--spiffy` as rows, see `decoding.draft_states`; None without it.

        Raises:
          OptionError: no calibrated graph is there, or one for other blocks or with fewer states.
        """
        if not self.spiffy:
            return None if self.spiffy is None else np.zeros((0, small_block), np.int32)
        return self.read_graph(model_name).states(self.spiffy, model.config.block_size, small_block)
