"""SuffixDecoding (arXiv:2411.04975): what followed the last tokens at all earlier places, by majority. No model.

The suffix trees of the paper become compares of the whole text with its last tokens, as in `lookup`. That has static
shapes, and a tree's counts are the votes of the matching places.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, no_type_check

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from failfast_jax.decoding.decode_state import Draft
from failfast_jax.decoding.drafter import Drafter, DraftShape
from failfast_jax.drafters.lookup import LONGEST_MATCH, matches, usual_length
from failfast_jax.options import LONGEST_DRAFT, MethodOptions, Site, option

SEPARATOR = -1
"""Stands between the texts of a corpus and in its unused part; no token equals it."""
MOST_PLACES = 64
"""Most places that vote: the latest ones with the longest match."""


class Corpus:
    """Earlier texts for `Suffix` to draft from, in a buffer of fixed size: the oldest tokens make room for new ones.

    Args:
      capacity: tokens that it holds, and one more for each text.
    """

    @no_type_check  # A wrong type is refused here, by name.
    def __init__(self, capacity: int) -> None:
        if not isinstance(capacity, (int, np.integer)) or not 1 <= capacity < 2**23:
            raise ValueError(f"a corpus needs a capacity of 1 to {2**23 - 1} tokens, got {capacity!r}")
        self.tokens = np.full(capacity, SEPARATOR, np.int32)
        """The texts, the latest one last, each followed by `SEPARATOR`."""

    def add(self, ids: Iterable[Any]) -> None:
        """Appends a text; ValueError: something in it is not a token id."""
        ids = np.asarray(list(ids))
        if ids.ndim != 1 or (ids.size and (not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0)):
            raise ValueError(f"a text is a list of token ids, got {ids.tolist()!r:.80}")
        text = np.append(ids, SEPARATOR).astype(np.int32)
        self.tokens = np.concatenate([self.tokens, text])[-len(self.tokens) :]


@flax.struct.dataclass
class _Vote:
    """Carry of the drafting loop."""

    index: Int[Array, ""]
    """Tokens voted on."""
    draft: Draft
    chance: Float[Array, " B"]
    """Product of the draft's confidences: that its last token is accepted."""
    agrees: Bool[Array, "B voters"]
    """Places that went on like the draft so far."""
    growing: Bool[Array, " B"]


@functools.partial(flax.struct.dataclass, kw_only=True)
class Suffix(Drafter):
    """Drafts, token by token, what most places with the longest match went on with; on ties what the latest one did.

    A token's confidence is its share of the votes times m / (m + 1) for a match of m tokens. The draft ends where
    the product of its confidences, the gain to expect of one more token, falls below `tau`. A round without a match of
    at least `min_match` tokens is a plain step of the target.
    """

    tau: Float[ArrayLike, ""]
    corpus: Int[Array, " corpus"]
    """Earlier texts with `SEPARATOR` between them; may be empty."""
    min_match: int = flax.struct.field(pytree_node=False, default=2)
    max_spec_len: int = flax.struct.field(pytree_node=False, default=63)

    @property
    def shape(self) -> DraftShape:
        return DraftShape(longest=self.max_spec_len, lengths=tuple(range(self.max_spec_len + 1)))

    def draft(self, state, committed):
        batch = committed.length.shape[0]
        earlier = jnp.append(self.corpus, SEPARATOR)
        text = jnp.concatenate([jnp.broadcast_to(earlier, (batch, earlier.size)), committed.tokens], axis=1)
        end = earlier.size + committed.length
        # The latest places after the longest match vote, latest first (-1: none).
        matched, places = matches(text, end), 1 + jnp.arange(text.shape[1])
        longest = matched.max(1)
        # As floats, exact up to 2^24: on CPU top_k of integers sorts the whole text.
        rank = jnp.where(matched == longest[:, None], places, -1).astype(jnp.float32)
        latest = jax.lax.top_k(rank, min(MOST_PLACES, rank.shape[1]))[0].astype(jnp.int32)
        start = _Vote(
            index=jnp.int32(0),
            draft=Draft.empty(batch, self.max_draft),
            chance=jnp.ones((batch,)),
            agrees=latest >= 0,
            growing=committed.running & (committed.room > 0) & (longest >= self.min_match),
        )

        def count_votes(vote: _Vote) -> _Vote:
            """Drafts one more token: what most places go on with."""
            at = latest + vote.index
            # A continuation that reaches the end of the text goes on with the draft.
            drafted = jnp.clip(at - end[:, None], 0, self.max_draft - 1)
            following = jnp.where(
                at < end[:, None],
                jnp.take_along_axis(text, jnp.clip(at, 0, text.shape[1] - 1), axis=1),
                jnp.take_along_axis(vote.draft.tokens, drafted, axis=1),
            )
            ballots = vote.agrees & (following != SEPARATOR)
            votes = jnp.sum(ballots[:, None] & (following[:, :, None] == following[:, None]), axis=2) * ballots
            winner = jnp.argmax(votes, axis=1)[:, None]  # the latest place comes first
            token = jnp.take_along_axis(following, winner, axis=1)
            share = votes.max(1) / jnp.maximum(vote.agrees.sum(1), 1)
            confidence = share * longest / (longest + 1.0)
            chance = vote.chance * confidence
            growing, index = vote.growing & (chance >= self.tau) & (chance > 0), vote.index + 1
            draft = vote.draft.replace(
                tokens=vote.draft.tokens.at[:, vote.index].set(token[:, 0]),
                confidence=vote.draft.confidence.at[:, vote.index].set(confidence),
                length=jnp.where(growing, index, vote.draft.length),
            )
            growing &= index < jnp.minimum(self.max_draft, committed.room)
            return _Vote(index, draft, chance, ballots & (following == token), growing)

        vote = jax.lax.while_loop(lambda vote: jnp.any(vote.growing), count_votes, start)
        return vote.draft, state


@dataclasses.dataclass(frozen=True)
class SuffixOptions(MethodOptions):
    """Options of `suffix`."""

    summary = "the text itself and a corpus (SuffixDecoding): what most places with the longest match go on with"

    tau: float = option(0.05, "product of the confidences below which a draft ends", least=0, most=1)
    max_spec_len: int | None = option(None, "longest draft (15 on CPU, 63 elsewhere)", least=1, most=LONGEST_DRAFT)
    lookup_min: int = option(2, "shortest match that it drafts from", least=1, most=LONGEST_MATCH)

    def build(self, site: Site) -> Suffix:
        return Suffix(
            tau=np.float32(self.tau),
            corpus=np.zeros(0, np.int32) if site.corpus is None else site.corpus,
            min_match=self.lookup_min,
            max_spec_len=self.max_spec_len or usual_length(site.platform),
        )
