"""Encodes prompts: text, messages or token ids, to token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from failfast_jax.errors import PromptError, explaining
from failfast_jax.template_rendering import LONGEST_TEXT, has_template, render
from failfast_jax.text_stream import TextStream

Message = dict[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


def encode(prompt: Any, tokenizer: Any, vocab_size: int, model_name: str, *, template: bool = True) -> list[int]:
    """Encodes a prompt: a string (one user turn, if the tokenizer has a chat template), messages, or ids.

    Args:
      template: False takes a string as it is, whatever the tokenizer has; white space is text, too.

    Raises:
      PromptError: nothing to encode with, an empty prompt or blank turn, or an id outside the vocabulary.
    """
    if not isinstance(prompt, (str, Sequence, np.ndarray, jax.Array)) or isinstance(prompt, bytes):
        raise PromptError(f"a prompt must be text, messages or token ids, got {prompt!r}")
    if not len(prompt):
        raise PromptError("the prompt is empty")
    if isinstance(prompt, str) or isinstance(prompt[0], dict):
        ids = _encode_text(prompt, tokenizer, model_name, template)
    else:
        ids = [_index(token) for token in prompt]
    if not ids:
        raise PromptError("the prompt is empty")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise PromptError(f"token id {token} is outside the vocabulary of {vocab_size} of {model_name}")
    return list(ids)


def _index(token: Any) -> int:
    try:
        return operator.index(token)
    except TypeError:
        raise PromptError(f"{token!r} is no token id: a prompt is text, messages, or whole numbers") from None


def _encode_text(prompt: str | Sequence[Any], tokenizer: Any, model_name: str, template: bool) -> list[int]:
    try:
        for text in _texts(prompt):
            text.encode()
    except UnicodeEncodeError:  # a surrogate
        raise PromptError("the prompt is not valid UTF-8 text") from None
    if tokenizer is None:
        raise PromptError(f"{model_name} has no tokenizer: give token ids (--token-ids) instead of text")
    if isinstance(prompt, str):
        if len(prompt) > LONGEST_TEXT:
            raise PromptError(f"the prompt has {len(prompt)} characters; at most {LONGEST_TEXT} are read")
        if not (template and has_template(tokenizer)):
            return _ids(prompt, tokenizer, model_name)
        if not prompt.strip():
            raise PromptError("the prompt is empty: a user's turn of spaces alone")
        prompt = [{"role": "user", "content": prompt}]
    elif not has_template(tokenizer):
        raise PromptError(f"{model_name} has no chat template: give the prompt as text or token ids")
    text = render(prompt, tokenizer, model_name, add_generation_prompt=True)
    return _ids(text, tokenizer, model_name, add_special_tokens=False)  # the template writes them


def answer_text(tokenizer: Any, prompt: Any, ids: Sequence[int], stop: Sequence[str] = ()) -> TextStream | None:
    """Returns the text stream of an answer; None without a tokenizer.

    It continues the prompt, unless a chat template wrote that: then it is a turn of its own.

    Args:
      prompt: see `encode`.
      ids: token ids of the prompt.
      stop: see `TextStream`.
    """
    if tokenizer is None:
        return None
    turn = has_template(tokenizer) if isinstance(prompt, str) else isinstance(prompt[0], Mapping)
    return TextStream(tokenizer, stop, () if turn else ids)


def _ids(text: str, tokenizer: Any, model_name: str, **options: Any) -> list[int]:
    with explaining(f"{model_name}: its tokenizer cannot take the prompt", PromptError):
        return tokenizer(text, **options)["input_ids"]


def _texts(prompt: Any) -> Iterator[str]:
    """Yields all strings of a prompt: a text, or messages with contents in one piece or in parts."""
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, Mapping):
        yield from _texts(list(prompt.values()))
    elif isinstance(prompt, Iterable):
        for part in prompt:
            yield from _texts(part)


def characters(prompt: Any) -> int:
    """Counts the characters of a text, or of messages; 0 for token ids."""
    return sum(map(len, _texts(prompt)))


def separate(prompts: Any) -> list[Any]:
    """Returns a list of prompts, for one prompt or several.

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
