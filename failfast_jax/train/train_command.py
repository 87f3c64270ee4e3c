"""`python -m failfast_jax.train run`: train a drafter for a target, from the target.

Four families. `dspark` and `dflash` drafters (a few layers that read the target's hidden states, with or without Markov
and confidence heads) are written in DeepSpec's layout, which other engines serve, too. With `--row-features` they are
this project's own: they start in closed form, which suits little data. `standalone` ones are block diffusion over all
layers of the model or some, with the target's embedding and head. `diffusion` trains a whole model, which drafts for
any target with the same tokens; `--preset fast-dllm-v2` does so as Fast-dLLM v2 was trained. A run lives in one folder
and continues from its last checkpoint when it is started again.
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

from failfast_jax.checkpoints.checkpoint import load_model, open_checkpoint
from failfast_jax.checkpoints.hub import DEFAULT_TARGET, default_target_path, find_models
from failfast_jax.checkpoints.model_folder import CHANCES
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.engine import FailFast
from failfast_jax.kernels.blocks import INPUTS
from failfast_jax.models.drafter_model import AUTOREGRESSIVE, FEATURE_BLOCK
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.sharding import whole
from failfast_jax.models.transformer import Decoder
from failfast_jax.options import require
from failfast_jax.policy import confidence_scaling
from failfast_jax.policy.expected_tokens import observed
from failfast_jax.public_data.question_sets import ROW_FILES
from failfast_jax.train import documents
from failfast_jax.train.block_loss import BlockObjective
from failfast_jax.train.block_start import choose_layers, spare_token
from failfast_jax.train.conversations import check_template, read_conversations
from failfast_jax.train.diffusion_run import DiffusionStart, StandaloneObjective
from failfast_jax.train.documents import Document, Documents
from failfast_jax.train.spread import Spread
from failfast_jax.train.train_config import BLOCKS, DIFFUSION, MASKED, TrainConfig, add_settings
from failfast_jax.train.trainer import Objective, Trainer, averaged, has_checkpoint
from failfast_jax.util import processes
from failfast_jax.util.command_line import OutOfTime, deadline_after
from failfast_jax.util.files import check_shared, read_json, sole_writer, user_path
from failfast_jax.util.progress import note
from failfast_jax.util.records import begin, check_same

SETTINGS_FILE = "train.json"
HELD_OUT = "held_out.npz"
"""File in the run's folder: documents never trained on, for measurements of the drafter."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--out", type=user_path, required=True, help="folder of the run")
    parser.add_argument(
        "--data",
        metavar="D",
        type=user_path,
        nargs="+",
        required=True,
        help=".npz, .jsonl or .parquet files, and folders of them",
    )
    processes.add_flag(parser)
    add_settings(parser)


def work(args: argparse.Namespace) -> None:
    """Trains, or continues training, and prints a line of JSON: the drafter's folder and its figures."""
    config = TrainConfig.from_flags(vars(args))
    deadline, source = deadline_after(config.minutes), config.target or default_target_path()
    find_models({"--target": config.target, "--start": config.start})
    target = open_checkpoint(source).config
    layers, spread = choose_layers(config, target, str(source)), Spread.over(config.fsdp)
    _check_sizes(config, target)
    # A missing chat template comes before anything else that the tokenizer is asked for, such as a mask token.
    if texts := [file for file in documents.files(args.data, (".npz", *ROW_FILES)) if file.suffix in ROW_FILES]:
        check_template(texts[0], load_tokenizer(source))
    start = DiffusionStart.open(config, source, target) if config.family in DIFFUSION else None
    rows = _documents(config, args.data, source, target)
    config = dataclasses.replace(config, mask_token=_mask_token(config, start, source))
    settings = config.learned() | {
        "target": str(config.target or DEFAULT_TARGET[1].partition(".")[0]),
        "target_key": target.shape_key(),
        "documents": len(rows),
        "documents_digest": rows.digest(),
    }
    require(config.held_out < len(rows), f"--held-out {config.held_out}", f"there are only {len(rows)} documents")
    order = np.random.default_rng(config.seed).permutation(len(rows))
    train, held_out = rows.take(order[: -config.held_out]), rows.take(order[-config.held_out :])
    check_same(settings)

    def finished() -> dict[str, Any] | None:
        begin(args.out / SETTINGS_FILE, settings, foreign="*", grows="steps")
        report = _finished_report(args.out / "drafter", config)
        if report is None:
            documents.write_documents(args.out / HELD_OUT, held_out.pairs(), target.vocab_size)
        return report

    with sole_writer(args.out):
        check_shared(args.out)
        report, done = processes.run_on_primary(finished), True
        if report is None:
            # From here on nothing is cheap: all that can be refused has been.
            model, begun = load_model(source, widen=True), processes.broadcast_from_primary(has_checkpoint(args.out))
            if start is not None:
                objective = start.objective(config, spread)
            elif config.family in MASKED:
                objective = StandaloneObjective(model, layers.copied, config)
            else:
                objective = BlockObjective.from_config(config, model, train, layers, begun=begun, deadline=deadline)
            evaluation = Evaluation(model, objective, held_out, config)
            report, done = _train(Trainer(config, objective, args.out, spread), train, evaluation, args.data, deadline)
        print(json.dumps(report))
        note(f"{report['steps']} steps are trained; the drafter is in {report['drafter']} (--drafter)")
        if not done:
            raise OutOfTime


