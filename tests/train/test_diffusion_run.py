"""Whole block-diffusion models: steps in bfloat16, packing, what is written, and devices that share parameters."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_texts import BLOCK, MASK, RELEASED, model, packed_batch, quick_jit, random_tokens
from checkpoint_files import run_python
from tiny_models import VOCAB, random_model, tiny_config
from training_runs import parameters

from failfast_jax import FailFast, load_model
from failfast_jax.checkpoints.fast_dllm_folder import as_fast_dllm, save_fast_dllm
from failfast_jax.checkpoints.parameter_map import Skeleton
from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.diffusion_run import DiffusionObjective
from failfast_jax.train.documents import Documents, PackedRows, packed
from failfast_jax.train.spread import Spread
from failfast_jax.train.trainer import initial_state, make_step


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
    start = random_model(tiny_config(model_type="llama", qkv_bias=False), seed=3)
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
    larger = random_model(tiny_config(num_layers=3, hidden_size=32, num_heads=4), seed=4)
    engine = FailFast(larger, tmp_path / "made")
    options = {"max_new_tokens": 12, "ignore_eos": True}
    one, two = (engine.generate([[2, 3, 4]], method=method, **options)[0] for method in ("failfast", "vanilla"))
    assert one.output_ids == two.output_ids and one.stats.drafted > 0


@pytest.mark.parametrize(
    ("changes", "message"), [({"qk_norm": True}, "has Qwen2's layers"), ({}, "mask token 99 is outside the vocabulary")]
)
def test_models_that_do_not_fit_the_layout_are_refused(changes, message):
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
