"""A model's folder, GGUF file or Hub id, opened once: which kind of model it is, which method it is for, loading."""

from __future__ import annotations

import functools
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
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.kernels.kernel_table import SIMULATED_TPU, device_of, refusal, unserved
from failfast_jax.models import sharding
from failfast_jax.models.drafter_model import AUTOREGRESSIVE, BLOCK_DIFFUSION, FEATURE_BLOCK, Kind
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.util import progress, values
from failfast_jax.util.files import is_regular_file, read_json

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
        if not isinstance(names := raw.get("architectures") or [], list):
            raise values.refusal(raw, "architectures", self.where, "must be a list")
        raw = raw | {"architectures": [str(name) for name in names]}
        layout = next((layout for layout in LAYOUTS if layout.claims(raw)), None)
        if layout is None and (sign := drafter_sign(raw)) is not None:
            read = ", ".join(name for layout in reversed(LAYOUTS) for name in layout.architectures)
            raise ConfigError(f"{self.name}: drafters with {sign} are not read (read are {read})")
        return layout

    @functools.cached_property
    def checkpoint(self) -> Checkpoint:
        """A whole model, its headers read."""
        return open_checkpoint(self.path, self.raw)

    @property
    def borrows(self) -> bool:
        """True for a drafter that is no model without its target."""
        return self.layout is not None

    @functools.cached_property
    def kind(self) -> Kind:
        """The kind of model that it drafts as."""
        if self.layout is not None:
            return self.layout.kind
        return BLOCK_DIFFUSION if self.checkpoint.config.is_diffusion else AUTOREGRESSIVE

    @property
    def method(self) -> str:
        """The method that drafts with it unless another is named."""
        if self.kind == FEATURE_BLOCK:
            return BLOCK_LAYOUT.read_config(self.raw, self.where).method
        return {BLOCK_DIFFUSION: "failfast", AUTOREGRESSIVE: "ar"}.get(self.kind, "eagle3")

    @property
    def has_heads(self) -> bool:
        """True for a block drafter with a Markov or a confidence head."""
        return BLOCK_LAYOUT.read_config(self.raw, self.where).published_method == "dspark"

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
        for name in options:
            if name not in (*DECODING_OPTIONS, *FORMER_OPTIONS):
                raise ConfigError(f"{self.where}: decoding option {name!r} is not one of {', '.join(DECODING_OPTIONS)}")
        return {name: value for name, value in options.items() if name in DECODING_OPTIONS}

    def check_is_target(self) -> None:
        """Raises ConfigError: a drafter that needs a target."""
        if self.borrows:
            raise ConfigError(f"{self.name}: a drafter, which cannot be a target; name it with --drafter, and a target")

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
            tokenizer = pool.submit(load_tokenizer, self.path)
            opened = self.checkpoint
            check_attention(attention, opened.config, as_dtype(dtype, device_of(attention).platform), self.name)
            place = None if mesh is None else sharding.placement(opened.config, mesh, drafter=is_drafter)
            return opened.load(as_dtype(dtype), place=place, quantize=quantize), tokenizer.result()


def own_method(source: str | os.PathLike) -> tuple[Kind, str]:
    """The kind of a drafter, and the method that drafts with it unless another is named; no tensor is read."""
    folder = ModelFolder(source)
    return folder.kind, folder.method


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
