"""Ids to text as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"
"""What tokenisers write for bytes that are not, or not yet, a character."""


class TextStream:
    """Turns tokens into text as they come; text that was handed out is final.

    Held back is what may still change: the end of a character, and the beginning of a stop string.

    Args:
      tokenizer: a transformers tokenizer.
      stop: strings before the first of which the text ends.

    Attributes:
      text: everything that was handed out.
      stopped: whether a stop string was found.
      used: tokens that the text took, up to the one that completed the stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.text, self.stopped, self.used = "", False, 0
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._shown, self._done = 0, 0
        """Where the window that is decoded begins, and the tokens whose text is in `_whole`."""
        self._whole = ""

    def add(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that is final now and was not before.

        Args:
          last: whether these are the last tokens, so that nothing is to be held back.
        """
        # With stop strings token by token: to know which one completes one.
        parts = [[token] for token in ids] if self._stop else [list(ids)]
        for number, part in enumerate(parts or [[]]):
            if self.stopped:
                break
            self._ids += part
            self.used += len(part)
            self._decode(last and number >= len(parts) - 1)
            self._look_for_stop()
        return self._hand_out(last or self.stopped)

    def _decode(self, last: bool) -> None:
        """Puts the text of whole characters behind `_whole`."""

        def text(ids: list[int]) -> str:
            return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""

        # A few tokens before the new ones are decoded with them: some tokenisers join words by what stands before.
        before = text(self._ids[self._shown : self._done])
        window = text(self._ids[self._shown :])
        if len(window) > len(before) and (last or not window.endswith(UNFINISHED)):
            self._whole += window[len(before) :]
            self._shown, self._done = self._done, len(self._ids)

    def _look_for_stop(self) -> None:
        found = [at for stop in self._stop if (at := self._whole.find(stop, max(len(self.text) - len(stop), 0))) >= 0]
        if found:
            self._whole, self.stopped = self._whole[: min(found)], True

    def _hand_out(self, everything: bool) -> str:
        end = len(self._whole) - (0 if everything else self._possible_stop())
        new = self._whole[len(self.text) : end]
        self.text += new
        return new

    def _possible_stop(self) -> int:
        """Characters at the end that a stop string may begin with."""
        return max(
            (
                length
                for stop in self._stop
                for length in range(1, min(len(stop), len(self._whole) + 1))
                if self._whole.endswith(stop[:length])
            ),
            default=0,
        )
