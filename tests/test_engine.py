"""The engine: batches, streams, limits, compile counts, and what it refuses, by flag, key or model."""

from __future__ import annotations

import itertools
import logging
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN
from tiny_engines import ROWS, BytePieces, diffusion_engine, engine, extended_engine, lossless, new_engine
from tiny_models import VOCAB, as_untrained_drafter, diffusion_config, random_model, tiny_config

from failfast_jax import FailFast, GenerationConfig, LoadOptions
from failfast_jax.decoding.exact_widths import interchangeable_widths
from failfast_jax.decoding.width_plan import Widths
from failfast_jax.errors import ConfigError, DeviceMemoryError, NonFiniteError, OptionError, PromptError
from failfast_jax.models.transformer import Decoder
from failfast_jax.prompts import encode, separate
from failfast_jax.runtime.model_runtime import DraftSession
from failfast_jax.util.compilation import Executables
from failfast_jax.util.hardware import explain_out_of_memory

DRAFTS = {"spec_len": 3, "max_spec_len": 6, "tau": 0.3}
DLLM = {"method": "dllm", "small_block_size": 4, "threshold": 0.5}
RAGGED = [[5, 6, 7], [8, 9] * 15, [3]]


# Streams and lengths.


@pytest.mark.parametrize(
    "make, options",
    [
        pytest.param(engine, {"method": "vanilla"}, id="vanilla"),
        pytest.param(engine, {"method": "failfast", **DRAFTS}, id="failfast"),
        pytest.param(diffusion_engine, DLLM, id="dllm"),
    ],
)
def test_a_streamed_batch_equals_single_answers(make, options):
    events = list(make().stream(RAGGED, max_new_tokens=40, **options))
    assert len(events) > 2 * len(RAGGED)
    for row, prompt in enumerate(RAGGED):
        (alone,) = make().generate([prompt], max_new_tokens=40, **options)
        mine = [event for event in events if event.sequence == row]
        texts = [event.text for event in mine]
        assert [event.result is not None for event in mine] == [False] * (len(mine) - 1) + [True]
        result = mine[-1].result
        assert [token for event in mine for token in event.ids] == result.output_ids == alone.output_ids
        assert (result.prompt_ids, result.method) == (prompt, options["method"])
        assert (result.finish_reason, result.stats.target_passes) == (alone.finish_reason, alone.stats.target_passes)
        assert [(r.drafted, r.passes) for r in result.rounds] == [(r.drafted, r.passes) for r in alone.rounds]
        assert (alone.text is None) is (make is diffusion_engine)
        assert texts == [None] * len(mine) if alone.text is None else "".join(texts) == alone.text
        # Only a row's last event may end inside a character.
        assert alone.text is None or not any(text.endswith("\ufffd") for text in texts[:-1])
    assert make is diffusion_engine or any(event.ids and not event.text for event in events)


