"""The engine: batches, streams, limits, compile counts, refusals."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import VOCAB, diffusion_config, random_model, tiny_config

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.decoding import plan as plans
from failfast_jax.decoding.exact import interchangeable_widths
from failfast_jax.errors import ConfigError, NonFiniteError, OptionError, PromptError
from failfast_jax.models.borrowed import as_untrained_drafter
from failfast_jax.models.transformer import Decoder
from failfast_jax.runtime import DraftSession

DRAFTS = {"spec_len": 3, "max_spec_len": 6, "tau": 0.3}
OF_METHOD = {"vanilla": {}, "failfast": DRAFTS}
RAGGED = [[5, 6, 7], [8, 9] * 15, [3]]


def new_engine(**options) -> FailFast:
    target = random_model(tiny_config(num_layers=1, max_position_embeddings=600), seed=1)
    return FailFast(target, random_model(diffusion_config(max_position_embeddings=600), seed=2), **options)


@functools.cache
def engine() -> FailFast:
    return new_engine(tokenizer=BytePieces(), drafter_tokenizer=BytePieces())


@functools.cache
def diffusion_engine() -> FailFast:
    return FailFast(random_model(diffusion_config(), seed=2))


class BytePieces:
    """A tokenizer whose tokens are single bytes, most of them halves of a two-byte character."""

    pieces = [b"\xc3" if i % 2 else bytes([0xA0 + i % 32]) for i in range(VOCAB - 2)] + [b"a", b"\n"]

    def get_vocab(self) -> dict[str, int]:
        return {f"token {i}": i for i in range(VOCAB)}

    def decode(self, ids, skip_special_tokens=True) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % VOCAB for c in text]}


# Batches.


@pytest.mark.parametrize("method", ["vanilla", "failfast"])
def test_rows_of_a_batch_equal_single_answers(method):
    options = {"method": method, "max_new_tokens": 40, **OF_METHOD[method]}
    together = engine().generate(RAGGED, **options)
    for prompt, row in zip(RAGGED, together):
        (alone,) = engine().generate([prompt], **options)
        assert alone.output_ids == row.output_ids and alone.finish_reason == row.finish_reason
        assert [dataclasses.astuple(r)[:1] for r in alone.rounds] == [dataclasses.astuple(r)[:1] for r in row.rounds]
        assert row.prompt_ids == prompt and row.method == method


@pytest.mark.parametrize("block_cache", [False, True])
def test_rows_of_a_diffusion_batch_equal_single_answers(block_cache):
    options = {"method": "dllm", "max_new_tokens": 40, "small_block_size": 4, "block_cache": block_cache}
    options |= {"threshold": 0.5}
    together = diffusion_engine().generate(RAGGED, **options)
    for prompt, row in zip(RAGGED, together):
        (alone,) = diffusion_engine().generate([prompt], **options)
        assert alone.output_ids == row.output_ids
        assert alone.stats.target_passes == row.stats.target_passes
        assert [r.passes for r in alone.rounds] == [r.passes for r in row.rounds]


def test_a_diffusion_answer_has_whole_blocks():
    (result,) = diffusion_engine().generate(
        [[4] * 11], method="dllm", max_new_tokens=45, small_block_size=4, threshold=0.5, ignore_eos=True
    )
    assert len(result.output_ids) == 8 * (45 // 8) - 11 % 8 + 1
    assert result.finish_reason == "length"


# Streams.


@pytest.mark.parametrize("method", ["vanilla", "failfast"])
def test_a_stream_says_what_generate_says(method):
    options = {"method": method, "max_new_tokens": 40, **OF_METHOD[method]}
    expected = engine().generate(RAGGED, **options)
    events = list(engine().stream(RAGGED, **options))
    assert len(events) > 2 * len(RAGGED)
    for row, whole in enumerate(expected):
        mine = [event for event in events if event.sequence == row]
        assert [token for event in mine for token in event.ids] == whole.output_ids
        assert "".join(event.text for event in mine) == whole.text
        assert [event.result is not None for event in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].result.output_ids == whole.output_ids
        assert mine[-1].result.rounds == whole.rounds


def test_a_diffusion_stream_says_what_generate_says():
    options = {"method": "dllm", "max_new_tokens": 40, "small_block_size": 4, "threshold": 0.5}
    expected = diffusion_engine().generate(RAGGED, **options)
    events = list(diffusion_engine().stream(RAGGED, **options))
    for row, whole in enumerate(expected):
        mine = [event for event in events if event.sequence == row]
        assert [token for event in mine for token in event.ids] == whole.output_ids
        assert all(event.text is None for event in mine)
    assert max(sum(event.sequence == row for event in events) for row in range(3)) > 2


def test_characters_are_not_streamed_in_halves():
    """Holding back: no event but a row's last one may end inside a character."""
    events = list(engine().stream([[5, 6, 7]], method="vanilla", max_new_tokens=40, ignore_eos=True))
    assert not any(event.text.endswith("\ufffd") for event in events[:-1])
    assert any(event.ids and not event.text for event in events)


