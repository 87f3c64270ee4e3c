"""Configuration of a training run: every option of `python -m failfast_jax.train run` is declared once, here."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from failfast_jax.checkpoints import drafter_folder, fast_dllm_folder
from failfast_jax.checkpoints.block_drafter_folder import BLOCK_LAYOUT
from failfast_jax.checkpoints.fast_dllm_folder import BORROWING_LAYOUT
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.models.block_network import MARKOV_HEADS, DSparkConfig
from failfast_jax.options import Option, add_flag, check_value, require, shown
from failfast_jax.util.values import asset

DSPARK, BLOCKS, STANDALONE, DIFFUSION = ("dspark",), ("dspark", "dflash"), ("standalone",), ("diffusion",)
MASKED = (*STANDALONE, *DIFFUSION)
"""Families of block-diffusion models."""
FAMILIES = (*BLOCKS, *MASKED)
THIRDS = "thirds"
"""`--row-features` without numbers: layers at 1/3 and 2/3 of the depth, and the last."""
DECIDED_BY_START = ("rows", "row_features", "draft_vocab", "features", "mask_token")
"""Options that a block drafter at `--start` decides."""

PRESETS: dict[str, dict[str, Any]] = asset("train_presets.toml")


@dataclasses.dataclass(frozen=True)
class Setting(Option):
    """Declaration of an option of a training run.

    Attributes:
      families: those that take it.
      group: its heading on the help page; empty: the families.
      learned: False if it does not change what is learned, so that a run may continue with another value.
      flag: further arguments of `add_argument`.
    """

    families: tuple[str, ...] = FAMILIES
    group: str = ""
    learned: bool = True
    flag: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _setting(default: Any, help: str, metavar: str | None = None, **about: Any) -> Any:
    flag = about.pop("flag", {}) | ({} if metavar is None else {"metavar": metavar})
    return dataclasses.field(default=default, metadata={"option": Setting(help, flag=flag, **about)})


_model = functools.partial(_setting, group="what is trained")
_data = functools.partial(_setting, group="data")
_block = functools.partial(_setting, families=BLOCKS)
_dspark = functools.partial(_setting, families=DSPARK)
_masked = functools.partial(_setting, families=MASKED)
_standalone = functools.partial(_setting, families=STANDALONE)
_diffusion = functools.partial(_setting, families=DIFFUSION)
_unknown = functools.partial(_setting, families=(*BLOCKS, *DIFFUSION))
_optimizer = functools.partial(_setting, group="optimisation")
_run = functools.partial(_setting, group="the run", learned=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of a training run, checked; each field is a flag.

    A None stands for a value that depends on other options or on the target; `from_flags` and `resolved` fill it in.

    Raises:
      OptionError: a value out of its range, or options that contradict each other.
    """

    preset: str | None = _model(None, "take unspecified options from this recipe", choices=tuple(PRESETS))
    target: str | None = _model(None, "model to draft for; default: SmolLM2-135M-Instruct", "P")
    family: str = _model("dspark", "kind of drafter", choices=FAMILIES)
    layers: str | None = _model(None, "target layers to start from; default: the last two, all (standalone)", "i,j")
    start: str | None = _model(None, "continue from this drafter (dspark: adding heads) or model (diffusion)", "P")

    seq_len: int = _data(320, "documents are cut to this many tokens", "L", least=8)
    held_out: int = _data(64, "documents never trained on", least=1)
    skip_short: bool = _data(False, "leave out documents shorter than a block")

    rows: int = _block(7, "tokens that one pass drafts", least=1)
    row_features: str | None = _block(
        None,
        "this project's network: target layers that enter each row; without numbers: 1/3, 2/3, last",
        flag={"metavar": "i,j", "nargs": "?", "const": THIRDS},
    )
    prefix_fraction: float | None = _block(
        None, "share of blocks that begin with known tokens; default: 0.25 with --row-features, else 0", least=0, most=1
    )
    ce_weight: float = _block(0.1, "weight of the cross-entropy with the answers", least=0)
    l1_weight: float = _block(0.9, "weight of the distance from the target's distribution", least=0)
    draft_vocab: int = _block(0, "draft only the n most frequent tokens of the answers; 0: all", least=0)
    anchors: int = _block(64, "blocks per document and step", least=1)
    features: str | None = _block(None, "target layers that it reads; default: five, evenly spread", "i,j")
    feature_cache: Path | None = _block(None, "folder: compute the target's features once", "DIR")  # noqa: RUF009
    borrow: bool = _block(False, "store neither the target's embedding nor its head")
    markov: str = _dspark("vanilla", "kind of the Markov head", choices=MARKOV_HEADS)
    markov_rank: int = _dspark(256, "size of its vectors", least=1)
    confidence_weight: float = _dspark(1.0, "weight of the confidence head's loss; 0: no such head", least=0)
    freeze: str | None = _dspark(None, "train the Markov and confidence heads alone", choices=("backbone",))
    confidence_for: str = _dspark("sampled", "kind of acceptance that the head predicts", choices=("sampled", "greedy"))
    mask_token: int | None = _unknown(None, "id for an unknown token; default: one that no text has", "ID")
    position_decay: float = _setting(3.0, "the k-th token weighs exp(-(k-1)/x); 0: all weigh 1", least=0, infinite=True)
    block_size: int = _masked(32, "positions per block; 1 (standalone): an autoregressive drafter", least=1)
    corruption: str = _masked("uniform", "masks: as released, or as in drafting", choices=("uniform", "draft"))
    drawn_blocks: int = _masked(
        0, "noised blocks of a document, drawn among its answers' (--corruption draft); 0: all, twice", "n", least=0
    )
    block_start: str = _masked("clean", "block before a first token (noised: as released)", choices=("clean", "noised"))
    mask_logit: str = _diffusion("hidden", "mask in the softmax (scored: as released)", choices=("hidden", "scored"))
    target_weight: float = _standalone(
        0.0, "share in the loss of the distance from the target's distribution, beside cross-entropy", least=0, most=1
    )
    packing: str = _diffusion(
        "none", "documents of a row; stream: several, which see earlier ones (as released)", choices=("none", "stream")
    )

    steps: int = _optimizer(1000, "optimiser steps", least=1)
    batch: int = _optimizer(8, "documents per step and accumulation, over all devices", least=1)
    accumulate: int = _optimizer(1, "batches whose gradients make a step", least=1)
    learning_rate: float = _optimizer(5e-4, "highest learning rate", above=0)
    schedule: str = _optimizer("cosine", "learning rate after the warm-up", choices=("cosine", "constant"))
    warmup: int = _optimizer(50, "steps of linear warm-up, at most a quarter of all", least=0)
    final_fraction: float = _optimizer(0.05, "last learning rate, as a share of the highest", least=0, most=1)
    weight_decay: float = _optimizer(0.01, "AdamW's weight decay, on matrices", least=0)
    beta2: float = _optimizer(0.95, "AdamW's decay of squared gradients", above=0, below=1)
    clip: float = _optimizer(1.0, "largest gradient norm; inf: no clipping", above=0, infinite=True)
    ema: float = _optimizer(0.99, "decay of the averaged parameters, which are saved; 0: no average", least=0, below=1)
    seed: int = _optimizer(0, "random seed of shuffling, masks and initialisation", least=0, most=2**32 - 1)
    compute_dtype: str | None = _optimizer(
        None, "dtype of the arithmetic; default: float32 on CPU, else bfloat16", choices=("float32", "bfloat16")
    )

    minutes: float | None = _run(None, "stop with a checkpoint after this time (exit status 3)", above=0)
    fsdp: int = _run(1, "devices that share parameters and optimiser state (diffusion)", "N")
    save_every: int = _run(100, "steps between checkpoints", least=1)
    eval_every: int = _run(0, "steps between measurements; 0: only at the end", least=0)
    eval_prompts: int = _run(16, "held-out documents to measure on, at most", least=1)
    eval_tokens: int = _run(64, "tokens per answer of a measurement", least=1)
    eval_spec_len: int | None = _run(None, "tokens per draft of a measurement; default: as trained, or 10", least=1)
    storage: str = _run(
        "bfloat16", "dtype of the stored weights (int8: block diffusion)", choices=fast_dllm_folder.STORAGES
    )

    start_config: DSparkConfig | None = None
    """Configuration of the block drafter at `start`."""

    def __post_init__(self) -> None:
        for field in settings():
            check_value(field, getattr(self, field.name))
        is_whole = self.family in DIFFUSION
        require(is_whole or self.fsdp == 1, f"--fsdp {self.fsdp}", "only --family diffusion shares its parameters")
        for name in ("features", "mask_token"):
            is_free = not self.row_features or getattr(self, name) is None
            require(is_free, shown(name, getattr(self, name)), "not with --row-features")
        is_stored = self.family in MASKED or self.storage in drafter_folder.STORAGES
        require(is_stored, f"--storage {self.storage}", f"only --family {' and '.join(MASKED)} store so")
        is_drafted = (self.corruption, self.block_start) == ("draft", "clean")
        flag = f"--drawn-blocks {self.drawn_blocks}"
        require(is_drafted or not self.drawn_blocks, flag, "needs --corruption draft, and --block-start clean")
        is_even = self.family not in MASKED or self.seq_len % self.block_size == 0
        require(is_even, f"--seq-len {self.seq_len}", f"must be a multiple of --block-size {self.block_size}")

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> TrainConfig:
        """Builds the configuration from parsed flags (None: absent), over the preset, over the defaults.

        Raises:
          CheckpointError, ConfigError: the drafter at `--start` cannot be read.
          OptionError: a bad value, an option that the family does not take, or one that `--start` decides.
        """
        values = {field.name: flags[field.name] for field in settings() if flags.get(field.name) is not None}
        preset = PRESETS.get(flags["preset"], {})
        family = (preset | values).get("family", cls.family)
        of_preset = preset.get("family", family)
        require(family == of_preset, f"--family {family}", f"--preset {flags['preset']} is of --family {of_preset}")
        start = _start_config(family, values)
        decided = [] if start is None else [*DECIDED_BY_START]
        if start is not None and start.markov is not None:
            decided += ["markov", "markov_rank"]
        for field in settings():
            if field.name in values:
                flag, takers = shown(field.name, values[field.name]), field.metadata["option"].families
                problem = f"--family {family} has no such option, only {', '.join(takers)}"
                require(family in takers, flag, problem)
                require(field.name not in decided, flag, f"the drafter of --start {values.get('start')} decides it")
        is_frozen = values.get("freeze") is not None
        require(start is not None or not is_frozen, "--freeze backbone", "needs --start, the drafter whose it is")
        values = preset | values
        if start is not None:
            values |= {"rows": start.block_size, "draft_vocab": start.draft_vocab or 0}
            values |= {"mask_token": start.mask_token_id, "start_config": start}
        reads_rows = "row_features" in values or (start is not None and bool(start.row_features))
        values.setdefault("compute_dtype", "float32" if jax.default_backend() == "cpu" else "bfloat16")
        values.setdefault("prefix_fraction", 0.25 if reads_rows else 0.0)
        return cls(**values)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the arithmetic; parameters stay float32."""
        return jnp.dtype(self.compute_dtype or "float32")

    def learned(self) -> dict[str, Any]:
        """Returns the options that change what is learned, JSON-ready: a run's folder belongs to them."""
        values = {field.name: getattr(self, field.name) for field in settings() if field.metadata["option"].learned}
        return values | {"feature_cache": self.feature_cache is not None}


