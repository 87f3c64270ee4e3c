"""`python -m failfast_jax.train run`: make a drafter for a target, from the target.

Five families. `dspark` and `dflash` drafters (a few layers that read the target's hidden states, with or without Markov
and confidence heads) and `eagle3` ones (one layer, which goes on from its own hidden states) are written in DeepSpec's
layout, which other engines serve, too. With `--row-features` block drafters are this project's own: they start in
closed form, which suits little data. `standalone` ones are block diffusion over all layers of the model or some, with
the target's embedding and head. `diffusion` trains a whole model, which drafts for any target with the same tokens;
`--preset fast-dllm-v2` does so as Fast-dLLM v2 was made. A run lives in one folder and continues from its last
checkpoint when it is started again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from failfast_jax import distributed
from failfast_jax.checkpoints import deepspec
from failfast_jax.checkpoints.drafter import CHANCES, STORAGES
from failfast_jax.checkpoints.dspark import check_target
from failfast_jax.checkpoints.hub import DEFAULT_TARGET, default_target_path, find_models, resolve_source
from failfast_jax.checkpoints.loading import load_model, open_source
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.command import OutOfTime, deadline_after
from failfast_jax.decoding.economics import observed
from failfast_jax.errors import OptionError
from failfast_jax.files import check_shared, read_json, sole_writer, user_path
from failfast_jax.models.config import ModelConfig
from failfast_jax.models.sharding import whole
from failfast_jax.options import flag_of
from failfast_jax.progress import note
from failfast_jax.train import confidence_scaling, data, loop, presets
from failfast_jax.train.confidence_scaling import Drafts
from failfast_jax.train.conversations import ROWS, check_template, read_conversations
from failfast_jax.train.diffusion import Start, frozen_parts, start_for
from failfast_jax.train.dspark import spare_token
from failfast_jax.train.evaluate import Evaluation
from failfast_jax.train.families import (
    BLOCKS,
    DIFFUSION,
    FAMILIES,
    MASKED,
    PUBLISHED,
    THIRDS,
    add_family_options,
    fill_in,
    started_from,
)
from failfast_jax.train.objectives import Layers, make_diffusion, make_objective
from failfast_jax.train.packing import packed_batches
from failfast_jax.train.resume import begin, check_same
from failfast_jax.train.spread import Spread

SETTINGS_FILE = "train.json"
HELD_OUT = "held_out.npz"
"""In the run's folder: documents never trained on, for measurements of what was made."""
LONGEST_CHAIN = 64
"""As long as `--spec-len` of `eagle3` may be."""
RUN_ONLY = (
    *("out", "minutes", "fsdp", "save_every", "eval_every", "eval_prompts", "eval_tokens", "eval_spec_len", "storage"),
    *("data", "cache_layers", "push_to_hub"),  # the documents themselves are compared, not where they lie
    *("distributed", "verbosity"),
)
"""Options that do not change what is learned."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--out", type=user_path, required=True, help="folder of the run")
    parser.add_argument(
        "--data",
        metavar="D",
        type=user_path,
        nargs="+",
        required=True,
        help=".npz, .jsonl or .parquet files, folders of them, and datasets of the Hub (NAME/NAME, NAME/NAME:SPLIT)",
    )
    parser.add_argument("--preset", choices=presets.PRESETS, help="options that are not given are as in this recipe")
    parser.add_argument("--target", help="model to draft for; default: SmolLM2-135M-Instruct")
    parser.add_argument("--family", choices=FAMILIES, help=f"default: {presets.FAMILY}")
    parser.add_argument(
        "--layers",
        metavar="i,j",
        help="target layers to start from; default: the last two, the last (eagle3), all (standalone)",
    )
    parser.add_argument(
        "--start",
        metavar="P",
        help="go on from this drafter; heads that it lacks are added (dspark); from this model instead of the target, "
        "a block-diffusion model or not (diffusion)",
    )
    both = parser.add_argument_group("what all families learn from")
    said = f"documents are cut to this many tokens; default: {presets.SEQ_LEN}"
    both.add_argument("--seq-len", metavar="L", type=int, help=said)
    both.add_argument("--held-out", type=int, default=64, help="documents never trained on")
    both.add_argument("--skip-short", action="store_true", help="leave out documents shorter than a block")
    add_family_options(parser)
    _add_run_arguments(parser)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("optimisation")
    for field in dataclasses.fields(loop.Optimization):
        about = {**field.metadata, "help": f"{field.metadata['help']}; default: {field.default}"}
        how.add_argument(flag_of(field.name), type=type(field.default), **about)
    how.add_argument("--compute-dtype", choices=("float32", "bfloat16"), help="default: float32 on CPU")
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--fsdp", metavar="N", type=int, default=1, help="devices that share parameters and optimiser state (diffusion)"
    )
    run.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    run.add_argument("--eval-every", type=int, default=0, help="steps between measurements; 0: only at the end")
    run.add_argument("--eval-prompts", type=int, help="held-out documents to measure on; default: 16, or all of fewer")
    run.add_argument("--eval-tokens", type=int, default=64)
    run.add_argument("--eval-spec-len", metavar="N", type=int, help="tokens a draft there; default: as trained, or 10")
    run.add_argument("--minutes", type=float, help="stop with a checkpoint after this time (exit status 3)")
    run.add_argument(
        "--push-to-hub", metavar="NAME", help="upload the finished drafter to this Hugging Face repository"
    )
    run.add_argument("--storage", choices=STORAGES, default="bfloat16")
    distributed.add_flag(run)


def check(args: argparse.Namespace) -> loop.Optimization:
    """Checks the options by themselves, and fills in those that the family decides.

    Raises:
      OptionError: a value that cannot be served.
    """
    presets.fill_in(args)
    fill_in(args)
    args.compute_dtype = args.compute_dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if args.eval_prompts is None:
        args.eval_prompts = min(16, args.held_out)
    fields = dataclasses.fields(loop.Optimization)
    optimization = loop.Optimization(**{field.name: getattr(args, field.name) for field in fields})
    optimization.validate()
    rules = {
        "rows": args.rows >= 1,
        "seq_len": args.seq_len >= 8,
        "held_out": args.held_out >= 1,
        "draft_vocab": args.draft_vocab >= 0,
        "markov_rank": args.markov_rank >= 1,
        "ce_weight": args.ce_weight >= 0,
        "l1_weight": args.l1_weight >= 0,
        "confidence_weight": args.confidence_weight >= 0,
        "ttt_length": 1 <= args.ttt_length <= LONGEST_CHAIN,
        "step_decay": 0 < args.step_decay <= 1,
        "anchors": args.anchors >= 1,
        "prefix_fraction": 0 <= args.prefix_fraction <= 1,
        "position_decay": args.position_decay >= 0,
        "kl_weight": 0 <= args.kl_weight <= 1,
        "block_size": args.block_size >= 2,
        "draft_fraction": 0 <= args.draft_fraction <= 1,
        "save_every": args.save_every >= 1,
        "eval_every": args.eval_every >= 0,
        "eval_prompts": 1 <= args.eval_prompts <= args.held_out,
        "eval_tokens": args.eval_tokens >= 1,
        "eval_spec_len": args.eval_spec_len is None or args.eval_spec_len >= 1,
    }
    loop.check_ranges(args, rules)
    if args.push_to_hub is not None:
        try:
            validate_repo_id(args.push_to_hub)
        except HFValidationError as error:
            raise OptionError(f"--push-to-hub {args.push_to_hub}: {str(error).splitlines()[0]}") from None
    if args.cache_layers and not args.feature_cache:
        raise OptionError(f"--cache-layers {args.cache_layers}: needs --feature-cache, where they are stored")
    if args.family in BLOCKS and (args.eval_spec_len or 0) > args.rows:
        raise OptionError(f"--eval-spec-len {args.eval_spec_len}: a pass drafts at most --rows {args.rows} tokens")
    for name in ("features", "mask_token"):
        if args.row_features and getattr(args, name) is not None:
            raise OptionError(f"{flag_of(name)} {getattr(args, name)}: not with --row-features")
    if args.no_fit and not args.row_features:
        raise OptionError("--no-fit: only with --row-features is there something to fit")
    if args.family in (*PUBLISHED, *DIFFUSION) and args.storage not in deepspec.STORAGES:
        said = f"{args.family} drafters are stored as {' or '.join(deepspec.STORAGES)}"
        raise OptionError(f"--storage {args.storage}: {said}")
    if args.fsdp != 1 and args.family not in DIFFUSION:
        raise OptionError(f"--fsdp {args.fsdp}: only the parameters of --family diffusion are shared among devices")
    if args.family in MASKED and args.seq_len % args.block_size:
        raise OptionError(f"--seq-len {args.seq_len}: must be a multiple of --block-size {args.block_size}")
    return optimization


def _parse_layers(text: str | None, flag: str, count: int, default: tuple[int, ...]) -> tuple[int, ...]:
    if text is None:
        return default
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"{flag} {text!r}: expected layer numbers separated by commas") from None
    for layer in layers:
        if not 0 <= layer < count:
            raise OptionError(f"{flag} {text}: the target's layers are 0 to {count - 1}")
    if len(set(layers)) != len(layers):
        raise OptionError(f"{flag} {text}: a layer is named twice")
    return layers


def _check_target(args: argparse.Namespace, source: Any, config: ModelConfig) -> Layers:
    """Checks the options against the target, and names its layers."""
    if config.is_diffusion:
        raise OptionError(f"--target {source}: a block-diffusion model; drafters are made from autoregressive targets")
    args.draft_vocab = min(args.draft_vocab, config.vocab_size)
    last = config.num_layers - 1
    if args.seq_len > config.max_position_embeddings:
        raise OptionError(f"--seq-len {args.seq_len}: the target's context is {config.max_position_embeddings}")
    if args.family in DIFFUSION:
        if args.layers is not None:
            raise OptionError(f"--layers {args.layers}: --family diffusion trains a whole model")
        return Layers((), (), ())
    cached = _parse_layers(args.cache_layers, "--cache-layers", last + 1, ())
    if (start := started_from(args)) is not None:
        check_target(start, config, resolve_source(args.start), str(source))
        return Layers((), start.feature_layers, cached)
    if args.mask_token is not None and not 0 <= args.mask_token < config.vocab_size:
        raise OptionError(f"--mask-token {args.mask_token}: the target's vocabulary has {config.vocab_size} tokens")
    first = {"standalone": 0, "eagle3": last}.get(args.family, max(last - 1, 1))
    own = _parse_layers(args.layers, "--layers", last + 1, tuple(range(min(first, last), last + 1)))
    if args.family == "eagle3" and len(own) > 1:
        raise OptionError(f"--layers {args.layers}: an EAGLE-3 drafter has one layer")
    if args.row_features:
        if min(own) == 0:
            given = "--row-features" if args.layers is None else f"--layers {args.layers}"
            raise OptionError(f"{given}: layer 0 has no layer before it whose output a drafter could read")
        thirds = tuple(dict.fromkeys((round(last / 3), round(last * 2 / 3), last)))
        text = None if args.row_features == THIRDS else args.row_features
        rows = _parse_layers(text, "--row-features", last + 1, thirds)
        return Layers(own, tuple(sorted({*rows, *(i - 1 for i in own)})), cached, rows)
    # What enters the first of its own layers, and others at even distances.
    spread = {round(last * share) for share in (0.05, 0.3, 0.55, 0.8)} | {max(own[0] - 1, 0)}
    return Layers(own, _parse_layers(args.features, "--features", last + 1, tuple(sorted(spread))), cached)


def work(args: argparse.Namespace) -> None:
    """Trains, or goes on training, and prints a line of JSON: the drafter's folder and its figures."""
    optimization, deadline = check(args), deadline_after(args.minutes)
    find_models({"--target": args.target, "--start": args.start})
    source = args.target or default_target_path()
    config = open_source(source).config
    layers, spread = _check_target(args, source, config), Spread.over(args.fsdp)
    loop.check_devices(optimization)
    _check_text(args, source)
    start = _diffusion_start(args, source, config)
    documents = _documents(args, source, config)
    if args.family in BLOCKS and not (layers.rows or args.start) and args.mask_token is None:
        args.mask_token = spare_token(load_tokenizer(source))
    settings = {name: value for name, value in vars(args).items() if name not in RUN_ONLY} | {
        "feature_cache": args.feature_cache is not None,
        "target": str(args.target or DEFAULT_TARGET[1].partition(".")[0]),
        "target_key": config.shape_key(),
        "documents": len(documents),
        "documents_digest": documents.digest(),
    }
    documents = documents.take(np.random.default_rng(args.seed).permutation(len(documents)))
    train, held_out = data.split(documents, args.held_out)
    check_same(settings)

    def begun() -> dict[str, Any] | None:
        begin(args.out / SETTINGS_FILE, settings, foreign="*", may_grow=("steps",))
        report = _finished(args.out / "drafter", optimization.steps, args.storage)
        if report is None:
            data.write_documents(args.out / HELD_OUT, held_out.pairs(), config.vocab_size)
        return report

    with sole_writer(args.out):
        check_shared(args.out)
        if (report := distributed.first(begun)) is None:
            _make(args, source, start, layers, (train, held_out), optimization, deadline, spread)
            return
        _show(report)
        _push(args)


