"""Whole block-diffusion models: the released objective, packing, what is written, and devices that share parameters."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_runs
from block_texts import BLOCK, MASK, WIDTH, draw, model, pair, quick_jit, random_tokens
from checkpoint_files import run_python
from released_reference import assert_gradients, masked_loss
from tiny_models import VOCAB, random_model, tiny_config
from training_runs import hf_tensors, parameters

from failfast_jax import FailFast, load_model
from failfast_jax.checkpoints.fast_dllm_folder import as_fast_dllm, save_fast_dllm
from failfast_jax.checkpoints.parameters import Skeleton
from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.diffusion_run import DiffusionObjective, frozen_parts
from failfast_jax.train.documents import Documents
from failfast_jax.train.packing import PackedRows, packed
from failfast_jax.train.spread import Spread
from failfast_jax.train.train_config import TrainConfig
from failfast_jax.train.trainer import initial_state, make_step

RELEASED = TrainConfig(family="diffusion", **training_runs.RELEASED)


def packed_batch() -> dict[str, np.ndarray]:
    """Two rows of two documents each, which end inside blocks; the second row has free blocks at its end."""
    tokens = random_tokens(2, 2 * WIDTH)
    labelled = np.zeros(tokens.shape, bool)
    labelled[0, 3:20] = labelled[0, 30:48] = labelled[1, 5:16] = labelled[1, 20:30] = True
    tokens[0, 20:24] = tokens[1, 30:] = -1
    return {"tokens": tokens, "labelled": labelled}


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_released_objective(tied):
    """Its value and the gradients of all parameters: those of an independent computation, with the same masks."""
    net = model(tie_embeddings=tied)
    objective = DiffusionObjective(net.config, parameters(net), RELEASED)
    batch, key = packed_batch(), jax.random.key(3)
    grad = quick_jit(jax.value_and_grad(objective.loss, has_aux=True))
    (value, metrics), gradients = grad(objective.trainable, objective.constants, batch, key)
    # Where anything may be masked the draws can be read off.
    every = np.ones(batch["tokens"].shape, bool)
    _, masked = draw(key, batch["tokens"], every, MASK, BLOCK, RELEASED)
    # Each answer once: in one view or in the other; nothing predicts the first token.
    first, labelled = np.asarray(masked)[:2], batch["labelled"]
    views = np.concatenate([first & labelled, ~first & labelled])
    tokens = np.where(batch["tokens"] < 0, MASK, batch["tokens"])
    tensors = hf_tensors(objective.trainable, net.config)

    def loss(tensors: dict[str, np.ndarray]) -> float:
        return masked_loss(tensors, net.config, tokens, views)

    assert metrics["labels"] == batch["labelled"].sum() and ("lm_head.weight" in tensors) != tied
    np.testing.assert_allclose(value, loss(tensors), rtol=1e-5)
    assert_gradients(hf_tensors(gradients, net.config), loss, tensors)


@pytest.mark.long
def test_steps_in_bfloat16_over_parameters_in_float32():
    """The loop's steps are float32's but for bfloat16's rounding, and keep changes too small for it."""
    net, batch, steps = model(), packed_batch(), 8
    settings = {"learning_rate": 1e-5, "schedule": "constant", "warmup": 0, "weight_decay": 0.0, "ema": 0.0}
    states, losses = {}, {}
    for dtype in ("float32", "bfloat16"):
        config = dataclasses.replace(RELEASED, steps=steps, batch=2, compute_dtype=dtype, **settings)
        objective = DiffusionObjective(net.config, parameters(net), config)
        step = quick_jit(make_step(objective, config))
        states[dtype] = [initial_state(objective, config)]
        for _ in range(steps):
            state, metrics = step(states[dtype][-1], {}, batch)
            states[dtype].append(state)
            losses.setdefault(dtype, float(metrics["loss"]))
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=1e-3)
    (start, first, *_, last), (_, wanted, *_, end) = states["bfloat16"], states["float32"]
    assert {leaf.dtype for leaf in jax.tree.leaves(last)} == {jnp.dtype("float32"), jnp.dtype("int32")}

    def off(got, expected) -> float:
        return float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))

    for name, before in start["params"].items():
        # The first moment after one step is the gradient.
        assert off(*(state["optimizer"][1][0].mu[name] for state in (first, wanted))) < 0.04, name
        assert off(*(state["params"][name] - before for state in (last, end))) < 0.15, name
        rounded = (value.astype(jnp.bfloat16) for value in (last["params"][name], before))
        assert np.mean(last["params"][name] != before) > 0.8 and np.mean(np.not_equal(*rounded)) < 0.4, name


