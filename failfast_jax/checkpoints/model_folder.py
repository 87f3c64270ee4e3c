"""A model's folder, GGUF file or Hub id, opened once: its kind, method and loading; pairs of target and drafter."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from failfast_jax.checkpoints.block_drafter_folder import BLOCK_LAYOUT
from failfast_jax.checkpoints.checkpoint import Checkpoint, as_dtype, open_checkpoint
from failfast_jax.checkpoints.config_file import drafter_sign
from failfast_jax.checkpoints.eagle_folder import EAGLE_LAYOUT
from failfast_jax.checkpoints.fast_dllm_folder import BORROWING_LAYOUT
from failfast_jax.checkpoints.hub import resolve_source
from failfast_jax.checkpoints.tokenizer import check_same_tokens, class_of, load_tokenizer
from failfast_jax.errors import CheckpointError, ConfigError, OptionError
from failfast_jax.kernels.kernel_table import SIMULATED_TPU, device_of, refusal, unserved
from failfast_jax.load_options import LoadOptions
from failfast_jax.models import quantization, sharding
from failfast_jax.models.drafter_model import AUTOREGRESSIVE, BLOCK_DIFFUSION, EAGLE, FEATURE_BLOCK, Kind
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.util import processes, progress, values
from failfast_jax.util.files import is_regular_file, read_json

logger = logging.getLogger("failfast_jax")

LAYOUTS = (BORROWING_LAYOUT, EAGLE_LAYOUT, BLOCK_LAYOUT)
"""Drafters that are no models without their target."""
DECODING_OPTIONS = ("spec_len", "tau", "max_spec_len")
FORMER_OPTIONS = ("lookup_min", "min_gain", "policy")
"""Options that folders of earlier versions may hold, too: without effect."""
CHANCES = "chances"
"""Key of `config.json`: how often tokens of each bin of confidence were right when the drafter was made."""


class ModelFolder:
    """A folder, `.gguf` file or Hub id whose `config.json`, if any, has been read; the rest is read when needed.

    Attributes:
      name: the source as it was named, for messages.
      raw: `config.json`; None: there is none.
      layout: one of `LAYOUTS`; None for a whole model.

    Raises:
      CheckpointError: nothing is there.
      ConfigError: a damaged `config.json`, or a drafter of an architecture that is not read.
    """

    def __init__(self, source: str | os.PathLike):
        self.name, self.path = str(source), resolve_source(source)
        config = self.path / "config.json"
        self.where = str(config)
        self.raw = read_json(config) if is_regular_file(config) else None
        self.layout = None if self.raw is None else self._find_layout(self.raw)

    def _find_layout(self, raw: dict[str, Any]) -> Any:
        raw = raw | {"architectures": values.entries(raw, "architectures", self.where, str, [])}
        layout = next((layout for layout in LAYOUTS if layout.claims(raw)), None)
        if layout is None and (sign := drafter_sign(raw)) is not None:
            read = ", ".join(name for layout in reversed(LAYOUTS) for name in layout.architectures)
            raise ConfigError(f"{self.name}: drafters with {sign} are not read (read are {read})")
        return layout

    @functools.cached_property
    def checkpoint(self) -> Checkpoint:
        """A whole model, its headers read."""
        return open_checkpoint(self.path, self.raw, self.gguf)

    @functools.cached_property
    def gguf(self) -> Any:
        """A GGUF file, its header read; None: it is a folder."""
        if self.path.suffix != ".gguf" or not self.path.is_file():
            return None
        from failfast_jax.checkpoints.gguf_file import GGUFFile

        return GGUFFile.open(self.path)

    @property
    def borrows(self) -> bool:
        """True for a drafter that is no model without its target."""
        return self.layout is not None

    @functools.cached_property
    def kind(self) -> Kind:
        """The kind of model that it drafts as."""
        if self.layout is not None:
            is_causal = self.layout.kind == BLOCK_DIFFUSION and self.raw.get("bd_size") == 1
            return AUTOREGRESSIVE if is_causal else self.layout.kind
        return BLOCK_DIFFUSION if self.checkpoint.config.is_diffusion else AUTOREGRESSIVE

    @property
    def method(self) -> str:
        """The method that drafts with it unless another is named."""
        if self.kind == FEATURE_BLOCK:
            return BLOCK_LAYOUT.read_config(self.raw, self.where).method
        return {BLOCK_DIFFUSION: "failfast", AUTOREGRESSIVE: "ar"}.get(self.kind, "eagle3")

    @property
    def chances(self) -> Any:
        """Its chances of right drafts, as its folder states them, unchecked; None: not stated."""
        return self.raw.get(CHANCES) if self.borrows else None

    def decoding(self, platform: str) -> dict[str, Any]:
        """Options that its folder recommends on a platform (`cpu`, ...); ConfigError: one that does not exist."""
        stored = (self.raw.get("decoding") or {}) if self.borrows else {}
        if not isinstance(stored, dict) or not all(isinstance(part, dict) for part in stored.values()):
            raise values.refusal(self.raw, "decoding", self.where, "must map platforms to options")
        options = {**stored.get("any", {}), **stored.get(platform, {})}
        if other := [name for name in options if name not in (*DECODING_OPTIONS, *FORMER_OPTIONS)]:
            allowed = ", ".join(DECODING_OPTIONS)
            raise ConfigError(f"{self.where}: decoding option {other[0]!r} is not one of {allowed}")
        return {name: value for name, value in options.items() if name in DECODING_OPTIONS}

    def check_is_target(self, needs_tokenizer: bool = False) -> None:
        """Raises ConfigError: a drafter that needs a target; CheckpointError: a tokenizer is needed and missing."""
        if self.borrows:
            raise ConfigError(f"{self.name}: a drafter, which cannot be a target; name it with --drafter, and a target")
        if needs_tokenizer and self.path.is_dir() and class_of(self.path) is None:
            advice = "put the model's tokenizer.json there, or give token ids to generate (--token-ids)"
            raise CheckpointError(f"--target {self.name}: has no tokenizer; {advice}")

    def open_drafter(self, target: ModelConfig, target_name: str, rope_theta: float | None = None) -> Any:
        """Opens a drafter that borrows from its target; see `DrafterLayout.open`."""
        return self.layout.open(self.path, self.raw, target, target_name, rope_theta)

    def fit(self, target: ModelConfig, target_name: str) -> Checkpoint:
        """Checks a drafter against its target without reading the weights, with the errors of loading."""
        if self.borrows:
            return self.open_drafter(target, target_name).checkpoint
        self.checkpoint.check()
        return self.checkpoint

    def load(
        self,
        dtype: Any = None,
        mesh: Mesh | None = None,
        *,
        is_drafter: bool = False,
        quantize: str | None = None,
        attention: str | None = None,
    ) -> tuple[Decoder, Any]:
        """Reads a whole model and its tokenizer (None: it has none); on a mesh, each device reads its own part.

        `check_attention` is asked before any weight is read.
        """
        with ThreadPoolExecutor(1) as pool:
            tokenizer = pool.submit(load_tokenizer, self.path, self.gguf)
            opened = self.checkpoint
            check_attention(attention, opened.config, as_dtype(dtype, device_of(attention).platform), self.name)
            place = None if mesh is None else sharding.placement(opened.config, mesh, drafter=is_drafter)
            flag = "--quantize-drafter" if is_drafter else "--quantize"
            model = opened.load(as_dtype(dtype), place=place, quantize=quantize, flag=flag)
            return model, tokenizer.result()


def check_attention(attention: str | None, config: Any, dtype: Any, name: str) -> None:
    """Warns, once, where XLA serves the attention of a model whose device has kernels; by configuration alone.

    OptionError: the kernel `attention` (None: the device's) does not serve the model.
    """
    base = getattr(config, "base", config)
    model = {"dtype": dtype, "head_dim": base.head_dim, "heads": base.num_heads, "kv_heads": base.num_kv_heads}
    if attention not in (None, SIMULATED_TPU):
        if reason := refusal(attention, jax.devices()[0], **model):
            raise OptionError(f"--attention {attention}: {name}: {reason}")
    elif reason := unserved(device_of(attention), **model):
        progress.warn_once(f"{name}: attention runs in XLA: {reason}")


@dataclasses.dataclass(frozen=True)
class Pair:
    """The models of an engine.

    Attributes:
      tokenizer: the target's, or None.
      vocab: ids that the drafter may propose: those below it.
      decoding: options that the drafter's folder recommends on this platform.
      chances: how often the drafter's folder says that its drafts are right, unchecked; None: not stated.
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


def read_pair(target: Decoder | str | os.PathLike, drafter: Any = None, options: LoadOptions = LoadOptions()) -> Pair:
    """Reads the models that are not loaded yet.

    Raises:
      ValueError: an option or a model that cannot be served, or two models that do not share their tokens; the
        message names them.
    """
    attention, theta = options.attention, options.rope_theta_drafter
    _check_options(drafter, options)
    platform = device_of(attention).platform
    dtype = as_dtype(options.dtype, platform)
    source, drafter_source = (ModelFolder(model) if is_path(model) else None for model in (target, drafter))
    if theta is not None and (drafter_source is None or drafter_source.kind not in (FEATURE_BLOCK, EAGLE)):
        raise OptionError(
            f"--rope-theta-drafter {theta}: only for the folder of a drafter that reads its target's features"
        )
    target_name, drafter_name = _name(target, "target"), _name(drafter, "drafter")

    def target_config() -> ModelConfig:
        return target.config if source is None else source.checkpoint.config

    parallel = options.tensor_parallel, options.data_parallel
    mesh = None if _is_single(options) else sharding.make_mesh(*parallel, target_config)
    if drafter_source is not None and attention not in (None, SIMULATED_TPU):
        check_attention(attention, drafter_source.fit(target_config(), target_name).config, dtype, drafter_name)

    model, tokenizer = target, options.tokenizer
    if source is not None:
        source.check_is_target(options.needs_tokenizer)
        if options.quantize is not None and source.checkpoint.has_blocks():
            progress.warn_once(f"--quantize {options.quantize}: {target_name} is quantised; its blocks stay as stored")
        model, tokenizer = source.load(dtype, mesh, quantize=options.quantize, attention=attention)
        tokenizer = options.tokenizer or tokenizer
    drafting, drafter_tokenizer, decoding, chances = drafter, options.drafter_tokenizer, {}, None
    scheme = quantization.drafter_scheme(options.quantize_drafter, None if drafter_source is None else model)
    if drafter_source is not None:
        decoding, chances = drafter_source.decoding(platform), drafter_source.chances
        if drafter_source.borrows:
            drafting = drafter_source.open_drafter(model.config, target_name, theta).load(model)
        else:
            flags = {"quantize": scheme, "attention": attention}
            drafting, drafter_tokenizer = drafter_source.load(dtype, mesh, is_drafter=True, **flags)
            drafter_tokenizer = options.drafter_tokenizer or drafter_tokenizer

    vocab = model.config.vocab_size
    if drafting is not None and not drafting.shares_tokens(model.config):
        vocab = check_same_tokens(
            tokenizer, drafter_tokenizer, model.config, drafting.config, target_name, drafter_name
        )
    for each, name in ((model, target_name), (drafting, drafter_name)):
        if each is not None:
            check_attention(attention, each.config, each.dtype, name)
    model, drafting = _as_run(model, drafting, mesh, options, scheme)
    pair = Pair(model, drafting, tokenizer, vocab, decoding, chances, target_name, drafter_name)
    _report(pair, source, drafter_source)
    return pair


def _report(pair: Pair, source: ModelFolder | None, drafter_source: ModelFolder | None) -> None:
    """Logs the memory and the arithmetic of models that were read; warns where XLA multiplies their blocks on a CPU."""
    rows = (source, pair.target, pair.target_name, None), (drafter_source, pair.drafter, pair.drafter_name, pair.target)
    for folder, model, name, shared in rows:
        if folder is not None and logger.isEnabledFor(logging.INFO):
            stored = folder.fit(pair.target.config, pair.target_name).stored_bytes()
            logger.info("%s: %s", name, quantization.summary(model, stored, shared))
        if reason := quantization.without_kernel(model):
            progress.warn_once(f"{name}: {reason}: XLA multiplies its quantised matrices, slowly, in {model.dtype}")


def is_path(model: Any) -> bool:
    """True for a model that is to be read."""
    return isinstance(model, (str, os.PathLike))


def _is_single(options: LoadOptions) -> bool:
    return options.tensor_parallel == options.data_parallel == 1 and processes.is_single_process()


def _check_options(drafter: Any, options: LoadOptions) -> None:
    quantization.check(options.quantize)
    quantization.check(options.quantize_drafter, "--quantize-drafter", quantization.AS_STORED)
    if options.quantize_drafter is not None and drafter is None:
        raise OptionError(f"--quantize-drafter {options.quantize_drafter}: there is no drafter")
    quantization.check_activations(options.activations)
    if options.activations == "int8" and not _is_single(options):
        sizes = {"--tensor-parallel": options.tensor_parallel, "--data-parallel": options.data_parallel}
        spread = " and ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1) or "--distributed"
        raise OptionError(f"--activations int8: for one device; leave it out, or {spread}")
    if options.attention is not None and (reason := refusal(options.attention, jax.devices()[0])):
        raise OptionError(f"--attention {options.attention}: {reason}")


def _name(model: Any, role: str) -> str:
    return str(model) if is_path(model) else f"the {role} model"


def _as_run(model: Any, drafter: Any, mesh: Mesh | None, options: LoadOptions, scheme: str | None) -> tuple[Any, Any]:
    """Both models on their devices, with their attention kernels, quantised if they are not yet (drafter: `scheme`)."""
    models = {}
    for role, each, quantize in (("target", model, options.quantize), ("drafter", drafter, scheme)):
        if each is not None:
            each = each.spread(mesh, kernel=options.attention, drafter=role == "drafter")
            models[role] = each if quantize is None else each.quantized(quantize)
    models = quantization.with_activations(models, options.activations)
    return models["target"], models.get("drafter")
