"""Families of drafters that `python -m failfast_jax.train` makes, and which options each of them takes."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from failfast_jax.checkpoints.drafter import is_drafter_folder
from failfast_jax.checkpoints.dspark import parse_config
from failfast_jax.checkpoints.hub import resolve_source
from failfast_jax.checkpoints.pair import feature_kind
from failfast_jax.errors import OptionError
from failfast_jax.files import read_json, user_path
from failfast_jax.models.drafter_model import FEATURE_BLOCK
from failfast_jax.models.dspark import DSparkConfig
from failfast_jax.models.markov import MARKOV_HEADS
from failfast_jax.options import flag_of
from failfast_jax.train.corruption import KINDS
from failfast_jax.train.diffusion import FREEZABLE
from failfast_jax.train.packing import PACKINGS
from failfast_jax.train.paired_forward import BLOCK_STARTS

BLOCKS, PUBLISHED = ("dspark", "dflash"), ("dspark", "dflash", "eagle3")
"""Families of block drafters, and those in DeepSpec's layout."""
STANDALONE, DIFFUSION = ("standalone",), ("diffusion",)
MASKED = (*STANDALONE, *DIFFUSION)
"""Families of block-diffusion models."""
FAMILIES = (*PUBLISHED, *MASKED)
BACKBONE = "backbone"
"""Of `--freeze`: what a block drafter is without its Markov and confidence heads."""
THIRDS = "thirds"
"""Of `--row-features`: layers at 1/3 and 2/3 of the depth, and the last one."""
DECIDED_BY_START = ("rows", "draft_vocab", "features", "row_features", "no_fit", "mask_token")


@dataclasses.dataclass(frozen=True)
class FamilyOption:
    """An option of `run` that not every family takes.

    Attributes:
      default: where it is not given.
      families: those that take it.
      help: what it does, without its default.
      more: further arguments of `add_argument`.
    """

    default: Any
    families: tuple[str, ...]
    help: str
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


def _number(default: float, families: tuple[str, ...], help: str) -> FamilyOption:
    return FamilyOption(default, families, help, {"type": type(default)})


SWITCH = {"action": "store_true"}
FAMILY_OPTIONS = {
    "rows": _number(7, BLOCKS, "tokens that one pass drafts"),
    "position_decay": _number(3.0, (*BLOCKS, *MASKED), "the k-th masked token weighs exp(-(k-1)/x); 0: all 1"),
    "draft_vocab": _number(0, PUBLISHED, "draft only the n most frequent tokens of the answers; 0: all"),
    "anchors": _number(64, PUBLISHED, "blocks, or chains, per document and step"),
    "prefix_fraction": FamilyOption(
        None, BLOCKS, "blocks that begin with known tokens; default: 0.25 with --row-features, else 0", {"type": float}
    ),
    "feature_cache": FamilyOption(
        None, PUBLISHED, "folder: compute the target's features once", {"type": user_path, "metavar": "DIR"}
    ),
    "cache_layers": FamilyOption(
        None, PUBLISHED, "target layers to store for other runs, too, beside what this one reads", {"metavar": "i,j"}
    ),
    "features": FamilyOption(
        None, PUBLISHED, "target layers whose outputs it reads; default: five, evenly spread", {"metavar": "i,j"}
    ),
    "row_features": FamilyOption(
        None,
        BLOCKS,
        "this project's own network: target layers that enter each row; without numbers: 1/3, 2/3, last",
        {"metavar": "i,j", "nargs": "?", "const": THIRDS},
    ),
    "no_fit": FamilyOption(False, BLOCKS, "with --row-features: a random start, not a ridge regression", SWITCH),
    "markov": FamilyOption("vanilla", ("dspark",), "kind of the Markov head", {"choices": MARKOV_HEADS}),
    "markov_rank": _number(256, ("dspark",), "size of its vectors"),
    "mask_token": FamilyOption(
        None,
        (*BLOCKS, *DIFFUSION),
        "id for what is not known; default: one that no text has",
        {"type": int, "metavar": "ID"},
    ),
    "ce_weight": _number(0.1, BLOCKS, "of the cross-entropy with the answers"),
    "l1_weight": _number(0.9, BLOCKS, "of the distance from the target's choices"),
    "confidence_weight": _number(1.0, ("dspark",), "of the confidence head's loss; 0: no such head"),
    "confidence_for": FamilyOption(
        "sampled",
        ("dspark",),
        "what it foretells: acceptance by rejection sampling, or by greedy answers",
        {"choices": ("sampled", "greedy")},
    ),
    "borrow": FamilyOption(False, PUBLISHED, "store neither the target's embedding nor its head", SWITCH),
    "ttt_length": _number(7, ("eagle3",), "passes that training unrolls"),
    "step_decay": _number(0.8, ("eagle3",), "the k-th pass weighs x ** (k-1)"),
    "block_size": _number(32, MASKED, "positions of a block"),
    "corruption": FamilyOption("mixed", MASKED, "what is masked (uniform: as released)", {"choices": KINDS}),
    "draft_fraction": _number(0.5, MASKED, "blocks that look like drafting (mixed)"),
    "no_complementary": FamilyOption(False, MASKED, "one mask a document, not it and its rest", SWITCH),
    "block_start": FamilyOption(
        "clean",
        MASKED,
        "row that predicts a block's first token: the last one of the clean block in front (as decoding does), or of "
        "the noised one (as released)",
        {"choices": BLOCK_STARTS},
    ),
    "mask_logit": FamilyOption(
        "hidden",
        MASKED,
        "whether the mask token is in the softmax: hidden (as decoding does) or scored (as released)",
        {"choices": ("hidden", "scored")},
    ),
    "packing": FamilyOption(
        "none",
        DIFFUSION,
        "documents in a row: one, several which see those in front of them (as released), or several by themselves",
        {"choices": PACKINGS},
    ),
    "freeze": FamilyOption(
        None,
        ("dspark", *DIFFUSION),
        f"parts that stay as they are: {', '.join(FREEZABLE)}; of dspark drafters {BACKBONE}, all but the heads",
        {"metavar": "PART,PART"},
    ),
    "kl_weight": _number(0.0, STANDALONE, "share of KL(target || drafter) in the loss"),
}


