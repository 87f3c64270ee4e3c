"""Folders of drafters that borrow from their target: settings, checks against the target, loading and writing.

`eagle_folder`, `block_drafter_folder` and `fast_dllm_folder` hold the keys and tensors of each kind.

The same settings lie at the top level (DeepSpec), in `dflash_config` (z-lab, SpecForge) or in `eagle_config` (NVIDIA);
vLLM's speculators keep the layers' shape in `transformer_layer_config`. Keys that nobody reads follow the rules of
`models.config_keys`. The text never depends on them, acceptance does.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from failfast_jax.checkpoints import safetensors_file
from failfast_jax.checkpoints.checkpoint import DTYPES, Checkpoint
from failfast_jax.checkpoints.config_file import NESTED, SHAPE
from failfast_jax.checkpoints.parameter_map import StoredTensor, TensorTable
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.kernels.blocks import as_array
from failfast_jax.models import config_keys, quantization
from failfast_jax.models.drafter_model import Kind
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import whole
from failfast_jax.models.transformer import Decoder
from failfast_jax.util import values
from failfast_jax.util.files import read_json, write_atomically

FULL, SLIDING = "full_attention", "sliding_attention"
FEATURE_LAYERS = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
STORAGES = ("bfloat16", "float32")
DRAFT_IDS = "d2t"
"""Tensor of a drafter of some tokens only: row r of its head is token r + d2t[r]."""
IGNORED = r".*rotary_emb\.inv_freq|d2t|t2d|verifier_(norm|lm_head)\.weight"
BORROWED = {"embed": "embed_tokens.weight", "head": "lm_head.weight"}
"""Parameters that may be the target's, and the tensors of a drafter's own."""

integer = partial(values.number, most=2**24)


def layer_numbers(raw: Mapping[str, Any], key: str, where: values.Where, least: int = -1) -> tuple[int, ...]:
    """Reads numbers of target layers (-1: the embedding); ConfigError: they are missing, or something else."""
    numbers = raw.get(key)
    if not isinstance(numbers, list) or not numbers or not all(type(n) is int and n >= least for n in numbers):
        raise values.refusal(raw, key, where, "must be a list of layer numbers")
    return tuple(numbers)


class Settings:
    """A drafter's settings, wherever they lie; `rope_theta` replaces the file's base frequency unless it is None.

    Attributes:
      raw: `config.json`, with speculators' layer keys beside the drafter's, as the others write them.
      where: the file, for messages.
      architecture: the first of `architectures`; "": none.
      speculators: the `speculators_model_type`.
      trained_for: layers and hidden size of the target that it was trained for; None: not known.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, rope_theta: float | None = None):
        names = raw.get("architectures")
        self.architecture = str(names[0]) if isinstance(names, list) and names else ""
        self.speculators = raw.get("speculators_model_type")
        layers = config_keys.entry(raw, SHAPE, where)
        self.raw = {key: value for key, value in raw.items() if key != SHAPE} | dict(layers)
        self.where, self.rope_theta = where, rope_theta
        self._homes = {"": self.raw} | {f"{home}.": config_keys.entry(self.raw, home, where) for home in NESTED}
        self._read: set[str] = set()
        self.trained_for = [self.get(integer, key, default=None) for key in ("num_target_layers", "target_hidden_size")]

    def stored(self, *keys: str) -> dict[str, Any]:
        """A setting's values by the names under which the file has them; null is no value.

        Args:
          keys: names of the same meaning. `block_size` may be `{"block_size": 8, "dflash_config.block_size": 8}`.
        """
        self._read.update(keys)
        names = [(home + key, inside.get(key)) for key in keys for home, inside in self._homes.items()]
        return {name: value for name, value in names if value is not None}

    def get(self, reader: Callable[..., Any], *keys: str, **options: Any) -> Any:
        """A setting under one of its names, read by a reader of `values` or of this module, with its errors.

        ConfigError: two names have different values.
        """
        stored = self.stored(*keys)
        first, *others = stored or keys[:1]
        for other in others:
            if stored[other] != stored[first]:
                raise ConfigError(
                    f"{self.where}: key {first!r} is {stored[first]!r} and key {other!r} is {stored[other]!r}: keep "
                    "one of them"
                )
        return reader(stored, first, self.where, **options)

    def feature_layers(self) -> tuple[int, ...] | None:
        """The target layers whose outputs the drafter reads (-1: the embedding); None where no key names them.

        `target_layer_ids`, and NVIDIA's ids in `eagle_config`, are numbers of layers. The other ids are vLLM's, which
        counts the embedding as 0: [2, 18, 33] are the outputs of layers 1, 17 and 32.

        Raises:
          ConfigError: not layer numbers, or two keys that contradict each other.
        """
        layers: dict[str, tuple[int, ...]] = {}
        for key in FEATURE_LAYERS:
            stored = self.stored(key)
            for name in stored:
                shift = 0 if key == "target_layer_ids" or name.startswith("eagle_config") else 1
                if stored[name] != []:
                    numbers = layer_numbers(stored, name, self.where, least=shift - 1)
                    layers[name] = tuple(n - shift for n in numbers)
        if len({*layers.values()}) > 1:
            claims = " and ".join(f"{name} names the outputs of layers {[*ids]}" for name, ids in layers.items())
            raise ConfigError(f"{self.where}: {claims}: keep one of them")
        return next(iter(layers.values()), None)

    def base(self, **changes: Any) -> ModelConfig:
        """The shape of the layers, with some keys replaced. A drafter's head is never its embedding."""
        shape = {key: value for key, value in self.raw.items() if key in config_keys.READ}
        config = config_keys.read_model(shape | {"tie_word_embeddings": False} | changes, self.where)
        if self.rope_theta is None:
            return config
        return dataclasses.replace(config, rope=dataclasses.replace(config.rope, theta=self.rope_theta))

    def sliding_windows(self, layers: int) -> tuple[int | None, ...]:
        """By layer, how many positions it sees, its own included; (): all layers see everything.

        Where only `use_sliding_window` is set, the layers from `max_window_layers` on slide, as transformers has it.

        Raises:
          ConfigError: other kinds of layers, another number of them, or no window.
        """
        kinds, window = self.raw.get("layer_types"), self.raw.get("sliding_window")
        if not kinds and self.raw.get("use_sliding_window") and window is not None:
            first = self.raw.get("max_window_layers")
            first = min(first, layers) if type(first) is int else layers
            kinds = [FULL] * first + [SLIDING] * (layers - first)
        kinds = kinds or [FULL] * layers
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
            rule = f"must name {FULL} or {SLIDING} for {layers} layers"
            raise values.refusal({"layer_types": kinds}, "layer_types", self.where, rule)
        if SLIDING not in kinds:
            return ()
        window = integer(self.raw, "sliding_window", self.where, most=values.LARGEST_ID)
        return tuple(window if kind == SLIDING else None for kind in kinds)

    def read(self, read_keys: Callable[[Settings, ModelConfig | None], Any], target: ModelConfig | None) -> Any:
        """Returns the network's configuration, see `DrafterLayout`, after a check of the keys that were not read.

        Raises:
          CheckpointError: the weights are quantised.
          ConfigError: a key changes drafts, or may.
        """
        config = read_keys(self, target)
        config_keys.check_not_quantised(self.raw, self.where)
        known = self._read | config_keys.READ | {*NESTED, "auto_map"}
        advice = "; look there if few drafts are accepted"
        for home, inside in self._homes.items():
            unread = {key: value for key, value in inside.items() if key not in known}
            # As publishers write them, null and 0 are off.
            active = {k: v for k, v in unread.items() if v or (v == 0 and k in config_keys.NEUTRAL)}
            config_keys.check_unread(active, self.where, "drafts", place=home, advice=advice)
        return config


