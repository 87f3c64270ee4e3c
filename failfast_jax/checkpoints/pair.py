"""A target and its drafter, read with their tokenizers, checked against each other and put on their devices."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
from jax.sharding import Mesh

from failfast_jax.checkpoints.checkpoint import as_dtype
from failfast_jax.checkpoints.model_folder import ModelFolder, check_attention
from failfast_jax.checkpoints.tokenizer import check_same_tokens
from failfast_jax.errors import OptionError
from failfast_jax.kernels.kernel_table import SIMULATED_TPU, device_of, refusal
from failfast_jax.load_options import LoadOptions
from failfast_jax.models import quantization, sharding
from failfast_jax.models.drafter_model import EAGLE, FEATURE_BLOCK
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.util import processes


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

    single = options.tensor_parallel == options.data_parallel == 1 and processes.is_single_process()
    mesh = None if single else sharding.make_mesh(options.tensor_parallel, options.data_parallel, target_config)
    if drafter_source is not None and attention not in (None, SIMULATED_TPU):
        check_attention(attention, drafter_source.fit(target_config(), target_name).config, dtype, drafter_name)

    model, tokenizer = target, options.tokenizer
    if source is not None:
        source.check_is_target()
        model, tokenizer = source.load(dtype, mesh, quantize=options.quantize, attention=attention)
        tokenizer = options.tokenizer or tokenizer
    drafting, drafter_tokenizer, decoding, chances = drafter, options.drafter_tokenizer, {}, None
    if drafter_source is not None:
        decoding, chances = drafter_source.decoding(platform), drafter_source.chances
        if drafter_source.borrows:
            drafting = drafter_source.open_drafter(model.config, target_name, theta).load(model)
        else:
            flags = {"is_drafter": True, "quantize": options.quantize_drafter, "attention": attention}
            drafting, drafter_tokenizer = drafter_source.load(dtype, mesh, **flags)
            drafter_tokenizer = options.drafter_tokenizer or drafter_tokenizer

    vocab = model.config.vocab_size
    if drafting is not None and not drafting.shares_tokens(model.config):
        vocab = check_same_tokens(
            tokenizer, drafter_tokenizer, model.config, drafting.config, target_name, drafter_name
        )
    for each, name in ((model, target_name), (drafting, drafter_name)):
        if each is not None:
            check_attention(attention, each.config, each.dtype, name)
    model = _placed(model, mesh, attention, options.quantize)
    if drafting is not None:
        drafting = _placed(drafting, mesh, attention, options.quantize_drafter, drafter=True)
    return Pair(model, drafting, tokenizer, vocab, decoding, chances, target_name, drafter_name)


def is_path(model: Any) -> bool:
    """True for a model that is to be read."""
    return isinstance(model, (str, os.PathLike))


def _check_options(drafter: Any, options: LoadOptions) -> None:
    quantization.check(options.quantize)
    quantization.check(options.quantize_drafter, "--quantize-drafter")
    if options.quantize_drafter is not None and drafter is None:
        raise OptionError(f"--quantize-drafter {options.quantize_drafter}: there is no drafter")
    if options.attention is not None and (reason := refusal(options.attention, jax.devices()[0])):
        raise OptionError(f"--attention {options.attention}: {reason}")


def _name(model: Any, role: str) -> str:
    return str(model) if is_path(model) else f"the {role} model"


def _placed(model: Any, mesh: Mesh | None, attention: str | None, quantize: str | None, drafter: bool = False) -> Any:
    """A model on its devices, with its attention kernel, quantised if it is not yet."""
    model = model.spread(mesh, kernel=attention, drafter=drafter)
    return model if quantize is None else model.quantized(quantize)
