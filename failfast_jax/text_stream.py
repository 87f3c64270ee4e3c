"""Decodes token ids to text, as a whole or as they come, up to a stop string."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from failfast_jax.results import Result, StreamEvent

UNFINISHED = "\ufffd"
"""The character that tokenizers write for bytes that are no complete character."""
SHORTEST_TAIL, LONGEST_TAIL = 4, 20
"""Tokens of a context that are decoded with the text after it: enough for a word, and for any character."""


def text_of(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Decodes ids exactly as the tokenizer spells them.

    Tokenizers of transformers may be configured to remove spaces before punctuation as well, which changes text that
    was already handed out (and which newer versions ignore for most tokenizers): never here.
    """
    cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    options = {"clean_up_tokenization_spaces": False} if cleans else {}
    return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, **options)


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Names of the tokens that `text_of` skips, by id."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {id: str(token) for id, token in added.items() if token.special}


class TextStream:
    """Turns tokens into text as they come; text that was handed out is final.

    Held back is text that may still change: the end of a character, and the beginning of a stop string.

    Args:
      tokenizer: a transformers tokenizer.
      stop: strings before the first of which the text ends, or names of special tokens, which the text does not have.
      context: ids that the text continues, so that a space between the two is kept (SentencePiece drops the first
        space of a text); none for a text of its own, such as a turn of a conversation.

    Attributes:
      text: all text that was handed out.
      stopped: True once a stop string was found.
      used: tokens that the text took, up to the token that completed the stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), context: Sequence[int] = ()):
        self.text, self.stopped, self.used = "", False, 0
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._stop_ids = {id for id, name in special_tokens(tokenizer).items() if name in stop} if stop else set()
        self._ids = _tail(tokenizer, context)
        self._shown, self._done = 0, len(self._ids)
        """Start of the window that is decoded, and the number of tokens whose text is in `_whole`."""
        self._whole = ""

    def add(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that is final now and was not before.

        Args:
          last: True for the last tokens: nothing is held back.
        """
        # Token by token if it matters which token completes a stop string.
        parts = [[token] for token in ids] if self._stop else [list(ids)]
        for number, part in enumerate(parts or [[]]):
            if self.stopped:
                break
            self._ids += part
            self.used += len(part)
            self._decode(last and number >= len(parts) - 1)
            # No stop string begins in text that was handed out.
            ends = [at for stop in self._stop if (at := self._whole.find(stop, len(self.text))) >= 0]
            if ends or not self._stop_ids.isdisjoint(part):
                self._whole, self.stopped = self._whole[: min(ends, default=None)], True
        # Characters at the end that a stop string may begin with.
        starts = [stop[:length] for stop in self._stop for length in range(1, len(stop))]
        possible = max((len(start) for start in starts if self._whole.endswith(start)), default=0)
        held = 0 if last or self.stopped else possible
        new = self._whole[len(self.text) : len(self._whole) - held]
        self.text += new
        return new

    def _decode(self, last: bool) -> None:
        """Appends whole characters to `_whole`."""
        # A few tokens before the new ones are decoded with them: some tokenizers join words by their left neighbours.
        # With "Hello" handed out, before = "Hello" and window = "Hello world": " world" is new.
        before = text_of(self._tokenizer, self._ids[self._shown : self._done])
        window = text_of(self._tokenizer, self._ids[self._shown :])
        # A context may end inside a character: "a\ufffd", then "aé".
        start = len(before if window.startswith(before) else before.rstrip(UNFINISHED))
        if len(window) > start and (last or not window.endswith(UNFINISHED)):
            self._whole += window[start:]
            self._shown, self._done = self._done, len(self._ids)


def _tail(tokenizer: Any, context: Sequence[int]) -> list[int]:
    """The last ids of a context, from the beginning of a character on."""
    for length in range(SHORTEST_TAIL, min(len(context), LONGEST_TAIL)):
        text = text_of(tokenizer, context[-length:])
        if text.strip(UNFINISHED) and not text.startswith(UNFINISHED):
            return list(context[-length:])
    return list(context)


class SequenceEvents:
    """Turns the ids of one sequence, as they grow, into events with the new ids and their text.

    Args:
      sequence: index of the prompt.
      text: the answer's text stream; None without a tokenizer.
    """

    def __init__(self, sequence: int, text: TextStream | None):
        self.sequence, self.text, self.sent = sequence, text, 0

    def event(self, ids: Sequence[int], result: Result | None = None) -> StreamEvent:
        """The event of all ids so far; with the result it is the last one."""
        new, self.sent = list(ids[self.sent :]), len(ids)
        text = None if self.text is None else self.text.add(new, last=result is not None)
        if result is not None and self.text is not None:
            result = dataclasses.replace(result, text=self.text.text)
        return StreamEvent(self.sequence, new, text, result)
