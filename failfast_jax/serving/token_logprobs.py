"""Log-probabilities as OpenAI's clients read them: of chats, and of completions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from failfast_jax.results import TokenLogprob
from failfast_jax.text import UNFINISHED, text_of

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""
WORD = "▁"
"""In SentencePiece's vocabularies: the space before a word, which decoding a token alone leaves out."""


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
        """A token alone; special ones by their names, parts of characters as U+FFFD."""
        if token not in self._texts:
            found = text_of(self._tokenizer, [token], skip_special_tokens=False)
            missing = self._piece(token).startswith(WORD) and not found.startswith(" ")
            self._texts[token] = f" {found}" if missing else found
        return self._texts[token]

    def bytes(self, token: int) -> list[int] | None:
        """UTF-8 of a token; None where a part of a character cannot be told."""
        text, piece = self.text(token), self._piece(token)
        if UNFINISHED not in text:
            return list(text.encode())
        if named := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
            return [int(named[1], 16)]
        known = piece and all(character in self._bytes for character in piece)
        return [self._bytes[character] for character in piece] if known else None

    def name(self, token: int) -> str:
        """A token's text, or for parts of characters another name that no other token has."""
        text = self.text(token)
        if text and UNFINISHED not in text:
            return text
        found = self.bytes(token)
        return "bytes:" + "".join(rf"\x{byte:02x}" for byte in found) if found else f"token_id:{token}"

    def _piece(self, token: int) -> str:
        """As it stands in the vocabulary."""
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        return (convert(token) if convert else None) or ""


def of_chat(spelling: Spelling, ids: Sequence[int], found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        spelled = {"token": spelling.text(token), "bytes": spelling.bytes(token)}
        return {**spelled, "logprob": max(logprob, LEAST)}

    content = [
        {**one(token, entry.logprob), "top_logprobs": [one(*best) for best in entry.best]}
        for token, entry in zip(ids, found)
    ]
    return {"content": content, "refusal": None}


def of_completion(
    spelling: Spelling, ids: Sequence[int], found: Sequence[TokenLogprob], offset: int, best: int
) -> dict[str, Any]:
    """`logprobs` of a completion's choice.

    Args:
      offset: characters before these tokens where they do not know their places in a text.
      best: most probable tokens that were asked for; the picked one stands beside them where it is none of them.
    """
    tokens, offsets = [spelling.name(token) for token in ids], []
    for token, entry in zip(ids, found):
        offsets.append(offset if entry.offset is None else entry.offset)
        offset += len(spelling.text(token))

    def top(token: int, entry: TokenLogprob) -> dict[str, float]:
        # The better one of two tokens with one text comes first.
        pairs = [(token, entry.logprob), *reversed(entry.best)]
        return {spelling.name(one): max(logprob, LEAST) for one, logprob in pairs}

    return {
        "tokens": tokens,
        "token_logprobs": [max(entry.logprob, LEAST) for entry in found],
        "top_logprobs": [top(*one) for one in zip(ids, found)] if best else None,
        "text_offset": offsets,
    }