# Limits.


def test_the_context_ends_the_output(caplog):
    small = new_engine(max_seq_len=64)
    options = {"method": "failfast", "ignore_eos": True, **DRAFTS}
    with caplog.at_level(logging.WARNING, logger="failfast_jax"):
        results = small.generate([[7] * 60, [7] * 63, [4]], max_new_tokens=50, **options)
    assert "prompt (63) and max_new_tokens (50) exceed the 64 tokens" in caplog.text
    assert [len(result.output_ids) for result in results] == [4, 1, 50]
    assert [result.finish_reason for result in results] == ["length"] * 3
    with pytest.raises(PromptError, match=r"prompt of 64 tokens does not fit.*64 tokens"):
        small.generate([[7] * 64], **options)


def test_stop_tokens():
    options = {"method": "vanilla", "max_new_tokens": 60}
    (free,) = engine().generate([[5, 6, 7]], ignore_eos=True, **options)
    (stopped,) = engine().generate([[5, 6, 7]], **options)
    assert free.finish_reason == "length" and len(free.output_ids) == 60
    if 1 in free.output_ids:
        assert stopped.output_ids == free.output_ids[: free.output_ids.index(1) + 1]
        assert stopped.finish_reason == "eos"
    else:
        assert stopped.output_ids == free.output_ids


# Counts.


def test_compiles_are_counted_once_a_bucket():
    fresh = new_engine()
    counts = {}
    for name, prompt, new_tokens in [
        ("first", [3] * 10, 20),
        ("second", [4] * 30, 33),
        ("new bucket", [5] * 10, 300),
        ("longer prompt", [6] * 100, 20),
        ("again", [7] * 10, 300),
    ]:
        (result,) = fresh.generate([prompt], method="vanilla", max_new_tokens=new_tokens)
        counts[name] = result.stats.compiles + result.stats.cache_hits
    # Without eager operations on the way: start, prefill and rounds are all there is.
    assert counts == {"first": 3, "second": 0, "new bucket": 3, "longer prompt": 1, "again": 0}


def test_settings_that_are_no_shapes_compile_nothing():
    options = {"method": "failfast", "max_new_tokens": 20, **DRAFTS}
    engine().generate([[3] * 10], **options)
    for change in ({"tau": 0.9}, {"temperature": 0.7}, {"seed": 5}, {"top_k": 3}, {"top_p": 0.5}, {"ignore_eos": True}):
        stats = engine().generate([[3] * 10], **(options | change))[0].stats
        assert (stats.compiles, stats.cache_hits) == (0, 0), change


def test_options_changed_between_requests_are_followed():
    """Once the program of the old options answered the request with the new ones."""
    fresh = new_engine()
    lengths = []
    for longest in (2, 5, 2):
        fresh.decoding = {"spec_len": longest, "max_spec_len": longest}
        (result,) = fresh.generate([[5, 6, 7]], method="failfast", max_new_tokens=30, tau=0.0, ignore_eos=True)
        lengths.append(max(len(r.drafted) for r in result.rounds))
    assert lengths == [2, 5, 2]
    assert (result.stats.compiles, result.stats.cache_hits) == (0, 0)


def test_engines_may_share_their_programs():
    first = new_engine()
    options = {"method": "vanilla", "max_new_tokens": 20}
    (want,) = first.generate([[3] * 10], **options)
    target = random_model(first.target.config, seed=1)
    (got,) = FailFast(target, programs=first.runtime.programs).generate([[3] * 10], **options)
    assert got.output_ids == want.output_ids and (got.stats.compiles, got.stats.cache_hits) == (0, 0)


@pytest.mark.parametrize("method", ["vanilla", "failfast"])
def test_host_waits_do_not_depend_on_the_rounds(method):
    stats = [
        engine().generate([[3] * 10], method=method, max_new_tokens=n, ignore_eos=True, **OF_METHOD[method])[0].stats
        for n in (5, 100)
    ]
    assert stats[1].rounds > 4 * stats[0].rounds
    assert stats[0].host_syncs == stats[1].host_syncs <= 3