def _show(report: dict[str, Any]) -> None:
    """Prints the report of a run on stdout, and on stderr the folder of its drafter."""
    print(json.dumps(report))
    note(f"{report['steps']} steps are trained; the drafter is in {report['drafter']} (--drafter)")


def _push(args: argparse.Namespace) -> None:
    if args.push_to_hub is not None:
        distributed.first(lambda: upload(args.out / "drafter", args.push_to_hub))


def upload(folder: Path, name: str) -> None:
    """Uploads a drafter's folder to the repository `name` of the Hub, which is created if it is missing."""
    try:
        HfApi().create_repo(name, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # network, authentication, validation: half a dozen unrelated classes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OSError(f"--push-to-hub {name}: {reason}; {folder} is finished, the same command tries again") from error
    print(f"https://huggingface.co/{name}", file=sys.stderr)


def _make(
    args: argparse.Namespace,
    source: Any,
    start: Start | None,
    layers: Layers,
    documents: tuple[data.Documents, data.Documents],
    optimization: loop.Optimization,
    deadline: float,
    spread: Spread,
) -> None:
    """Trains in a folder that is begun; `documents`: to learn from, and to measure on."""
    train, held_out = documents
    # From here on nothing is cheap: all that can be refused has been.
    target = load_model(source)
    if start is None:
        objective = make_objective(args, target, train, layers, deadline)
    else:
        objective = make_diffusion(args, start, spread)
    tokenizers = None if start is None else (start.target_tokenizer, start.tokenizer)
    figures = {"prompts": args.eval_prompts, "tokens": args.eval_tokens, "spec_len": args.eval_spec_len}
    measure = Evaluation(target, objective, held_out, tokenizers=tokenizers, **figures)
    _train(args, optimization, objective, measure, train, deadline, spread)


def _diffusion_start(args: argparse.Namespace, source: Any, config: ModelConfig) -> Start | None:
    """Of a whole model: what training starts from, checked against the target; None for other families."""
    if args.family not in DIFFUSION:
        return None
    start = start_for(args.start or source, source, config, args.block_size, args.mask_token)
    frozen_parts(args.freeze, start.config)
    args.mask_token = start.config.mask_token_id
    return start


def _check_text(args: argparse.Namespace, source: Any) -> None:
    """Before anything else is asked of the tokenizer, such as a token to spare: can it write conversations?"""
    text = [file for file in data.files(args.data, (".npz", *ROWS)) if data.kind(file) in ROWS]
    if text:
        check_template(text[0], load_tokenizer(source))


def _documents(args: argparse.Namespace, source: Any, config: ModelConfig) -> data.Documents:
    """The run's documents; the tokenizer is read once there is text to read."""

    def read(file: Path) -> list[data.Document]:
        return read_conversations(file, load_tokenizer(source), config.vocab_size, whole=args.family in DIFFUSION)

    # A chain that the text cuts short teaches, too; a pair and what it predicts are three tokens.
    shortest = {"standalone": args.block_size, "eagle3": 3, "diffusion": 3}.get(args.family, args.rows + 2)
    limits = {"shortest": shortest, "longest": args.seq_len, "skip_short": args.skip_short}
    return data.load_documents(args.data, vocab_size=config.vocab_size, read=dict.fromkeys(ROWS, read), **limits)


def _train(
    args: argparse.Namespace,
    optimization: loop.Optimization,
    objective: loop.Objective,
    measure: Evaluation,
    documents: data.Documents,
    deadline: float,
    spread: Spread,
) -> None:
    how = {"length": args.seq_len, "batch": optimization.batch * optimization.accumulate, "seed": optimization.seed}
    if args.family in DIFFUSION:
        dataset, share = packed_batches(documents, block=args.block_size, packing=args.packing, **how)
        print(f"{len(documents)} documents fill {share:.0%} of their rows", file=sys.stderr)
    else:
        dataset = data.batches(documents, **how)
    often = {"save_every": args.save_every, "eval_every": args.eval_every, "deadline": deadline}
    state, done = loop.train(objective, dataset, optimization, args.out, spread=spread, evaluate=measure, **often)
    # A run whose last step was done before measures nothing more.
    figures = measure.last or measure(loop.averaged(state))
    steps_done, made = int(state["step"]), _on_host(loop.averaged(state))
    made, drafts, calibrated = _calibrated(objective, made, measure.drafts)

    def written() -> dict[str, Any]:
        training = {
            **read_json(args.out / SETTINGS_FILE),
            "data": [path.name for path in args.data],
            "storage": args.storage,
        }
        training |= {"steps_done": steps_done, "held_out_figures": figures} | calibrated
        more = {"training": training} | ({} if args.family in DIFFUSION else {CHANCES: observed(drafts)})
        objective.save(made, args.out / "drafter", storage=args.storage, **more)
        return _report(args.out / "drafter", training)

    _show(distributed.first(written))
    if not done:
        raise OutOfTime
    _push(args)


def _calibrated(objective: loop.Objective, made: Any, drafts: Drafts) -> tuple[Any, Drafts, dict[str, Any]]:
    """Parameters whose confidence head says what held-out drafts are worth, these drafts, and what became of it."""
    if not objective.calibrates:
        return made, drafts, {}
    scale, shift = confidence_scaling.fit_scaling(drafts)
    errors = {
        "before": confidence_scaling.error(drafts),
        "expected": confidence_scaling.held_out_error(drafts),
    }
    record = {"scale": scale, "shift": shift, "calibration_error": errors}
    calibrated = objective.calibrated(made, scale, shift)
    return calibrated, confidence_scaling.rescaled(drafts, scale, shift), {"calibration": record}


def _on_host(tree: Any) -> Any:
    """Whole parameters, on every host if several processes have parts of them."""
    return jax.tree.map(lambda leaf: leaf if leaf.is_fully_addressable else np.asarray(whole(leaf)), tree)


def _report(drafter: Path, training: dict[str, Any]) -> dict[str, Any]:
    return {"drafter": str(drafter), "steps": training["steps_done"], **training["held_out_figures"]}


def _finished(drafter: Path, steps: int, storage: str) -> dict[str, Any] | None:
    """The report of a run whose drafter is written; None if there is still something to do."""
    if not (drafter / "config.json").is_file():
        return None
    training = read_json(drafter / "config.json").get("training") or {}
    if (training.get("steps_done"), training.get("storage")) != (steps, storage):
        return None
    return _report(drafter, training)
