"""The embedded default target against transformers' greedy decoding of the same GGUF file."""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys

import pytest
from checkpoint_files import FIXTURES
from flax import nnx
from tiny_engines import lossless
from tiny_models import as_untrained_drafter

from failfast_jax import FailFast
from failfast_jax.bench.comparison import first_difference
from failfast_jax.checkpoints.hub import default_target_path, embedded
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.decoding.width_plan import DEFAULT_WIDTHS, Widths
from failfast_jax.default_pair import DIFFUSION_DRAFTER, embedded_drafter
from failfast_jax.errors import CheckpointError
from failfast_jax.generate import main
from failfast_jax.kernels import cpu_blocks
from failfast_jax.kernels.blocks import TiledMatrix
from failfast_jax.models.layers import Linear
from failfast_jax.models.quantization import parameter_bytes
from failfast_jax.runtime import model_runtime

pytestmark = [pytest.mark.long, pytest.mark.optimized]

try:
    GGUF = default_target_path()
except CheckpointError as error:
    pytest.skip(str(error), allow_module_level=True)

GOLDEN = json.loads((FIXTURES / "smollm2_greedy.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in GOLDEN["cases"]}
DRAFTS = {"method": "failfast", "spec_len": 7, "max_spec_len": 7}


@pytest.fixture(scope="module")
def engine():
    """Computes as transformers does; every prompt is in one bucket, so that each program is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runtime, "SMALLEST_CAPACITY", 512)
        model, tokenizer = ModelFolder(GGUF).load()
        few = Widths(DEFAULT_WIDTHS["cpu"].verify, prefill=(32, 128))
        tokenizers = {"tokenizer": tokenizer, "drafter_tokenizer": tokenizer}
        yield FailFast.load(model, as_untrained_drafter(model), widths=few, activations="float32", **tokenizers)


def test_the_file_is_the_one_that_transformers_read():
    assert hashlib.sha256(GGUF.read_bytes()).hexdigest() == GOLDEN["metadata"]["gguf_sha256"]
    assert len(CASES) >= 5 and len({case["kind"] for case in CASES.values()}) > 1


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_those_of_transformers(engine, name):
    case = CASES[name]
    assert engine.tokenizer(case["prompt"])["input_ids"] == case["prompt_ids"]
    (result,) = engine.generate([case["prompt_ids"]], method="vanilla", max_new_tokens=64)
    assert result.output_ids == case["new_ids"]
    assert result.text == case["text"]
    assert result.finish_reason == ("length" if len(case["new_ids"]) == 64 else "eos")


@pytest.mark.parametrize("name, exact", [("code_completion", False), ("one_token", False), ("code_completion", True)])
def test_drafting_changes_nothing(engine, name, exact):
    case = CASES[name]
    (result,) = engine.generate([case["prompt_ids"]], max_new_tokens=16, exact=exact, **DRAFTS)
    at = first_difference(case["new_ids"][:16], result.output_ids)
    assert at is None or (not exact and case["gaps"][at] < 1e-3)
    assert result.stats.drafted > 0


def test_the_command_line_answers_a_prompt_from_stdin_with_the_default_drafter(monkeypatch, capsys):
    case = CASES["list_request"]  # one user turn of the model's chat template
    monkeypatch.setattr(sys, "stdin", io.StringIO("List ten animals that live in the sea, one per line."))
    assert main(["--method", "failfast", "--max-new-tokens", "64", "--activations", "float32"]) == 0
    captured = capsys.readouterr()
    assert captured.out == case["text"] + "\n"
    # A drafter that draws a blank is not the one that was trained.
    assert int(re.search(r"failfast: 64 tokens.* (\d+) of \d+ drafted tokens accepted", captured.err)[1]) >= 8
    assert "not trained" not in captured.err
    assert sum(file.stat().st_size for file in embedded_drafter().iterdir()) <= 32 * 2**20


@pytest.mark.skipif(cpu_blocks.refusal(576) is not None, reason="needs the kernel of blocks")
def test_the_embedded_drafter_is_in_blocks_of_8_bits_and_changes_nothing():
    pair = FailFast.load(method="dspark")
    network, head = pair.drafter.network, pair.drafter.head
    matrices = [node.weight[...] for _, node in nnx.iter_graph(network) if isinstance(node, Linear)]
    assert all(isinstance(matrix, TiledMatrix) for matrix in [*matrices, head])
    assert {(matrix.bits, matrix.activations) for matrix in [*matrices, head]} == {(8, "int8")}
    # 1.0625 bytes a number, which are 2 in the file; the head's rows are the target's own.
    stored = (embedded_drafter() / "model.safetensors").stat().st_size
    assert 0.52 < parameter_bytes(network) / stored < 0.54 and head.shape == (8192, 576)
    prompts = [CASES["list_request"]["prompt_ids"], CASES["code_completion"]["prompt_ids"]]
    results = [lossless(pair, [prompt], method="dspark", max_new_tokens=64)[0] for prompt in prompts]
    assert sum(result.stats.accepted for result in results) > sum(result.stats.rounds for result in results) / 2


def test_the_embedded_diffusion_model_drafts_where_whole_blocks_are_needed():
    """It has a name of its own, too; what is in the file is what is computed with."""
    pair = FailFast.load(method="specdiff")
    assert pair.drafter.config.block_size == 16 and pair.drafter.config.num_layers == 8
    assert FailFast.load(pair, "smollm2-diffusion").drafter.config == pair.drafter.config
    plain = FailFast.load(pair, method="vanilla")
    assert plain.target is pair.target and plain.runtime.programs is pair.runtime.programs
    assert pair.drafter.config.mask_token_id == pair.target.config.vocab_size == pair.vocab
    folder = embedded(DIFFUSION_DRAFTER)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 45e6
    for options in ({"method": "failfast", "max_spec_len": 32}, {"method": "specdiff", "steps": 2}):
        (result,) = lossless(pair, [CASES["list_request"]["prompt_ids"]], spec_len=8, max_new_tokens=64, **options)
        # A drafter that draws a blank is not the one that was trained.
        assert result.stats.accepted > result.stats.rounds / 2