class OpenedDrafter(NamedTuple):
    """A drafter whose configuration and headers have been read, and whose weights have not.

    Attributes:
      checkpoint: its parameters; embedding and head where they are there.
      load: reads it for its target, in the target's dtype; CheckpointError: NaN or infinity in a tensor.
    """

    checkpoint: Checkpoint
    load: Callable[[Decoder], Any]


@dataclasses.dataclass(frozen=True)
class DrafterLayout:
    """Reader of one kind of drafters that read their target's hidden states.

    Attributes:
      architectures: names by which `config.json` knows them.
      claims: true for the `config.json` of such a drafter.
      network: makes the module from its configuration.
      borrowed: parameters outside the network, which may be the target's.
      read_keys: the network's configuration from settings and the target's, None where that is not known.
      table: the network's parameters by tensors, from its configuration and the names of the tensors.
      model: makes the drafter from `network`, the weights of `borrowed`, `draft_ids`, and `shared`: the names of the
        weights that are the target's.
    """

    kind: Kind
    architectures: tuple[str, ...]
    claims: Callable[[Mapping[str, Any]], bool]
    network: Callable[..., nnx.Module]
    borrowed: tuple[str, ...]
    read_keys: Callable[[Settings, ModelConfig | None], Any]
    table: Callable[[Any, Iterable[str]], TensorTable]
    model: Callable[..., Any]

    def read_config(self, raw: Mapping[str, Any], where: str, target: ModelConfig | None = None) -> Any:
        """Reads `config.json`; ConfigError: a value that is not served, or an unread key that changes drafts."""
        return Settings(raw, where).read(self.read_keys, target)

    def open(
        self,
        folder: Path,
        raw: Mapping[str, Any],
        target: ModelConfig,
        target_name: str = "the target",
        rope_theta: float | None = None,
    ) -> OpenedDrafter:
        """Opens a drafter that fits a target; its weights are not read.

        Args:
          raw: its `config.json`.
          rope_theta: base frequency of its rotary embedding; None: as `config.json` says.

        Raises:
          CheckpointError: missing, unexpected, mis-shaped or damaged tensors, or only pickled ones.
          ConfigError: a configuration that cannot be served, or a drafter of another target.
        """
        settings = Settings(raw, str(folder / "config.json"), rope_theta)
        config = settings.read(self.read_keys, target)
        check_target(config, target, folder, target_name, *settings.trained_for)
        tensors = safetensors_file.folder_tensors(folder, safetensors_file.DTYPES | safetensors_file.INTEGERS)
        vocab, count, ids = config.base.vocab_size, config.draft_vocab, None
        if count == vocab and DRAFT_IDS not in tensors and "head" in self.borrowed:
            config, count = dataclasses.replace(config, draft_vocab=None), None
        elif count == vocab and DRAFT_IDS not in tensors:
            ids = np.arange(vocab, dtype=np.int32)
        elif count is not None:
            ids = draft_ids(tensors, count, vocab, folder)
        rows = {"embed": vocab, "head": count or vocab}
        stored = {name: (rows[name], target.hidden_size) for name in self.borrowed if BORROWED[name] in tensors}
        network, table = partial(self.network, config), self.table(config, tensors)
        checkpoint = Checkpoint(folder, config.base, raw, table, tensors, network=network, extra_shapes=stored)
        checkpoint.check()
        return OpenedDrafter(checkpoint, partial(self._load, checkpoint, ids))

    def _load(self, checkpoint: Checkpoint, ids: np.ndarray | None, target: Decoder) -> Any:
        weights = {"embed": target.embed[...]}
        if "head" in self.borrowed:
            weights["head"] = target.head_weight if ids is None else quantization.take_rows(target.head_weight, ids)

        def unless_shared(name: str, value: jax.Array) -> dict[str, jax.Array]:
            """Drops a copy of the target's embedding or head. A copy in 16 bits of a weight in 32 is one."""
            weight = weights.get(name)
            if weight is None:
                return {name: value}
            stored, read, weight = checkpoint.tensors[BORROWED[name]].dtype, np.asarray(value), as_array(weight)
            rounded = stored.itemsize < 4 and np.array_equal(read, whole(weight.astype(stored).astype(read.dtype)))
            return {} if rounded or np.array_equal(read, whole(weight)) else {name: value}

        dtypes = checkpoint.storage_dtypes(np.dtype(target.dtype))
        values = checkpoint.read(dtypes, convert=unless_shared)
        shared = tuple(name for name in weights if name not in values)
        weights |= {name: values.pop(name) for name in {*weights} - {*shared}}
        network = checkpoint.abstract_module(target.dtype).filled(values)
        ids = None if ids is None else jax.device_put(ids)
        return self.model(network=network, **weights, draft_ids=ids, shared=shared)

    def load(self, folder: Path, target: Decoder, target_name: str = "the target") -> Any:
        """Reads a folder's drafter for a target; see `open` for errors."""
        return self.open(folder, read_json(folder / "config.json"), target.config, target_name).load(target)


