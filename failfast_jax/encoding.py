"""Prompts as users give them: text, messages or token ids, to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from failfast_jax.errors import PromptError

Message = dict[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


def encode(prompt: Any, tokenizer: Any, vocab_size: int, model_name: str, *, template: bool = True) -> list[int]:
    """Token ids of a prompt: a string (one user turn, if the tokenizer has a chat template), messages, or ids.

    Args:
      template: False takes a string as it is, whatever the tokenizer has.

    Raises:
      PromptError: nothing to encode with, an empty prompt, or an id outside the vocabulary.
    """
    if not len(prompt) or (isinstance(prompt, str) and not prompt.strip()):
        raise PromptError("the prompt is empty")
    if isinstance(prompt, str) or isinstance(prompt[0], dict):
        ids = _encode_text(prompt, tokenizer, model_name, template)
    else:
        ids = [int(token) for token in prompt]
    if not ids:
        raise PromptError("the prompt is empty")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise PromptError(f"token id {token} is outside the vocabulary of {vocab_size} of {model_name}")
    return list(ids)


def _encode_text(prompt: str | Sequence[Message], tokenizer: Any, model_name: str, template: bool) -> list[int]:
    if any("\ud800" <= character <= "\udfff" for text in _texts(prompt) for character in text):
        raise PromptError("the prompt is not valid UTF-8 text")
    if tokenizer is None:
        raise PromptError(f"{model_name} has no tokenizer: give token ids (--token-ids) instead of text")
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if isinstance(prompt, str):
        if not (has_template and template):
            return tokenizer(prompt)["input_ids"]
        prompt = [{"role": "user", "content": prompt}]
    elif not has_template:
        raise PromptError(f"{model_name} has no chat template: give the prompt as text or token ids")
    return tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=True, return_dict=False)


def _texts(prompt: Any) -> Iterator[str]:
    """All strings of a prompt: a text, or messages with contents in one piece or in parts."""
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, Mapping):
        yield from _texts(list(prompt.values()))
    elif isinstance(prompt, Iterable):
        for part in prompt:
            yield from _texts(part)


def separate(prompts: Any) -> list[Any]:
    """One prompt or several, as a list of prompts.

    Raises:
      PromptError: neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (np.ndarray, jax.Array)):
        prompts = np.asarray(prompts).tolist()
    if not isinstance(prompts, Iterable):
        raise PromptError(f"prompts must be text, messages, token ids, or a list of them, got {prompts!r}")
    prompts = list(prompts)
    if not prompts:
        raise PromptError("the prompt is empty")
    single = isinstance(prompts[0], (dict, int, np.integer))
    return [prompts] if single else prompts
