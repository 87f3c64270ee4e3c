"""A target that writes prompts and answers them: one shard of training data at a time."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from failfast_jax.engine import FailFast
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.options import CommandOptions, option, require
from failfast_jax.template_rendering import has_template, render
from failfast_jax.text_stream import special_tokens, text_of
from failfast_jax.train.documents import Document
from failfast_jax.train.openings import is_held_out

FEWEST_SAMPLED = 3
"""A prompt of fewer sampled tokens is skipped as empty."""
DOCUMENTS = 1024
"""Default number of documents."""
_USER_CONTENT = "<<the user's content>>"


@dataclasses.dataclass(frozen=True)
class SelfgenOptions(CommandOptions):
    """Options of the command that are numbers and choices."""

    documents: int | None = option(
        None, f"rounded up to whole shards; default: {DOCUMENTS}, or all --questions", least=1
    )
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

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = self.data_parallel
        require(
            self.batch_size % parts == 0, f"--batch-size {self.batch_size}", f"must divide by --data-parallel {parts}"
        )


ELSEWHERE = ("documents", "tensor_parallel", "data_parallel")
"""Options that do not change what a shard holds."""


@dataclasses.dataclass(frozen=True)
class WriterTexts:
    """Texts that a shard depends on.

    Attributes:
      openings: of prompts that the target writes.
      held_out: texts as `openings.normal` returns them.
      questions: texts of users that are answered instead of prompts that the target writes.
    """

    openings: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()


def settings_of(options: SelfgenOptions, texts: WriterTexts) -> dict[str, Any]:
    """Returns what a shard depends on besides the target: options, and digests of texts (questions: if any)."""
    values = {name: value for name, value in dataclasses.asdict(options).items() if name not in ELSEWHERE}
    for name, lines in dataclasses.asdict(texts).items():
        if lines or name != "questions":
            values[name] = hashlib.sha256("\0".join(lines).encode()).hexdigest()[:16]
    return values


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
      turn: of `user_turn`.
      skipped: prompts that were not used, by reason.
      compile_s: seconds spent on compiling so far.
      tokens: written so far, of prompts and answers.

    Raises:
      OptionError: no chat template, a prompt that would begin with nothing, or a context too small for the limits.
    """

    def __init__(self, engine: FailFast, options: SelfgenOptions, texts: WriterTexts):
        self.engine, self.options, self.texts = engine, options, texts
        self.skipped: Counter[str] = Counter()
        self.compile_s, self.tokens = 0.0, 0
        name, room, answer = engine.target_name, engine.max_seq_len, options.max_answer_tokens
        self.turn = before, after = user_turn(engine.tokenizer, name)
        self._openings, self._after = [self._encode(before + text) for text in texts.openings], self._encode(after)
        self._special = {*special_tokens(engine.tokenizer), *engine.eos_token_ids}
        require(
            all(self._openings),
            f"--target {name}",
            "its chat template writes nothing before the user's text, so that an empty opening is an empty prompt: "
            "name openings with --openings FILE, without an empty line",
        )
        needed = max(map(len, self._openings)) + options.max_prompt_tokens + len(self._after) + answer
        require(
            needed <= room or bool(texts.questions),
            f"--max-prompt-tokens {options.max_prompt_tokens}",
            f"with the template and --max-answer-tokens {answer} a document may have {needed} tokens, and the target's "
            f"context is {room}",
        )
        self._questions = [engine.encode(text) for text in texts.questions]
        for number, (ids, text) in enumerate(zip(self._questions, texts.questions)):
            require(
                len(ids) + answer <= room,
                "--questions",
                f"number {number} has {len(ids)} tokens, which with --max-answer-tokens {answer} is more than the "
                f"target's context of {room}: {text[:60]!r}",
            )

    def _encode(self, text: str) -> list[int]:
        return self.engine.tokenizer(text, add_special_tokens=False)["input_ids"]

    def generate(self, prompts: list[list[int]], limit: int, **sampling: Any) -> list[list[int]]:
        """Returns the outputs of a batch with their stop tokens; the batch is filled up: one program serves all."""
        full = prompts + prompts[:1] * (self.options.batch_size - len(prompts))
        config = GenerationConfig(method=self.options.method, max_new_tokens=limit, **sampling)
        results = self.engine.generate(full, config)
        self.compile_s += results[0].stats.compile_s
        return [result.output_ids for result in results[: len(prompts)]]

    def prompts(self, shard: int, batch: int) -> list[tuple[list[int], str, int]]:
        """Returns a batch of sampled prompts: ids, the user's text, and the number of sampled tokens of each."""
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
                prompts.append((opening + ids + self._after, text, len(ids)))
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
            for ids, _, sampled in self.prompts(number, attempt):
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