def test_the_released_mask_rate():
    """E[p] = 0.5005; blocks without a mask and blocks of masks alone occur; the second view has the rest."""
    tokens, maskable = random_tokens(400, 64), np.ones((400, 64), bool)
    maskable[:, :5] = False
    _, masked = draw(jax.random.key(1), tokens, maskable, MASK, BLOCK, RELEASED)
    first, second = np.asarray(masked).reshape(2, 400, 64)
    assert not first[:, :5].any() and ((first ^ second) == maskable).all()
    share = first[:, BLOCK:].reshape(-1, BLOCK).mean(-1)
    assert share.mean() == pytest.approx(0.5005, abs=0.02)
    # p is uniform: each count of masks in a block is as likely as any other.
    counts = np.bincount((share * BLOCK).astype(int), minlength=BLOCK + 1) / len(share)
    np.testing.assert_allclose(counts, 1 / (BLOCK + 1), atol=0.035)


def test_documents_of_a_row_see_only_themselves():
    """A document after another one: computed as if it were alone, which its place in the row does not change."""
    noised, clean = random_tokens(1, WIDTH, seed=1), random_tokens(1, WIDTH, seed=2)
    other = random_tokens(2, WIDTH, seed=3)
    row = np.concatenate([other[:1], noised], axis=1), np.concatenate([other[1:], clean], axis=1)
    segment = np.asarray([[1] * (WIDTH // BLOCK) + [2] * (WIDTH // BLOCK)], np.int32)
    alone, together, mixed = pair(model(), noised, clean), pair(model(), *row, None, segment), pair(model(), *row)
    for one, two, three in zip(alone, together, mixed):
        np.testing.assert_allclose(one, two[:, WIDTH:], atol=2e-5)
        assert np.abs(np.asarray(one) - np.asarray(three)[:, WIDTH:]).max() > 1e-2


def some_documents(count: int = 9, labelled: bool = False) -> Documents:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCAB - 1, n).astype(np.int32) for n in rng.integers(5, 40, count)]
    prompts = np.asarray([3] * count, np.int32)
    marks = [np.arange(len(row)) % 5 > 2 for row in tokens] if labelled else None
    return Documents(tokens, prompts, marks)


@pytest.mark.parametrize("packing", ["none", "stream", "separate"])
def test_packed_rows_hold_every_document_once(packing):
    """Each from the start of a block on; the same rows from the same seed."""
    documents = some_documents(labelled=packing == "separate")
    rows, again = (PackedRows(documents, 64, BLOCK, 1, packing) for _ in range(2))
    numbers = []
    for row, same in zip(rows, again):
        np.testing.assert_array_equal(row["tokens"], same["tokens"])
        assert ("segment" in row) == (packing == "separate") and not row["labelled"][row["tokens"] < 0].any()
        for start in range(0, 64, BLOCK):
            for number, tokens in enumerate(documents.tokens):
                if np.array_equal(row["tokens"][start:][: len(tokens)], tokens):
                    numbers.append(number)
                    marks = documents.answers(number) & (np.arange(len(tokens)) > 0)
                    np.testing.assert_array_equal(row["labelled"][start:][: len(tokens)], marks)
    assert sorted(numbers) == list(range(len(documents)))
    assert (len(rows) == len(documents)) == (packing == "none")


def test_rows_are_filled():
    lengths = np.random.default_rng(0).integers(1, 17, 500).tolist()
    rows = packed(lengths, 64, "stream")
    assert sorted(number for row in rows for number in row) == list(range(500))
    assert all(sum(lengths[number] for number in row) <= 64 for row in rows)
    assert sum(lengths) / (64 * len(rows)) > 0.95


def test_only_what_is_not_frozen_is_trained():
    net, key = model(), jax.random.key(0)
    objective = DiffusionObjective(net.config, parameters(net), RELEASED, frozen=("embed", "head"))
    assert set(objective.constants) == {"embed", "head.weight"}
    assert {name.split(".")[0] for name in objective.trainable} == {"layers", "norm"}
    whole = DiffusionObjective(net.config, parameters(net), RELEASED)
    one, two = (quick_jit(o.loss)(o.trainable, o.constants, packed_batch(), key)[0] for o in (objective, whole))
    assert one == two
    for text, config, message in (
        ("head,norm", tiny_config(tie_embeddings=True), "the model has embed, norm, layers; its head is its embedding"),
        ("body", net.config, "--freeze body: the model has embed, head, norm, layers"),
        ("embed,head,norm,layers", net.config, "nothing is left to train"),
    ):
        with pytest.raises(OptionError, match=message):
            frozen_parts(text, config)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_what_is_written_is_a_model_and_a_drafter(tmp_path, family):
    """For `load_model`, for `dllm`, and for a target of other sizes with the same tokens."""
    start = random_model(tiny_config(model_type=family, qkv_bias=family == "qwen2"), seed=3)
    config = as_fast_dllm(start.config, BLOCK, MASK, "start")
    shapes = Skeleton.made_by(lambda rngs: Decoder(config, rngs=rngs)).shapes
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()} | parameters(start)
    save_fast_dllm(tmp_path / "made", config, params, storage="float32", training={"steps_done": 1})
    loaded = load_model(tmp_path / "made")
    assert loaded.config == config
    raw = json.loads((tmp_path / "made" / "config.json").read_text())
    assert raw["architectures"] == ["Fast_dLLM_QwenForCausalLM"] and raw["training"] == {"steps_done": 1}
    # One block alone is seen as by the start, in both directions: its last row sees what a causal row sees.
    ids = random_tokens(1, BLOCK)
    expected = random_model(dataclasses.replace(start.config, block_size=BLOCK), seed=3).logits(ids)
    np.testing.assert_allclose(loaded.logits(ids), expected, atol=1e-5)
    if family == "llama":
        return
    answers = FailFast(tmp_path / "made").generate([[2, 3, 4]], method="dllm", max_new_tokens=2 * BLOCK)
    assert len(answers[0].output_ids) > 1
    larger = random_model(tiny_config(num_layers=3, hidden_size=32, num_heads=4), seed=4)
    engine = FailFast(larger, tmp_path / "made")
    options = {"max_new_tokens": 12, "ignore_eos": True}
    one, two = (engine.generate([[2, 3, 4]], method=method, **options)[0] for method in ("failfast", "vanilla"))
    assert one.output_ids == two.output_ids and one.stats.drafted > 0


