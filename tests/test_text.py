"""Streamed text: in any pieces it is the text of the whole, and ends before the first stop string."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_engines import BytePieces
from tiny_models import VOCAB
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import failfast_jax
from failfast_jax.text_stream import UNFINISHED, TextStream, text_of


class Words:
    """A tokenizer that joins words by what stands before, as SentencePiece does; id 0 is special."""

    words = ("<s>", " a", " b", "c", ".", " the", "é")

    def __init__(self):
        self.added_tokens_decoder = {0: AddedToken("<s>", special=True), 4: AddedToken(".", special=False)}

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
    stream, text = TextStream(tokenizer, stops), ""
    for piece in cut(ids, ends):
        text += stream.add(piece)
        # What was handed out is never taken back.
        assert stream.text == text
        if stream.stopped:
            break
    text += stream.add((), last=True)
    used = next((n for n in range(len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in stops)), None)
    if used is None:
        assert not stream.stopped and text == tokenizer.decode(ids)
        return
    whole = tokenizer.decode(ids[:used])
    assert stream.stopped and stream.used == used
    assert text == whole[: min(whole.index(stop) for stop in stops if stop in whole)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@example(data=None)
def test_a_text_that_continues_another_is_the_rest_of_both(name, data):
    """In any pieces, whatever the context ends with: a word, special tokens, or half a character."""
    tokenizer, vocab = TOKENIZERS[name]
    drawn = st.lists(st.integers(0, vocab - 1), max_size=30)
    context, ids = ([1, 0, 0], [2, 3]) if data is None else (data.draw(drawn), data.draw(drawn))
    ends = [] if data is None else data.draw(st.lists(st.integers(0, 5), max_size=12))
    stream = TextStream(tokenizer, context=context)
    text = "".join(stream.add(piece) for piece in cut(ids, ends)) + stream.add((), last=True)
    before, whole = tokenizer.decode(context), tokenizer.decode([*context, *ids])
    if not before.endswith(UNFINISHED):
        assert before + text == whole
    else:
        assert text in (whole[len(before) :], whole[len(before.rstrip(UNFINISHED)) :])


@pytest.mark.parametrize("stops", [["<s>"], ["no such text", "<s>"], ["c", "<s>"]])
def test_the_name_of_a_special_token_is_a_stop_string(stops):
    """It is no part of the text, and neither is what comes after it."""
    stream = TextStream(Words(), stops)
    assert stream.add([1, 2]) + stream.add([0, 3, 1]) == "a b" and stream.stopped and stream.used == 3
    assert stream.add((), last=True) == "" and stream.text == "a b"


def test_a_tokenizer_that_cleans_up_is_not_asked_to():
    """As transformers 5.0 to 5.6 do for any tokenizer of this configuration, Llama 3's among them."""
    letters = {character: id for id, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = tokenizer(text := "I 'm sure , x = [ 1 ] . do n't !")["input_ids"]
    assert tokenizer.decode(ids) != text == text_of(tokenizer, ids)
    stream = TextStream(tokenizer, [" ."])
    assert "".join(stream.add([token]) for token in ids) == text[: text.index(" .")] and stream.stopped


def test_ids_become_text_in_one_place():
    package = Path(failfast_jax.__file__).parent
    decoding = re.compile(r"tokenizer\.(batch_)?decode\(")
    assert [path.name for path in package.rglob("*.py") if decoding.search(path.read_text())] == ["text_stream.py"]
