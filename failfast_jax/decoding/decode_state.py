"""What the compiled loop carries: committed tokens, caches, sampling settings and the log of rounds."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from failfast_jax.models.kv_cache import KVCache

RUNNING, FINISHED_EOS, FINISHED_LENGTH, FAILED = 0, 1, 2, 3
"""Values of `DecodeState.finish`. FAILED: the target's logits are not finite, so that there is no next token."""

MAX_EOS_TOKENS = 8


@flax.struct.dataclass
class Sampling:
    """How the target picks its own token; per sequence, so that a batch may mix settings."""

    temperature: Float[Array, " B"]
    """0 is greedy."""
    top_k: Int[Array, " B"]
    """Keep the k best logits; 0 keeps all."""
    top_p: Float[Array, " B"]
    """Keep the smallest set of best tokens with at least this probability, after top-k; 1 keeps all."""
    seed: UInt[Array, " B"]
    """Randomness is a function of (seed, sequence, position) only."""
    sequence: Int[Array, " B"]
    """Index of the sequence in its request."""


@flax.struct.dataclass
class Logprobs:
    """Log-probabilities at the places of tokens, under the target's softmax as it is: temperature 1, no filters."""

    chosen: Float[Array, "B R"]
    """Of the token itself."""
    best: Int[Array, "B R K"]
    """The most probable tokens, best first; K may be 0."""
    of_best: Float[Array, "B R K"]

    @classmethod
    def zeros(cls, batch: int, rows: int, best: int) -> Logprobs:
        """Buffers."""
        shape = batch, rows, best
        return cls(jnp.zeros((batch, rows)), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))


@flax.struct.dataclass
class Tree:
    """A draft with alternatives: nodes in an order in which parents come first."""

    tokens: Int[Array, "B n"]
    parent: Int[Array, "B n"]
    """0: the last committed token; j + 1: node j."""
    confidence: Float[Array, "B n"]
    """In [0, 1]: of each node behind its parent."""
    size: Int[Array, " B"]
    """Nodes; the rest is padding."""

    @classmethod
    def empty(cls, batch: int, nodes: int) -> Tree:
        """No nodes, in buffers for so many."""
        zeros = jnp.zeros((batch, nodes), jnp.int32)
        return cls(tokens=zeros, parent=zeros, confidence=jnp.zeros((batch, nodes)), size=zeros[:, 0])


@flax.struct.dataclass
class Alternatives:
    """The next best tokens of each drafted position, best first."""

    tokens: Int[Array, "B M K"]
    probability: Float[Array, "B M K"]


@flax.struct.dataclass
class Draft:
    """What a drafter proposes for positions `length .. length + M - 1` of each sequence."""

    tokens: Int[Array, "B M"]
    """Ids; anything beyond `length`."""
    confidence: Float[Array, "B M"]
    """In [0, 1]; for model drafters the largest softmax probability."""
    length: Int[Array, " B"]
    """Number of drafted tokens, 0 .. M."""
    passes: Int[Array, " B"]
    """Forward passes of the drafter that this sequence took part in."""
    q: Float[Array, "B M U"] | None = None
    """Distribution that each token was drawn from, over the drafter's vocabulary: the draft is then accepted by
    rejection sampling. None: argmax or given tokens."""
    alternatives: Alternatives | None = None
    """What `drafters.branch_tree` makes branches of."""
    tree: Tree | None = None
    """Verified instead of `tokens`, which are one of its paths. The log shows `tokens` with the accepted path put over
    their beginning."""
    expected: Float[Array, " B"] | None = None
    """Tokens that the round is expected to emit, and (`seconds`) to take; None where nothing was weighed."""
    seconds: Float[Array, ""] | None = None

    @classmethod
    def empty(cls, batch: int, width: int) -> Draft:
        """No tokens, in buffers for `width` of them."""
        zeros = jnp.zeros((batch,), jnp.int32)
        return cls(
            tokens=jnp.zeros((batch, width), jnp.int32),
            confidence=jnp.zeros((batch, width)),
            length=zeros,
            passes=zeros,
        )


@flax.struct.dataclass
class Verified:
    """What the target says about a draft."""

    picks: Int[Array, "B M1"]
    """The target's own token after the last committed one (column 0) and after each drafted one."""
    features: Float[Array, "B M1 F E"]
    """Residual stream of the requested target layers at the verified positions `length - 1 ...`."""
    finite: Bool[Array, "B M1"]
    """Whether the logits behind each pick are numbers."""
    accepted: Int[Array, " B"]
    """Leading drafted tokens that the target agrees with (of a tree: nodes of the longest such path, along which
    `picks` and `features` lie)."""
    passes: Int[Array, ""]
    """Forward passes of the target."""
    logprobs: Logprobs | None = None
    """Of the picks, if the state keeps them."""