def _check_sizes(config: TrainConfig, target: ModelConfig) -> None:
    """OptionError: a batch that devices cannot share, or matrices, as wide as the target's, that int8 cannot store."""
    devices = len(jax.devices())
    require(config.batch % devices == 0, f"--batch {config.batch}", f"must be a multiple of the {devices} devices")
    inputs = (target.hidden_size, target.num_heads * target.head_dim, target.intermediate_size)
    fits = config.storage != "int8" or not any(size % INPUTS for size in inputs)
    require(fits, "--storage int8", f"matrices of {inputs} inputs: must be multiples of {INPUTS}")


def _mask_token(config: TrainConfig, start: DiffusionStart | None, source: Any) -> int | None:
    """Returns the id of an unknown token; None where the drafter's own network has none among its inputs."""
    if start is not None:
        return start.model_config.mask_token_id
    if config.mask_token is None and config.family in BLOCKS and not (config.row_features or config.start):
        return spare_token(load_tokenizer(source))
    return config.mask_token


def _documents(config: TrainConfig, paths: list[Path], source: Any, target: ModelConfig) -> Documents:
    """Reads the run's documents; the tokenizer is loaded once there is text to read."""

    def read(file: Path) -> list[Document]:
        return read_conversations(file, load_tokenizer(source), target.vocab_size, whole=config.family in DIFFUSION)

    shortest = 3 if config.family in MASKED else config.rows + 2
    readers = dict.fromkeys(ROW_FILES, read)
    return documents.load_documents(
        paths, target.vocab_size, shortest, config.seq_len, skip_short=config.skip_short, read=readers
    )


def _train(
    trainer: Trainer, train: Documents, evaluation: Evaluation, data: list[Path], deadline: float
) -> tuple[dict[str, Any], bool]:
    """Trains and writes the drafter's folder, with its confidence head scaled and the settings of the run.

    Returns:
      The run's report, and whether all steps are done.
    """
    config, objective = trainer.config, trainer.objective
    if config.family in MASKED:
        batches, share = documents.packed_batches(train, config)
        print(f"{len(train)} documents fill {share:.0%} of their rows", file=sys.stderr)
    else:
        batch = config.batch * config.accumulate
        batches = documents.batches(train, length=config.seq_len, batch=batch, seed=config.seed)
    state, done = trainer.train(batches, evaluation, deadline)
    params, training = averaged(state), {"storage": config.storage, "steps_done": trainer.step}
    # A run whose last step was done before has measured nothing in this process.
    figures, drafts = evaluation.last or evaluation(params), evaluation.drafts
    params = jax.tree.map(lambda leaf: leaf if leaf.is_fully_addressable else np.asarray(whole(leaf)), params)
    if objective.calibrates:
        scale, shift = confidence_scaling.fit_scaling(drafts)
        errors = {"before": confidence_scaling.error(drafts), "expected": confidence_scaling.held_out_error(drafts)}
        training["calibration"] = {"scale": scale, "shift": shift, "calibration_error": errors}
        params, drafts = objective.calibrated(params, scale, shift), confidence_scaling.rescaled(drafts, scale, shift)

    def write() -> dict[str, Any]:
        settings, folder = read_json(trainer.folder / SETTINGS_FILE), trainer.folder / "drafter"
        record = {**settings, "data": [path.name for path in data], **training, "held_out_figures": figures}
        chances = {} if config.family in DIFFUSION else {CHANCES: observed(drafts)}
        objective.save(params, folder, storage=config.storage, training=record, **chances)
        return _report(folder, record)

    return processes.run_on_primary(write), done


