"""Models spread over 8 simulated devices give the tokens of one.

The comparison is a script, in a process of its own: the number of devices is fixed when JAX is first used.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import numpy as np
import pytest
from checkpoint_files import GOLDEN, gguf_tokenizer, run_python, write_gguf
from gguf import GGMLQuantizationType as Quant
from tiny_models import (
    as_untrained_drafter,
    diffusion_config,
    random_dspark,
    random_eagle,
    random_extended,
    random_model,
    tiny_config,
)

from failfast_jax import FailFast, load_model
from failfast_jax.decoding import picking
from failfast_jax.decoding.decode_state import Sampling
from failfast_jax.errors import OptionError
from failfast_jax.kernels import blocks
from failfast_jax.models import quantization, sharding
from failfast_jax.models.transformer import Decoder
from tpu_scripts import hlo

PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 3, 4, 5], [9, 8, 7, 6, 5], [11, 12], [5] * 20]
OPTIONS = {"failfast": {"spec_len": 3, "max_spec_len": 6, "tau": 0.2}, "vanilla": {}, "lookup": {"max_spec_len": 7}}


def answers(engine: FailFast, method: str, batch: int) -> list[list[int]]:
    results = engine.generate(
        (PROMPTS * 2)[:batch], method=method, max_new_tokens=20, ignore_eos=True, **OPTIONS[method]
    )
    return [result.output_ids for result in results]


def collectives(program: jax.stages.Compiled) -> dict[str, int]:
    """Collective operations of a program, by kind."""
    return {kind: count for kind, count in hlo.collectives(program.as_text()).items() if count}


def target_pass(engine: FailFast) -> jax.stages.Compiled:
    """One target pass of 8 rows."""
    target = engine.target
    cache = jax.jit(lambda: target.init_cache(1, 128))()

    def run(target, cache, tokens, start):
        hidden, cache, _ = target.window(tokens, cache, start, start[0] + 8)
        return target.logits_of(hidden).max(-1), cache

    tokens, start = jax.numpy.zeros((1, 8), int), jax.numpy.zeros((1,), int)
    return jax.jit(run, donate_argnums=1).lower(target, cache, tokens, start).compile()


def check_sampling(mesh) -> dict[str, int]:
    """Picks from logits spread by vocabulary are those of one device; returns what they cost to exchange."""
    execution = sharding.Execution(mesh=mesh, batch=sharding.DATA, vocab=sharding.TENSOR)
    options = Sampling(
        temperature=np.float32([0.8, 0.0, 1.2]),
        top_k=np.int32([0, 3, 9]),
        top_p=np.float32([0.9, 0.5, 1.0]),
        seed=np.uint32([1, 2, 3]),
        sequence=np.int32([0, 1, 2]),
    )
    logits = np.random.default_rng(0).normal(size=(3, 8, 64)).astype(np.float32)
    positions = np.tile(np.arange(8), (3, 1))
    spread = jax.device_put(logits, sharding.NamedSharding(mesh, sharding.P(sharding.DATA, None, sharding.TENSOR)))
    program = jax.jit(picking.pick, static_argnums=3).lower(spread, positions, options, execution).compile()
    expected = jax.jit(picking.pick)(logits, positions, options)
    np.testing.assert_array_equal(program(spread, positions, options), expected)
    return collectives(program)


def check_readers_of_features(target: Decoder, expected: list[int]) -> None:
    """Drafters that are computed whole on every device lead to the expected text."""
    chain = {"method": "eagle3", "spec_len": 3}
    tree = {"method": "eagle3", "tree_budget": 7, "tree_depth": 2, "tree_top_k": 2}
    for drafter, groups, requests in (
        (random_extended(target), 1, [{"method": "auto"}]),
        (random_dspark(target), 1, [{"method": "dspark"}]),
        (random_eagle(target), 2, [chain, tree]),
    ):
        engine = FailFast(target, drafter, tensor_parallel=4 // groups, data_parallel=groups)
        for request in requests:
            results = engine.generate(PROMPTS[:1] * groups, max_new_tokens=20, ignore_eos=True, **request)
            assert [result.output_ids for result in results] == [expected] * groups, request


def check_files() -> None:
    """Each device reads its part."""
    folders = GOLDEN / "qwen2_target_160", GOLDEN / "fast_dllm_v2_untied"
    spread, one = FailFast(*folders, tensor_parallel=2), FailFast(*folders)
    assert answers(spread, "failfast", 1) == answers(one, "vanilla", 1)
    weight = spread.target.layers[0].attention.qkv.weight[...]
    assert 2 * weight.addressable_shards[0].data.shape[0] == weight.shape[0]


def check_blocks_of_a_file(folder: Path) -> None:
    """A GGUF file is read onto a mesh in blocks: each device has its part, and computes what the numbers would."""
    kind = Quant.Q4_1

    def kind_of(_, value: np.ndarray) -> Quant:
        return kind if value.ndim == 2 and value.shape[1] % 32 == 0 else Quant.F32

    path = write_gguf(folder / "model.gguf", "qwen2_untied", quantise=kind_of, extra=gguf_tokenizer)
    spread, one = FailFast(path, tensor_parallel=2), FailFast(load_model(path, widen=True))
    assert answers(spread, "lookup", 1) == answers(one, "vanilla", 1)
    layer = spread.target.layers[0]
    for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down, spread.target.head):
        matrix = linear.weight[...]
        assert matrix.bits == 4 and isinstance(matrix, blocks.TransposedMatrix)
        assert {leaf.addressable_shards[0].data.size / leaf.size for leaf in jax.tree.leaves(matrix)} == {1 / 2}


def check_rounding(target: Decoder, drafter: Decoder) -> None:
    """Weights are rounded where they lie, each device's part by itself: its groups of inputs are its own."""
    for scheme, tensor in (("int8", 4), ("int4", 2)):
        small = FailFast(target, drafter, tensor_parallel=tensor, quantize=scheme, quantize_drafter=scheme)

        def rounded(path: tuple, weight: jax.Array, scheme: str = scheme, tensor: int = tensor) -> jax.Array:
            name = sharding.name_of(path)
            if weight.ndim < 2 or "bias" in name:
                return weight
            inputs = weight.shape[-1] // (tensor if name.endswith(("o.weight", "down.weight")) else 1)
            group = inputs if scheme == "int8" else math.gcd(inputs, 128)
            if scheme == "int4" and group % 32:  # it stays as it is
                return weight
            return blocks.as_array(blocks.quantize(weight, quantization.SCHEMES[scheme], group))

        same = jax.tree_util.tree_map_with_path(rounded, target)
        ids = [[3, 4, 5, 6]]
        np.testing.assert_allclose(small.target.logits(ids), same.logits(ids), atol=1e-4, err_msg=scheme)
        assert answers(small, "failfast", 1) == answers(FailFast(same), "vanilla", 1), scheme
        with pytest.raises(OptionError, match="was read for other devices"):
            FailFast(small.target, data_parallel=tensor)
        mlp = small.target.layers[0].mlp
        leaves = [leaf for layer in (mlp.gate_up, mlp.down) for leaf in jax.tree.leaves(layer.weight[...])]
        assert {leaf.addressable_shards[0].data.size / leaf.size for leaf in leaves} == {1 / tensor}, scheme


