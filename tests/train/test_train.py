"""The training command: data, resume, both families, and what it refuses."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.checkpoints.loading import load_drafter
from failfast_jax.models.rope import rotary, rotated_heads
from failfast_jax.train import conditioned, data, loop, standalone
from failfast_jax.train.block_diffusion import Corruption
from failfast_jax.train.block_diffusion import Settings as BlockSettings
from failfast_jax.train.evaluate import Evaluation

VOCAB = 40
LENGTH = 32


def write_data(path, documents: int = 12, seed: int = 0, **changes):
    rng = np.random.default_rng(seed)
    prompt_len, answer_len = rng.integers(3, 7, documents), rng.integers(12, 24, documents)
    arrays = {
        "prompt": rng.integers(2, VOCAB, prompt_len.sum()).astype(np.uint16),
        "prompt_len": prompt_len.astype(np.int32),
        "answer": rng.integers(2, VOCAB, answer_len.sum()).astype(np.uint16),
        "answer_len": answer_len.astype(np.int32),
    }
    np.savez(path, **(arrays | changes))
    return path


def load(path, **options):
    return data.load_documents([path], **({"vocab_size": VOCAB, "shortest": 8, "longest": LENGTH} | options))


@pytest.fixture(scope="module")
def target():
    return random_model(tiny_config(num_layers=3))


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return load(write_data(tmp_path_factory.mktemp("data") / "a.npz"))


def make_objective(family: str, target, documents):
    if family == "standalone":
        settings = BlockSettings(corruption=Corruption("mixed", complementary=True), position_decay=2.0, kl_weight=0.5)
        return standalone.StandaloneObjective(target, (0, 2), 8, settings)
    base = conditioned.dataclasses.replace(target.config, num_layers=1)
    config = conditioned.ConditionedConfig(base, (1,), (0, 2), 4, 20)
    ids = data.frequent_tokens(documents, VOCAB, 20, (1,))
    model = conditioned.initial(target, config, (2,), 0)
    return conditioned.ConditionedObjective(model, target, ids, conditioned.Settings(anchors=3))


# -- data ----------------------------------------------------------------------------------------------------


def test_documents_are_read_as_they_were_written(tmp_path):
    path = write_data(tmp_path / "a.npz", documents=3)
    stored = np.load(path)
    documents = load(path, longest=20)
    assert len(documents) == 3
    np.testing.assert_array_equal(documents.prompt_length, stored["prompt_len"])
    first = np.concatenate([stored["prompt"][: stored["prompt_len"][0]], stored["answer"][: stored["answer_len"][0]]])
    np.testing.assert_array_equal(documents.tokens[0], first[:20])


def test_documents_are_read_as_they_were_saved(documents, tmp_path):
    data.save_documents(tmp_path / "saved.npz", documents)
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
    with pytest.raises(data.DataError, match=rf"bad\.npz.*{message}"):
        load(path)


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    path = write_data(tmp_path / "bad.npz")
    stored = dict(np.load(path))
    place = int(stored["answer_len"][:2].sum()) + 1  # in document 2
    stored["answer"][place] = VOCAB
    np.savez(path, **stored)
    with pytest.raises(
        data.DataError, match="document 2: token id 40 in 'answer' is outside the target's vocabulary of 40"
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
        with pytest.raises(data.DataError, match=f"{name}: .*({message})"):
            load(tmp_path / name)


def test_short_documents_are_refused_or_skipped(tmp_path):
    path = write_data(tmp_path / "a.npz")
    lengths = sorted(len(row) for row in load(path).tokens)
    shortest = lengths[2]
    with pytest.raises(data.DataError, match=rf"a\.npz: document \d+ has .* it needs at least {shortest}"):
        load(path, shortest=shortest)
    assert len(load(path, shortest=shortest, skip_short=True)) == sum(n >= shortest for n in lengths)
    with pytest.raises(data.DataError, match="no usable documents"):
        load(path, shortest=100, skip_short=True)


def test_too_many_held_out_documents_are_refused(documents):
    with pytest.raises(data.DataError, match="--held-out 12: there are only 12 documents"):
        data.split(documents, 12)


def test_frequent_tokens(documents):
    ids = data.frequent_tokens(documents, VOCAB, 10, always=(1,))
    assert len(ids) == 10 and 1 in ids and (np.diff(ids) > 0).all()
    counts = np.bincount(documents.answer_tokens(), minlength=VOCAB)
    rest = np.setdiff1d(np.arange(VOCAB), ids)
    assert min(counts[i] for i in ids if i != 1) >= counts[rest].max()


def test_batches_cover_the_documents_and_depend_on_the_step_alone(documents):
    make = lambda: data.batches(documents, length=LENGTH, batch=4, seed=3)  # noqa: E731
    first, second = make(), make()
    seen = np.concatenate([first[step]["document"] for step in range(3)])
    assert sorted(seen) == list(range(12))
    np.testing.assert_array_equal(first[7]["tokens"], second[7]["tokens"])


# -- the target-conditioned objective ------------------------------------------------------------------------


def test_blocks_start_inside_answers(documents, target):
    objective = make_objective("conditioned", target, documents)
    batch = data.batches(documents, length=LENGTH, batch=4, seed=0)[0]
    settings = conditioned.Settings(anchors=200, prefix_fraction=0.5)
    anchors, known = conditioned.sample_blocks(jax.random.key(0), batch, objective.config, settings)
    assert (anchors >= batch["prompt_length"][:, None] - 1).all() and (anchors <= batch["length"][:, None] - 2).all()
    assert known.min() == 1 and known.max() == objective.config.rows
    assert 0.4 < float((known > 1).mean()) < 0.6


def test_the_loss_equals_a_plain_reference(documents, target):
    """Gradients too: dense attention, block by block, against the batched loss."""
    objective = make_objective("conditioned", target, documents)
    batch = jax.tree.map(jnp.asarray, objective.prepare(data.batches(documents, length=LENGTH, batch=2, seed=0)[0]))
    settings, config = conditioned.Settings(anchors=3, position_decay=2.0, kl_weight=0.3), objective.config
    lengths, host_tokens = np.asarray(batch["length"]), np.asarray(batch["tokens"])
    anchors = np.asarray([[8, 12], [7, lengths[1] - 2]])
    known = np.asarray([[1, 3], [2, 1]])
    constants = {**objective.constants, "captured": objective.captured}
    ids = objective.draft_ids.tolist()
    teacher = target.forward(jnp.asarray(batch["tokens"]))
    mine = np.asarray([objective.captured.index(layer) for layer in config.feature_layers])

    def plain(trainable):
        model = objective.model(trainable)
        total = weights = 0.0
        for b in range(2):
            for a in range(2):
                anchor, prefix = int(anchors[b, a]), int(known[b, a])
                at = anchor + np.arange(config.rows)
                tokens = batch["tokens"][b, np.minimum(at, LENGTH - 1)]
                features = batch["features"][b, :, mine].swapaxes(0, 1)
                rows = np.arange(config.rows) < prefix
                x = model.inputs(target.embed[...][tokens][None], rows[None], features[None, anchor - 1])
                own_rotary, context_rotary = (rotary(config.base, p[None]) for p in (at, np.arange(anchor)))
                for index, layer in enumerate(model.layers):
                    q, k, v = rotated_heads(layer.attention.heads(layer.input_norm(x)), *own_rotary)
                    before = model.context(index, features[None, :anchor], *context_rotary)
                    k, v = (jnp.concatenate([c, own], 1) for c, own in zip(before, (k, v)))
                    k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
                    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) * q.shape[-1] ** -0.5
                    x = x + layer.attention.output(jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), v))
                    x = x + layer.mlp(layer.post_norm(x))
                log_q = jax.nn.log_softmax(model.norm(x)[0] @ constants["head"].T)
                for row in range(prefix - 1, config.rows):
                    if anchor + row + 1 >= lengths[b]:
                        continue
                    weight = np.exp(-(row - prefix + 1) / 2.0)
                    label = int(host_tokens[b, anchor + row + 1])
                    log_p = jax.nn.log_softmax(teacher[b, anchor + row, np.asarray(ids)])
                    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q[row]))
                    ce = -log_q[row, ids.index(label)] if label in ids else 0.0
                    total += weight * (0.7 * ce + 0.3 * kl)
                    weights += weight
        return total / weights

    def batched(trainable):
        return conditioned.loss_of_blocks(objective.model(trainable), constants, batch, anchors, known, settings)[0]

    value, grads = jax.jit(jax.value_and_grad(batched))(objective.trainable)
    want, wanted = jax.jit(jax.value_and_grad(plain))(objective.trainable)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * float(jnp.abs(want).max()))


def test_the_fit_is_a_least_squares_solution(documents, target):
    """Without a penalty, the fitted first row is what numpy's lstsq says."""
    objective = make_objective("conditioned", target, documents)
    model = objective.model(objective.trainable)
    batches = [
        {**b, "features": np.asarray(objective.features(b))}
        for b in (data.batches(documents, length=LENGTH, batch=4, seed=0)[i] for i in range(3))
    ]
    share = conditioned.fit_inputs(model, target, 2, batches, objective.captured, ridge=1e-9)
    inputs, goals = [], []
    for batch in batches:
        for row in range(4):
            place = np.arange(int(batch["prompt_length"][row]) - 1, int(batch["length"][row]))
            parts = [batch["features"][row, place - 1, objective.captured.index(layer)] for layer in (0, 2)]
            parts = [p / np.sqrt((p**2).mean(-1, keepdims=True) + 1e-6) for p in parts]
            embedded = np.asarray(target.embed[...])[batch["tokens"][row, place]]
            inputs.append(np.concatenate([*parts, embedded, np.ones((len(place), 1))], -1))
            goals.append(batch["features"][row, place, objective.captured.index(1)])
    inputs, goals = np.concatenate(inputs), np.concatenate(goals)
    solution, *_ = np.linalg.lstsq(inputs, goals, rcond=None)
    best = 1 - ((goals - inputs @ solution) ** 2).sum() / ((goals - goals.mean(0)) ** 2).sum()
    assert share == pytest.approx(best, abs=1e-4)
    guess = (
        inputs[:, :32] @ np.asarray(model.fuse.weight[...]).T + inputs[:, 32:48] @ np.asarray(model.token.weight[...]).T
    )
    np.testing.assert_allclose(guess + np.asarray(model.offsets[...])[0], inputs @ solution, atol=2e-3)


