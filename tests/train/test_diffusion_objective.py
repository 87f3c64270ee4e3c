"""Block diffusion: its masks, its pass over two copies, its value and gradients; packing, and what is written."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import run_python
from released_reference import assert_gradients, masked_loss
from tiers import tiers
from tiny_models import VOCAB, committed, diffusion_config, random_model, tiny_config
from training_runs import RELEASED_OPTIONS, hf_tensors, parameters

from failfast_jax import FailFast, load_model
from failfast_jax.checkpoints.fast_dllm_folder import as_fast_dllm, save_fast_dllm
from failfast_jax.checkpoints.parameter_map import AbstractModule
from failfast_jax.decoding.stopping import BelowThreshold
from failfast_jax.drafters.block_diffusion import Wide
from failfast_jax.errors import ConfigError
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.diffusion_loss import draw_masks, loss
from failfast_jax.train.diffusion_run import DiffusionObjective
from failfast_jax.train.documents import Documents, PackedRows, packed
from failfast_jax.train.train_config import TrainConfig
from failfast_jax.train.trainer import initial_state, make_step

MASK = VOCAB - 1
BLOCK, WIDTH = 8, 24
RELEASED = TrainConfig(family="diffusion", **RELEASED_OPTIONS)

# Compiling takes most of the time here, and of that the optimisations most.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def model(block: int = BLOCK, **changes) -> Decoder:
    """Two layers with grouped queries, unless `changes` says otherwise."""
    return random_model(diffusion_config(block, **{"num_layers": 2, "num_kv_heads": 2, **changes}), seed=5, gain=1.5)


def random_tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, MASK, shape).astype(np.int32)


def packed_batch() -> dict[str, np.ndarray]:
    """Two rows of two documents each, which end inside blocks; the second row has free blocks at its end."""
    tokens = random_tokens(2, 2 * WIDTH)
    labelled = np.zeros(tokens.shape, bool)
    labelled[0, 3:20] = labelled[0, 30:48] = labelled[1, 5:16] = labelled[1, 20:30] = True
    tokens[0, 20:24] = tokens[1, 30:] = -1
    return {"tokens": tokens, "labelled": labelled}


drawn = quick_jit(draw_masks, static_argnums=(2, 3))
value_and_grad = quick_jit(jax.value_and_grad(loss, has_aux=True), static_argnums=3, static_argnames="head_chunk")


def blocks_drawn(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Masks of both views of 400 texts of 8 blocks, and which positions may be masked: by block."""
    maskable = np.ones((400, 8 * BLOCK), bool)
    maskable[:, :5] = False
    masked = np.asarray(drawn(jax.random.key(1), maskable, BLOCK, kind))
    assert not (masked & ~maskable).any()
    return masked.reshape(2, -1, BLOCK), maskable.reshape(-1, BLOCK)


def test_released_masks():
    """E[p] = 0.5005; blocks without a mask and blocks of masks alone occur; the second view has the rest."""
    (first, second), maskable = blocks_drawn("uniform")
    np.testing.assert_array_equal(first ^ second, maskable)
    full = first[maskable.all(-1)]
    assert full.mean() == pytest.approx(0.5005, abs=0.02)
    # p is uniform: each count of masks in a block is as likely as any other.
    counts = np.bincount(full.sum(-1), minlength=BLOCK + 1) / len(full)
    np.testing.assert_allclose(counts, 1 / (BLOCK + 1), atol=0.035)


def test_masks_of_drafting_are_a_clean_prefix_then_masks():
    views, maskable = blocks_drawn("draft")
    for masked in views:
        np.testing.assert_array_equal(masked, maskable & (np.cumsum(masked, -1) > 0))
        counts = np.bincount(masked[maskable.all(-1)].sum(-1), minlength=BLOCK + 1)
        expected = counts.sum() / BLOCK
        assert counts[0] == 0 and (np.abs(counts[1:] - expected) <= 4 * np.sqrt(expected)).all()
    assert (views[0] != views[1]).any()


OPTIONS = {
    "released": RELEASED,
    "released, tied": RELEASED,
    "clean": TrainConfig(position_decay=4.0),
    "draft": TrainConfig(corruption="draft", position_decay=0.01),
}