def check_borrowed(vocab: int) -> None:
    """A drafter that borrows its target's embedding has the same arrays, where they are."""
    target = random_model(tiny_config(vocab_size=vocab))
    spread, one = (FailFast(target, as_untrained_drafter(target, 8), tensor_parallel=parts) for parts in (2, 1))
    assert answers(spread, "failfast", 1) == answers(one, "vanilla", 1)
    places = [each.embed[...].sharding for each in (spread.target, spread.drafter)]
    assert places[0].is_equivalent_to(places[1], 2)


def check_copied_heads() -> None:
    """A model that is read in blocks has its KV heads copied, and computes what its numbers do."""
    folder, ids = GOLDEN / "field" / "qwen3_a", [[3, 4, 5, 6]]
    exact = np.asarray(load_model(folder).logits(ids))
    for scheme, error in (("int8", 0.03), ("int4", 0.4)):
        engine = FailFast(folder, tensor_parallel=4, quantize=scheme)
        assert isinstance(engine.target.layers[0].attention.o.weight[...], blocks.TransposedMatrix), scheme
        assert engine.target.config == FailFast(load_model(folder), tensor_parallel=4).target.config
        assert (engine.target.logits(ids) - exact).std() < error * exact.std(), scheme


def main() -> None:
    sizes = {"num_heads": 12, "num_kv_heads": 4, "hidden_size": 64, "intermediate_size": 64}
    target = random_model(tiny_config(**sizes, o_bias=True, mlp_bias=True, tie_embeddings=False))
    drafter = random_model(diffusion_config(num_heads=4, num_kv_heads=2))
    one = FailFast(target, drafter)
    expected = {batch: answers(one, "vanilla", batch) for batch in (1, 4)}
    # Each answer compiles its programs for 8 devices that share this machine's cores: no more of them than it takes.
    for method, batch, tensor, data in (("lookup", 1, 4, 1), ("failfast", 1, 8, 1), ("failfast", 4, 4, 2)):
        engine = FailFast(target, drafter, tensor_parallel=tensor, data_parallel=data)
        assert answers(engine, method, batch) == expected[batch], (method, tensor, data)
        if method == "lookup":  # two layers, the embedding, and the maximum over the vocabulary
            assert collectives(target_pass(engine)) == {"all-reduce": 2 * 2 + 1 + 1}
            # The greedy maximum and its place; sampling moves the logits once.
            assert check_sampling(engine.mesh) == {"all-reduce": 2, "all-to-all": 1}
    check_sampling(sharding.make_mesh(2, 3))  # groups with a row each
    check_files()
    check_rounding(target, drafter)
    check_copied_heads()
    for vocab in (39, 40):
        check_borrowed(vocab)
    with tempfile.TemporaryDirectory() as folder:
        check_blocks_of_a_file(Path(folder))
    check_readers_of_features(target, expected[1][0])
    for options, prompts, message in (
        ({"tensor_parallel": 16}, 1, r"--tensor-parallel 16 \(x 1 data-parallel\): there are 8 cpu devices; .* 8$"),
        ({"tensor_parallel": 3}, 1, "--tensor-parallel 3: 4 key and value heads cannot.* 1, 2, 4, 8$"),
        ({"data_parallel": 2}, 3, "a batch of 3 over 2 data-parallel groups"),
    ):
        with pytest.raises(OptionError, match=message):
            FailFast(target, drafter, **options).generate(PROMPTS[:prompts], method="vanilla", max_new_tokens=2)


@pytest.mark.long
def test_every_split_gives_the_tokens_of_one_device():
    done = run_python("tests/models/test_sharding.py")
    assert done.returncode == 0, done.stderr[-3000:]


def test_an_unknown_kernel_and_an_unknown_parameter_are_refused():
    with pytest.raises(ValueError, match="'cuda': must be one of reference, cpu, tpu"):
        sharding.Execution(kernel="cuda")
    with pytest.raises(ValueError, match="unknown.thing"):
        sharding.parameter_spec("unknown.thing", sharding.ONE_DEVICE)


if __name__ == "__main__":
    main()