def draft_ids(tensors: Mapping[str, StoredTensor], count: int, vocab: int, folder: Path) -> np.ndarray:
    """Reads the token id of each of a head's `count` rows; CheckpointError: `d2t` is missing or names other tokens."""
    stored = tensors.get(DRAFT_IDS)
    if stored is None:
        raise CheckpointError(f"{folder}: tensor {DRAFT_IDS} is missing: the ids of the {count} of {vocab} tokens")
    if stored.shape != (count,) or stored.dtype not in (np.int64, np.int32):
        raise CheckpointError(
            f"{stored.file}: tensor {DRAFT_IDS} is {stored.dtype} {list(stored.shape)}, not {count} integers"
        )
    ids = np.arange(count, dtype=np.int64) + stored.read(0, count)
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) < count:
        raise CheckpointError(f"{stored.file}: tensor {DRAFT_IDS} does not name {count} of {vocab} tokens")
    return ids.astype(np.int32)


def check_target(
    config: Any,
    target: ModelConfig,
    folder: str | Path,
    target_name: str,
    target_layers: int | None = None,
    target_size: int | None = None,
) -> None:
    """Checks that a drafter fits a target, by its configuration, and by the layers and hidden size that it names.

    ConfigError: it was trained for another one; both are named.
    """
    advice, base, layers = "give its own target with --target", config.base, config.feature_layers
    count = target.num_layers
    for size, here, there in (
        ("hidden size", target_size or base.hidden_size, target.hidden_size),
        ("hidden size", base.hidden_size, target.hidden_size),
        ("layers", target_layers or count, count),
        ("vocabulary", base.vocab_size, target.vocab_size),
    ):
        if here != there:
            raise ConfigError(f"{folder}: drafts for a target with {size} {here}; {target_name} has {there}: {advice}")
    if len(layers) > count + 1:
        raise ConfigError(f"{folder}: reads {len(layers)} of the target's layers; {target_name} has {count}")
    if other := [layer for layer in layers if not -1 <= layer < count]:
        raise ConfigError(f"{folder}: reads the target's layer {other[0]}; {target_name} has {count}: {advice}")


def layer_keys(config: ModelConfig, eos_token_ids: Iterable[int]) -> dict[str, Any]:
    """Keys that every model's `config.json` has, for layers of full attention."""
    eos = list(eos_token_ids)
    return {
        "attention_dropout": 0.0,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], storage: str, extra: Mapping[str, Any]
) -> None:
    """Writes a folder; `config.json`, with `extra` in it, comes last, so that an unfinished folder is none.

    Args:
      storage: dtype of the tensors that have one of `STORAGES`, the others stay; ValueError: it is none of them.
    """
    from safetensors.numpy import save

    if storage not in STORAGES:
        raise ValueError(f"storage {storage!r}: must be one of {', '.join(STORAGES)}")
    floats = [DTYPES[name] for name in STORAGES]
    stored = {
        name: np.ascontiguousarray(tensor.astype(DTYPES[storage]) if tensor.dtype in floats else tensor)
        for name, tensor in tensors.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    # `save_file` of the library makes a file that others may not read.
    write_atomically(folder / safetensors_file.WEIGHTS, save(stored))
    text = json.dumps({**dict(sorted(config.items())), **extra}, indent=1)
    write_atomically(folder / "config.json", text + "\n")