def test_a_stream_waits_once_in_a_few_rounds():
    *_, last = engine().stream([[3] * 10], method="vanilla", max_new_tokens=100, ignore_eos=True)
    slices = 100 / DraftSession.stream_rounds
    assert slices <= last.result.stats.host_syncs <= slices + 4


def test_statistics_add_up():
    for result in engine().generate(RAGGED, method="failfast", max_new_tokens=40, **DRAFTS):
        stats, rounds = result.stats, result.rounds
        assert stats.rounds == len(rounds)
        assert stats.drafted == sum(len(r.drafted) for r in rounds)
        assert stats.accepted == sum(r.accepted for r in rounds)
        assert stats.drafter_passes == sum(r.passes for r in rounds)
        assert [token for r in rounds for token in r.emitted] == result.output_ids
        for r in rounds[:-1]:
            assert r.emitted[:-1] == r.drafted[: r.accepted] and len(r.emitted) == r.accepted + 1
            assert len(r.confidence) == len(r.drafted) and all(0 <= c <= 1 + 1e-6 for c in r.confidence)
            assert r.accepted == len(r.drafted) or r.drafted[r.accepted] != r.emitted[-1]


# Methods that are not named.


def test_the_default_method(caplog):
    assert engine().resolve(GenerationConfig(method=None)).method == "failfast"
    alone = FailFast(random_model(tiny_config()))
    with caplog.at_level(logging.WARNING, logger="failfast_jax"):
        assert [alone.resolve(GenerationConfig(method=None)).method for _ in range(2)] == ["lookup"] * 2
        assert alone.resolve(GenerationConfig(method="vanilla")).method == "vanilla"
    assert [record.getMessage() for record in caplog.records] == [
        "no drafter and no method were named: --method lookup"
    ]


# Profiles.


PROFILE = """
import sys
from pathlib import Path
from tiny_models import random_model, tiny_config
from failfast_jax import FailFast

def files():
    return sorted(path for path in Path(sys.argv[1]).rglob("*") if path.is_file())

engine = FailFast(random_model(tiny_config()))
options = {"method": "vanilla", "max_new_tokens": 8}
with engine.profile(sys.argv[1]):
    engine.generate([[3] * 10], **options)
written = files()
engine.generate([[3] * 10], **options)
assert written and files() == written, (written, files())
"""