def test_features_are_cached_once_and_for_the_right_documents(documents, target, tmp_path, monkeypatch):
    layers = (0, 2)
    cache = conditioned.FeatureCache(tmp_path / "cache", documents, target, layers)
    batch = data.batches(documents, length=LENGTH, batch=4, seed=0)[0]
    want = np.asarray(conditioned.target_features(target, jnp.asarray(batch["tokens"]), layers))
    got = cache.batch(batch).astype(np.float32)
    for row, length in enumerate(batch["length"]):
        np.testing.assert_allclose(got[row, :length], want[row, :length], rtol=2**-7, atol=1e-3)
        assert not got[row, length:].any()
    # More layers than a run reads, computed in two pieces.
    late = {"also": (1,), "deadline": 0.0}
    with pytest.raises(loop.OutOfTime):
        conditioned.FeatureCache(tmp_path / "wide", documents, target, layers, **late)
    conditioned.FeatureCache(tmp_path / "wide", documents, target, layers, **late)
    monkeypatch.setattr(conditioned, "_target_features", None)  # nothing is computed again
    for folder in ("cache", "wide"):
        again = conditioned.FeatureCache(tmp_path / folder, documents, target, layers)
        np.testing.assert_array_equal(again.batch(batch), cache.batch(batch))
    only = conditioned.FeatureCache(tmp_path / "wide", documents, target, (2,))
    np.testing.assert_array_equal(only.batch(batch), cache.batch(batch)[:, :, 1:])
    with pytest.raises(data.DataError, match=r"holds features of layers \[0, 2\], not of \[1\]"):
        conditioned.FeatureCache(tmp_path / "cache", documents, target, (0, 1, 2))
    with pytest.raises(data.DataError, match="features of other documents"):
        conditioned.FeatureCache(tmp_path / "cache", documents.take(range(5)), target, layers)


