"""Text as it comes: in any pieces it is the text of the whole, and ends before the first stop string."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_engines import BytePieces
from tiny_models import VOCAB

from failfast_jax.serving.text import TextStream


class Words:
    """A tokenizer that joins words by what stands before, as SentencePiece does; id 0 is special."""

    words = ("<s>", " a", " b", "c", ".", " the", "é")

    def decode(self, ids, skip_special_tokens=True) -> str:
        return "".join(self.words[token] for token in ids if token).removeprefix(" ")


TOKENIZERS = {"bytes": (BytePieces(), VOCAB), "words": (Words(), 7)}


def cut(ids: list[int], ends: list[int]) -> list[list[int]]:
    """In pieces of these lengths, and the rest."""
    pieces, at = [], 0
    for length in ends:
        pieces.append(ids[at : at + length])
        at += length
    return [*pieces, ids[at:]]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_make_the_whole(name, data):
    tokenizer, vocab = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, vocab - 1), max_size=30))
    stream = TextStream(tokenizer)
    pieces = [stream.add(piece) for piece in cut(ids, data.draw(st.lists(st.integers(0, 5), max_size=12)))]
    pieces.append(stream.add((), last=True))
    assert "".join(pieces) == stream.text == tokenizer.decode(ids)
    assert stream.used == len(ids) and not stream.stopped


@given(
    ids=st.lists(st.integers(1, 5), max_size=30),
    ends=st.lists(st.integers(0, 5), max_size=12),
    stops=st.lists(st.text(alphabet=" abc.", min_size=1, max_size=4), min_size=1, max_size=3),
)
@example(ids=[1, 2, 3], ends=[1, 1], stops=["bc", "a bx"])
def test_it_ends_before_the_first_stop_string(ids, ends, stops):
    tokenizer = Words()
    stream, said = TextStream(tokenizer, stops), ""
    for piece in cut(ids, ends):
        said += stream.add(piece)
        # What was handed out is never taken back.
        assert stream.text == said
        if stream.stopped:
            break
    said += stream.add((), last=True)
    used = next((n for n in range(len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in stops)), None)
    if used is None:
        assert not stream.stopped and said == tokenizer.decode(ids)
        return
    text = tokenizer.decode(ids[:used])
    assert stream.stopped and stream.used == used
    assert said == text[: min(text.index(stop) for stop in stops if stop in text)]
