"""State of the compiled loop: committed tokens, caches, sampling settings and the log of rounds.

Shapes: B sequences, M drafted tokens, n nodes of a tree, T positions of a buffer, V ids of the target's vocabulary, U
of the drafter's, F captured layers of width E.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from failfast_jax.models.kv_cache import KVCache

RUNNING, FINISHED_EOS, FINISHED_LENGTH, FAILED = 0, 1, 2, 3
"""Values of `DecodeState.finish`. FAILED: the target's logits are not finite, so there is no next token."""

MAX_EOS_TOKENS = 8


@flax.struct.dataclass
class Sampling:
    """Settings of the target's pick; per sequence, so that a batch may mix them. Temperature 0 is greedy."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    """Keep the k best logits; 0 keeps all."""
    top_p: Float[Array, " B"]
    """Keep the smallest set of best tokens with at least this probability, after top-k; 1 keeps all."""
    seed: UInt[Array, " B"]
    sequence: Int[Array, " B"]
    """Index of the sequence in its request. Randomness is a function of (seed, sequence, position) only."""


@flax.struct.dataclass
class Prompts:
    """A batch of prompts, and the `sampling` settings of their answers."""

    tokens: Int[Array, "B P"]
    """Token ids, padded on the right with anything."""
    length: Int[Array, " B"]
    """At least 1."""
    eos: Int[Array, "B Z"]
    """Stop token ids of each sequence, padded with -1: see `stop_tokens`."""
    sampling: Sampling


@flax.struct.dataclass
class Logprobs:
    """Log-probabilities of tokens under the target's plain softmax: temperature 1, no filters."""

    chosen: Float[Array, "B R"]
    """That of the token itself."""
    best: Int[Array, "B R K"]
    """The most probable tokens, best first; K may be 0."""
    of_best: Float[Array, "B R K"]

    @classmethod
    def zeros(cls, batch: int, rows: int, best: int) -> Logprobs:
        """Returns empty buffers."""
        shape = batch, rows, best
        return cls(jnp.zeros((batch, rows)), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))


@flax.struct.dataclass
class Tree:
    """A draft with alternatives: nodes in an order in which parents come first.

    Example: `a`, then either `b` or `c`, or `d` at once: tokens a b c d, parent 0 1 1 0.
    """

    tokens: Int[Array, "*B n"]
    parent: Int[Array, "*B n"]
    """0: the last committed token; j + 1: node j."""
    size: Int[Array, "*B"]
    """Number of nodes; the rest is padding."""
    confidence: Float[Array, "*B n"] | None
    """In [0, 1]: of each node, given its parent. None in the log."""


@flax.struct.dataclass
class Forecast:
    """Tokens and time that a round chosen by costs should emit and take."""

    tokens: Float[Array, "*B"]
    seconds: Float[Array, "*B"]
    """Of the whole batch."""
    width: Int[Array, "*B"]
    """Rows of the verify."""


@flax.struct.dataclass
class Draft:
    """A drafter's proposal for positions `length .. length + M - 1` of each sequence."""

    tokens: Int[Array, "B M"]
    """Ids; anything beyond `length`."""
    confidence: Float[Array, "B M"]
    """In [0, 1]; for model drafters the largest softmax probability."""
    length: Int[Array, " B"]
    passes: Int[Array, " B"]
    """Forward passes of the drafter that this sequence took part in."""
    q: Float[Array, "B M U"] | None = None
    """Distribution that each token was drawn from, over the drafter's vocabulary: the draft is then accepted by
    rejection sampling. None: argmax or given tokens."""
    tree: Tree | None = None
    """Verified instead of `tokens`, which are one of its paths. The log shows `tokens` with the accepted path over
    their beginning."""
    forecast: Forecast | None = None
    """Set by drafters that choose by costs (`Drafter.uses_costs`)."""

    @classmethod
    def empty(cls, batch: int, width: int) -> Draft:
        """Returns drafts without tokens, in buffers for `width` of them."""
        tokens, none = jnp.zeros((batch, width), jnp.int32), jnp.zeros(batch, jnp.int32)
        return cls(tokens=tokens, confidence=jnp.zeros((batch, width)), length=none, passes=none)


@flax.struct.dataclass
class Verified:
    """The target's verdict on a draft."""

    picks: Int[Array, "B M1"]
    """The target's own token after the last committed one (column 0) and after each drafted one."""
    features: Float[Array, "B M1 F E"]
    """Residual stream of the requested target layers at the verified positions `length - 1 ...`."""
    finite: Bool[Array, "B M1"]
    """True if the logits of the pick are numbers."""
    accepted: Int[Array, " B"]
    """Leading drafted tokens that the target agrees with (in a tree: nodes of the longest such path, along which
    `picks` and `features` lie)."""
    passes: Int[Array, ""]
    """Forward passes of the target."""
    logprobs: Logprobs | None = None
    """Those of the picks, if the state keeps them."""


