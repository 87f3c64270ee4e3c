"""Models spread over 8 simulated devices give the tokens of one."""

from __future__ import annotations

import json

import jax
import pytest
from checkpoint_files import run_python
from jax.sharding import PartitionSpec as P
from tiny_models import random_model, tiny_config

from failfast_jax.errors import OptionError
from failfast_jax.models import sharding

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def report() -> dict:
    """What `tensor_parallel.py` prints."""
    done = run_python("tests/tensor_parallel.py")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_split_gives_the_tokens_of_one_device(report):
    verdicts = {name: equal for name, equal in report.items() if isinstance(equal, bool)}
    assert len(verdicts) == 14 and all(verdicts.values()), verdicts


def test_a_layer_costs_two_sums_over_devices_and_sampling_moves_the_logits_once(report):
    # Two layers, the embedding, and the maximum over the vocabulary; the greedy maximum and its place.
    assert report["collectives of a pass of two layers"] == {"all-reduce": 2 * 2 + 1 + 1}
    assert report["collectives of picks"] == {"all-reduce": 2, "all-to-all": 1}


def test_weights_load_into_their_shards(report):
    assert report["a device's part of the heads"] == 0.5


def test_int8_is_rounded_in_place_and_spread_like_its_floats(report):
    """The scales of outputs that each device has whole are on every device."""
    assert report["a device's part of int8"] == [1 / 8, 1 / 8, 1 / 8, 1]
    assert report["rounding gathers"] == ["all-reduce"]


def test_what_cannot_be_spread_is_refused(report):
    devices, heads, batch = report["errors"]
    assert devices == "--tensor-parallel 16 (x 1 data-parallel): there are 8 cpu devices"
    assert heads.startswith("--tensor-parallel 3: 4 key and value heads cannot") and heads.endswith(" 1, 2, 4, 8")
    assert batch.startswith("a batch of 3 over 2 data-parallel groups")


@pytest.mark.parametrize(
    "kv_heads, heads, devices, copies", [(8, 40, 8, 1), (2, 12, 4, 2), (4, 28, 8, 2), (3, 9, 2, None), (1, 8, 8, 8)]
)
def test_kv_heads_are_copied_where_there_are_fewer_than_devices(kv_heads, heads, devices, copies):
    assert sharding.kv_copies(tiny_config(num_heads=heads, num_kv_heads=kv_heads), devices) == copies


def test_every_parameter_has_a_place():
    model = random_model(tiny_config(tie_embeddings=False, o_bias=True, mlp_bias=True))
    model = model.quantized()
    mesh = sharding.mesh_of(jax.devices()[:1])
    execution = sharding.execution_of(model.config, mesh)
    assert all(isinstance(s, P) for s in jax.tree.leaves(sharding.parameter_specs(model, execution)))
    with pytest.raises(ValueError, match="unknown.thing"):
        sharding.parameter_spec("unknown.thing", execution)


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="'cuda': must be one of reference, cpu, tpu"):
        sharding.Execution(kernel="cuda")


def test_too_many_devices_are_refused():
    with pytest.raises(OptionError, match="--tensor-parallel 4096"):
        sharding.make_mesh(4096)
