"""Training documents: what is read, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from training_runs import LENGTH, VOCAB, load, write_data

from failfast_jax.train.documents import DataError, batches, frequent_tokens, split, write_documents


def test_documents_are_read_as_they_were_written(tmp_path):
    path = write_data(tmp_path / "a.npz", documents=3)
    stored = np.load(path)
    documents = load(path, longest=20)
    assert len(documents) == 3
    np.testing.assert_array_equal(documents.prompt_length, stored["prompt_len"])
    first = np.concatenate([stored["prompt"][: stored["prompt_len"][0]], stored["answer"][: stored["answer_len"][0]]])
    np.testing.assert_array_equal(documents.tokens[0], first[:20])


def test_documents_are_read_as_they_were_saved(documents, tmp_path):
    write_documents(tmp_path / "saved.npz", documents.pairs(), VOCAB)
    again = load(tmp_path / "saved.npz")
    assert again.digest() == documents.digest()
    assert again.take([1, 0]).digest() != again.take([0, 1]).digest()


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    for name, seed in (("b.npz", 1), ("a.npz", 0)):
        write_data(tmp_path / name, documents=2, seed=seed)
    both = load(tmp_path)
    np.testing.assert_array_equal(both.tokens[2], load(tmp_path / "b.npz").tokens[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": np.full(1, 40, np.uint16)}, "adds up to"),
        ({"prompt_len": np.zeros(12, np.int32)}, "document 0 has an empty prompt"),
        ({"prompt_len": np.zeros(0, np.int32), "prompt": np.zeros(0, np.uint16)}, "no documents"),
        ({"answer_len": np.ones((2, 2), np.int32)}, "'answer_len' must be one-dimensional integers"),
        ({"prompt": np.zeros(5, np.float32)}, "'prompt' must be one-dimensional integers, got float32"),
    ],
)
def test_broken_arrays_are_refused(tmp_path, changes, message):
    path = write_data(tmp_path / "bad.npz", **changes)
    with pytest.raises(DataError, match=rf"bad\.npz.*{message}"):
        load(path)


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    path = write_data(tmp_path / "bad.npz")
    stored = dict(np.load(path))
    place = int(stored["answer_len"][:2].sum()) + 1  # in document 2
    stored["answer"][place] = VOCAB
    np.savez(path, **stored)
    with pytest.raises(
        DataError,
        match="document 2: token id 40 in 'answer' is outside the target's vocabulary of 40",
    ):
        load(path)


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "text.npz").write_text("hello")
    whole = write_data(tmp_path / "cut.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    np.savez(tmp_path / "part.npz", prompt=np.arange(3))
    for name, message in (
        ("empty.npz", "empty file"),
        ("text.npz", "not a readable|damaged"),
        ("cut.npz", "not a readable|damaged"),
        ("part.npz", "array 'prompt_len' is missing"),
        ("none.npz", "no such file or folder"),
    ):
        with pytest.raises(DataError, match=f"{name}: .*({message})"):
            load(tmp_path / name)


def test_short_documents_are_refused_or_skipped(tmp_path):
    path = write_data(tmp_path / "a.npz")
    lengths = sorted(len(row) for row in load(path).tokens)
    shortest = lengths[2]
    with pytest.raises(DataError, match=rf"a\.npz: document \d+ has .* it needs at least {shortest}"):
        load(path, shortest=shortest)
    assert len(load(path, shortest=shortest, skip_short=True)) == sum(n >= shortest for n in lengths)
    with pytest.raises(DataError, match="no usable documents"):
        load(path, shortest=100, skip_short=True)


def test_too_many_held_out_documents_are_refused(documents):
    with pytest.raises(DataError, match="--held-out 12: there are only 12 documents"):
        split(documents, 12)


def test_frequent_tokens(documents):
    ids = frequent_tokens(documents, VOCAB, 10, always=(1,))
    assert len(ids) == 10 and 1 in ids and (np.diff(ids) > 0).all()
    counts = np.bincount(documents.answer_tokens(), minlength=VOCAB)
    rest = np.setdiff1d(np.arange(VOCAB), ids)
    assert min(counts[i] for i in ids if i != 1) >= counts[rest].max()


def test_batches_cover_the_documents_and_depend_on_the_step_alone(documents):
    make = lambda: batches(documents, length=LENGTH, batch=4, seed=3)  # noqa: E731
    first, second = make(), make()
    seen = np.concatenate([first[step]["document"] for step in range(3)])
    assert sorted(seen) == list(range(12))
    np.testing.assert_array_equal(first[7]["tokens"], second[7]["tokens"])