@pytest.mark.parametrize("name", tiers(OPTIONS, quick=["released"], long=None))
def test_loss_and_gradients_equal_the_reference(name):
    """An independent computation, with the same masks; 192 rows of logits, in ten chunks of which one is not full."""
    options, net, batch, key = OPTIONS[name], model(tie_embeddings="tied" in name), packed_batch(), jax.random.key(3)
    (value, metrics), gradients = value_and_grad(net, batch, key, options, head_chunk=20)
    maskable = batch["labelled"] & (np.arange(2 * WIDTH) > 0)
    masked = np.asarray(drawn(key, maskable, BLOCK, options.corruption))
    tokens = np.where(batch["tokens"] < 0, MASK, batch["tokens"])
    terms = {"own_end": options.block_start == "noised", "decay": options.position_decay}

    def reference(tensors: dict[str, np.ndarray]) -> float:
        return masked_loss(tensors, net.config, tokens, masked, **terms)

    tensors = hf_tensors(parameters(net), net.config)
    assert ("lm_head.weight" in tensors) != net.config.tie_embeddings
    np.testing.assert_allclose(value, reference(tensors), rtol=1e-5)
    assert_gradients(hf_tensors(parameters(gradients), net.config), reference, tensors)
    blocks = masked.reshape(-1, BLOCK).any(-1)
    assert metrics["labels"] == masked.sum() and metrics["firsts"] == blocks.sum()
    if options.corruption == "uniform":  # each answer token once: in one view or in the other
        assert metrics["labels"] == batch["labelled"].sum()


def test_labels_are_scored_by_the_rows_that_draft_them():
    """Labels that are what `Wide` drafts into a block of masks cost `-log(confidence)` each."""
    net = model(num_layers=1)
    drafter = Wide(model=net, rule=BelowThreshold(0.0), vocab=VOCAB, spec_len=BLOCK, max_spec_len=BLOCK)
    start = WIDTH - BLOCK
    view = committed(random_tokens(1, start, seed=4).tolist(), 128, BLOCK)
    draft, _ = quick_jit(
        lambda d, c: d.draft(d.prefill(d.init(1, 128), c, jnp.int32(0), start, jnp.zeros((1, start, 0, 16))), c)
    )(drafter, view)
    text = np.concatenate([view.tokens[:, :start], draft.tokens[:, :BLOCK]], axis=1)
    labelled = np.arange(WIDTH)[None] >= start
    # A key that masks the whole block in both views.
    keys = map(jax.random.key, range(1000))
    key = next(key for key in keys if drawn(key, labelled, BLOCK, "draft").sum() == 2 * BLOCK)
    options = TrainConfig(corruption="draft", position_decay=0.0)
    (value, metrics), _ = value_and_grad(net, {"tokens": text, "labelled": labelled}, key, options)
    np.testing.assert_allclose(value, -np.log(draft.confidence[0, :BLOCK]).mean(), rtol=1e-5)
    assert metrics["accuracy"] == 1 and metrics["labels"] == 2 * BLOCK


def test_tokens_that_are_no_labels():
    """The first one, and the mask token; without any label the loss is 0."""
    batch = packed_batch()
    batch["labelled"][:] = True
    batch["tokens"][:, 9] = MASK
    (value, metrics), _ = value_and_grad(model(), batch, jax.random.key(0), OPTIONS["clean"])
    assert metrics["labels"] == (batch["tokens"] >= 0).sum() - 2 * len(batch["tokens"]) and np.isfinite(value)
    batch["labelled"][:] = False
    (value, metrics), gradients = value_and_grad(model(), batch, jax.random.key(0), OPTIONS["clean"])
    assert value == 0 and metrics["labels"] == 0 and metrics["accuracy"] == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.long
