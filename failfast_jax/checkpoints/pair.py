"""A target and its drafter, read with their tokenizers, checked against each other and put on their devices."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from failfast_jax.checkpoints import safetensors_file
from failfast_jax.checkpoints.block_drafter_folder import (
    BLOCK_ARCHITECTURES,
    is_speculators,
    load_dspark,
    open_dspark,
    parse_config,
)
from failfast_jax.checkpoints.checkpoint import Checkpoint, as_dtype, open_checkpoint
from failfast_jax.checkpoints.drafter import (
    config_for,
    decoding_defaults,
    is_drafter_folder,
    load_drafter,
    read_drafter,
    stored_chances,
)
from failfast_jax.checkpoints.drafter_keys import foreign_layout
from failfast_jax.checkpoints.eagle_folder import ARCHITECTURES, is_eagle_folder, load_eagle, open_eagle
from failfast_jax.checkpoints.hub import resolve_source
from failfast_jax.checkpoints.tokenizer import check_same_tokens, load_tokenizer
from failfast_jax.errors import CheckpointError, ConfigError, OptionError
from failfast_jax.models import quantization, sharding
from failfast_jax.models.attention import SIMULATED_TPU, device_of, refusal, supports, unserved
from failfast_jax.models.block_network import DSparkConfig
from failfast_jax.models.drafter_model import AUTOREGRESSIVE, BLOCK_DIFFUSION, EAGLE, FEATURE_BLOCK, Kind
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.options import is_finite
from failfast_jax.util import progress
from failfast_jax.util.files import is_there, read_json

LOADERS: dict[Kind, Callable] = {FEATURE_BLOCK: load_dspark, EAGLE: load_eagle}
"""Of drafters that read their target's features: `(folder, target, target_name, rope_theta) -> model`."""
OPENERS: dict[Kind, Callable] = {FEATURE_BLOCK: open_dspark, EAGLE: open_eagle}
"""Likewise, from the headers alone: `(folder, target's configuration, target_name) -> parameter_map.OpenedDrafter`."""


def feature_kind(source: str | os.PathLike) -> Kind | None:
    """The kind of a drafter that reads its target's features; None for a whole model.

    Raises:
      CheckpointError: nothing is there.
      ConfigError: a drafter of another architecture than those that are read.
    """
    config = resolve_source(source) / "config.json"
    if not is_there(config):
        return None
    raw = read_json(config)
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        raise ConfigError(f"{config}: key 'architectures' must be a list, got {names!r}")
    names = [str(name) for name in names]
    if is_eagle_folder(raw):
        return EAGLE
    named = raw.get("speculators_model_type") is None and {*BLOCK_ARCHITECTURES} & {*names}
    if named or is_speculators(raw):
        return FEATURE_BLOCK
    layout = foreign_layout(raw, names)
    if layout is None and raw.get("num_hidden_layers") == 1 and _has_eagles_tensors(config.parent):
        layout = "EAGLE-1, EAGLE-2 or HASS: drafters of one layer over a token and the target's last state"
    if layout is not None:
        read = ", ".join((*BLOCK_ARCHITECTURES, *ARCHITECTURES))
        raise ConfigError(f"{source}: {layout} are not read (read are {read})")
    return None


def _has_eagles_tensors(folder: Path) -> bool:
    """Whether a folder's tensors are those of EAGLE's first generations, whose configuration is a Llama's."""
    try:
        names = safetensors_file.folder_tensors(folder, safetensors_file.DTYPES | safetensors_file.INTEGERS)
    except CheckpointError:  # whoever reads it says so
        return False
    return "fc.weight" in names and not any(name.startswith("model.") for name in names)


def check_is_target(source: str | os.PathLike) -> None:
    """Raises ConfigError: a drafter that needs a target."""
    if is_drafter_folder(source) or feature_kind(source):
        raise ConfigError(f"{source}: a drafter, which cannot be a target; name it with --drafter, and its target")


def own_method(source: str | os.PathLike) -> tuple[Kind, str]:
    """The kind of any drafter, and the method that drafts with it unless another is named; no tensor is read.

    Raises:
      CheckpointError, ConfigError: nothing is there, or a configuration that cannot be served.
    """
    if is_drafter_folder(source):
        return BLOCK_DIFFUSION, "failfast"
    kind = feature_kind(source)
    if kind == EAGLE:
        return kind, "eagle3"
    if kind == FEATURE_BLOCK:
        return kind, _block_config(source).method
    diffusion = open_checkpoint(source).config.is_diffusion
    return (BLOCK_DIFFUSION, "failfast") if diffusion else (AUTOREGRESSIVE, "ar")