def _report(drafter: Path, training: dict[str, Any]) -> dict[str, Any]:
    return {"drafter": str(drafter), "steps": training["steps_done"], **training["held_out_figures"]}


def _finished_report(drafter: Path, config: TrainConfig) -> dict[str, Any] | None:
    """Returns the report of a run whose drafter is written; None if there is still something to do."""
    if not (drafter / "config.json").is_file():
        return None
    training = read_json(drafter / "config.json").get("training") or {}
    is_finished = (training.get("steps_done"), training.get("storage")) == (config.steps, config.storage)
    return _report(drafter, training) if is_finished else None


class Evaluation:
    """Answers held-out prompts with the engine, drafting one pass per round.

    Each of several processes does so on one of its own devices, lest others wait for it; process 0's figures count.

    Args:
      objective: converts parameters to a drafter (`drafter`).
      config: the number of prompts, which are answered in one batch, and the lengths of answers and drafts.

    Raises:
      OptionError, PromptError: these drafts, or answers to these prompts, are impossible.

    Attributes:
      last: the last result.
      drafts: of the last result, the confidences of each draft's tokens, and how many were accepted.
    """

    def __init__(self, target: Decoder, objective: Objective, held_out: Documents, config: TrainConfig):
        self.objective = objective
        # The engine runs on one device, training on all.
        self._device = jax.local_devices()[0]
        self.prompts = [prompt.tolist() for prompt, _ in held_out.pairs()[: config.eval_prompts]]
        self.last: dict[str, float] | None = None
        self.drafts: confidence_scaling.Drafts = []
        drafter, spec_len = self._drafter(objective.trainable), config.eval_spec_len
        # A confidence is at most 1, so that tau 1 ends (almost) every draft after its first pass.
        cut: dict[str, Any] = {"method": "failfast", "tau": 1.0}
        if drafter.kind == AUTOREGRESSIVE:
            cut = {"method": "ar"}
        elif drafter.kind == FEATURE_BLOCK:  # a block, or its first tokens
            cut |= {"tau": 0.0, "max_spec_len": spec_len or drafter.max_block_draft}
        self.options = {**cut, "max_new_tokens": config.eval_tokens, "spec_len": spec_len}
        tokenizer, drafter_tokenizer = objective.tokenizers
        with processes.as_single_process():
            self.engine = FailFast(target, drafter, tokenizer=tokenizer, drafter_tokenizer=drafter_tokenizer)
            # Refuses options and prompts that do not fit: now and not after the last step.
            self.engine.session(self.prompts, self.engine.resolve(**self.options))

    def _drafter(self, trainable: Any) -> Any:
        drafter = self.objective.drafter(trainable)
        return jax.tree.map(lambda leaf: jax.device_put(whole(leaf), self._device), drafter)

    def __call__(self, trainable: Any) -> dict[str, float]:
        """Returns `accepted_per_round`, `drafted_per_round`, `rounds`, and the share of accepted first tokens."""
        self.engine.drafter = self._drafter(trainable)
        with processes.as_single_process():
            results = self.engine.generate(self.prompts, **self.options)
        rounds = [log for result in results for log in result.rounds]
        figures = {
            "accepted_per_round": float(np.mean([log.accepted for log in rounds])),
            "first_token_accepted": float(np.mean([log.accepted > 0 for log in rounds])),
            "drafted_per_round": float(np.mean([len(log.drafted) for log in rounds])),
            "rounds": len(rounds),
        }
        self.drafts = [(log.confidence, log.accepted) for log in rounds]
        self.last = processes.broadcast_from_primary(figures)
        return self.last
