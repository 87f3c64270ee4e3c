"""The engine: batches, streams, limits, compile counts, refusals."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging

import numpy as np
import pytest
from checkpoint_files import GOLDEN
from tiny_engines import diffusion_engine, engine, lossless, new_engine
from tiny_models import VOCAB, diffusion_config, random_model, tiny_config

from failfast_jax import FailFast, GenerationConfig
from failfast_jax.decoding.exact_widths import interchangeable_widths
from failfast_jax.decoding.width_plan import Widths
from failfast_jax.drafters import METHODS
from failfast_jax.drafters.lookup import LookupOptions
from failfast_jax.errors import NonFiniteError, PromptError
from failfast_jax.generate import main
from failfast_jax.models.transformer import Decoder
from failfast_jax.runtime.model_runtime import DraftSession
from failfast_jax.util.compilation import Executables

DRAFTS = {"spec_len": 3, "max_spec_len": 6, "tau": 0.3}
DLLM = {"method": "dllm", "small_block_size": 4, "threshold": 0.5}
RAGGED = [[5, 6, 7], [8, 9] * 15, [3]]


# Batches.


CASES = {
    "vanilla": (engine, {"method": "vanilla"}),
    "failfast": (engine, {"method": "failfast", **DRAFTS}),
    "dllm": (diffusion_engine, DLLM),
}


def test_rows_of_a_batch_equal_single_answers():
    """As `test_runtime` has for other methods, and for `dllm` with a cache of the block."""
    for prompt, row in zip(RAGGED, diffusion_engine().generate(RAGGED, max_new_tokens=40, **DLLM)):
        (alone,) = diffusion_engine().generate([prompt], max_new_tokens=40, **DLLM)
        assert alone.output_ids == row.output_ids and alone.finish_reason == row.finish_reason
        assert [(r.drafted, r.passes) for r in alone.rounds] == [(r.drafted, r.passes) for r in row.rounds]
        assert alone.stats.target_passes == row.stats.target_passes
        assert row.prompt_ids == prompt and row.method == "dllm"


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


# Streams.


@pytest.mark.parametrize("case", CASES)
def test_a_stream_equals_generate(case):
    make, options = CASES[case]
    expected = make().generate(RAGGED, max_new_tokens=40, **options)
    events = list(make().stream(RAGGED, max_new_tokens=40, **options))
    assert len(events) > 2 * len(RAGGED)
    for row, whole in enumerate(expected):
        mine = [event for event in events if event.sequence == row]
        assert [token for event in mine for token in event.ids] == whole.output_ids
        texts = [event.text for event in mine]
        assert (whole.text is None) is (make is diffusion_engine)
        assert texts == [None] * len(mine) if whole.text is None else "".join(texts) == whole.text
        assert [event.result is not None for event in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].result.output_ids == whole.output_ids
        assert mine[-1].result.rounds == whole.rounds


def test_characters_are_not_streamed_in_halves():
    """Only a row's last event may end inside a character."""
    events = list(engine().stream([[5, 6, 7]], method="vanilla", max_new_tokens=40, ignore_eos=True))
    assert not any(event.text.endswith("\ufffd") for event in events[:-1])
    assert any(event.ids and not event.text for event in events)


# Limits.


def test_the_context_ends_the_output(caplog):
    small = new_engine(max_seq_len=64)
    options = {"method": "failfast", "ignore_eos": True, **DRAFTS}
    with caplog.at_level(logging.WARNING, logger="failfast_jax"):
        results = small.generate([[7] * 60, [7] * 63, [4]], max_new_tokens=50, **options)
    assert "prompt (63) and max_new_tokens (50) exceed" in caplog.text
    assert [len(result.output_ids) for result in results] == [4, 1, 50]
    assert [result.finish_reason for result in results] == ["length"] * 3
    with pytest.raises(PromptError, match=r"prompt of 64 tokens does not fit.*64 tokens"):
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
    (got,) = FailFast.load(target, programs=first.runtime.programs).generate([[3] * 10], **options)
    assert got.output_ids == want.output_ids and (got.stats.compiles, got.stats.cache_hits) == (0, 0)


@pytest.mark.parametrize("case", ["vanilla", "failfast"])
def test_host_waits_do_not_depend_on_the_rounds(case):
    options = {"ignore_eos": True, **CASES[case][1]}
    stats = [engine().generate([[3] * 10], max_new_tokens=n, **options)[0].stats for n in (5, 100)]
    assert stats[1].rounds > 4 * stats[0].rounds
    assert stats[0].host_syncs == stats[1].host_syncs <= 3


def test_a_stream_waits_once_in_a_few_rounds():
    *_, last = engine().stream([[3] * 10], method="vanilla", max_new_tokens=100, ignore_eos=True)
    slices = 100 / DraftSession.stream_rounds
    assert slices <= last.result.stats.host_syncs <= slices + 4


