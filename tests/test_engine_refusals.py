"""Models that an engine is given, prompts and options: what is served, and what is refused with which words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engines import BytePieces, diffusion_engine, engine, new_engine
from tiny_models import VOCAB, diffusion_config, random_model, tiny_config

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.errors import OptionError, PromptError
from failfast_jax.models.borrowed import as_untrained_drafter

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


def test_the_block_size_is_an_option():
    model = random_model(diffusion_config(8))
    assert model.with_block_size(16).config.block_size == 16 and model.config.block_size == 8
    drafter = engine().build_drafter(GenerationConfig(method="failfast", block_size=16))
    assert drafter.block == 16


# Refusals; those that the command line shows are in `test_generate_cli`.


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tau": float("nan")}, "--tau nan"),
        ({"spec_len": 0}, "--spec-len 0"),
        ({"max_spec_len": 0}, "--max-spec-len 0"),
        ({"top_k": -1}, "--top-k"),
        ({"schedule": "tall"}, "--schedule tall"),
        ({"threshold": 2.0}, "--threshold"),
        ({"block_size": 1}, "--block-size 1"),
        ({"small_block_size": 0}, "--small-block-size 0"),
        ({"max_new_tokens": "5"}, "--max-new-tokens '5': must be an integer"),
        ({"spec_len": 2.5}, "--spec-len 2.5: must be an integer"),
        ({"tau": "high"}, "--tau 'high': must be a number"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(OptionError) as error:
        engine().generate([[3]], **options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ("  \n", "the prompt is empty"),
        ([{"role": "user", "content": "hello"}], "has no chat template"),
        (5, "prompts must be text, messages, token ids, or a list of them, got 5"),
    ],
)
def test_prompts_that_cannot_be_served(prompt, message):
    with pytest.raises(PromptError, match=message):
        engine().generate(prompt, method="vanilla")


def test_arrays_of_ids_are_prompts():
    options = {"method": "vanilla", "max_new_tokens": 3}
    want = engine().generate([[3, 4], [5, 6]], **options)
    for prompts in (np.asarray([[3, 4], [5, 6]]), jnp.asarray([[3, 4], [5, 6]])):
        assert [r.output_ids for r in engine().generate(prompts, **options)] == [r.output_ids for r in want]
    assert engine().generate(jnp.asarray([3, 4]), **options)[0].output_ids == want[0].output_ids


def test_text_needs_a_tokenizer():
    with pytest.raises(PromptError, match="has no tokenizer: give token ids"):
        diffusion_engine().generate("hello", method="dllm")


def test_prompts_may_be_text_or_ids():
    text = "A prompt."
    ids = [ord(c) % VOCAB for c in text]
    options = {"method": "vanilla", "max_new_tokens": 3}
    for prompt in (text, [text], ids, [ids], np.asarray(ids), [np.asarray(ids)]):
        (result,) = engine().generate(prompt, **options)
        assert result.prompt_ids == ids


def test_models_with_other_tokens():
    target = random_model(tiny_config())
    other = random_model(diffusion_config(vocab_size=VOCAB + 8))
    with pytest.raises(ValueError, match=rf"the target model.*the drafter model.*{VOCAB} and {VOCAB + 8} ids"):
        FailFast(target, other)


def test_ids_that_the_target_lacks_are_never_drafted():
    """A drafter whose embedding has more rows than the target's proposes only what the target knows."""
    wide = random_model(diffusion_config(vocab_size=VOCAB + 24, mask_token_id=VOCAB + 1), seed=2)
    loud = np.where(np.arange(VOCAB + 24) < VOCAB, 1, 3)[:, None]
    wide.head.weight[...] = wide.head.weight[...] * loud
    pair = FailFast(engine().target, wide, tokenizer=BytePieces(), drafter_tokenizer=BytePieces())
    assert pair.vocab == VOCAB
    (result,) = pair.generate([[5, 6, 7]], method="failfast", max_new_tokens=40, **DRAFTS)
    drafted = {token for r in result.rounds for token in r.drafted}
    assert drafted and max(drafted) < VOCAB
    alone = FailFast(wide).generate([[5, 6, 7]], method="dllm", max_new_tokens=16, small_block_size=4)[0]
    assert max(alone.output_ids) >= VOCAB + 2  # on its own it says others


@pytest.mark.parametrize("length", [1, 601])
def test_a_context_length_out_of_range(length):
    with pytest.raises(OptionError, match=f"--max-seq-len {length}: must be between 2 and the context of 600"):
        new_engine(max_seq_len=length)


def test_the_default_platform_is_the_one_that_runs():
    assert engine().platform == jax.default_backend()
