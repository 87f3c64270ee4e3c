"""Choice of the target's layers that a drafter starts from, reads and stores."""

from __future__ import annotations

import dataclasses

from failfast_jax.checkpoints.feature_drafter_folder import check_target
from failfast_jax.checkpoints.hub import resolve_source
from failfast_jax.errors import OptionError
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.options import require
from failfast_jax.train.train_config import DIFFUSION, STANDALONE, THIRDS, TrainConfig


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """Numbers of target layers.

    Attributes:
      copied: those that the drafter's layers start from.
      features: those whose outputs the drafter reads.
      cached: those whose outputs are stored for other runs, too.
      rows: those whose outputs enter each row (`--row-features`).
    """

    copied: tuple[int, ...] = ()
    features: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()


def choose_layers(config: TrainConfig, target: ModelConfig, name: str) -> LayerChoice:
    """Chooses the target's layers, and checks the options against the target.

    Args:
      name: the target's name in messages.

    Raises:
      OptionError: the target cannot serve the options.
    """
    is_text = not target.is_diffusion
    require(is_text, f"--target {name}", "a block-diffusion model; drafters are made from autoregressive targets")
    context, size, last = target.max_position_embeddings, target.vocab_size, target.num_layers - 1
    require(config.seq_len <= context, f"--seq-len {config.seq_len}", f"the target's context is {context}")
    if config.family in DIFFUSION:
        require(config.layers is None, f"--layers {config.layers}", "--family diffusion trains a whole model")
        return LayerChoice()
    cached = _layer_numbers(config.cache_layers, "--cache-layers", last, ())
    if (start := config.start_config) is not None:
        check_target(start, target, resolve_source(config.start), name, start.num_target_layers)
        return LayerChoice(features=start.feature_layers, cached=cached)
    mask = config.mask_token
    require(mask is None or 0 <= mask < size, f"--mask-token {mask}", f"the target's vocabulary has {size} tokens")
    first = 0 if config.family in STANDALONE else max(last - 1, 1)
    copied = _layer_numbers(config.layers, "--layers", last, tuple(range(min(first, last), last + 1)))
    if not config.row_features:
        # The input of the first copied layer, and others at even distances.
        spread = {round(last * share) for share in (0.05, 0.3, 0.55, 0.8)} | {max(copied[0] - 1, 0)}
        features = _layer_numbers(config.features, "--features", last, tuple(sorted(spread)))
        return LayerChoice(copied, features, cached)
    flag = "--row-features" if config.layers is None else f"--layers {config.layers}"
    require(min(copied) > 0, flag, "layer 0 has no layer before it whose output a drafter could read")
    thirds = tuple(dict.fromkeys((round(last / 3), round(last * 2 / 3), last)))
    text = None if config.row_features == THIRDS else config.row_features
    rows = _layer_numbers(text, "--row-features", last, thirds)
    return LayerChoice(copied, tuple(sorted({*rows, *(layer - 1 for layer in copied)})), cached, rows)


def _layer_numbers(text: str | None, flag: str, last: int, default: tuple[int, ...]) -> tuple[int, ...]:
    if text is None:
        return default
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"{flag} {text!r}: expected layer numbers separated by commas") from None
    require(all(0 <= layer <= last for layer in layers), f"{flag} {text}", f"the target's layers are 0 to {last}")
    require(len({*layers}) == len(layers), f"{flag} {text}", "a layer is named twice")
    return layers