def has_heads(source: str | os.PathLike) -> bool:
    """Whether a block drafter, a DFlash or a DSpark, has a Markov or a confidence head; no tensor is read."""
    return _block_config(source).published_method == "dspark"


def _block_config(source: str | os.PathLike) -> DSparkConfig:
    file = resolve_source(source) / "config.json"
    return parse_config(read_json(file), str(file))


@dataclasses.dataclass(frozen=True)
class Fit:
    """A drafter that fits a target, as far as configurations and headers tell.

    Attributes:
      method: that drafts with it unless another is named.
      config: of its layers.
      parameters: numbers that its files hold.
    """

    kind: Kind
    method: str
    config: ModelConfig
    parameters: int


def check_drafter(drafter: str | os.PathLike, target: Checkpoint, tokenizer: Any) -> Fit:
    """Holds a drafter against a target without reading the weights of either (of a standalone drafter: its own).

    Args:
      tokenizer: the target's, or None.

    Raises:
      CheckpointError, ConfigError, ValueError: it cannot be read, or belongs to another target; the message names it.
    """
    kind, method = own_method(drafter)
    if is_drafter_folder(drafter):
        folder = read_drafter(drafter)
        size = sum(value.size for value in folder.params.values())
        return Fit(kind, method, config_for(folder, target.config, str(target.path)), size)
    if kind in OPENERS:
        opened = OPENERS[kind](resolve_source(drafter), target.config, str(target.path))
        return Fit(kind, method, opened.config.base, sum(math.prod(shape) for shape in opened.shapes.values()))
    model = open_checkpoint(drafter)
    model.check()
    names = {"target_name": str(target.path), "drafter_name": str(drafter)}
    check_same_tokens(tokenizer, load_tokenizer(drafter), target.config, model.config, **names)
    return Fit(kind, method, model.config, model.num_parameters())


@dataclasses.dataclass(frozen=True)
class Pair:
    """What an engine runs.

    Attributes:
      tokenizer: the target's, or None.
      vocab: ids that the drafter may propose: those below it.
      decoding: options that the drafter's folder recommends on this platform.
      chances: what it says of the chances of its drafts, unchecked; None: nothing.
      target_name, drafter_name: for messages.
    """

    target: Decoder
    drafter: Any
    tokenizer: Any
    vocab: int
    decoding: dict[str, Any]
    chances: Any
    target_name: str
    drafter_name: str


def brought_by(drafter: str | os.PathLike, platform: str | None = None) -> tuple[dict[str, Any], Any]:
    """Decoding options for a platform (None: this one), and `stored_chances`, that a drafter's folder brings; of other
    models none.

    Raises:
      ConfigError: an option that does not exist, or a value out of its range.
    """
    if not is_drafter_folder(drafter) and not feature_kind(drafter):
        return {}, None
    folder = resolve_source(drafter)
    return decoding_defaults(folder, platform or jax.default_backend()), stored_chances(folder)


def load_with_tokenizer(
    source: str | os.PathLike,
    dtype: Any = None,
    mesh: Mesh | None = None,
    *,
    drafter: bool = False,
    quantize: str | None = None,
    attention: str | None = None,
) -> tuple[Decoder, Any]:
    """A model and its tokenizer (None if it has none), read side by side; on a mesh, each device reads its own part.

    Raises:
      OptionError: see `check_attention`; nothing of its weights is read by then.
    """
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(load_tokenizer, source)
        opened = open_checkpoint(source)
        check_attention(attention, opened.config, as_dtype(dtype, device_of(attention).platform), str(source))
        place = None if mesh is None else sharding.placement(opened.config, mesh, drafter=drafter)
        return opened.load(as_dtype(dtype), place=place, quantize=quantize), tokenizer.result()