def test_a_profile_is_written_for_the_answers_inside(tmp_path):
    """In a process without accelerators' plugins: one of another version than JAX crashes its profiler."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROFILE, str(tmp_path / "trace")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# Numbers that are none.


def with_bad_weights(model: Decoder, value: float) -> Decoder:
    weight = model.layers[0].mlp.down.weight
    weight[...] = weight[...].at[0].set(value)
    return model


@pytest.mark.parametrize("value", [np.nan, 3e38])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["vanilla", "lookup"])
def test_no_token_comes_from_logits_that_are_not_finite(method, temperature, value):
    broken = FailFast(with_bad_weights(random_model(tiny_config()), value))
    with pytest.raises(NonFiniteError, match="the target model: the logits for position 3 are not finite.*--dtype"):
        broken.generate([[5, 6, 7]], method=method, max_new_tokens=20, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("block_cache", [False, True])
def test_no_diffusion_token_comes_from_logits_that_are_not_finite(block_cache, temperature):
    broken = FailFast(with_bad_weights(random_model(diffusion_config()), np.nan))
    options = {"method": "dllm", "small_block_size": 4, "block_cache": block_cache, "temperature": temperature}
    with pytest.raises(NonFiniteError, match="the target model: the logits for position 3 of prompt 0 are not finite"):
        list(broken.stream([[5, 6, 7]] * 2, max_new_tokens=20, **options))


# Buffers.


@pytest.mark.parametrize("max_seq_len", [240, 232])
def test_a_diffusion_prefill_stays_within_its_buffer(max_seq_len):
    """A chunk of 132 positions, the smallest of whole blocks of 12, would have reached beyond a buffer of 256."""
    model = random_model(diffusion_config(12, num_layers=2), seed=2)
    prompt = np.random.default_rng(3).integers(2, VOCAB - 1, 217).tolist()
    options = {"method": "dllm", "max_new_tokens": 12, "small_block_size": 4, "ignore_eos": True}
    (want,) = FailFast(model).generate(prompt, **options)
    (got,) = FailFast(model, max_seq_len=max_seq_len).generate(prompt, **options)
    assert got.output_ids == want.output_ids


# Exactness where rows depend on the width of their pass.


def depends_on_width(monkeypatch, width_matters) -> None:
    """Makes the hidden states of some widths differ from those of the others."""
    window = Decoder.window

    def patched(self, tokens, *rest):
        hidden, *others = window(self, tokens, *rest)
        return (hidden[..., ::-1] if width_matters(tokens.shape[1]) else hidden, *others)

    monkeypatch.setattr(Decoder, "window", patched)


@pytest.mark.parametrize("narrowest, warned", [(17, False), (1000, True)])
def test_exact_leaves_out_widths_that_matter(monkeypatch, caplog, narrowest, warned):
    """Narrow widths differ from wide ones: they are not used. All differ: one constant width serves."""
    depends_on_width(monkeypatch, lambda w: w < 17 if narrowest == 17 else w not in (64, 72))
    monkeypatch.setattr(plans, "CPU_LADDER", (1, 4, 8, 16, 32, 64))
    monkeypatch.setattr(plans, "CPU_PREFILL_WIDTHS", (32, 128))
    fresh = new_engine()
    options = {"max_new_tokens": 30, "ignore_eos": True, "exact": True}
    with caplog.at_level(logging.WARNING, logger="failfast_jax"):
        vanilla = fresh.generate([[5, 6, 7]], **(options | {"method": "vanilla"}))[0]
        drafted = fresh.generate([[5, 6, 7]], **(options | {"method": "failfast"} | DRAFTS))[0]
    assert vanilla.output_ids == drafted.output_ids
    assert ("every step runs at 72 rows" in caplog.text) is warned
    plan = fresh.runtime.plan(fresh.build_drafter(GenerationConfig(method="vanilla")), exact=True)
    assert plan.constant is warned
    narrowest_fine = 72 if warned else min(interchangeable_widths(fresh.target, (32, 64)))  # 32 on most machines
    assert plan.widths == (narrowest_fine,)


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


# Refusals.


@pytest.mark.parametrize(
    "options, message",
    [
        ({"method": "magic"}, "--method magic: must be one of failfast, "),
        ({"tau": 1.5}, "--tau 1.5: must be in"),
        ({"tau": float("nan")}, "--tau nan"),
        ({"spec_len": 8, "max_spec_len": 4}, "--max-spec-len 4: must be at least --spec-len 8"),
        ({"max_spec_len": 4}, "--max-spec-len 4: must be at least --spec-len 10"),
        ({"spec_len": 0}, "--spec-len 0"),
        ({"max_spec_len": 0}, "--max-spec-len 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"temperature": -1.0}, "--temperature"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_k": -1}, "--top-k"),
        ({"seed": -1}, "--seed"),
        ({"schedule": "tall"}, "--schedule tall"),
        ({"threshold": 2.0}, "--threshold"),
        ({"block_size": 1}, "--block-size 1"),
        ({"small_block_size": 0}, "--small-block-size 0"),
        ({"max_new_tokens": "5"}, "--max-new-tokens '5': must be an integer"),
        ({"spec_len": 2.5}, "--spec-len 2.5: must be an integer"),
        ({"tau": "high"}, "--tau 'high': must be a number"),
        ({"method": "fast-dllm", "small_block_size": 3}, "--small-block-size 3: must divide the block size 8"),
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
        ([VOCAB], f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([-1], "token id -1 is outside"),
        ([3] * 600, "prompt of 600 tokens does not fit"),
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


def test_models_of_the_wrong_kind():
    target, diffusion = random_model(tiny_config()), random_model(diffusion_config())
    with pytest.raises(
        ConfigError, match="needs a drafter of kind block-diffusion or conditioned, this one is autoregressive"
    ):
        FailFast(target, target).generate([[3]], method="failfast")
    with pytest.raises(ConfigError, match="needs a drafter of kind autoregressive, this one is block-diffusion"):
        FailFast(target, diffusion).generate([[3]], method="ar")
    with pytest.raises(ConfigError, match="a block-diffusion model cannot verify drafts"):
        FailFast(diffusion).generate([[3]], method="vanilla")
    with pytest.raises(ConfigError, match="needs a block-diffusion model"):
        FailFast(target).generate([[3]], method="dllm")
    with pytest.raises(OptionError, match="--method failfast: needs --drafter"):
        FailFast(target).generate([[3]], method="failfast")
    with pytest.raises(OptionError, match="must be at least the block size 8"):
        diffusion_engine().generate([[3]], method="dllm", max_new_tokens=7)


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
    pair = FailFast(
        random_model(tiny_config(num_layers=1), seed=1),
        wide,
        tokenizer=BytePieces(),
        drafter_tokenizer=BytePieces(),
    )
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
