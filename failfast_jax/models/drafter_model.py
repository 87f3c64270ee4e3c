"""Models that draft for a target: what drafters read of them, and the base of those that read hidden states.

`transformer.Decoder` is one, a whole model with its own embedding and head. So are the models that read the target's
hidden states: `block_network.DSparkModel` and `eagle_network.BoundEagle`. Their passes differ too much to be shared:
each drafter in `drafters/` serves the models of some kinds. All are pytrees and have:

- `kind`: inputs, and tokens per pass.
- `method`: the method that drafts with it unless a request names another.
- `max_block_draft`: maximum number of tokens of one block's draft, fixed by training; None: any number.
- `feature_layers`: target layers (0-based; -1: the embedding) whose outputs it reads: the axis F of features; () for
  none.
- `context`: maximum number of positions that it can attend to; None: as many as its target.
- `dtype`: of its own parameters and its cache.
- `execution`: the attention kernel, and the devices it is spread over.
- `init_cache(batch, capacity)`: an empty cache for `batch` sequences of at most `capacity` positions.
- `shares_tokens(target)`: true if its tokens are its target's by construction, so that no tokenizers need be compared.
- `spread(mesh, kernel=, drafter=)`, `quantized(scheme)`: the model as an engine runs it; see `Decoder`.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from failfast_jax.kernels.blocks import BlockMatrix
from failfast_jax.models import quantization
from failfast_jax.models.kv_cache import KVCache
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import TENSOR, Execution, name_of, put_parameter

AUTOREGRESSIVE, BLOCK_DIFFUSION = "autoregressive", "block-diffusion"
FEATURE_BLOCK, EAGLE = "feature-block", "eagle"
Kind = Literal["autoregressive", "block-diffusion", "feature-block", "eagle"]
"""`autoregressive`: predicts one token a pass. `block-diffusion`: fills masked positions, many a pass, from its own
cache of the text. `feature-block`: fills up to `max_block_draft` of them, from the target's hidden states. `eagle`:
one token a pass, from the target's hidden states and then from its own."""


class FeatureNetwork(nnx.Module):
    """Base of networks that read the target's hidden states: their `config` has sizes of layers as its `base`."""

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the parameters and the cache."""
        return self.norm.weight[...].dtype


class FeatureModel:
    """Base of models that read the target's hidden states: a network, and the embedding and head that it is bound to.

    Subclasses are pytrees with the fields `network`, `embed`, `draft_ids` and `shared`, the names of those of `embed`
    and `head` that are the target's.
    """

    context: ClassVar[None] = None
    config = property(lambda model: model.network.config)
    execution = property(lambda model: model.network.execution)
    dtype = property(lambda model: model.network.dtype)
    feature_layers = property(lambda model: model.config.feature_layers)

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of keys and values."""
        return KVCache.zeros(self.config.base, batch, capacity, self.dtype)

    def over_vocabulary(self, logits: Float[Array, "*R v"]) -> Float[Array, "*R V"]:
        """Logits of the target's whole vocabulary; -inf for what it cannot draft."""
        if self.draft_ids is None:
            return logits
        wide = jnp.full((*logits.shape[:-1], self.embed.shape[0]), -jnp.inf)
        return wide.at[..., self.draft_ids].set(logits)

    def shares_tokens(self, target: ModelConfig) -> bool:
        """Returns true: it was trained for its target."""
        return True

    def spread(self, mesh: Mesh | None, *, kernel: str | None = None, drafter: bool = True) -> FeatureModel:
        """With its execution set: its layers whole on every device of a mesh, embedding and head by vocabulary."""
        network = copy.copy(self.network)
        network.execution = Execution(kernel=kernel, mesh=mesh)
        model = self.replace(network=network)
        if mesh is None:
            return model
        quantization.check_layout(model)

        def place(path: Any, value: Any) -> Any:
            is_large = name_of(path).split(".")[0] in ("embed", "head")
            is_even = is_large and value.shape[0] % mesh.shape[TENSOR] == 0
            return put_parameter(value, mesh, P(TENSOR if is_even else None))

        return jax.tree_util.tree_map_with_path(place, model, is_leaf=lambda node: isinstance(node, BlockMatrix))

    def quantized(self, scheme: str = "int8") -> FeatureModel:
        """With all its matrices quantised, except those that are its target's; OptionError: see
        `quantization.check`."""
        return quantization.quantized(self, scheme, keep=self.shared)