def test_the_options_of_a_request_are_checked_once(monkeypatch, capsys):
    """From flags, keywords or a resolved request to the end of an answer; again for other defaults of a drafter."""
    checks = []

    @dataclasses.dataclass(frozen=True)
    class CountedOptions(LookupOptions):
        def __post_init__(self):
            checks.append(self.max_spec_len)

    monkeypatch.setitem(METHODS, "failfast", CountedOptions)
    words = f"--target {GOLDEN / 'qwen2_target_160'} --method failfast --max-spec-len 5 --token-ids 3,4 --json"
    assert main([*words.split(), "--max-new-tokens", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "failfast" and checks == [5]
    alone = FailFast.load(random_model(tiny_config(num_layers=1)))
    assert alone.resolve().method == "auto"
    config = alone.resolve(method="failfast", max_spec_len=6, max_new_tokens=4)
    alone.build_drafter(config)
    assert alone.generate([[3, 4]], config) and [*alone.stream([[3, 4]], config)] and checks == [5, 6]
    alone.decoding = {"max_spec_len": 7}
    assert alone.resolve(config).resolution.options.max_spec_len == 6 and checks == [5, 6, 6]
    assert alone.resolve(method="failfast").resolution.options.max_spec_len == 7


# Numbers that are not finite.


def with_bad_weights(model: Decoder, value: float) -> Decoder:
    weight = model.layers[0].mlp.down.weight
    weight[...] = weight[...].at[0].set(value)
    return model


@pytest.mark.parametrize(
    "config, options",
    [
        (tiny_config(num_layers=1), {"method": "vanilla"}),
        (tiny_config(num_layers=1), {"method": "lookup"}),
        (diffusion_config(), {**DLLM, "block_cache": False}),
        (diffusion_config(), {**DLLM, "block_cache": True}),
    ],
)
def test_no_token_comes_from_logits_that_are_not_finite(config, options):
    programs = Executables()
    for value, temperature in itertools.product((np.nan, 3e38), (0.0, 0.8)):
        broken = FailFast.load(with_bad_weights(random_model(config), value), programs=programs)
        with pytest.raises(NonFiniteError, match="the target model: the logits for position 3 of prompt 0 are not"):
            list(broken.stream([[5, 6, 7]] * 2, max_new_tokens=20, temperature=temperature, **options))


@pytest.mark.parametrize("method", ["vanilla", "lookup", "failfast"])
def test_logits_that_are_not_finite_later_on(method):
    """A token of the text has an infinite embedding: the text up to it is right, and nothing follows."""
    whole, sampled = new_engine(), {"temperature": 2.0, "seed": 1, "ignore_eos": True}
    before = whole.generate([[5, 6, 7]], method="vanilla", max_new_tokens=20, **sampled)[0].output_ids
    late = max(before.index(token) for token in before if token not in (5, 6, 7))
    assert 0 < late < 19
    broken = new_engine(programs=whole.runtime.programs)
    broken.target.embed[...] = broken.target.embed[...].at[before[late]].set(np.inf)
    options = {"method": method, **sampled} | (DRAFTS if method == "failfast" else {})
    assert broken.generate([[5, 6, 7]], max_new_tokens=late + 1, **options)[0].output_ids == before[: late + 1]
    with pytest.raises(NonFiniteError, match=f"the logits for position {3 + late + 1} are not finite"):
        broken.generate([[5, 6, 7]], max_new_tokens=20, **options)


@pytest.mark.parametrize("value", [np.nan, 3e38])
def test_a_drafter_that_is_not_finite_loses_nothing(value):
    target, drafter = random_model(tiny_config(num_layers=1), seed=1), random_model(diffusion_config(), seed=2)
    broken = FailFast.load(target, with_bad_weights(drafter, value))
    lossless(broken, [[5, 6, 7]], method="failfast", max_new_tokens=20, ignore_eos=True, **DRAFTS)


# Buffers.


def test_a_diffusion_prefill_stays_within_its_buffer():
    """A chunk of 132 positions, the smallest of whole blocks of 12, would have reached beyond a buffer of 256."""
    model = random_model(diffusion_config(12), seed=2)
    prompt = np.random.default_rng(3).integers(2, VOCAB - 1, 217).tolist()
    options = {"method": "dllm", "max_new_tokens": 12, "small_block_size": 4, "ignore_eos": True}
    answers = [FailFast.load(model, max_seq_len=most).generate(prompt, **options)[0] for most in (256, 240)]
    assert answers[0].output_ids == answers[1].output_ids


# Exactness where rows depend on the width of their pass.


def depends_on_width(monkeypatch, width_matters) -> None:
    """Makes the hidden states of some widths differ from those of the others."""
    window = Decoder.window

    def patched(self, tokens, *rest):
        hidden, *others = window(self, tokens, *rest)
        return (hidden[..., ::-1] if width_matters(tokens.shape[1]) else hidden, *others)

    monkeypatch.setattr(Decoder, "window", patched)


@pytest.mark.long
@pytest.mark.parametrize("narrowest, warned", [(17, False), (1000, True)])
def test_exact_leaves_out_widths_that_matter(monkeypatch, caplog, narrowest, warned):
    """Narrow widths differ from wide ones: they are not used. All differ: one constant width serves."""
    depends_on_width(monkeypatch, lambda w: w < 17 if narrowest == 17 else w not in (64, 72))
    fresh = new_engine(widths=Widths(verify=(1, 8, 32), prefill=(32,)))
    with caplog.at_level(logging.WARNING, logger="failfast_jax"):
        lossless(fresh, [[5, 6, 7]], method="failfast", max_new_tokens=30, ignore_eos=True, exact=True, **DRAFTS)
    assert ("every step runs at 72 rows" in caplog.text) is warned
    plan = fresh.runtime.plan(fresh.build_drafter(GenerationConfig(method="vanilla")), exact=True)
    assert plan.constant is warned
    narrowest_fine = 72 if warned else min(interchangeable_widths(fresh.target, (32, 72)))  # 32 on most machines
    assert plan.widths == (narrowest_fine,)