@flax.struct.dataclass
class RoundLog:
    """One row a round; each sequence's rounds are rows 0 .. its own count - 1, whenever it joined the batch."""

    drafted: Int[Array, "B rounds M"]
    confidence: Float[Array, "B rounds M"]
    draft_length: Int[Array, "B rounds"]
    accepted: Int[Array, "B rounds"]
    """Drafted tokens that the target agreed with, before any cut at EOS or at the length limit."""
    emitted: Int[Array, "B rounds"]
    """Tokens appended, after cuts."""
    passes: Int[Array, "B rounds"]
    """Drafter passes."""
    rounds: Int[Array, " B"]
    """Rounds in which the sequence was still running."""
    target_passes: Int[Array, " B"]
    """Forward passes of the target in these rounds, prefill not counted."""
    drafter_passes: Int[Array, ""]
    """Forward passes of the drafter over the batch, prefill not counted."""
    round: Int[Array, ""]
    """Rounds of the batch so far."""
    tree_tokens: Int[Array, "B rounds n"] | None = None
    """The nodes of verified trees, as in `Tree`; None where drafts are rows of tokens."""
    tree_parent: Int[Array, "B rounds n"] | None = None
    tree_size: Int[Array, "B rounds"] | None = None
    expected: Float[Array, "B rounds"] | None = None
    """As in `Draft`; None where nothing is weighed."""
    seconds: Float[Array, "B rounds"] | None = None

    @classmethod
    def zeros(cls, batch: int, rounds: int, max_draft: int, *, trees: bool = False, weighed: bool = False) -> RoundLog:
        """A log without rounds."""

        def counts(*shape: int) -> Int[Array, "..."]:
            return jnp.zeros(shape, jnp.int32)

        return cls(
            drafted=counts(batch, rounds, max_draft),
            confidence=jnp.zeros((batch, rounds, max_draft), jnp.float32),
            draft_length=counts(batch, rounds),
            accepted=counts(batch, rounds),
            emitted=counts(batch, rounds),
            passes=counts(batch, rounds),
            rounds=counts(batch),
            target_passes=counts(batch),
            drafter_passes=counts(),
            round=counts(),
            tree_tokens=counts(batch, rounds, max_draft) if trees else None,
            tree_parent=counts(batch, rounds, max_draft) if trees else None,
            tree_size=counts(batch, rounds) if trees else None,
            expected=jnp.zeros((batch, rounds)) if weighed else None,
            seconds=jnp.zeros((batch, rounds)) if weighed else None,
        )

    def weighed(self, row: int, index: int) -> dict[str, float]:
        """`expected` and `seconds` of a row's round, from a log on the host; none where nothing was weighed."""
        if self.expected is None:
            return {}
        return {"expected": float(self.expected[row, index]), "seconds": float(self.seconds[row, index])}

    def tree_of(self, row: int, index: int) -> dict[str, list[int]] | None:
        """`results.Round.tree` of a row's round, from a log on the host; None: nothing was drafted."""
        if self.tree_size is None or not self.tree_size[row, index]:
            return None
        nodes = row, index, slice(int(self.tree_size[row, index]))
        return {"tokens": self.tree_tokens[nodes].tolist(), "parent": (self.tree_parent[nodes] - 1).tolist()}


@flax.struct.dataclass
class Committed:
    """The part of the state that a drafter reads."""

    tokens: Int[Array, "B T"]
    """Committed ids; anything beyond `length`."""
    length: Int[Array, " B"]
    """Committed tokens: prompt and output."""
    prompt_length: Int[Array, " B"]
    room: Int[Array, " B"]
    """Longest draft that still fits: capacity - length - 1, at least 0."""
    running: Bool[Array, " B"]
    """Sequences that are not finished; the others' drafts are ignored."""
    eos: Int[Array, "B Z"]
    """Stop token ids, padded with -1."""
    sampling: Sampling | None = None
    """For drafters that sample."""


@flax.struct.dataclass
class Outcome:
    """What became of a draft."""

    before: Committed
    """What the draft continued."""
    after: Committed
    draft: Draft
    agreed: Int[Array, " B"]
    """Leading tokens of `draft` that are now part of the text. (Of a tree that took a branch: those before it.)"""
    features: Float[Array, "B M1 F E"]
    """The target's, of positions `before.length - 1 ...`; final for the first `after.length - before.length`."""


@flax.struct.dataclass
class DecodeState:
    """Everything a round reads and writes. The target's cache always holds `length - 1` tokens."""

    tokens: Int[Array, "B T"]
    """Committed ids; anything beyond `length`. T exceeds the capacity by the widest window."""
    length: Int[Array, " B"]
    """Committed tokens: prompt and output."""
    prompt_length: Int[Array, " B"]
    max_length: Int[Array, " B"]
    """Length at which the sequence stops: prompt + max_new_tokens, at most the capacity."""
    finish: Int[Array, " B"]
    """RUNNING, FINISHED_EOS, FINISHED_LENGTH or FAILED."""
    eos: Int[Array, "B Z"]
    """Stop token ids, padded with -1."""
    sampling: Sampling
    target: KVCache
    drafter: Any
    """The drafter's own state, see `decoding.drafter`."""
    log: RoundLog
    capacity: int = flax.struct.field(pytree_node=False)
    """Most tokens that a sequence may hold."""
    logprobs: Logprobs | None = None
    """Of emitted tokens, each at its place in `tokens`; None where nobody is to know them."""

    @property
    def running(self) -> Bool[Array, " B"]:
        """Sequences that are not finished."""
        return self.finish == RUNNING

    @property
    def committed(self) -> Committed:
        """What drafters see of the state."""
        return Committed(
            tokens=self.tokens,
            length=self.length,
            prompt_length=self.prompt_length,
            room=jnp.maximum(self.capacity - self.length - 1, 0),
            running=self.running,
            eos=self.eos,
            sampling=self.sampling,
        )
