"""Prompts and options that an engine refuses, and the flag, key or model that each message names."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN
from tiny_engines import ROWS, BytePieces, engine, extended_engine, new_engine
from tiny_models import VOCAB, diffusion_config, random_model, tiny_config

from failfast_jax import FailFast, LoadOptions
from failfast_jax.errors import ConfigError, DeviceMemoryError, OptionError, PromptError
from failfast_jax.models.transformer import as_untrained_drafter
from failfast_jax.prompts import encode

DRAFTS = {"spec_len": 3, "max_spec_len": 6, "tau": 0.3}


# Models.


def test_an_untrained_drafter_shares_its_targets_weights():
    for tied in (False, True):
        target = random_model(tiny_config(tie_embeddings=tied))
        drafter = as_untrained_drafter(target, 16)
        assert drafter.config.mask_token_id == VOCAB and drafter.config.vocab_size == VOCAB + 1
        assert drafter.config.block_size == 16 and target.config.block_size == 1
        assert drafter.layers is target.layers
        np.testing.assert_allclose(drafter.embed[...][VOCAB], target.embed[...].mean(0), atol=1e-6)
        np.testing.assert_array_equal(drafter.embed[...][:VOCAB], target.embed[...])
        assert drafter.logits(jnp.asarray([[1, 2, VOCAB]])).shape == (1, 3, VOCAB + 1)
        assert target.embed[...].shape[0] == VOCAB


# Refusals; those that the command line shows are in `test_generate_cli`.


SPEC_LEN_9, STEPS = {"spec_len": 9, "max_spec_len": 9}, {"method": "specdiff"}
ALIGNED = {"schedule": "aligned"}
REJECTION = {"acceptance": "rejection"}
REFUSED = [
    ({"tau": float("nan")}, "--tau nan"),
    ({"max_new_tokens": "5"}, "--max-new-tokens '5': must be an integer"),
    ({"temperature": -1e-9}, "--temperature -1e-09: must be in"),
    ({"top_p": 0.0}, r"--top-p 0.0: must be in \(0, 1\]"),
    ({"top_k": -1}, "--top-k -1: must be"),
    ({"tau": "high"}, "--tau 'high': must be a number"),
    ({"min_gain": 1.0}, "--min-gain 1.0: no longer an option: --method auto weighs"),
    ({"method": "auto", "policy": "fixed"}, r"--policy fixed: no longer .*\(--method failfast, --method lookup\)"),
    ({"policy": "auto"}, "--policy auto: no longer an option: --method auto decides"),
    ({"lookup_min": 2}, "--lookup-min 2: --method failfast has no such option, only --method auto, lookup, suffix"),
    ({"method": "suffix", "lookup_min": 0}, "--lookup-min 0: must be in"),
    (STEPS | {"steps": 11}, "--steps 11: must be at most --spec-len 10"),
    (ALIGNED | {"rule": "congestion"}, "--rule congestion: not with --schedule aligned"),
    ({"rule": "congestion", "tau": 0.0}, "--tau 0.0: not with --rule congestion"),
    ({"rule": "luck"}, "--rule luck: must be 'confidence' or 'congestion'"),
    (SPEC_LEN_9 | {"reuse": True}, "--reuse: drafts of --spec-len 9 leave no room"),
    ({"tree_budget": 16}, "--tree-budget 16: --method failfast has no such option, only --method eagle3"),
    # Drafts that are not sampled from left to right.
    (REJECTION | {"method": "lookup"}, "--acceptance rejection: "),
    (REJECTION | ALIGNED, "--schedule aligned: not with --acceptance rejection"),
    (REJECTION | {"method": "auto"}, "--acceptance rejection: "),
    (REJECTION | {"reuse": True}, "--reuse: not with --acceptance rejection"),
    (REJECTION | STEPS | {"steps": 2}, "--steps 2: not with --acceptance rejection"),
    (REJECTION | {"exact": True, "temperature": 0.5}, "--acceptance rejection: "),
]
REFUSED_EXTENDED = [
    ({"spec_len": ROWS + 1}, "--spec-len 6: this drafter fills up to 5"),
    ({"method": "fast-dllm"}, "method fast-dllm needs a drafter of kind block-diffusion"),
    (ALIGNED, "--schedule aligned: needs a drafter of kind block-diffusion"),
    ({"block_size": 8}, "--block-size 8"),
    ({"reuse": True}, f"--reuse: drafts of --spec-len {ROWS} leave no room"),
]
CASES = [(engine, *case) for case in REFUSED] + [(extended_engine, *case) for case in REFUSED_EXTENDED]


@pytest.mark.parametrize("make, options, message", CASES)
def test_options_that_cannot_be_served(make, options, message):
    with pytest.raises((OptionError, ConfigError), match=message):
        make().generate([[3, 1, 4]], **{"method": "failfast"} | options)


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ("", "the prompt is empty"),
        ([{"role": "user", "content": "hello"}], "has no chat template"),
        (5, "prompts must be text, messages, token ids, or a list of them, got 5"),
    ],
)
def test_prompts_that_cannot_be_served(prompt, message):
    with pytest.raises(PromptError, match=message):
        engine().generate(prompt, method="vanilla")


def test_white_space_is_text_but_no_turn():
    assert engine().encode("\n") == [ord("\n") % VOCAB]
    talker = types.SimpleNamespace(chat_template="any")
    with pytest.raises(PromptError, match="the prompt is empty: a user's turn of spaces alone"):
        encode("  \n", talker, VOCAB, "tiny")


def test_prompts_may_be_text_or_ids():
    text = "A prompt."
    ids = [ord(c) % VOCAB for c in text]
    batch = [ids, ids[::-1]]
    options = {"method": "vanilla", "max_new_tokens": 3}
    for prompt in (text, [text], ids, [ids], np.asarray(ids), [np.asarray(ids)], jnp.asarray(ids)):
        assert [result.prompt_ids for result in engine().generate(prompt, **options)] == [ids]
    for prompts in (np.asarray(batch), jnp.asarray(batch)):
        assert [result.prompt_ids for result in engine().generate(prompts, **options)] == batch


def test_ids_that_the_target_lacks_are_never_drafted():
    """A drafter whose embedding has more rows than the target's proposes only what the target knows."""
    wide = random_model(diffusion_config(vocab_size=VOCAB + 24, mask_token_id=VOCAB + 1), seed=2)
    loud = np.where(np.arange(VOCAB + 24) < VOCAB, 1, 3)[:, None]
    wide.head.weight[...] = wide.head.weight[...] * loud
    pair = FailFast.load(engine().target, wide, tokenizer=BytePieces(), drafter_tokenizer=BytePieces())
    assert pair.vocab == VOCAB
    (result,) = pair.generate([[5, 6, 7]], method="failfast", max_new_tokens=40, **DRAFTS)
    drafted = {token for r in result.rounds for token in r.drafted}
    assert drafted and max(drafted) < VOCAB
    alone = FailFast.load(wide).generate([[5, 6, 7]], method="dllm", max_new_tokens=16, small_block_size=4)[0]
    assert max(alone.output_ids) >= VOCAB + 2  # without the target it writes others


