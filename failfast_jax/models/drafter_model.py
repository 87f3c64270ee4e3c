"""The interface between models that draft and drafters.

`transformer.Decoder`, a whole model with its own embedding and head, satisfies it. So do the models that read the
target's hidden states: `block_network.DSparkModel` (a few layers that fill a block) and `eagle_network.BoundEagle` (one
layer that continues from its own hidden states). The passes of models differ too much to be shared: each drafter in
`drafters/` serves the models of some kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import Execution

AUTOREGRESSIVE, BLOCK_DIFFUSION = "autoregressive", "block-diffusion"
FEATURE_BLOCK, EAGLE = "feature-block", "eagle"
Kind = Literal["autoregressive", "block-diffusion", "feature-block", "eagle"]
"""`autoregressive`: predicts one token a pass. `block-diffusion`: fills masked positions, many a pass, from its own
cache of the text. `feature-block`: fills up to `rows` of them, from the target's hidden states. `eagle`: one token
a pass, from the target's hidden states and then from its own."""


@runtime_checkable
class DrafterModel(Protocol):
    """A model that drafts for a target; a pytree."""

    @property
    def kind(self) -> Kind:
        """Kind of the model: its inputs, and tokens per pass."""

    @property
    def method(self) -> str:
        """The method that drafts with it unless a request names another."""

    @property
    def rows(self) -> int | None:
        """Most tokens that a draft may have, which training fixed; None: any number."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers (0-based; -1: the embedding) whose outputs it reads: the axis F of features; () for none."""

    @property
    def context(self) -> int | None:
        """Most positions that it can attend to; None: as many as its target."""

    @property
    def dtype(self) -> jnp.dtype:
        """Type of its own parameters and its cache."""

    @property
    def execution(self) -> Execution:
        """The attention kernel, and the devices it is spread over."""

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `batch` sequences of at most `capacity` positions."""

    def shares_tokens(self, target: ModelConfig) -> bool:
        """Returns true if its tokens are its target's by construction, so that no tokenizers need be compared."""

    def spread(self, mesh: Mesh | None, *, kernel: str | None = None, drafter: bool = True) -> DrafterModel:
        """The model as an engine runs it: its execution set, its parameters spread over the mesh (if any).

        Raises:
          OptionError: it cannot be spread so; what does not divide evenly is left whole if it is a drafter.
        """

    def quantized(self, scheme: str) -> DrafterModel:
        """The model with the weight of every `Linear` of its own quantised; see `quantization`."""

    def shape_key(self) -> Mapping[str, Any]:
        """JSON-ready; what tells models of another shape from it."""

    def own_parameters(self) -> list[jax.Array]:
        """Its parameters, less those that it borrows from its target."""
