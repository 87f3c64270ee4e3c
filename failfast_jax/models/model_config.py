"""The shape and the rules of one decoder. `config_keys` reads them from a `config.json`."""

from __future__ import annotations

import dataclasses
from typing import Any

# Fast-dLLM v2 uses the first unused row of Qwen2.5's embedding as its mask token.
FAST_DLLM_MASK_TOKEN = 151_665
FAST_DLLM_MODEL_TYPE = "Fast_dLLM_Qwen"
SDAR_MASK_TOKEN = 151_669
SDAR_MODEL_TYPE = "sdar"
BLOCK_KEYS = {FAST_DLLM_MODEL_TYPE: ("bd_size", 32), SDAR_MODEL_TYPE: ("block_size", 4)}
"""For block-diffusion models: the key of the block's size, and the size where it is missing."""
ORIGINAL_CONTEXT = "original_max_position_embeddings"
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", ORIGINAL_CONTEXT, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", ORIGINAL_CONTEXT, "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "divisors": ("divisors",),
}
"""Settings of each kind of rotary embedding."""
ENDS = frozenset(
    """
    <|im_end|> <|eot_id|> <|eom_id|> <|end|> <|endoftext|> <|end_of_text|> <|return|> <|call|>
    <\uff5cend\u2581of\u2581sentence\uff5c> <end_of_turn> <end_of_utterance> <turn|> </s> <eos> <EOT> _<EOT> [EOT] [EOS]
    """.split()
)
"""Names of tokens that end a text or a turn, whatever a model's files call them."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and the long-context scaling of the checkpoint.

    `kind` is a key of `ROPE_KEYS`; the other fields carry that kind's settings under the names of Hugging Face's
    `rope_scaling`. `divisors` is ours: GGUF files carry Llama 3's scaling as a tensor, one divisor per frequency.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin; 1 except for `yarn`."""
    divisors: tuple[float, ...] = ()

    def context(self, stated: int) -> int:
        """Returns the maximum of positions if `max_position_embeddings` is `stated`: YaRN extends it by its factor."""
        return max(stated, int(self.factor * self.original_max_position_embeddings)) if self.kind == "yarn" else stated

    def to_dict(self, context: int) -> dict[str, Any]:
        """The `rope_parameters` of a `config.json`.

        Args:
          context: the model's `max_position_embeddings`.
        """
        if self.kind == "divisors":
            # transformers divides by such lists in LongRoPE alone: one for short texts, one for long ones.
            both = {key: list(self.divisors) for key in ("short_factor", "long_factor")}
            fixed = {"factor": 1.0, "attention_factor": 1.0, ORIGINAL_CONTEXT: context}
            return {"rope_theta": self.theta, "rope_type": "longrope", **both, **fixed}
        settings = {name: getattr(self, name) for name in ROPE_KEYS[self.kind]}
        return {"rope_theta": self.theta, "rope_type": self.kind, **settings}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and rules of one decoder.

    Attributes:
      model_type: as in `config.json`: a key of `config_keys.FAMILIES`.
      vocab_size: rows of the embedding; logits are as wide.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_layers: decoder layers.
      num_heads: query heads per layer, a multiple of `num_kv_heads`.
      num_kv_heads: heads of its keys and values.
      head_dim: width of a head, even.
      rms_norm_eps: added to mean squares before their root is taken.
      rope: the rotary embedding.
      qkv_bias, o_bias, mlp_bias: biases of queries, keys and values, of attention's output, of the MLP's matrices.
      qk_norm: RMSNorm of each query's and each key's head, before the rotary embedding (Qwen3).
      tie_embeddings: the embedding also makes the logits.
      max_position_embeddings: the context: maximum number of tokens of prompt and output together.
      block_size: position i sees position j if i // block_size >= j // block_size; 1 is causal.
      mask_token_id: the [MASK] token of a block-diffusion model; None for an autoregressive model.
      token_shift: row i predicts token i + 1; without it (SDAR) a block-diffusion model fills position i from row i.
      eos_token_ids: stop tokens.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    max_position_embeddings: int = 2048
    block_size: int = 1
    mask_token_id: int | None = None
    token_shift: bool = True
    eos_token_ids: tuple[int, ...] = ()

    @property
    def is_diffusion(self) -> bool:
        """True if it fills blocks of masked positions."""
        return self.block_size > 1

    def shape_key(self) -> dict[str, Any]:
        """JSON-ready; what a target must have in common with the one that a drafter was trained for."""
        return {key: getattr(self, key) for key in ("model_type", "vocab_size", "hidden_size", "num_layers")}

    def with_mask_row(self, num_layers: int, block_size: int) -> ModelConfig:
        """The configuration of a block-diffusion drafter with this model's embedding and a mask outside of it.

        Args:
          num_layers: the drafter's.
          block_size: positions that it fills together.
        """
        return dataclasses.replace(self, num_layers=num_layers, block_size=block_size, mask_token_id=self.vocab_size)