def read_pair(
    target: Decoder | str | os.PathLike,
    drafter: Any = None,
    *,
    tokenizer: Any = None,
    drafter_tokenizer: Any = None,
    dtype: Any = None,
    mesh: Mesh | None = None,
    attention: str | None = None,
    quantize: str | None = None,
    quantize_drafter: str | None = None,
    rope_theta_drafter: float | None = None,
) -> Pair:
    """Reads what is not loaded yet; see `FailFast` for the arguments.

    Raises:
      ValueError: an option or a model that cannot be served, or two models that do not share their tokens; the
        message names them.
    """
    _check_options(drafter, attention, quantize, quantize_drafter)
    _check_theta(rope_theta_drafter, drafter)
    platform = device_of(attention).platform
    dtype = as_dtype(dtype, platform)
    names = {"target_name": _name(target, "target"), "drafter_name": _name(drafter, "drafter")}
    if _is_path(drafter) and attention not in (None, SIMULATED_TPU):
        check_attention(attention, _layers_of(drafter, target), dtype, names["drafter_name"])
    if _is_path(target):
        check_is_target(target)
        target, loaded = load_with_tokenizer(target, dtype, mesh, quantize=quantize, attention=attention)
        tokenizer = tokenizer or loaded
    decoding, chances = brought_by(drafter, platform) if _is_path(drafter) else ({}, None)
    if _is_path(drafter) and is_drafter_folder(drafter):
        drafter = load_drafter(drafter, target, names["target_name"])
        drafter_tokenizer = tokenizer  # it drafts in its target's tokens
    if _is_path(drafter) and (kind := feature_kind(drafter)):
        place = resolve_source(drafter)
        drafter = LOADERS[kind](place, target, names["target_name"], rope_theta_drafter)
        drafter_tokenizer = tokenizer
    if _is_path(drafter):
        rest = {"quantize": quantize_drafter, "attention": attention}
        drafter, loaded = load_with_tokenizer(drafter, dtype, mesh, drafter=True, **rest)
        drafter_tokenizer = drafter_tokenizer or loaded
    vocab = target.config.vocab_size
    if drafter is not None and not drafter.shares_tokens(target.config):
        vocab = check_same_tokens(tokenizer, drafter_tokenizer, target.config, drafter.config, **names)
    for model, name in zip((target, drafter), names.values()):
        if model is not None:
            check_attention(attention, model.config, model.dtype, name)
    target = _placed(target, mesh, attention, quantize)
    if drafter is not None:
        drafter = _placed(drafter, mesh, attention, quantize_drafter, drafter=True)
    return Pair(target, drafter, tokenizer, vocab, decoding, chances, **names)


def config_at(model: Decoder | str | os.PathLike) -> ModelConfig:
    """A target's configuration, whether it is loaded or not."""
    return open_checkpoint(model).config if _is_path(model) else model.config


def _layers_of(drafter: str | os.PathLike, target: Decoder | str | os.PathLike) -> ModelConfig:
    """The configuration of a drafter's layers, by its headers; of one that has its target's heads, the target's."""
    if is_drafter_folder(drafter):
        return config_at(target)
    if kind := feature_kind(drafter):
        return OPENERS[kind](resolve_source(drafter), config_at(target), _name(target, "target")).config.base
    return open_checkpoint(drafter).config


def _check_options(drafter: Any, attention: str | None, quantize: str | None, quantize_drafter: str | None) -> None:
    quantization.check(quantize)
    quantization.check(quantize_drafter, "--quantize-drafter")
    if quantize_drafter is not None and drafter is None:
        raise OptionError(f"--quantize-drafter {quantize_drafter}: there is no drafter")
    if attention is not None and (reason := refusal(attention, jax.devices()[0])):
        raise OptionError(f"--attention {attention}: {reason}")


def check_attention(attention: str | None, config: Any, dtype: Any, name: str) -> None:
    """Says on stderr, once, why XLA serves the attention of a model whose device has kernels.

    Args:
      attention: kernel that was asked for; None: what the device has.
      config: of the model, which need not be loaded.
      name: of the model.

    Raises:
      OptionError: the kernel that was asked for does not serve it.
    """
    base = getattr(config, "base", config)
    model = {"dtype": dtype, "head_dim": base.head_dim, "heads": base.num_heads, "kv_heads": base.num_kv_heads}
    if attention not in (None, SIMULATED_TPU):
        if reason := supports(attention, jax.devices()[0], **model):
            raise OptionError(f"--attention {attention}: {name}: {reason}")
    elif reason := unserved(device_of(attention), **model):
        progress.warn_once(f"{name}: attention runs in XLA: {reason}")


def _check_theta(theta: float | None, drafter: Any) -> None:
    """Raises OptionError: no frequency, or a drafter that has none of its own or is a whole model."""
    if theta is None:
        return
    flag = f"--rope-theta-drafter {theta}"
    if not isinstance(theta, (int, float)) or isinstance(theta, bool) or not is_finite(theta) or theta <= 0:
        raise OptionError(f"{flag}: must be a positive number")
    if not _is_path(drafter) or is_drafter_folder(drafter) or not feature_kind(drafter):
        raise OptionError(f"{flag}: only for the folder of a drafter that reads its target's features")


def _is_path(model: Any) -> bool:
    return isinstance(model, (str, os.PathLike))


def _name(model: Any, role: str) -> str:
    return str(model) if _is_path(model) else f"the {role} model"


def _placed(model: Any, mesh: Mesh | None, attention: str | None, quantize: str | None, drafter: bool = False) -> Any:
    """A model on its devices, with its attention kernel, quantised if it is not yet."""
    model = model.spread(mesh, kernel=attention, drafter=drafter)
    return model if quantize is None else model.quantized(quantize)