# -- the loop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["conditioned", "standalone"])
def test_a_killed_run_goes_on_to_the_same_losses(documents, target, tmp_path, family):
    objective = make_objective(family, target, documents)
    optimization = loop.Optimization(steps=14, batch=2, accumulate=2, learning_rate=1e-3, warmup=3)
    dataset = data.batches(documents, length=LENGTH, batch=4, seed=0)

    class Killed(Exception):
        pass

    class UntilStep:
        def __init__(self, last):
            self.last = last

        def __getitem__(self, step):
            if step == self.last:
                raise Killed
            return dataset[step]

    def run(folder, batches):
        folder.mkdir(exist_ok=True)
        state, done = loop.train(objective, batches, optimization, folder, save_every=4)
        assert done
        return state, [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]

    whole, log = run(tmp_path / "whole", dataset)
    with pytest.raises(Killed):
        run(tmp_path / "killed", UntilStep(10))
    with (tmp_path / "killed" / "log.jsonl").open("a") as file:
        file.write('{"step": 9, "los')  # cut off while it was written
    continued, log_continued = run(tmp_path / "killed", dataset)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(continued)):
        np.testing.assert_array_equal(a, b)
    timeless = [{k: v for k, v in record.items() if not k.endswith("_per_s")} for record in log]
    assert timeless == [{k: v for k, v in r.items() if not k.endswith("_per_s")} for r in log_continued]


