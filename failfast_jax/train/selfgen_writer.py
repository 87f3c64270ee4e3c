"""A target that writes prompts and answers them: one shard of training data at a time."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from typing import Any

import numpy as np

from failfast_jax.engine import FailFast
from failfast_jax.errors import OptionError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.template_rendering import has_template, render
from failfast_jax.text_stream import special_tokens, text_of
from failfast_jax.train.documents import Document
from failfast_jax.train.openings import is_held_out

FEWEST_SAMPLED = 3
"""A prompt of fewer sampled tokens is skipped as empty."""
_USER_CONTENT = "<<the user's content>>"


@dataclasses.dataclass(frozen=True)
class TurnTexts:
    """A chat template around the content of one user turn."""

    before: str
    """System turn, if the template adds one, and the user's header."""
    after: str
    """End of turn and the assistant's header."""


@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """Options and texts that a shard depends on, beside the target and the shard's number."""

    method: str
    batch_size: int
    max_prompt_tokens: int
    max_answer_tokens: int
    temperature: float
    top_p: float
    seed: int
    shard_size: int
    openings: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    """Texts as `normal` returns them."""
    questions: tuple[str, ...] = ()
    """Texts of users that are answered instead of prompts that the target writes."""

    def settings(self) -> dict[str, Any]:
        """Returns a JSON-ready form, with digests of the texts; without questions it is that of earlier versions."""
        values = dataclasses.asdict(self)
        for name in ("openings", "held_out", "questions"):
            values[name] = hashlib.sha256("\0".join(values[name]).encode()).hexdigest()[:16]
        return values if self.questions else {name: value for name, value in values.items() if name != "questions"}


def user_turn(tokenizer: Any, name: str = "the model") -> TurnTexts:
    """Returns the texts around a user's content in the chat template, with those that the template adds by itself.

    Raises:
      ValueError: no tokenizer, no chat template, or one that does not render the content exactly once.
    """
    if not has_template(tokenizer):
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise ValueError(f"--target {name}: has no {missing}, which writing its own prompts needs")
    messages = [{"role": "user", "content": _USER_CONTENT}]
    text = render(messages, tokenizer, f"--target {name}", add_generation_prompt=True)
    parts = text.split(_USER_CONTENT)
    if len(parts) != 2:
        raise ValueError(f"--target {name}: its chat template renders the user's content {len(parts) - 1} times")
    return TurnTexts(*parts)


