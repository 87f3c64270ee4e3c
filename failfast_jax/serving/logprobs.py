"""Log-probabilities as OpenAI's clients read them: of chats, and of completions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from failfast_jax.results import TokenLogprob
from failfast_jax.text_stream import UNFINISHED, text_of

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""
WORD_START = "▁"
"""In SentencePiece's vocabularies: the space before a word, which decoding a single token leaves out."""


class Spelling:
    """Single tokens as text and as bytes.

    Args:
      tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer, self._texts = tokenizer, {}
        self._bytes = {character: byte for byte, character in bytes_to_unicode().items()}

    def text(self, token: int) -> str:
        """Returns a token's text: special tokens by name, partial characters as U+FFFD."""
        if token not in self._texts:
            text = text_of(self._tokenizer, [token], skip_special_tokens=False)
            lacks_space = self._piece(token).startswith(WORD_START) and not text.startswith(" ")
            self._texts[token] = f" {text}" if lacks_space else text
        return self._texts[token]

    def bytes(self, token: int) -> list[int] | None:
        """Returns a token's UTF-8 bytes; None for a partial character whose bytes the vocabulary does not tell."""
        text, piece = self.text(token), self._piece(token)
        if UNFINISHED not in text:
            return list(text.encode())
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
            return [int(byte[1], 16)]
        known = piece and all(character in self._bytes for character in piece)
        return [self._bytes[character] for character in piece] if known else None

    def name(self, token: int) -> str:
        """Returns a token's text; for partial characters a unique name such as `bytes:\\xf0`."""
        text = self.text(token)
        if text and UNFINISHED not in text:
            return text
        spelled = self.bytes(token)
        return "bytes:" + "".join(rf"\x{byte:02x}" for byte in spelled) if spelled else f"token_id:{token}"

    def _piece(self, token: int) -> str:
        """The token's entry in the vocabulary."""
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        return (convert(token) if convert else None) or ""


def of_chat(spelling: Spelling, ids: Sequence[int], entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Returns `logprobs` of a chat's choice."""

    def entry_of(token: int, logprob: float) -> dict[str, Any]:
        return {"token": spelling.text(token), "bytes": spelling.bytes(token), "logprob": max(logprob, MIN_LOGPROB)}

    content = [
        {**entry_of(token, entry.logprob), "top_logprobs": [entry_of(*best) for best in entry.best]}
        for token, entry in zip(ids, entries)
    ]
    return {"content": content, "refusal": None}


def of_completion(
    spelling: Spelling, ids: Sequence[int], entries: Sequence[TokenLogprob], offset: int, best: int
) -> dict[str, Any]:
    """Returns `logprobs` of a completion's choice. A partial character counts as one U+FFFD in the offsets.

    Args:
      offset: characters of the text before these tokens.
      best: number of most probable tokens that were requested; the picked token is reported beside them.
    """

    def top(token: int, entry: TokenLogprob) -> dict[str, float]:
        # Of two tokens with the same text the more probable one overwrites the other.
        pairs = [(token, entry.logprob), *reversed(entry.best)]
        return {spelling.name(other): max(logprob, MIN_LOGPROB) for other, logprob in pairs}

    # Tokens of 4 and 3 characters after 7 others begin at [7, 11].
    offsets = list(itertools.accumulate((len(spelling.text(token)) for token in ids), initial=offset))[:-1]
    return {
        "tokens": [spelling.name(token) for token in ids],
        "token_logprobs": [max(entry.logprob, MIN_LOGPROB) for entry in entries],
        "top_logprobs": [top(*pair) for pair in zip(ids, entries)] if best else None,
        "text_offset": offsets,
    }