@functools.cache
def settings() -> tuple[dataclasses.Field, ...]:
    """Returns the fields of `TrainConfig` that are flags."""
    return tuple(field for field in dataclasses.fields(TrainConfig) if "option" in field.metadata)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the flag of each setting under its heading; the value of an absent flag is None."""
    groups: dict[str, Any] = {}
    for field in settings():
        about: Setting = field.metadata["option"]
        title = about.group or f"{', '.join(about.families)} drafters"
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        add_flag(group, field, **about.flag)


def _start_config(family: str, values: Mapping[str, Any]) -> DSparkConfig | None:
    """Reads the configuration of the block drafter at `--start`; None: no block drafter is trained, or from the start.

    Raises:
      CheckpointError, ConfigError: there is none.
      OptionError: it cannot be trained so.
    """
    start, layers = values.get("start"), values.get("layers")
    if start is None or family in DIFFUSION:
        return None
    continues, flag = "not with --start, which continues from a drafter as it is", f"--start {start}"
    require(layers is None, f"--layers {layers}", continues)
    layout, kind = (BLOCK_LAYOUT, "dspark or dflash") if family in BLOCKS else (BORROWING_LAYOUT, family)
    folder = ModelFolder(start)
    require(folder.layout is layout, flag, f"not a {kind} drafter")
    if family in STANDALONE:
        return None
    model_config = BLOCK_LAYOUT.read_config(folder.raw, folder.where)
    is_other = model_config.own_row or bool(model_config.sliding_windows) or model_config.full_is_causal
    require(not is_other, flag, "z-lab's layout, sliding layers and causal blocks are read, and not trained")
    has_heads = family != "dspark" and model_config.published_method == "dspark"
    require(not has_heads, flag, "has a Markov or a confidence head: --family dspark")
    return model_config