class Writer:
    """Writes training data with a target: prompts, and answers to them.

    Args:
      engine: the target, with its tokenizer.
      options: see `ShardOptions`.

    Attributes:
      skipped: prompts that were not used, by reason.
      compile_s: seconds spent on compiling so far.

    Raises:
      ValueError: no chat template, a prompt that would begin with nothing, or a context too small for the limits.
    """

    def __init__(self, engine: FailFast, options: ShardOptions):
        self.engine, self.options = engine, options
        self.turn = user_turn(engine.tokenizer, engine.target_name)
        self._openings = [self._encode(self.turn.before + opening) for opening in options.openings]
        if not all(self._openings):
            raise OptionError(
                f"--target {engine.target_name}: its chat template writes nothing before the user's text, so that an "
                "empty opening is an empty prompt: name openings with --openings FILE, without an empty line"
            )
        self._after = self._encode(self.turn.after)
        self._special = {*special_tokens(engine.tokenizer), *engine.eos_token_ids}
        needed = (
            max(map(len, self._openings)) + options.max_prompt_tokens + len(self._after) + options.max_answer_tokens
        )
        if needed > engine.max_seq_len and not options.questions:
            raise OptionError(
                f"--max-prompt-tokens {options.max_prompt_tokens}: with the template and --max-answer-tokens "
                f"{options.max_answer_tokens} a document may have {needed} tokens, and the target's context is "
                f"{engine.max_seq_len}"
            )
        self._questions = [self._asked(number, text) for number, text in enumerate(options.questions)]
        self.skipped: Counter[str] = Counter()
        self.compile_s = 0.0

    def _asked(self, number: int, text: str) -> list[int]:
        """Returns the ids of a question in the chat template."""
        ids, answer = self.engine.encode(text), self.options.max_answer_tokens
        if len(ids) + answer > self.engine.max_seq_len:
            raise OptionError(
                f"--questions: number {number} has {len(ids)} tokens, which with --max-answer-tokens {answer} is more "
                f"than the target's context of {self.engine.max_seq_len}: {text[:60]!r}"
            )
        return ids

    def _encode(self, text: str) -> list[int]:
        return self.engine.tokenizer(text, add_special_tokens=False)["input_ids"]

    def generate(self, prompts: list[list[int]], limit: int, **sampling: Any) -> list[list[int]]:
        """Returns the outputs of a batch with their stop tokens; the batch is filled up: one program serves all."""
        options = self.options
        full = prompts + prompts[:1] * (options.batch_size - len(prompts))
        config = GenerationConfig(method=options.method, max_new_tokens=limit, **sampling)
        results = self.engine.generate(full, config)
        self.compile_s += results[0].stats.compile_s
        return [result.output_ids for result in results[: len(prompts)]]

    def prompts(self, shard: int, batch: int) -> list[tuple[list[int], str, int]]:
        """Returns a batch of sampled prompts: ids, the user's text, and the number of sampled tokens of each."""
        options = self.options
        randomness = np.random.SeedSequence([options.seed, shard, batch])
        chosen = np.random.default_rng(randomness).integers(len(self._openings), size=options.batch_size)
        openings = [self._openings[index] for index in chosen]
        sampled = self.generate(
            openings,
            options.max_prompt_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=int(randomness.generate_state(1)[0]),
        )
        prompts = []
        for index, opening, output in zip(chosen, openings, sampled):
            # The rest of the template ends the turn.
            ids = output[:-1] if output[-1] in self.engine.eos_token_ids else output
            # Some tokenizers drop a space before the first token: hence decoded together with the opening.
            start = len(text_of(self.engine.tokenizer, opening, skip_special_tokens=False))
            whole = text_of(self.engine.tokenizer, opening + ids, skip_special_tokens=False)
            text = options.openings[index] + whole[start:]
            if len(ids) < FEWEST_SAMPLED or not text.strip():
                self.skipped["empty"] += 1
            elif not self._special.isdisjoint(ids):
                self.skipped["special tokens"] += 1
            elif is_held_out(text, options.held_out):
                self.skipped["held out"] += 1
            else:
                prompts.append((opening + ids + self._after, text, len(ids)))
        return prompts

    def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        """Returns the target's greedy answers to at most `batch_size` prompts."""
        return self.generate(prompts, self.options.max_answer_tokens)

    def shard(self, number: int, seen: set[tuple[int, ...]], progress: Any = None) -> list[Document]:
        """Writes one shard.

        Args:
          seen: prompts of earlier shards, which are not used again; this shard's are added.
          progress: called with (documents, tokens written) after each batch of answers.

        Raises:
          ValueError: hardly any sampled prompt can be used.
        """
        size, batch = self.options.shard_size, self.options.batch_size
        if self._questions:
            # By length, so that little of a batch is padding.
            questions = sorted(self._questions[number * size : (number + 1) * size], key=len)
            prompts = [(ids, 0) for ids in questions]
        else:
            prompts = self._sampled(number, seen)
        documents = []
        for start in range(0, len(prompts), batch):
            part = prompts[start : start + batch]
            answers = self.answers([ids for ids, _ in part])
            documents += [(ids, answer) for (ids, _), answer in zip(part, answers)]
            if progress:
                progress(len(part), sum(sampled for _, sampled in part) + sum(map(len, answers)))
        return documents

    def _sampled(self, number: int, seen: set[tuple[int, ...]]) -> list[tuple[list[int], int]]:
        """Returns prompts of a shard that the target writes, and the number of sampled tokens of each; see `shard`."""
        size, batch = self.options.shard_size, self.options.batch_size
        prompts: list[tuple[list[int], int]] = []
        tries, most = 0, 8 + 16 * -(-size // batch)
        while len(prompts) < size:
            if tries == most:
                raise ValueError(
                    f"shard {number}: only {len(prompts)} of {tries * batch} prompts that the target wrote can be used "
                    f"(skipped so far: {dict(self.skipped)})"
                )
            for ids, _, sampled in self.prompts(number, tries):
                if tuple(ids) in seen:
                    self.skipped["duplicate"] += 1
                elif len(prompts) < size:
                    seen.add(tuple(ids))
                    prompts.append((ids, sampled))
            tries += 1
        return prompts
