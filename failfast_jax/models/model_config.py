"""What one decoder is: its shape and rules, as read from `config.json`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from failfast_jax.errors import ConfigError, quoted
from failfast_jax.util import values

# Fast-dLLM v2 uses the first unused row of Qwen2.5's embedding as its mask token.
FAST_DLLM_MASK_TOKEN = 151_665
FAST_DLLM_MODEL_TYPE = "Fast_dLLM_Qwen"
SDAR_MASK_TOKEN = 151_669
SDAR_MODEL_TYPE = "sdar"
QWEN3_MODEL_TYPES = ("qwen3", SDAR_MODEL_TYPE)
SUPPORTED_MODEL_TYPES = ("qwen2", "qwen3", "llama", FAST_DLLM_MODEL_TYPE, SDAR_MODEL_TYPE)
BLOCK_KEYS = {FAST_DLLM_MODEL_TYPE: ("bd_size", 32), SDAR_MODEL_TYPE: ("block_size", 4)}
"""Of block-diffusion models: the key of the block's size, and the size where it is missing."""
LARGEST = {
    "num_layers": ("num_hidden_layers", 2**12),
    "num_heads": ("num_attention_heads", 2**12),
    "num_kv_heads": ("num_key_value_heads", 2**12),
    "head_dim": ("head_dim", 2**12),
    "hidden_size": ("hidden_size", 2**20),
    "intermediate_size": ("intermediate_size", 2**22),
    "vocab_size": ("vocab_size", 2**24),
    "max_position_embeddings": ("max_position_embeddings", 2**30),
}
"""Keys of `config.json` by field, and bounds beyond any model: a damaged or hostile file must not take all memory."""

POSITIVE_OF_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")