@flax.struct.dataclass
class RoundLog:
    """One entry per round; a sequence's rounds are entries 0 .. `rounds` - 1, whenever it joined the batch."""

    integers: Int[Array, "B rounds integers"]
    floats: Float[Array, "B rounds floats"]
    """The columns named below, side by side: each write takes microseconds, whatever its size."""
    rounds: Int[Array, " B"]
    """Rounds in which the sequence was still running."""
    target_passes: Int[Array, " B"]
    """Forward passes of the target in these rounds, prefill not counted."""
    drafter_passes: Int[Array, ""]
    """Forward passes of the drafter over the batch, prefill not counted."""
    round: Int[Array, ""]
    """Rounds of the batch so far."""
    tree: Tree | None = None
    """The verified trees, with leaves `[B, rounds, ...]`; None for chains."""

    draft_length = property(lambda log: log.integers[..., 0])
    accepted = property(lambda log: log.integers[..., 1])
    """Drafted tokens that the target agreed with, before any cut at EOS or at the length limit."""
    emitted = property(lambda log: log.integers[..., 2])
    """Tokens appended, after cuts."""
    passes = property(lambda log: log.integers[..., 3])
    """Drafter passes."""
    width = property(lambda log: log.integers[..., 4])
    """Rows of the verify; 0 without a forecast, as `expected` (tokens) and `seconds` are."""
    drafted = property(lambda log: log.integers[..., 5:])
    expected = property(lambda log: log.floats[..., 0])
    seconds = property(lambda log: log.floats[..., 1])
    confidence = property(lambda log: log.floats[..., 2:])

    @classmethod
    def zeros(cls, batch: int, rounds: int, max_draft: int, *, trees: bool = False) -> RoundLog:
        """Returns a log without rounds; every leaf has memory of its own, as states are donated."""

        def zeros(*shape: int, dtype: Any = jnp.int32) -> Array:
            return jnp.zeros((batch, rounds, *shape), dtype)

        return cls(
            integers=zeros(5 + max_draft),
            floats=zeros(2 + max_draft, dtype=jnp.float32),
            **{name: jnp.zeros(batch, jnp.int32) for name in ("rounds", "target_passes")},
            **{name: jnp.zeros((), jnp.int32) for name in ("drafter_passes", "round")},
            tree=Tree(zeros(max_draft), zeros(max_draft), zeros(), confidence=None) if trees else None,
        )


@flax.struct.dataclass
class Committed:
    """The part of the state that a drafter reads."""

    tokens: Int[Array, "B T"]
    """Committed ids, prompt and output; anything beyond `length`."""
    length: Int[Array, " B"]
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
    """The result of a round, for the drafter to learn from."""

    before: Committed
    """The text that the draft continued."""
    after: Committed
    draft: Draft
    agreed: Int[Array, " B"]
    """Leading tokens of `draft` that are now part of the text (in a tree that took a branch: those before it)."""
    features: Float[Array, "B M1 F E"]
    """The target's, of positions `before.length - 1 ...`; final for the first `after.length - before.length`."""


@flax.struct.dataclass
class DecodeState:
    """Everything a round reads and writes. The target's cache always holds `length - 1` tokens."""

    tokens: Int[Array, "B T"]
    """Committed ids, prompt and output; anything beyond `length`. T exceeds the capacity by the widest window."""
    length: Int[Array, " B"]
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
    features: Float[Array, "B rows F E"]
    """The newest verify's, see `Verified`: the next one writes over them, which costs less than zeros."""
    capacity: int = flax.struct.field(pytree_node=False)
    """Maximum number of tokens of a sequence."""
    logprobs: Logprobs | None = None
    """Those of emitted tokens, each at its place in `tokens`; None if they are not kept."""

    running = property(lambda state: state.finish == RUNNING)
    """`[B]`: sequences that are not finished."""
    steps = property(lambda state: state.log.round)
    """Rounds of the batch so far."""

    @property
    def committed(self) -> Committed:
        """The part that drafters read."""
        return Committed(
            tokens=self.tokens,
            length=self.length,
            prompt_length=self.prompt_length,
            room=jnp.maximum(self.capacity - self.length - 1, 0),
            running=self.running,
            eos=self.eos,
            sampling=self.sampling,
        )
