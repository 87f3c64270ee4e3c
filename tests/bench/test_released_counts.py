"""Passes and lengths as the released code counts them, from records."""

import numpy as np
import pytest
from tiny_engines import standalone_engine

from failfast_jax.bench.answer_log import to_record
from failfast_jax.bench.paper.released_passes import aligned_passes, released_rounds
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.public_data.acceptance_law import CHUNK, DATASETS, draw, fit, published_for

BLOCK = 8
OPTIONS = {"schedule": "aligned", "tau": 0.2, "spec_len": 4, "max_spec_len": 12, "small_block_size": 4}


def shape_of(config: GenerationConfig) -> dict:
    engine = standalone_engine()
    return engine.build_drafter(engine.resolve(config)).describe()


@pytest.mark.parametrize("reuse", [False, True])
def test_prefills_and_own_passes(reuse):
    """A draft's own passes are those of the same text taken as a prompt, whose prefill is not counted."""
    engine, rng, prefills = standalone_engine(), np.random.default_rng(3), 0
    config = GenerationConfig("failfast", max_new_tokens=30, ignore_eos=True, reuse=reuse, **OPTIONS)
    for size in (5, 8, 16, 27):
        text, kept = rng.integers(2, 39, size).tolist(), None
        [result] = engine.generate([text], config)
        record = {**to_record(result), "drafter": shape_of(config), "options": {"reuse": reuse}}
        for entry, (passes, prefill) in zip(record["detail"], aligned_passes(record)):
            [answer] = engine.generate([text], max_new_tokens=1, ignore_eos=True, method="failfast", **OPTIONS)
            alone = answer.rounds[0]
            assert passes == alone.passes
            need = len(text) // BLOCK * BLOCK
            assert prefill == (len(text) > BLOCK and kept != need)
            kept = need if len(text) > BLOCK else None
            if (len(text) + len(alone.drafted) - 1) // BLOCK > len(text) // BLOCK:
                kept = BLOCK
            prefills += prefill
            done = len(text) - size
            text = text + record["output_ids"][done : done + entry["emitted"]]
        counts = released_rounds(record)
        assert len(counts.accepted) == record["rounds"] and sum(counts.accepted) + record["rounds"] >= 30
        drafted = [entry["drafted"] for entry in record["detail"]]
        assert all(length >= cut and (reuse or length % 4 == 0) for length, cut in zip(counts.speculated, drafted))
    assert prefills > 10


@pytest.mark.parametrize(
    ("shape", "length", "passes"),
    [
        ({"kind": "ar", "spec_len": 8, "grows": False}, 8, 8),
        ({"kind": "ar", "spec_len": 8, "grows": True}, 2, 2),
        (GenerationConfig("lookup"), 2, 2),
        ({"kind": "aligned", "spec_len": 10, "grows": True, "block": 32, "shift": 1}, 10, 2),
        (GenerationConfig("fast-dllm", spec_len=7, small_block_size=4), 7, 3),
    ],
)
def test_a_stop_token_hides_no_speculation(shape, length, passes):
    cut = {"accepted": 1, "emitted": 2, "drafted": 2, "passes": 2, "ids": [4, 5], "confidence": []}
    drafter = shape if isinstance(shape, dict) else shape_of(shape)
    counts = released_rounds({"detail": [cut], "tokens": 2, "options": {}, "prompt_tokens": 9, "drafter": drafter})
    assert (counts.speculated, counts.passes) == ((length,), (passes,))


def passes_by_law(law, rounds=500, orders=20) -> float:
    """Passes per round whose drafts have the law's lengths: as few as can be, and prefills as the released code has.

    The rounds stand in several orders, so that drafts begin and end everywhere in blocks of 32 and small blocks of 8.
    """
    chunks, accepted = draw(law, rounds, seed=0)
    rng, passes = np.random.default_rng(0), 0
    for _ in range(orders):
        prompt = length = 3 * 32 + int(rng.integers(32))
        detail = []
        for at in rng.permutation(rounds):
            drafted, agreed = int(CHUNK * chunks[at]), int(accepted[at])
            last = length + drafted - 1
            # One for each small block that the draft touches, and one for each full block, which stores it.
            fewest = last // 8 - length // 8 + 1 + last // 32 - length // 32
            detail.append({"passes": fewest, "accepted": agreed, "emitted": agreed + 1, "ids": [0] * drafted})
            passes, length = passes + fewest, length + agreed + 1
        drafter = {"block": 32, "shift": 1, "spec_len": CHUNK}
        record = {"drafter": drafter, "prompt_tokens": prompt, "options": {}, "detail": detail}
        passes += sum(prefill for _, prefill in aligned_passes(record))
    return passes / (rounds * orders)


@pytest.mark.parametrize("target", ["qwen2.5-32b", "qwen2.5-14b"])
def test_the_papers_passes_follow_from_its_lengths(target):
    """A pass fills a small block, or more are needed: the sums lie just below the paper's figures."""
    for dataset in DATASETS:
        statistics = published_for(target, dataset)
        assert statistics.drafter_passes - 0.2 < passes_by_law(fit(statistics)) < statistics.drafter_passes + 0.05
