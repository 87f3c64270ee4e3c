"""The cached, padded, compiled paths against outputs of the public PyTorch models."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN, GOLDEN_NAMES
from tiny_models import committed

from failfast_jax import FailFast
from failfast_jax.decoding import BelowThreshold
from failfast_jax.drafters.aligned import Aligned
from failfast_jax.drafters.block_diffusion import Wide

DIFFUSION = [name for name in GOLDEN_NAMES if name.startswith("fast_dllm")]
TARGETS = [name for name in GOLDEN_NAMES if name not in DIFFUSION]
CAPACITY, PREFILL = 256, 128


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.optimized) for name in TARGETS[:2]] + TARGETS[2:]
)
def test_greedy_tokens(name, golden_model):
    engine = FailFast(golden_model(name))
    with np.load(GOLDEN / name / "golden.npz") as data:
        keys = [key for key in data if key.startswith("greedy_")]
        assert keys
        for key in keys:
            expected, prompt = data[key].reshape(-1).tolist(), int(key.split("_")[1])
            result = engine.generate([expected[:prompt]], method="vanilla", max_new_tokens=96)[0]
            assert result.output_ids == expected[prompt:]
            assert result.finish_reason == ("length" if len(result.output_ids) == 96 else "eos")


@jax.jit
def prefill(drafter, now):
    features = jnp.zeros((1, PREFILL, 0, drafter.model.config.hidden_size))
    return drafter.prefill(drafter.init(1, CAPACITY + 128), now, jnp.int32(0), PREFILL, features)


first_draft = jax.jit(lambda drafter, state, now: drafter.draft(state, now)[0])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(DIFFUSION[0], "wide", marks=pytest.mark.optimized),
        (DIFFUSION[0], "aligned"),
        *(pytest.param(name, kind, marks=pytest.mark.long) for name in DIFFUSION[1:] for kind in ("wide", "aligned")),
        pytest.param("field/sdar_a", "wide", marks=pytest.mark.long),
    ],
)
def test_drafts(name, kind, golden_model):
    """Prefill and first draft; texts are padded, so that all share a program. SDAR has no token shift."""
    model = golden_model(name)
    vocab = model.config.vocab_size
    entries = json.loads((GOLDEN / name / f"drafts_{kind}.json").read_text())
    assert len(entries) >= 7
    make = functools.partial(Wide if kind == "wide" else Aligned, model=model, vocab=vocab)
    any_lengths = {"spec_len": 1, "max_spec_len": 1, "rule": BelowThreshold(np.float32(0))}
    for entry in entries:
        aligned = {}
        if kind == "aligned":
            aligned = {
                "threshold": np.float32(entry["drafter_threshold"]),
                "small_block": entry["small_block_size"],
            }
        context = entry["text" if "text" in entry else "context"]
        length = len(context)
        now = committed([context], CAPACITY, CAPACITY - length - 1)
        state = prefill(make(**any_lengths, **aligned), now)
        drafter = make(
            rule=BelowThreshold(np.float32(entry["tau"])),
            spec_len=entry.get("spec_len", entry.get("initial_spec_len")),
            max_spec_len=entry["max_spec_len"],
            **aligned,
        )
        draft = first_draft(drafter, state, now)
        drafted = int(draft.length[0])
        assert draft.tokens[0, :drafted].tolist() == entry["draft"], length
        assert int(draft.passes[0]) == entry["passes"], length
        if kind == "wide":
            np.testing.assert_allclose(draft.confidence[0, :drafted], entry["confidence"], atol=2e-4)