def test_accumulated_gradients_are_those_of_the_whole_batch(documents, target):
    """With blocks that do not depend on the key: one batch of 4, or twice 2."""
    objective = make_objective("conditioned", target, documents)
    anchors, known = jnp.full((4, 3), 8), jnp.ones((4, 3), jnp.int32)

    class Fixed:
        trainable = objective.trainable

        def loss(self, trainable, constants, batch, key):
            del key
            constants = {**constants, "captured": objective.captured}
            n = batch["tokens"].shape[0]
            settings = conditioned.Settings(anchors=3, position_decay=None, kl_weight=0.0)
            return conditioned.loss_of_blocks(
                objective.model(trainable), constants, batch, anchors[:n], known[:n], settings
            )

    batch = objective.prepare(data.batches(documents, length=LENGTH, batch=4, seed=0)[0])
    norms = []
    for accumulate in (1, 2):
        optimization = loop.Optimization(steps=5, batch=4 // accumulate, accumulate=accumulate)
        step = loop.make_step(Fixed(), optimization)
        _, metrics = jax.jit(step)(loop.initial_state(Fixed(), optimization), objective.constants, batch)
        norms.append(float(metrics["grad_norm"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_folder_belongs_to_one_setting(tmp_path):
    loop.check_folder(tmp_path / "run", {"seed": 1, "rows": 7})
    loop.check_folder(tmp_path / "run", {"seed": 1, "rows": 7})
    with pytest.raises(loop.TrainError, match="a run with rows=7 began there, now it is 8"):
        loop.check_folder(tmp_path / "run", {"seed": 1, "rows": 8})
    with pytest.raises(loop.TrainError, match="a run with target='a' began there, now it is 'b'"):
        loop.check_folder(tmp_path / "targets", {"target": "a", "draft_vocab": 7})
        loop.check_folder(tmp_path / "targets", {"target": "b", "draft_vocab": 8})
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "train.part").write_text("{")  # killed at its very start
    loop.check_folder(tmp_path / "cut", {"seed": 1})
    (tmp_path / "file").touch()
    with pytest.raises(loop.TrainError, match="file: not a folder"):
        loop.check_folder(tmp_path / "file", {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(loop.TrainError, match="not empty"):
        loop.check_folder(tmp_path / "other", {})


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_learning_rates(schedule):
    optimization = loop.Optimization(steps=100, warmup=10, schedule=schedule, learning_rate=1.0, final_fraction=0.1)
    rates = [float(optimization.learning_rates()(step)) for step in range(101)]
    assert rates[0] == 0 and rates[10] == pytest.approx(1.0) and rates[100] == pytest.approx(0.1, abs=1e-3)
    assert (rates[50] == 1.0) == (schedule == "wsd")


@pytest.mark.parametrize("family", ["conditioned", "standalone"])
def test_training_makes_a_drafter_that_loads_and_drafts(documents, target, tmp_path, family):
    """Overfits a few documents: the drafter then predicts some of the target's own answers."""
    objective = make_objective(family, target, documents)
    engine = FailFast(target)
    prompts = [row[:n].tolist() for row, n in zip(documents.tokens, documents.prompt_length)]
    answers = engine.generate(prompts, method="vanilla", max_new_tokens=16, ignore_eos=True)
    own = data.Documents([np.asarray(a.prompt_ids + a.output_ids, np.int32) for a in answers], documents.prompt_length)
    optimization = loop.Optimization(steps=80, batch=12, learning_rate=1e-2, warmup=5, ema=0.9)
    measure = Evaluation(target, objective, own, prompts=12, tokens=16)
    measure.engine.eos_token_ids = ()
    before = measure(objective.trainable)
    state, _ = loop.train(
        objective, data.batches(own, length=24, batch=12, seed=0), optimization, tmp_path, evaluate=measure
    )
    assert measure.last["accepted_per_round"] > before["accepted_per_round"] + 0.3
    objective.save(state["ema"], tmp_path / "drafter", storage="float32")
    loaded = load_drafter(tmp_path / "drafter", target)
    drafted = FailFast(target, loaded).generate(
        prompts, tau=1.0, spec_len=4, max_spec_len=4, max_new_tokens=16, ignore_eos=True
    )
    assert [r.output_ids for r in drafted] == [a.output_ids for a in answers]
    assert sum(r.stats.accepted for r in drafted) > 0