def add_family_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of all families, grouped by who takes them."""
    groups = {}
    for name, option in FAMILY_OPTIONS.items():
        title = f"{', '.join(option.families)} drafters"
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        said = "" if option.default in (None, False) else f"; default: {option.default}"
        group.add_argument(flag_of(name), default=None, help=option.help + said, **option.more)


def fill_in(args: argparse.Namespace) -> None:
    """Gives options that are not given their defaults.

    Raises:
      OptionError: one that the family does not take, or that the drafter at `--start` decides.
    """
    start = started_from(args)
    decided = (
        DECIDED_BY_START if start is None or start.markov is None else (*DECIDED_BY_START, "markov", "markov_rank")
    )
    for name, option in FAMILY_OPTIONS.items():
        value = getattr(args, name)
        given = flag_of(name) if value is True else f"{flag_of(name)} {value}"
        if value is None:
            setattr(args, name, option.default)
        elif args.family not in option.families:
            takers = ", ".join(option.families)
            raise OptionError(f"{given}: --family {args.family} has no such option, only {takers}")
        elif start is not None and name in decided:
            raise OptionError(f"{given}: the drafter of --start {args.start} decides it")
    if start is not None:
        args.rows, args.draft_vocab, args.mask_token = start.block_size, start.draft_vocab or 0, start.mask_token_id
    if args.family == "dspark" and args.freeze not in (None, BACKBONE):
        raise OptionError(
            f"--freeze {args.freeze}: of a dspark drafter {BACKBONE} can stay as it is, all but its heads"
        )
    if args.family == "dspark" and args.freeze and start is None:
        raise OptionError(f"--freeze {args.freeze}: needs --start, the drafter whose {BACKBONE} stays as it is")
    if args.prefix_fraction is None:
        args.prefix_fraction = 0.25 if args.row_features or (start is not None and start.row_features) else 0.0


def started_from(args: argparse.Namespace) -> DSparkConfig | None:
    """The shape of the drafter at `--start`; None: training starts from a model's layers.

    Raises:
      CheckpointError, ConfigError: there is none.
      OptionError: it cannot be trained so.
    """
    if args.start is None or args.family in DIFFUSION:
        return None
    flag = f"--start {args.start}"
    if args.family not in BLOCKS or args.layers is not None:
        given = f"--family {args.family}" if args.layers is None else f"--layers {args.layers}"
        raise OptionError(f"{given}: not with --start, which goes on from a dspark or dflash drafter as it is")
    if is_drafter_folder(args.start) or feature_kind(args.start) != FEATURE_BLOCK:
        raise OptionError(f"{flag}: not a dspark or dflash drafter")
    file = resolve_source(args.start) / "config.json"
    config = parse_config(read_json(file), str(file))
    if config.own_row or config.sliding_windows or config.full_is_causal:
        raise OptionError(f"{flag}: z-lab's layout, sliding layers and causal blocks are read, and not trained")
    if args.family != "dspark" and config.published_method == "dspark":
        raise OptionError(f"{flag}: has a Markov or a confidence head: --family dspark")
    return config
