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
      stop: strings before the first of which the text ends. Special tokens are found by their names as well, though
        the text does not have them.
      context: ids that the text continues, so that a space between the two is kept (SentencePiece drops the first
        space of a text); none for a text of its own, such as a turn of a conversation.
      offsets: True records `offsets`.

    Attributes:
      text: all text that was handed out.
      stopped: True once a stop string was found.
      used: tokens that the text took, up to the token that completed the stop string.
      offsets: characters of the text before each token.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), context: Sequence[int] = (), *, offsets: bool = False):
        self.text, self.stopped, self.used = "", False, 0
        self.offsets: list[int] = []
        self._tokenizer, self._stop, self._singly = tokenizer, tuple(stop), offsets or bool(stop)
        self._names = special_tokens(tokenizer) if stop else {}
        self._ids = _tail(tokenizer, context)
        self._shown, self._done = 0, len(self._ids)
        """Start of the window that is decoded, and the number of tokens whose text is in `_whole`."""
        self._whole = self._searched = ""
        """The text, and the same with the names of special tokens, in which stop strings are looked for."""
        self._hidden: list[tuple[int, int]] = []
        """Start and length in `_searched` of each such name."""
        self._looked = 0

    def add(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that is final now and was not before.

        Args:
          last: True for the last tokens: nothing is held back.
        """
        # Token by token where it matters which token completes a stop string, or where a token begins.
        parts = [[token] for token in ids] if self._singly else [list(ids)]
        for number, part in enumerate(parts or [[]]):
            if self.stopped:
                break
            if self._singly:
                self.offsets += [len(self._whole)] * len(part)
            self._ids += part
            self.used += len(part)
            self._decode(last and number >= len(parts) - 1)
            for name in filter(None, map(self._names.get, part)):
                self._hidden.append((len(self._searched), len(name)))
                self._searched += name
            self._look_for_stop()
        return self._hand_out(last or self.stopped)

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
            self._searched += window[start:]
            self._shown, self._done = self._done, len(self._ids)

    def _look_for_stop(self) -> None:
        ends = []
        for stop in self._stop:
            if (at := self._searched.find(stop, max(self._looked - len(stop), 0))) >= 0:
                ends.append(self._place(at))
            # The text itself: "a<s>b" has "a<s>" and "ab". A stop string cannot begin in text that was handed out.
            if (at := self._whole.find(stop, len(self.text))) >= 0:
                ends.append(at)
        self._looked = len(self._searched)
        if ends:
            self._whole, self.stopped = self._whole[: min(ends)], True

    def _place(self, at: int) -> int:
        """The place in `_whole` of one in `_searched`: `ab</s>c` has `c` at 6, which is 2 in `abc`."""
        return at - sum(min(at - start, length) for start, length in self._hidden if start < at)

    def _hand_out(self, everything: bool) -> str:
        end = len(self._whole)
        if not everything:
            spelled = self._place(len(self._searched) - self._possible_stop(self._searched))
            end = min(spelled, end - self._possible_stop(self._whole))
        new = self._whole[len(self.text) : end]
        self.text += new
        return new

    def _possible_stop(self, text: str) -> int:
        """Characters at the end of a text that a stop string may begin with."""
        return max(
            (
                length
                for stop in self._stop
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )


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