def test_a_diffusion_answer_is_no_longer_than_asked():
    """After a prompt that ends inside a block or at its end, and where a block would reach beyond the context."""
    options = DLLM | {"ignore_eos": True}
    for prompt, most in (([4] * 11, 45), ([4] * 16, 16), ([4] * 16, 3), ([4] * 250, 45)):
        (result,) = diffusion_engine().generate([prompt], max_new_tokens=most, **options)
        assert len(result.output_ids) == min(most, 256 - len(prompt)) and result.finish_reason == "length"
        if most >= 8 and len(prompt) < 100:
            (whole,) = diffusion_engine().generate([prompt], max_new_tokens=most, released_length=True, **options)
            assert len(whole.output_ids) == 8 * (most // 8) - len(prompt) % 8 + 1
            shared = min(most, len(whole.output_ids))
            assert whole.output_ids[:shared] == result.output_ids[:shared]


@pytest.mark.long
def test_a_diffusion_prefill_stays_within_its_buffer():
    """A chunk of 132 positions, the smallest of whole blocks of 12, would have reached beyond a buffer of 256."""
    model = random_model(diffusion_config(12), seed=2)
    prompt = np.random.default_rng(3).integers(2, VOCAB - 1, 217).tolist()
    options = {"method": "dllm", "max_new_tokens": 12, "small_block_size": 4, "ignore_eos": True}
    answers = [FailFast.load(model, max_seq_len=most).generate(prompt, **options)[0] for most in (256, 240)]
    assert answers[0].output_ids == answers[1].output_ids


def test_the_context_ends_the_output(caplog):
    small = new_engine(max_seq_len=64)
    options = {"method": "failfast", "ignore_eos": True, **DRAFTS}
    with caplog.at_level(logging.WARNING, logger="failfast_jax"):
        results = small.generate([[7] * 60, [7] * 63, [4]], max_new_tokens=50, **options)
    assert "prompt (63) and max_new_tokens (50) exceed" in caplog.text
    assert [len(result.output_ids) for result in results] == [4, 1, 50]
    assert [result.finish_reason for result in results] == ["length"] * 3
    with pytest.raises(PromptError, match=r"prompt of 64 tokens does not fit.*64 tokens; shorten it, or raise"):
        small.generate([[7] * 64], **options)


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
    target = random_model(fresh.target.config, seed=1)
    (shared,) = FailFast.load(target, programs=fresh.runtime.programs).generate([[7] * 10], method="vanilla")
    assert (shared.stats.compiles, shared.stats.cache_hits) == (0, 0)


def test_options_changed_between_requests_are_followed():
    """Once the program of the old options answered the request with the new ones. Those that are no shapes compile
    nothing."""
    fresh = new_engine(programs=engine().runtime.programs)
    options = {"method": "failfast", "max_new_tokens": 30, "tau": 0.0, "ignore_eos": True}
    lengths = []
    for longest in (2, 6, 2):
        fresh.decoding = {"spec_len": longest, "max_spec_len": longest}
        (result,) = fresh.generate([[5, 6, 7]], **options)
        lengths.append(max(len(r.drafted) for r in result.rounds))
    assert lengths == [2, 6, 2]
    for change in (
        {"tau": 0.9},
        {"temperature": 0.7},
        {"seed": 5},
        {"top_k": 3},
        {"top_p": 0.5},
        {"ignore_eos": False},
    ):
        stats = fresh.generate([[3] * 10], **options | change)[0].stats
        assert (stats.compiles, stats.cache_hits) == (0, 0), change


def test_waits_for_the_device():
    """They do not depend on the rounds; a stream waits once in a few of them."""
    options = {"method": "failfast", "ignore_eos": True, **DRAFTS}
    stats = [engine().generate([[3] * 10], max_new_tokens=n, **options)[0].stats for n in (5, 100)]
    assert stats[1].rounds > 4 * stats[0].rounds
    assert stats[0].host_syncs == stats[1].host_syncs <= 3
    *_, last = engine().stream([[3] * 10], method="vanilla", max_new_tokens=100, ignore_eos=True)
    slices = 100 / DraftSession.stream_rounds
    assert slices <= last.result.stats.host_syncs <= slices + 4


# Numbers that are not finite.


def with_bad_weights(model: Decoder, value: float) -> Decoder:
    weight = model.layers[0].mlp.down.weight
    weight[...] = weight[...].at[0].set(value)
    return model


@pytest.mark.parametrize(
    "config, options",
    [
        pytest.param(tiny_config(num_layers=1), {"method": "lookup", "max_spec_len": 7}, id="lookup"),
        pytest.param(diffusion_config(), {**DLLM, "block_cache": False}, id="dllm"),
        pytest.param(diffusion_config(), {**DLLM, "block_cache": True}, id="dllm with a block cache"),
    ],
)
def test_no_token_comes_from_logits_that_are_not_finite(config, options):
    programs = Executables()
    for value, temperature in itertools.product((np.nan, 3e38), (0.0, 0.8)):
        broken = FailFast.load(with_bad_weights(random_model(config), value), programs=programs)
        with pytest.raises(NonFiniteError, match="the target model: the logits for position 3 of prompt 0 are not"):
            list(broken.stream([[5, 6, 7]] * 2, max_new_tokens=20, temperature=temperature, **options))


@pytest.mark.parametrize("options", [{"method": "vanilla"}, {"method": "failfast", **DRAFTS}], ids=["plain", "drafts"])
def test_logits_that_are_not_finite_later_on(options):
    """A token of the text has an infinite embedding: the text up to it is right, and nothing follows."""
    options = options | {"temperature": 2.0, "seed": 1, "ignore_eos": True}
    before = engine().generate([[5, 6, 7]], max_new_tokens=20, **options)[0].output_ids
    late = max(before.index(token) for token in before if token not in (5, 6, 7))
    assert 0 < late < 19
    broken = new_engine(programs=engine().runtime.programs)
    broken.target.embed[...] = broken.target.embed[...].at[before[late]].set(np.inf)
    assert broken.generate([[5, 6, 7]], max_new_tokens=late + 1, **options)[0].output_ids == before[: late + 1]
    with pytest.raises(NonFiniteError, match=f"the logits for position {3 + late + 1} are not finite"):
        broken.generate([[5, 6, 7]], max_new_tokens=20, **options)


@pytest.mark.parametrize("value", [np.nan, 3e38])
def test_a_drafter_that_is_not_finite_loses_nothing(value):
    broken = new_engine(programs=engine().runtime.programs)
    with_bad_weights(broken.drafter, value)
    lossless(broken, [[5, 6, 7]], method="failfast", max_new_tokens=20, ignore_eos=True, **DRAFTS)


# Exactness where rows depend on the width of their pass.


@pytest.mark.long
@pytest.mark.parametrize("narrowest, warned", [(17, False), (1000, True)])
def test_exact_leaves_out_widths_that_matter(monkeypatch, caplog, narrowest, warned):
    """Narrow widths differ from wide ones: they are not used. All differ: one constant width serves."""
    window = Decoder.window

    def patched(self, tokens, *rest):
        hidden, *others = window(self, tokens, *rest)
        width = tokens.shape[1]
        differs = width < 17 if narrowest == 17 else width not in (64, 72)
        return (hidden[..., ::-1] if differs else hidden, *others)

    monkeypatch.setattr(Decoder, "window", patched)
    fresh = new_engine(widths=Widths(verify=(1, 8, 32), prefill=(32,)))
    with caplog.at_level(logging.WARNING, logger="failfast_jax"):
        lossless(fresh, [[5, 6, 7]], method="failfast", max_new_tokens=30, ignore_eos=True, exact=True, **DRAFTS)
    assert ("every step runs at 72 rows" in caplog.text) is warned
    plan = fresh.runtime.plan(fresh.build_drafter(GenerationConfig(method="vanilla")), exact=True)
    assert plan.constant is warned
    narrowest_fine = 72 if warned else min(interchangeable_widths(fresh.target, (32, 72)))  # 32 on most machines
    assert plan.widths == (narrowest_fine,)


# Drafters beside their target.


@pytest.mark.parametrize("tied", [False, True])
def test_an_untrained_drafter_shares_its_targets_weights(tied):
    target = random_model(tiny_config(tie_embeddings=tied))
    drafter = as_untrained_drafter(target, 16)
    assert drafter.config.mask_token_id == drafter.config.vocab_size == VOCAB
    assert drafter.config.block_size == 16 and target.config.block_size == 1
    assert drafter.layers is target.layers
    assert drafter.embed is target.embed
    np.testing.assert_allclose(drafter.embedded(np.array([VOCAB]))[0], target.embed[...].mean(0), atol=1e-6)
    assert drafter.logits(jnp.asarray([[1, 2, VOCAB]])).shape == (1, 3, VOCAB)
    assert drafter.quantized().embed.get_value() is target.embed.get_value()
    options = {"method": "failfast", "temperature": 1.0, "acceptance": "rejection", "ignore_eos": True}
    (result,) = FailFast.load(target, drafter).generate([[3, 4, 5]], max_new_tokens=4, **options)
    assert len(result.output_ids) == 4 and result.stats.drafted > 0


def test_ids_that_the_target_lacks_are_never_drafted():
    """A drafter whose embedding has more rows than the target's proposes only what the target knows."""
    wide = random_model(diffusion_config(vocab_size=VOCAB + 24, mask_token_id=VOCAB + 1), seed=2)
    loud = np.where(np.arange(VOCAB + 24) < VOCAB, 1, 3)[:, None]
    wide.head.weight[...] = wide.head.weight[...] * loud
    assert int(wide.logits(jnp.asarray([[5, 6, 7]]))[0, -1].argmax()) >= VOCAB  # by itself it would
    pair = FailFast.load(engine().target, wide, tokenizer=BytePieces(), drafter_tokenizer=BytePieces())
    assert pair.vocab == VOCAB
    (result,) = pair.generate([[5, 6, 7]], method="failfast", max_new_tokens=20, **DRAFTS)
    drafted = {token for r in result.rounds for token in r.drafted}
    assert drafted and max(drafted) < VOCAB


# Refusals; those that the command line shows are in `test_generate_cli`.


ALIGNED, REJECTION, STEPS = {"schedule": "aligned"}, {"acceptance": "rejection"}, {"method": "specdiff", "steps": 2}
REFUSED = [
    ({"tau": float("nan")}, "--tau nan"),
    ({"max_new_tokens": "5"}, "--max-new-tokens '5': must be an integer"),
    ({"temperature": -1e-9}, "--temperature -1e-09: must be at least 0, and finite"),
    ({"top_p": 0.0}, r"--top-p 0.0: must be in \(0, 1\]"),
    ({"tau": "high"}, "--tau 'high': must be a number"),
    ({"min_gain": 1.0}, "--min-gain 1.0: no longer an option: --method auto weighs"),
    ({"method": "auto", "policy": "fixed"}, r"--policy fixed: no longer .*\(--method failfast, --method lookup\)"),
    ({"policy": "auto"}, "--policy auto: no longer an option: --method auto decides"),
    (STEPS | {"steps": 11}, "--steps 11: must be at most --spec-len 10"),
    (ALIGNED | {"rule": "congestion"}, "--rule congestion: not with --schedule aligned"),
    ({"rule": "congestion", "tau": 0.0}, "--tau 0.0: not with --rule congestion"),
    ({"rule": "luck"}, "--rule luck: must be 'confidence' or 'congestion'"),
    ({"spec_len": 9, "max_spec_len": 9, "reuse": True}, "--reuse: drafts of --spec-len 9 leave no room"),
    # Drafts that are not sampled from left to right.
    (REJECTION | {"method": "lookup"}, "--acceptance rejection: "),
    (REJECTION | ALIGNED, "--schedule aligned: not with --acceptance rejection"),
    (REJECTION | {"reuse": True}, "--reuse: not with --acceptance rejection"),
    (REJECTION | STEPS, "--steps 2: not with --acceptance rejection"),
    (REJECTION | {"exact": True, "temperature": 0.5}, "--acceptance rejection: "),
]
REFUSED_EXTENDED = [
    ({"spec_len": ROWS + 1}, "--spec-len 6: this drafter fills up to 5 positions in a pass; take at most 5"),
    ({"method": "fast-dllm"}, "method fast-dllm needs a drafter of kind block-diffusion"),
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
    for prompt in (text, [text], ids, [ids], np.asarray(ids), [np.asarray(ids)], jnp.asarray(ids)):
        assert [engine().encode(part) for part in separate(prompt)] == [ids]
    for prompts in (np.asarray(batch), jnp.asarray(batch)):
        assert [engine().encode(part) for part in separate(prompts)] == batch


REFUSED_LOADING = {
    "--dtype int8": {"dtype": "int8"},
    "--dtype 5": {"dtype": 5},
    "--tensor-parallel 0": {"tensor_parallel": 0},
    "--data-parallel 'two'": {"data_parallel": "two"},
    "--method magic": {"method": "magic"},
    "--quantize-drafter int8": {"quantize_drafter": "int8"},
    "max_seqlen: .*max_seq_len": {"max_seqlen": 5},
    "temperature: no option of loading": {"temperature": 0.5},
}


@pytest.mark.parametrize("message, changes", REFUSED_LOADING.items(), ids=REFUSED_LOADING)
def test_options_of_loading_that_cannot_be_served(message, changes):
    """Before any model is read, whichever way they are written."""
    with pytest.raises(OptionError, match=message):
        FailFast.load("nowhere", **changes)
    with pytest.raises(OptionError, match=message):
        FailFast.load("nowhere", options=LoadOptions().changed(**changes))


def test_engines_without_models_or_room():
    with pytest.raises(OptionError, match=r"FailFast.load\(\)"):
        FailFast()
    with pytest.raises(OptionError, match="--max-seq-len 601: must be between 2 and the context of 600"):
        new_engine(max_seq_len=601)


# Memory.

EXHAUSTED = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in hbm. Used 20.1G of 15.75G.")


def test_a_program_that_does_not_fit_is_explained(monkeypatch):
    """XLA raises this error when it compiles; its other errors stay as they are."""
    whole = jax.stages.Lowered.compile

    def compiled(lowered, **options):
        if "@jit_the_loop_over_rounds " in str(lowered.compiler_ir().operation):
            raise EXHAUSTED
        return whole(lowered, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    with pytest.raises(DeviceMemoryError) as caught:
        new_engine().generate([[1, 2, 3]], max_new_tokens=4)
    advice = (
        "--max-seq-len",
        "choose --quantize int8 (0.00 GB) or --quantize int4 (0.00 GB) or --quantize-drafter int8 (0.00 GB) or",
        "--tensor-parallel",
    )
    for part in ("1 x 256 tokens", "the target model 0.00 GB", *advice, "Used 20.1G of 15.75G"):
        assert part in str(caught.value)
    assert caught.value.__cause__ is EXHAUSTED
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explain_out_of_memory("compiling"):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")


def test_models_that_do_not_fit_are_explained(monkeypatch):
    for name in ("make_array_from_callback", "device_put"):
        monkeypatch.setattr(jax, name, mock.Mock(side_effect=EXHAUSTED))
    with pytest.raises(DeviceMemoryError, match="qwen2_target_160: 0.00 GB of parameters.*--quantize int8"):
        FailFast.load(GOLDEN / "qwen2_target_160")
    with pytest.raises(DeviceMemoryError, match="or the batch, choose --quantize int4 .0.00 GB., or spread"):
        FailFast.load(GOLDEN / "qwen2_target_160", quantize="int8")
    with pytest.raises(DeviceMemoryError, match="or the batch, or spread"):
        FailFast.load(GOLDEN / "qwen2_target_160", quantize="int4")


def test_only_layouts_that_fit_are_named():
    layouts = {"--quantize int8": 10**18, "--quantize int4": 5 * 10**7}
    with pytest.raises(DeviceMemoryError, match=r"batch, choose --quantize int4 \(0.05 GB\), or spread"):
        with explain_out_of_memory("loading", layouts=lambda _: layouts):
            raise EXHAUSTED
