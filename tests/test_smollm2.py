"""The embedded default target against transformers' greedy decoding of the same GGUF file."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import sys

import pytest
from checkpoint_files import FIXTURES
from tiers import tiers

from failfast_jax import FailFast
from failfast_jax.bench.comparison import first_difference
from failfast_jax.checkpoints.hub import default_target_path
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.decoding.width_plan import DEFAULT_WIDTHS, Widths
from failfast_jax.default_pair import embedded_drafter
from failfast_jax.errors import CheckpointError
from failfast_jax.generate import main
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.models.transformer import as_untrained_drafter
from failfast_jax.runtime import model_runtime

pytestmark = [pytest.mark.long, pytest.mark.optimized]

try:
    GGUF = default_target_path()
except CheckpointError as error:
    pytest.skip(str(error), allow_module_level=True)

GOLDEN = json.loads((FIXTURES / "smollm2_greedy.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in GOLDEN["cases"]}
SHORT = ("code_completion", "one_token")
DRAFTS = {"failfast": {"spec_len": 7, "max_spec_len": 7}, "lookup": {}, "vanilla": {}}


@pytest.fixture(scope="module")
def engine():
    """Every prompt in one bucket, so that each program is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runtime, "SMALLEST_CAPACITY", 512)
        model, tokenizer = ModelFolder(GGUF).load()
        few = Widths(DEFAULT_WIDTHS["cpu"].verify, prefill=(32, 128))
        tokenizers = {"tokenizer": tokenizer, "drafter_tokenizer": tokenizer}
        yield FailFast.load(model, as_untrained_drafter(model), widths=few, **tokenizers)


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


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("method", tiers(["lookup", "failfast"], quick=["failfast"]))
def test_drafting_changes_nothing(engine, method, name):
    case = CASES[name]
    (result,) = engine.generate([case["prompt_ids"]], method=method, max_new_tokens=16, **DRAFTS[method])
    at = first_difference(case["new_ids"][:16], result.output_ids)
    assert at is None or case["gaps"][at] < 1e-3
    assert result.stats.drafted > 0


@pytest.mark.parametrize("name", SHORT[:1])
def test_exact_answers_are_identical(engine, name):
    prompt = CASES[name]["prompt_ids"]
    answers = {
        method: engine.generate([prompt], method=method, max_new_tokens=16, exact=True, **options)[0].output_ids
        for method, options in DRAFTS.items()
    }
    assert answers["lookup"] == answers["failfast"] == answers["vanilla"]
    assert len(answers["vanilla"]) == 16


def test_the_command_line_answers_a_prompt_from_stdin(engine, monkeypatch, capsys):
    case = CASES["chat_question"]  # one user turn of the model's chat template
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?"))
    assert main(["--method", "vanilla", "--max-new-tokens", "64"]) == 0
    captured = capsys.readouterr()
    assert captured.out == case["text"] + "\n"
    assert f"vanilla: {len(case['new_ids'])} tokens" in captured.err


def test_the_default_drafter_ships(caplog):
    with caplog.at_level(logging.WARNING, logger="failfast_jax"):
        pair = FailFast.load(method="failfast")
    assert pair.drafter_name == str(embedded_drafter()) and "not trained" not in caplog.text
    assert pair.build_drafter(GenerationConfig()).max_draft == 15  # the text's; its own are shorter
    folder = embedded_drafter()
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 32 * 2**20
    # A drafter that draws a blank is not the one that was trained.
    result = pair.generate(["Name three colours."], method="failfast", max_new_tokens=24)[0]
    assert result.stats.accepted >= 3
    assert (
        result.output_ids == pair.generate(["Name three colours."], method="vanilla", max_new_tokens=24)[0].output_ids
    )


@pytest.mark.long(rare=True)
def test_the_schedule_that_needs_a_standalone_drafter_says_what_it_uses(caplog):
    with caplog.at_level(logging.WARNING, logger="failfast_jax"):
        pair = FailFast.load(method="failfast", schedule="aligned")
    assert "not trained to draft" in caplog.text
    plain = FailFast.load(pair, method="vanilla")
    assert plain.target is pair.target and plain.runtime.programs is pair.runtime.programs
    assert pair.drafter.config.mask_token_id == pair.target.config.vocab_size == pair.vocab
