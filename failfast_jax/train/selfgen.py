"""`python -m failfast_jax.train selfgen`: training data that the target writes itself.

The target continues the user's turn of its own chat template, after one of a list of openings (sampled), and
then answers what it wrote (greedy). A drafter is to predict the target's own text, so no other data is needed.
With `--questions` it answers those instead.
HumanEval prompts, those built into `bench` and those named in tests are never trained on: a prompt that
contains one of them, or is contained in one, is skipped.

A folder holds `selfgen.json`, the settings, and shards `shard-00000.npz` of documents (see `documents`): system turn,
user turn and assistant header are the prompt; the greedy answer ends with a stop token unless cut at the limit.
A shard is a function of the settings and its number. Running again continues after the last whole shard.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

from failfast_jax.checkpoints.checkpoint import DTYPES, as_dtype
from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.defaults import load_pair
from failfast_jax.engine import FailFast
from failfast_jax.errors import OptionError
from failfast_jax.options import add_flags_of, require
from failfast_jax.public_data.question_sets import load_dataset
from failfast_jax.train.documents import DataError, read_documents, write_documents
from failfast_jax.train.openings import OPENINGS_FILE, held_out_prompts, is_held_out, read_openings
from failfast_jax.train.resume import begin, check_same, is_begun
from failfast_jax.train.selfgen_writer import DOCUMENTS, SelfgenOptions, Writer, WriterTexts, settings_of
from failfast_jax.util import processes
from failfast_jax.util.command_line import OutOfTime, deadline_after
from failfast_jax.util.files import sole_writer, user_path
from failfast_jax.util.progress import progress_bar

SETTINGS_FILE, SHARDS = "selfgen.json", "shard-*.npz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--out", metavar="FOLDER", type=user_path, required=True, help="shards; an unfinished run continues"
    )
    parser.add_argument("--target", metavar="P", help="as of failfast_jax.generate; default: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--questions",
        metavar="D",
        help="answer these instead of prompts that the target writes: a --dataset of failfast_jax.bench, or a file",
    )
    parser.add_argument(
        "--openings",
        metavar="FILE",
        type=user_path,
        help="beginnings of prompts, one per line, \\n for a line break; default: a built-in list",
    )
    add_flags_of(parser, SelfgenOptions)
    parser.add_argument("--dtype", choices=DTYPES, help="weight dtype (default: as stored)")
    processes.add_flag(parser)
    parser.add_argument("--minutes", type=float, help="stop after the shard that ends after this time (exit status 3)")


def _questions(name: str, held_out: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the texts of `--questions`, each once, without those that are held out."""
    flag = f"--questions {name}"
    try:
        questions = load_dataset(name).questions
    except (ValueError, OSError) as error:
        raise OptionError(f"{flag}: {error}") from None
    texts = [question.prompt for question in questions if question.follows is None]
    require(all(isinstance(text, str) for text in texts), flag, "must be texts, not messages or token ids")
    kept = tuple(text for text in dict.fromkeys(texts) if not is_held_out(text, held_out))
    require(bool(kept), flag, "every question is one of those that are held out")
    if len(kept) < len(texts):
        print(f"selfgen: {len(texts) - len(kept)} of {len(texts)} questions are held out or double", file=sys.stderr)
    return kept


def shard_path(folder: Path, number: int) -> Path:
    """Returns the path of a shard."""
    return folder / f"shard-{number:05}.npz"


def work(args: argparse.Namespace, load: Callable[..., FailFast] | None = None) -> None:
    """Writes the shards that are missing, with the engine that `load` (default: `load_pair`) returns.

    Of several processes the first one reads and writes the folder."""
    options, deadline = SelfgenOptions.given(args), deadline_after(args.minutes)
    # Texts that shards depend on are read before anything else is loaded.
    held_out, questions = held_out_prompts(), ()
    if args.questions is not None:
        require(
            args.openings is None, f"--openings {args.openings}", "not with --questions, which are asked as they are"
        )
        questions = _questions(args.questions, held_out)
    texts = WriterTexts(read_openings(args.openings or OPENINGS_FILE), held_out, questions)
    count = options.documents or len(texts.questions) or DOCUMENTS
    if texts.questions:
        count = min(count, len(texts.questions))
    target = args.target or default_target_path().name
    settings = {"target": target, "dtype": as_dtype(args.dtype).name, **settings_of(options, texts)}
    file, shards = args.out / SETTINGS_FILE, range(-(-count // options.shard_size))
    check_same(settings)
    begun = processes.run_on_primary(lambda: is_begun(file, settings, SHARDS))
    if begun and not _missing(args.out, shards):
        print(f"selfgen: {args.out} has all {len(shards)} shards", file=sys.stderr)
        return
    mesh = {"tensor_parallel": options.tensor_parallel, "data_parallel": options.data_parallel}
    engine = (load or load_pair)(args.target, method=options.method, dtype=args.dtype, **mesh)
    writer = Writer(engine, options, texts)
    settings |= {
        "vocab_size": engine.target.config.vocab_size,
        "eos_token_ids": list(engine.eos_token_ids),
        "template": list(writer.turn),
    }
    with sole_writer(args.out):
        processes.run_on_primary(lambda: begin(file, settings, SHARDS))
        summary = write_shards(writer, args.out, shards, deadline)
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(writer.skipped.items())) or "none"
    print(f"selfgen: {summary} | skipped: {skipped} | compile {writer.compile_s:.1f} s", file=sys.stderr)


def _missing(folder: Path, shards: range) -> list[int]:
    return processes.run_on_primary(lambda: [number for number in shards if not shard_path(folder, number).exists()])


def write_shards(writer: Writer, folder: Path, shards: range, deadline: float) -> str:
    """Writes the shards that a folder lacks; returns a summary.

    Raises:
      OutOfTime: at the deadline, after a whole shard.
    """
    size, vocab = writer.options.shard_size, writer.engine.target.config.vocab_size
    missing, seen, finished, start = _missing(folder, shards), set(), 0, time.perf_counter()
    done, total = (len(shards) - len(missing)) * size, len(shards) * size
    if questions := writer.texts.questions:
        done, total = min(done, len(questions)), min(total, len(questions))
    speed = ""
    with progress_bar("selfgen", "doc", total=total, initial=done) as bar:
        for number in shards:
            path = shard_path(folder, number)
            if number not in missing:
                seen.update(map(tuple, processes.run_on_primary(functools.partial(_prompts, path, vocab))))
                continue
            documents = writer.shard(number, seen, bar.update)
            finished += len(documents)
            # Compiling is over after the first shard and says nothing about the ones to come.
            seconds = max(time.perf_counter() - start - writer.compile_s, 1e-9)
            speed = f"{writer.tokens / seconds:.0f} tokens/s"
            bar.set_postfix_str(speed, refresh=False)
            processes.run_on_primary(functools.partial(write_documents, path, documents, vocab))
            if number < missing[-1] and processes.broadcast_from_primary(time.monotonic() > deadline):
                raise OutOfTime
    return f"{finished} documents, {writer.tokens} tokens, {speed}"


def _prompts(shard: Path, vocab_size: int) -> list[tuple[int, ...]]:
    try:
        return [tuple(prompt.tolist()) for prompt, _ in read_documents(shard, vocab_size)]
    except DataError as error:
        raise DataError(f"{error}; remove it to make it again") from None