REFUSED_LOADING = {
    "--dtype int8": {"dtype": "int8"},
    "--dtype 5": {"dtype": 5},
    "--tensor-parallel 0": {"tensor_parallel": 0},
    "--data-parallel 'two'": {"data_parallel": "two"},
    "--max-seq-len 1.5": {"max_seq_len": 1.5},
    "--method magic": {"method": "magic"},
    "--method ar": {"method": "ar"},
    "--quantize-drafter int8": {"quantize_drafter": "int8"},
    "--rope-theta-drafter -1.0": {"rope_theta_drafter": -1.0},
    "max_seqlen: .*max_seq_len": {"max_seqlen": 5},
    "temperature: no option of loading": {"temperature": 0.5},
}


@pytest.mark.parametrize("message, changes", REFUSED_LOADING.items(), ids=REFUSED_LOADING)
def test_options_of_loading_that_cannot_be_served(message, changes):
    """Before any model is read, whichever way they are written."""
    for load in (
        lambda: FailFast.load("nowhere", **changes),
        lambda: FailFast.load("nowhere", options=LoadOptions().changed(**changes)),
    ):
        with pytest.raises(OptionError, match=message):
            load()


@pytest.mark.parametrize("length", [1, 601])
def test_a_context_length_out_of_range(length):
    with pytest.raises(OptionError, match=r"FailFast.load\(\)"):
        FailFast()
    with pytest.raises(OptionError, match=f"--max-seq-len {length}: must be between 2 and the context of 600"):
        new_engine(max_seq_len=length)


# Memory.

EXHAUSTED = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.1G of 15.75G."
)


def fail(error):
    def failing(*_, **__):
        raise error

    return failing


@pytest.mark.parametrize("program", ["the_start", "prefill", "the_loop_over_rounds"])
def test_a_program_that_does_not_fit_is_explained(monkeypatch, program):
    """XLA raises this error when it compiles; its other errors stay as they are."""
    small, whole = new_engine(), jax.stages.Lowered.compile

    def compiled(lowered, **options):
        if f"@jit_{program} " in str(lowered.compiler_ir().operation):
            raise error
        return whole(lowered, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    error = EXHAUSTED
    with pytest.raises(DeviceMemoryError) as caught:
        small.generate([[1, 2, 3]] * 2, max_new_tokens=4)
    advice = "--max-seq-len", "--quantize int8", "--tensor-parallel"
    for part in ("2 x 256 tokens", "the target model 0.00 GB", *advice, "Used 20.1G of 15.75G"):
        assert part in str(caught.value)
    assert caught.value.__cause__ is EXHAUSTED
    error = jax.errors.JaxRuntimeError("INTERNAL: no")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        small.generate([[1, 2, 3]] * 2, max_new_tokens=4)


def test_models_that_do_not_fit_are_explained(monkeypatch):
    monkeypatch.setattr(jax, "make_array_from_callback", fail(EXHAUSTED))
    monkeypatch.setattr(jax, "device_put", fail(EXHAUSTED))
    with pytest.raises(DeviceMemoryError, match="qwen2_target_160: 0.00 GB of parameters.*--quantize int8"):
        FailFast.load(GOLDEN / "qwen2_target_160")