def test_steps_in_bfloat16_over_parameters_in_float32():
    """The loop's steps are float32's but for bfloat16's rounding, and keep changes too small for it."""
    net, batch = model(), packed_batch()
    settings = {"learning_rate": 1e-5, "schedule": "constant", "warmup": 0, "weight_decay": 0.0, "ema": 0.0}
    ends, losses = {}, {}
    for dtype in ("float32", "bfloat16"):
        config = dataclasses.replace(RELEASED, steps=8, batch=2, compute_dtype=dtype, **settings)
        objective = DiffusionObjective(net.config, parameters(net), config)
        step, ends[dtype] = quick_jit(make_step(objective, config)), initial_state(objective, config)
        for _ in range(8):
            ends[dtype], metrics = step(ends[dtype], {}, batch)
            losses.setdefault(dtype, float(metrics["loss"]))
    assert losses["bfloat16"] != losses["float32"] == pytest.approx(losses["bfloat16"], rel=1e-3)
    assert {leaf.dtype for leaf in jax.tree.leaves(ends["bfloat16"])} == {jnp.dtype("float32"), jnp.dtype("int32")}
    for name, before in parameters(net).items():
        after, wanted = (ends[dtype]["params"][name] for dtype in ("bfloat16", "float32"))
        assert jnp.linalg.norm(after - wanted) < 0.15 * jnp.linalg.norm(wanted - before), name
        rounded = (value.astype(jnp.bfloat16) for value in (after, before))
        assert np.mean(after != before) > 0.8 and np.mean(np.not_equal(*rounded)) < 0.4, name


@pytest.mark.parametrize("packing", ["none", "stream"])
def test_packed_rows_hold_every_document_once(packing):
    """Each from the start of a block on; the same rows from the same seed."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCAB - 1, length).astype(np.int32) for length in rng.integers(5, 40, 9)]
    documents = Documents(tokens, np.full(9, 3, np.int32), [np.arange(len(row)) % 5 > 2 for row in tokens])
    rows, again = (PackedRows(documents, 64, BLOCK, 1, packing) for _ in range(2))
    numbers = []
    for row, same in zip(rows, again):
        np.testing.assert_array_equal(row["tokens"], same["tokens"])
        assert not row["labelled"][row["tokens"] < 0].any()
        for start in range(0, 64, BLOCK):
            for number, ids in enumerate(tokens):
                if np.array_equal(row["tokens"][start:][: len(ids)], ids):
                    numbers.append(number)
                    marks = documents.labelled[number] & (np.arange(len(ids)) > 0)
                    np.testing.assert_array_equal(row["labelled"][start:][: len(ids)], marks)
    assert sorted(numbers) == list(range(9)) and (len(rows) == 9) == (packing == "none")


def test_rows_are_filled():
    lengths = np.random.default_rng(0).integers(1, 17, 500).tolist()
    rows = packed(lengths, 64, "stream")
    assert sorted(number for row in rows for number in row) == list(range(500))
    assert all(sum(lengths[number] for number in row) <= 64 for row in rows)
    assert sum(lengths) / (64 * len(rows)) > 0.95


@pytest.mark.long
def test_a_model_of_other_layers_is_written_as_a_drafter(tmp_path):
    """Llama's, with biases of zero; for a target of other sizes with the same tokens."""
    with pytest.raises(ConfigError, match="start: model_type qwen3 does not fit Fast-dLLM v2's layout"):
        as_fast_dllm(tiny_config(model_type="qwen3", qk_norm=True), BLOCK, MASK, "start")
    start = random_model(tiny_config(model_type="llama", qkv_bias=False), seed=3)
    config = as_fast_dllm(start.config, BLOCK, MASK, "start")
    shapes = AbstractModule.made_by(lambda rngs: Decoder(config, rngs=rngs)).shapes
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
    larger = random_model(tiny_config(num_layers=3, hidden_size=32, num_heads=4), seed=4)
    engine = FailFast(larger, tmp_path / "made")
    options = {"max_new_tokens": 12, "ignore_eos": True}
    one, two = (engine.generate([[2, 3, 4]], method=method, **options)[0] for method in ("failfast", "vanilla"))
    assert one.output_ids == two.output_ids and one.stats.drafted > 0


@pytest.mark.long
def test_devices_share_parameters(tmp_path):
    """Four of them, in a mesh of two by two and in one of four: the gradients and losses of devices with copies, each
    with a part of what is trained and of what the optimiser keeps; a run goes on on another mesh."""
    done = run_python("tests/train/shared_parameters.py", tmp_path, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["pieces"] == [1, 4]
    assert report["last"][0] == pytest.approx(report["last"][1], rel=1e-4)
    assert report["parameters"] < 1e-4
    assert report["parts"] == [[VOCAB // 4, 16]] * 2