ORIGINAL_CONTEXT = "original_max_position_embeddings"
DUAL_CHUNK = "dual_chunk_attention_config"
COMMON_ROPE_KEYS = ("rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned", ORIGINAL_CONTEXT)
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", ORIGINAL_CONTEXT, "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", ORIGINAL_CONTEXT, "beta_fast", "beta_slow", "truncate", "attention_factor"),
        *("mscale", "mscale_all_dim"),
    ),
    "divisors": ("divisors",),
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor"),
}
"""Settings of each kind of rotary embedding; another one there is another kind's, or a mistake."""
SUPPORTED_ROPE = "default, linear, llama3, yarn"
FULL_ATTENTION = ("full_attention", "attention")
"""Names of full attention in `layer_types`: today's and an older one."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and the long-context scaling of the checkpoint.

    `kind` is one of `default`, `linear`, `llama3`, `yarn`; the other fields carry the parameters of
    that kind under the names that Hugging Face's `rope_scaling` uses. `divisors` is ours: GGUF files
    carry Llama 3's scaling as a tensor, one divisor per frequency.
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

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str) -> RopeConfig:
        """Reads `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

        What is read is what transformers 5 makes of it. It reads `rope_scaling` alone where both are there, so both
        must then say the same; settings by layer type must be the same for the types that the layers have.

        Raises:
          ConfigError: settings that contradict each other, or that are not supported.
        """
        keys = [key for key in ("rope_scaling", "rope_parameters") if raw.get(key)]
        configs = [cls._of_key(key, raw, where) for key in keys] or [cls._parse({}, raw, f"{where}: rope")]
        if configs[0] != configs[-1]:
            raise ConfigError(
                f"{where}: rope_scaling and rope_parameters say different things; write all settings, rope_theta too, "
                "into one of them and remove the other"
            )
        return configs[0]

    @classmethod
    def _of_key(cls, key: str, raw: Mapping[str, Any], where: str) -> RopeConfig:
        """Reads the object `raw[key]`: flat, or `{"full_attention": {...}, ...}`."""
        values, where = raw[key], f"{where}: {key}"
        if not any(isinstance(value, Mapping) for value in values.values()):
            return cls._parse(values, raw, where)
        types = raw.get("layer_types")
        names = types if isinstance(types, list) else []
        used = sorted({str(name) for name in names if name not in FULL_ATTENTION}) or FULL_ATTENTION[:1]
        if any(name in FULL_ATTENTION for name in names):
            used = [*used, FULL_ATTENTION[0]]
        for name in used:
            if not isinstance(values.get(name), Mapping):
                raise ConfigError(f"{where} has no settings for layers of type {name!r}, only {', '.join(values)}")
        if flat := [name for name, value in values.items() if not isinstance(value, Mapping) and value is not None]:
            raise ConfigError(f"{where}: {flat[0]} stands beside settings by layer type; write it into each of them")
        configs = {name: cls._parse(values[name], raw, f"{where}.{name}") for name in used}
        if len(set(configs.values())) > 1:
            raise ConfigError(f"{where} differs between {' and '.join(configs)}; all layers here have the same")
        return next(iter(configs.values()))

    @classmethod
    def _parse(cls, values: Mapping[str, Any], raw: Mapping[str, Any], where: str) -> RopeConfig:
        """Reads flat settings, with defaults from the configuration around them."""
        theta = next((each["rope_theta"] for each in (values, raw) if each.get("rope_theta") is not None), 10_000.0)
        for each in (values, raw):
            if each.get("partial_rotary_factor", 1) not in (None, 1):
                raise ConfigError(f"{where}: partial_rotary_factor other than 1 is not supported")
        kind = values.get("rope_type") or values.get("type") or "default"
        if kind not in ROPE_KEYS:
            raise ConfigError(f"{where} of type {kind!r} is not supported (supported: {SUPPORTED_ROPE})")
        for key, value in values.items():
            if key not in (*ROPE_KEYS[kind], *COMMON_ROPE_KEYS) and value not in (None, False, 1, [], ""):
                raise ConfigError(f"{where} of type {kind!r} has the key {key!r}, which this type does not use")

        def need(key: str) -> float:
            if values.get(key) is None:
                raise ConfigError(f"{where} of type {kind!r} needs the key {key!r}")
            return float(values[key])

        settings: dict[str, Any] = {}
        if kind in ("llama3", "yarn"):
            outside, inside = raw.get(ORIGINAL_CONTEXT), values.get(ORIGINAL_CONTEXT)
            context = inside if outside is None else outside
            settings[ORIGINAL_CONTEXT] = int(stated_context(raw) if context is None else context)
        if kind == "divisors":
            settings["divisors"] = tuple(float(value) for value in values.get("divisors") or ())
        if kind == "longrope":  # divisors, as `to_dict` writes them
            short, long = values.get("short_factor"), values.get("long_factor")
            numbers = isinstance(short, list) and all(type(value) in (int, float) for value in short)
            if not numbers or short != long or values.get("attention_factor") != 1:
                raise ConfigError(f"{where} of type 'longrope' is not supported (supported: {SUPPORTED_ROPE})")
            kind, settings["divisors"] = "divisors", tuple(map(float, short))
        if kind == "llama3":
            settings |= {key: need(key) for key in ("low_freq_factor", "high_freq_factor")}
        if kind in ("linear", "llama3", "yarn"):
            settings["factor"] = need("factor")
        if kind == "yarn":
            settings |= {
                "beta_fast": float(values.get("beta_fast") or 32.0),
                "beta_slow": float(values.get("beta_slow") or 1.0),
                "truncate": bool(values.get("truncate", True)),
                "attention_factor": _yarn_attention_factor(values, settings["factor"]),
            }
        return cls(theta=float(theta), kind=kind, **settings)

    def context(self, stated: int) -> int:
        """Most positions of a model whose `max_position_embeddings` is `stated`: YaRN's factor extends them."""
        return max(stated, int(self.factor * self.original_max_position_embeddings)) if self.kind == "yarn" else stated

    def to_dict(self, context: int) -> dict[str, Any]:
        """As `rope_parameters` of a `config.json`.

        Args:
          context: the model's `max_position_embeddings`.
        """
        if self.kind == "divisors":
            # transformers divides by such lists in LongRoPE alone: one for short texts, one for long ones.
            both = {key: list(self.divisors) for key in ("short_factor", "long_factor")}
            fixed = {"factor": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": context}
            return {"rope_theta": self.theta, "rope_type": "longrope", **both, **fixed}
        names = [name for name in ROPE_KEYS[self.kind] if not name.startswith("mscale")]
        scaling = {name: getattr(self, name) for name in names}
        return {"rope_theta": self.theta, "rope_type": self.kind, **scaling}


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """As transformers computes it: given, from two `mscale`s, or from the factor alone."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def scaled(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return float(scaled(mscale) / scaled(mscale_all) if mscale and mscale_all else scaled(1.0))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and rules of one decoder, as read from `config.json`: see `from_dict`, which names the keys.

    Attributes:
      model_type: one of `SUPPORTED_MODEL_TYPES`.
      vocab_size: rows of the embedding; logits are as wide.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_layers: decoder layers.
      num_heads: query heads of a layer, a multiple of `num_kv_heads`.
      num_kv_heads: heads of its keys and values.
      head_dim: width of a head, even.
      rms_norm_eps: added to mean squares before their root is taken.
      rope: the rotary embedding.
      qkv_bias: whether queries, keys and values have biases.
      o_bias: whether the output projection of attention has one.
      mlp_bias: whether the MLP's matrices have.
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
    """RMSNorm of each query's and each key's head, before the rotary embedding (Qwen3)."""
    tie_embeddings: bool = False
    """Whether the embedding also makes the logits."""
    max_position_embeddings: int = 2048
    """The context: most tokens of prompt and output together."""
    block_size: int = 1
    """Attention rule: position i sees position j iff i // block_size >= j // block_size; 1 is causal."""
    mask_token_id: int | None = None
    """The [MASK] token of a block-diffusion model; None for an autoregressive model."""
    token_shift: bool = True
    """Whether row i predicts token i + 1; a block-diffusion model without it (SDAR) fills position i from row i."""
    eos_token_ids: tuple[int, ...] = ()
    """Stop tokens."""

    @property
    def is_diffusion(self) -> bool:
        """Whether it fills blocks of masked positions."""
        return self.block_size > 1

    def shape_key(self) -> dict[str, Any]:
        """JSON-ready; what a target must have in common with the one that a drafter was trained for."""
        return {key: getattr(self, key) for key in ("model_type", "vocab_size", "hidden_size", "num_layers")}

    def with_mask_row(self, num_layers: int, block_size: int) -> ModelConfig:
        """Of a block-diffusion drafter of `num_layers` layers, which fills blocks of `block_size` positions and borrows
        this model's embedding; one row more is its mask."""
        return dataclasses.replace(
            self,
            num_layers=num_layers,
            block_size=block_size,
            mask_token_id=self.vocab_size,
            vocab_size=self.vocab_size + 1,
        )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Parses a Hugging Face `config.json`.

        The mask token is only read from the key `mask_token_id` here; `resolve_mask_token` adds what a tokenizer says.

        Args:
          raw: the file's object.
          where: the file, for messages.

        Raises:
          ConfigError: an unknown `model_type`, a missing key or a value that the decoder cannot serve.
        """
        if (model_type := raw.get("model_type")) not in SUPPORTED_MODEL_TYPES:
            known = ", ".join(SUPPORTED_MODEL_TYPES)
            raise ConfigError(f"{where}: model_type {quoted(model_type)} is not supported (supported: {known})")
        _check_types(raw, where)
        try:
            config = cls._parse(raw, where)
        except (TypeError, ValueError, ArithmeticError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{where}: a value has the wrong type ({error})") from error
        config._check(raw, where)
        return config

    @classmethod
    def _parse(cls, raw: Mapping[str, Any], where: str) -> ModelConfig:
        model_type = raw["model_type"]

        def need(key: str) -> int:
            value = raw.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"{where}: key {key!r} must be a positive integer, got {value!r}")
            return value

        heads, hidden = need("num_attention_heads"), need("hidden_size")
        head_dim = raw.get("head_dim", 128 if model_type in QWEN3_MODEL_TYPES else None)
        rope = RopeConfig.from_dict(raw, where)
        is_llama, is_diffusion = model_type == "llama", model_type in BLOCK_KEYS
        has_bias_key = is_llama or model_type in QWEN3_MODEL_TYPES
        attention_bias = bool(raw.get("attention_bias", False))
        return cls(
            model_type=model_type,
            vocab_size=need("vocab_size"),
            hidden_size=hidden,
            intermediate_size=need("intermediate_size"),
            num_layers=need("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=head_dim or hidden // heads,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=rope,
            qkv_bias=attention_bias if has_bias_key else True,
            o_bias=attention_bias if has_bias_key else False,
            qk_norm=model_type in QWEN3_MODEL_TYPES,
            mlp_bias=bool(raw.get("mlp_bias", False)) if is_llama else False,
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            max_position_embeddings=min(rope.context(stated_context(raw)), _unchunked(raw, where)),
            block_size=raw.get(*BLOCK_KEYS[model_type]) if is_diffusion else 1,
            mask_token_id=raw.get("mask_token_id") if is_diffusion else None,
            token_shift=model_type != SDAR_MODEL_TYPE,
            eos_token_ids=eos_ids(raw.get("eos_token_id"), where),
        )

    def _check(self, raw: Mapping[str, Any], where: str) -> None:
        """Raises ConfigError: values out of all bounds, that contradict each other, or ask for what is not built."""
        for name, (key, most) in LARGEST.items():
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{where}: key {key!r} must be from 1 to {most}, got {getattr(self, name)}")
        positive = {"rms_norm_eps": self.rms_norm_eps, "rope_theta": self.rope.theta}
        for key, value in (positive | {key: getattr(self.rope, key) for key in POSITIVE_OF_ROPE}).items():
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{where}: key {key!r} must be a positive number, got {value}")
        if self.rope.kind == "llama3" and self.rope.low_freq_factor >= self.rope.high_freq_factor:
            raise ConfigError(f"{where}: low_freq_factor must be below high_freq_factor, as in Llama 3")
        if self.num_heads % self.num_kv_heads:
            heads = f"num_attention_heads {self.num_heads} is no multiple of num_key_value_heads {self.num_kv_heads}"
            raise ConfigError(f"{where}: {heads}")
        if self.head_dim % 2:
            raise ConfigError(f"{where}: head_dim {self.head_dim} is odd; rotary embeddings need an even one")
        if self.rope.kind == "divisors" and len(self.rope.divisors) != self.head_dim // 2:
            raise ConfigError(f"{where}: {len(self.rope.divisors)} rope divisors for {self.head_dim // 2} frequencies")
        if raw.get("hidden_act", "silu") not in ("silu", "swish"):  # two names of one function
            raise ConfigError(f"{where}: hidden_act {quoted(raw['hidden_act'])} is not supported (supported: silu)")
        if self.model_type in BLOCK_KEYS and (not isinstance(self.block_size, int) or self.block_size < 2):
            key, _ = BLOCK_KEYS[self.model_type]
            raise ConfigError(f"{where}: {key} must be an integer of at least 2, got {self.block_size!r}")


def _check_types(raw: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError: a key with a value of the wrong type, or out of all bounds."""
    for key, most in LARGEST.values():
        values.number(raw, key, where, most=most, default=None)
    for model_type, (key, _) in BLOCK_KEYS.items():
        if raw.get("model_type") == model_type:
            values.number(raw, key, where, least=2, most=2**16, default=None)
    values.number(raw, "mask_token_id", where, least=0, default=None)
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"):
        values.flag(raw, key, where)
    values.number(raw, "rms_norm_eps", where, float, least=values.SMALLEST_FLOAT, most=1, default=None)
    for key in ("rope_scaling", "rope_parameters"):
        if raw.get(key) is not None and not isinstance(raw[key], Mapping):
            raise ConfigError(f"{where}: key {key!r} must be an object, got {quoted(raw[key])}")
        inner = raw.get(key) or {}
        for each in (inner, *(value for value in inner.values() if isinstance(value, Mapping))):
            _check_rope(each, f"{where}: {key}")
            for name in ("rope_type", "type"):
                values.text(each, name, f"{where}: {key}", None)
    _check_rope(raw, where)


def _check_rope(raw: Mapping[str, Any], where: str) -> None:
    values.number(raw, "rope_theta", where, float, least=1.1, most=values.LARGEST_FLOAT, default=None)
    values.number(raw, "partial_rotary_factor", where, float, least=0, most=1, default=None)
    values.number(raw, ORIGINAL_CONTEXT, where, most=2**30, default=None)
    for key in POSITIVE_OF_ROPE:
        if raw.get(key) == 0 and key.startswith("beta"):
            continue  # YaRN's default, as in transformers
        values.number(raw, key, where, float, least=1e-6, most=1e9, default=None)
    for key in ("mscale", "mscale_all_dim"):
        values.number(raw, key, where, float, least=0, most=1e6, default=None)
    for key in ("divisors", "short_factor", "long_factor"):
        numbers = values.entries(raw, key, where, float, [])
        if not all(values.is_number(number, float, 1e-6, 1e9) for number in numbers):
            raise values.refusal(raw, key, where, "must be a list of numbers from 1e-06 to 1e+09")


ENDS = frozenset(
    (
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>"),
        *("<|call|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_turn>", "<end_of_utterance>", "<turn|>"),
        *("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    )
)
"""Names of tokens that end a text or a turn, whatever a model's files call them."""


def stated_context(raw: Mapping[str, Any]) -> int:
    """`max_position_embeddings`, or its default in transformers."""
    return int(raw.get("max_position_embeddings") or (2048 if raw.get("model_type") == "llama" else 32_768))


def _unchunked(raw: Mapping[str, Any], where: str) -> int:
    """Up to how many positions the dual chunk attention of Qwen2.5-1M is plain attention."""
    settings, where = raw.get(DUAL_CHUNK), f"{where}: {DUAL_CHUNK}"
    if not settings:
        return LARGEST["max_position_embeddings"][1]
    if not isinstance(settings, Mapping):
        raise values.refusal(raw, DUAL_CHUNK, where, "must be an object")
    chunk, local, original = (
        values.number(settings, key, where) for key in ("chunk_size", "local_size", ORIGINAL_CONTEXT)
    )
    return min(chunk - local, original)


def eos_ids(value: Any, where: str) -> tuple[int, ...]:
    """`eos_token_id` of a config: absent, one id or a list of ids.

    Raises:
      ConfigError: anything else.
    """
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(values.is_number(id, int, -1, values.LARGEST_ID) for id in ids):
        raise ConfigError(f"{where}: key 'eos_token_id' must be a token id or a list of them, got {quoted(value)}")
    return tuple(id for id in ids if id >= 0)  # -1 is how some say that there is none


def resolve_mask_token(config: ModelConfig, tokenizer_mask: int | None, where: str) -> ModelConfig:
    """Fills `mask_token_id` of a block-diffusion model: its config, its tokenizer's mask token, else its family's id.

    Raises:
      ConfigError: none of the three gives an id below `vocab_size`.
    """
    if not config.is_diffusion:
        return config
    usual = SDAR_MASK_TOKEN if config.model_type == SDAR_MODEL_TYPE else FAST_DLLM_MASK_TOKEN
    candidates = (config.mask_token_id, tokenizer_mask, usual)
    mask = next(candidate for candidate in candidates if candidate is not None)
    if not 0 <= mask < config.vocab_size:
        raise ConfigError(
            f"{where}: mask token {mask} is outside the vocabulary of {config.vocab_size}; "
            "set mask_token_id in config.json"
        )
    return dataclasses.replace(config, mask_token_id=mask)
