"""Suffix decoding against brute force, round by round, and its corpus."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, committed, random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.drafters.lookup import LONGEST_MATCH
from failfast_jax.drafters.suffix import MOST_PLACES, SEPARATOR, Corpus, Suffix
from failfast_jax.errors import PromptError

WIDTH, CORPUS, LONGEST = 96, 40, 12
init = jax.jit(lambda drafter: drafter.init(2, WIDTH))
draft_of = jax.jit(lambda drafter, state, now: drafter.draft(state, now))


def suffix(tau: float) -> Suffix:
    return Suffix(tau=np.float32(tau), corpus=Corpus(CORPUS).tokens, min_match=1, max_spec_len=LONGEST)


def by_hand(drafter: Suffix, text: list[int], room: int) -> tuple[list[int], list[float]]:
    """The draft by plain search and counting."""
    searched = [*np.asarray(drafter.corpus).tolist(), SEPARATOR, *text]
    longest, places = 0, []
    for end in range(1, len(searched)):
        length = 0
        while (
            length < min(end, LONGEST_MATCH, len(text))
            and searched[end - 1 - length] == searched[-1 - length] != SEPARATOR
        ):
            length += 1
        if length > longest:
            longest, places = length, []
        if length == longest:
            places.insert(0, end)
    drafted, confidences, chance = [], [], np.float32(1)
    if longest < drafter.min_match:
        return drafted, confidences
    places = places[:MOST_PLACES]
    while len(drafted) < min(drafter.max_spec_len, room):
        text = searched + drafted
        following = [text[place + len(drafted)] for place in places]
        votes = Counter(token for token in following if token != SEPARATOR)
        if not votes:
            break
        best = max(votes.values())
        token = next(token for token in following if votes[token] == best)
        confidence = np.float32(best / len(places)) * np.float32(longest) / np.float32(longest + 1)
        chance *= confidence
        if chance < drafter.tau:
            break
        drafted.append(token)
        confidences.append(confidence)
        places = [place for place, other in zip(places, following) if other == token]
    return drafted, confidences


tokens = st.integers(0, 2)
texts = st.lists(tokens, min_size=1, max_size=50) | st.builds(
    lambda unit, times: (unit * times)[:60],
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(2, 30),
)


@settings(max_examples=100)
@given(
    batch=st.lists(texts, min_size=2, max_size=2),
    earlier=st.lists(st.integers(SEPARATOR, 2), max_size=CORPUS),
    more=st.lists(st.lists(tokens, max_size=12), min_size=2, max_size=6),
    tau=st.sampled_from([0.0, 0.05, 0.11, 0.3, 0.7]),
    room=st.sampled_from([0, 1, 5, 40]),
)
def test_drafts_are_what_most_places_go_on_with(batch, earlier, more, tau, room):
    """In the first round, and in later ones, in which a sequence has grown by some tokens or by none."""
    drafter = suffix(tau)
    corpus = np.asarray([SEPARATOR] * (CORPUS - len(earlier)) + earlier, np.int32)
    drafter = drafter.replace(corpus=corpus)
    state = init(drafter)
    for row, added in enumerate([[], *more]):
        batch[row % 2] = [*batch[row % 2], *added][:WIDTH]
        draft, state = draft_of(drafter, state, committed(batch, WIDTH, room))
        assert draft.tokens.shape == (2, LONGEST) and not draft.passes.any()
        for text, length, *got in zip(batch, draft.length, draft.tokens, draft.confidence):
            drafted, confidence = by_hand(drafter, text, room)
            assert got[0][:length].tolist() == drafted
            np.testing.assert_allclose(got[1][:length], confidence, rtol=1e-6)


def test_a_corpus_forgets_the_oldest_tokens():
    corpus = Corpus(8)
    corpus.add([1, 2, 3])
    assert corpus.tokens.tolist() == [SEPARATOR] * 4 + [1, 2, 3, SEPARATOR]
    corpus.add(np.arange(4, 9))
    assert corpus.tokens.tolist() == [3, SEPARATOR, 4, 5, 6, 7, 8, SEPARATOR]
    corpus.add([])
    corpus.add(range(20))
    assert corpus.tokens.tolist() == [*range(13, 20), SEPARATOR]
    for ids in ([3, -1], [0.5], [[1, 2]], ["a"]):
        with pytest.raises(ValueError, match="a text is a list of token ids"):
            corpus.add(ids)
    for capacity in (0, 2**23, 2.5):
        with pytest.raises(ValueError, match="a corpus needs a capacity of 1 to"):
            Corpus(capacity)


def test_an_engine_learns_from_earlier_answers_without_compiling():
    engine = FailFast(random_model(tiny_config(num_layers=1), seed=1))
    options = {"method": "suffix", "max_new_tokens": 30, "ignore_eos": True, "max_spec_len": 3}
    options |= {"temperature": 1.0, "top_p": 0.9}
    engine.corpus = Corpus(100)
    (first,) = engine.generate([[5, 6, 7]], **options)
    engine.corpus.add(first.prompt_ids + first.output_ids)
    (second,) = engine.generate([[5, 6, 7]], **options)
    assert second.output_ids == first.output_ids
    assert (second.stats.compiles, second.stats.cache_hits) == (0, 0)
    assert second.stats.rounds == 8 < first.stats.rounds  # three drafted tokens and one more in each
    assert second.stats.accepted == second.stats.drafted
    (other,) = engine.generate([[9, 8, 7]], **options)
    assert other.output_ids != first.output_ids
    engine.corpus.add([VOCAB])
    with pytest.raises(PromptError, match=f"the corpus holds token id {VOCAB}, which the target model lacks"):
        engine.generate([[5]], **options)