def test_models_that_do_not_fit_the_layout_are_refused():
    for changes, message in (
        ({"qk_norm": True}, "has Qwen2's layers"),
        ({}, "mask token 99 is outside the vocabulary"),
    ):
        with pytest.raises(ConfigError, match=message):
            as_fast_dllm(tiny_config(**changes), 8, 99, "start")


def test_devices_that_share_parameters_are_counted():
    with pytest.raises(OptionError, match="--fsdp 3: must divide the 4 devices"):
        Spread.over(3, jax.devices() * 4)
    spread = Spread.over(4, jax.devices() * 4)
    assert [spread.axis(shape) for shape in ((8, 24), (24, 6), (7, 9), (64,), (2, 8, 16))] == [1, 0, None, None, 2]


@pytest.mark.long
def test_devices_share_parameters(tmp_path):
    """Four of them, in a mesh of two by two and in one of four: the gradients and losses of devices with copies, each
    with a part of what is trained and of what the optimiser keeps; a run goes on on another mesh."""
    done = run_python("tests/train/shared_parameters.py", tmp_path, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["gradients"] < 1e-5
    assert report["pieces"] == [1, 4]
    assert report["losses"][0] == pytest.approx(report["losses"][1], rel=1e-4)
    assert report["parameters"] < 1e-4
    assert report["parts"] == [[VOCAB, 16], [VOCAB // 4, 16]] and report["moments"] == [VOCAB // 4, 16]
