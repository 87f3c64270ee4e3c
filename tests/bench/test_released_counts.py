"""Passes and lengths as the released code counts them, from records."""

import functools

import numpy as np
import pytest
from tiny_engines import standalone_engine

from failfast_jax.bench.answer_log import to_record
from failfast_jax.bench.paper.released_passes import aligned_passes, released_rounds
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.public_data.acceptance_law import CHUNK, DATASETS, Law, draw, fit, published_for

BLOCK = 8
OPTIONS = {"schedule": "aligned", "tau": 0.2, "spec_len": 4, "max_spec_len": 12, "small_block_size": 4}


@functools.cache
def recorded(method: str = "failfast", **options):
    """Records of some answers, and their prompts."""
    engine, rng = standalone_engine(), np.random.default_rng(3)
    config = GenerationConfig(method, max_new_tokens=30, ignore_eos=True, **options)
    shape = engine.build_drafter(engine.resolve(config)).describe()
    prompts = [rng.integers(2, 39, size).tolist() for size in (5, 8, 16, 27)]
    results = [engine.generate([prompt], config)[0] for prompt in prompts]
    return [{**to_record(result), "drafter": shape, "options": options} for result in results], prompts


@pytest.mark.parametrize("reuse", [False, True])
def test_prefills_and_own_passes(reuse):
    """A draft's own passes are those of the same text taken as a prompt, whose prefill is not counted."""
    engine, prefills = standalone_engine(), 0
    for record, prompt in zip(*recorded(**OPTIONS, reuse=reuse)):
        text, kept = list(prompt), None
        for entry, (own, prefill) in zip(record["detail"], aligned_passes(record)):
            [answer] = engine.generate([text], max_new_tokens=1, ignore_eos=True, method="failfast", **OPTIONS)
            alone = answer.rounds[0]
            assert own == alone.passes
            need = len(text) // BLOCK * BLOCK
            assert prefill == (len(text) > BLOCK and kept != need)
            kept = need if len(text) > BLOCK else None
            if (len(text) + len(alone.drafted) - 1) // BLOCK > len(text) // BLOCK:
                kept = BLOCK
            prefills += prefill
            done = len(text) - len(prompt)
            text += record["output_ids"][done : done + entry["emitted"]]
    assert prefills > 10


def test_counts():
    records, _ = recorded(**OPTIONS)
    for record in records:
        found = released_rounds(record)
        assert len(found.accepted) == record["rounds"] and sum(found.accepted) + record["rounds"] >= 30
        drafted = [entry["drafted"] for entry in record["detail"]]
        assert all(length % 4 == 0 and length >= cut for length, cut in zip(found.speculated, drafted))
    static, _ = recorded("fast-dllm", spec_len=5, small_block_size=4)
    assert {length for record in static for length in released_rounds(record).speculated} == {5}
    other, _ = recorded("lookup")
    assert released_rounds(other[0]).passes == tuple(entry["passes"] for entry in other[0]["detail"])


def test_a_stop_token_hides_no_speculation():
    cut = {"accepted": 1, "emitted": 2, "drafted": 2, "passes": 2, "ids": [4, 5], "confidence": []}
    record = {"detail": [cut], "tokens": 2, "options": {}, "prompt_tokens": 9}
    for shape, length, passes in (
        ({"kind": "ar", "spec_len": 8, "grows": False}, 8, 8),
        ({"kind": "ar", "spec_len": 8, "grows": True}, 2, 2),
        ({"kind": "other"}, 2, 2),
        ({"kind": "aligned", "spec_len": 10, "grows": True, "block": 32, "shift": 1}, 10, 2),
        ({"kind": "aligned", "spec_len": 7, "grows": False, "block": 8, "shift": 1}, 7, 3),
    ):
        found = released_rounds({**record, "drafter": shape})
        assert (found.speculated, found.passes) == ((length,), (passes,))


def fewest_passes(length: int, drafted: int, block: int = 32, small_block: int = 8) -> int:
    """Passes that an `aligned` draft takes behind `length` tokens if every pass fills its whole small block.

    One for each small block that the draft touches, and one for each full block, which stores it.
    """
    last = length + drafted - 1
    return last // small_block - length // small_block + 1 + last // block - length // block


def passes_by_law(law: Law, *, rounds: int = 500, answers: int = 20, seed: int = 0) -> tuple[float, float]:
    """Passes a round that drafts of the law's lengths take: the drafts' own (the fewest), and prefills as released.

    Args:
      rounds: of an answer.
      answers: the same rounds in other orders, for the places at which blocks end.
      seed: of the draw and the orders.
    """
    chunks, accepted = draw(law, rounds, seed)
    rng, own, prefills = np.random.default_rng(seed), 0, 0
    drafter = {"block": 32, "shift": 1, "spec_len": CHUNK}
    for _ in range(answers):
        prompt = length = 3 * 32 + int(rng.integers(32))
        detail = []
        for at in rng.permutation(rounds):
            drafted, agreed = int(CHUNK * chunks[at]), int(accepted[at])
            passes = fewest_passes(length, drafted)
            detail.append({"passes": passes, "accepted": agreed, "emitted": agreed + 1, "ids": [0] * drafted})
            own, length = own + passes, length + agreed + 1
        record = {"drafter": drafter, "prompt_tokens": prompt, "options": {}, "detail": detail}
        prefills += sum(prefill for _, prefill in aligned_passes(record))
    return own / (rounds * answers), prefills / (rounds * answers)


@pytest.mark.parametrize("target", ["qwen2.5-32b", "qwen2.5-14b"])
def test_the_papers_passes_follow_from_its_lengths(target):
    """A pass fills a small block, or more are needed: the sums lie just below the paper's figures."""
    for dataset in DATASETS:
        statistics = published_for(target, dataset)
        assert statistics.drafter_passes - 0.2 < sum(passes_by_law(fit(statistics))) < statistics.drafter_passes + 0.05


def test_fewest_passes():
    """The drafter's own, where every pass fills all positions that it may."""
    for record in recorded(**OPTIONS, threshold=0.0)[0]:
        length = record["prompt_tokens"]
        for entry, (own, _) in zip(record["detail"], aligned_passes(record)):
            if entry["drafted"] % 4 == 0:  # not cut at the answer's end
                assert own == fewest_passes(length, entry["drafted"], BLOCK, 4)
            length += entry["emitted"]
