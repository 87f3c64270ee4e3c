"""Training documents: what is read, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import VOCAB
from training_runs import LENGTH, load, write_data

from failfast_jax.errors import DataError
from failfast_jax.train.documents import Documents, batches, write_documents


def test_documents_are_read_as_they_were_written(tmp_path, documents):
    path = write_data(tmp_path / "b.npz", documents=3)
    stored = np.load(path)
    cut = load(path, longest=20)
    assert len(cut) == 3
    np.testing.assert_array_equal(cut.prompt_length, stored["prompt_len"])
    first = np.concatenate([stored["prompt"][: stored["prompt_len"][0]], stored["answer"][: stored["answer_len"][0]]])
    np.testing.assert_array_equal(cut.tokens[0], first[:20])
    write_documents(tmp_path / "a.npz", documents.pairs(), VOCAB)
    again = load(tmp_path / "a.npz")
    assert again.digest() == documents.digest()
    assert again.take([1, 0]).digest() != again.take([0, 1]).digest()
    # A folder, in the order of its names.
    np.testing.assert_array_equal(load(tmp_path, longest=20).tokens[len(again)], cut.tokens[0])
    write_documents(tmp_path / "wide.npz", [([70_000, 1], [2]), ([3], [4, 5])], vocab_size=65_537)
    with np.load(tmp_path / "wide.npz") as wide:
        assert wide["prompt"].dtype == wide["answer"].dtype == np.uint32 and wide["prompt"].tolist() == [70_000, 1, 3]


BROKEN = [
    ({"answer": np.full(1, 39, np.uint16)}, "answer_len must hold lengths of at least 1"),
    ({"answer_len": np.full(12, -1, np.int32)}, "answer_len must hold lengths of at least 1"),
    ({"prompt": np.zeros(5, np.float32)}, "'prompt'"),
    ({"prompt_len": np.int32([3]), "prompt": np.full(3, 2, np.uint16)}, "1 prompts, but 12 answers"),
    ({"answer_len": np.int32([2, 3]), "answer": np.uint16([2, 3, 4, 40, 5])}, "document 1: token id 40 in 'answer'"),
]


@pytest.mark.parametrize("changes, words", BROKEN, ids=lambda value: value if isinstance(value, str) else "")
def test_broken_arrays_are_refused(tmp_path, changes, words):
    with pytest.raises(DataError, match=rf"bad\.npz: .*{words}"):
        load(write_data(tmp_path / "bad.npz", **changes))


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    whole = write_data(tmp_path / "cut.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    np.savez(tmp_path / "part.npz", prompt=np.arange(3))
    for name, words in {"text": "", "cut": "", "part": "'prompt_len'", "none": "no such file"}.items():
        with pytest.raises(DataError, match=rf"{name}\.npz: .*{words}"):
            load(tmp_path / f"{name}.npz")


def test_short_documents_are_refused_or_skipped(tmp_path):
    path = write_data(tmp_path / "a.npz")
    lengths = sorted(len(row) for row in load(path).tokens)
    with pytest.raises(DataError, match=r"a\.npz: document \d+ .*--skip-short"):
        load(path, shortest=lengths[2])
    assert len(load(path, shortest=lengths[2], skip_short=True)) == sum(n >= lengths[2] for n in lengths)
    with pytest.raises(DataError, match="no usable documents"):
        load(path, shortest=100, skip_short=True)


def test_frequent_tokens():
    """Of answers alone: later turns of the user do not count, token 9 here."""
    tokens, answers = np.int32([3, 5, 5, 9, 9, 9, 7, 5]), np.array([0, 1, 1, 0, 0, 0, 1, 1], bool)
    documents = Documents([tokens], np.int32([1]), [answers])
    assert documents.frequent_tokens(VOCAB, 3, always=(1,)).tolist() == [1, 5, 7]
    assert documents.frequent_tokens(VOCAB, 4, always=(1,)).tolist() == [0, 1, 5, 7]


def test_batches_cover_the_documents_and_depend_on_the_step_alone(documents):
    first, second = (batches(documents, length=LENGTH, batch=4, seed=3) for _ in range(2))
    seen = np.concatenate([first[step]["document"] for step in range(3)])
    assert sorted(seen) == list(range(12))
    np.testing.assert_array_equal(first[7]["tokens"], second[7]["tokens"])
