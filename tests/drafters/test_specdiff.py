"""SpecDiff's options, and that its text is the target's; `test_diffusion` has its drafts."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_engines import engine
from tiny_models import are_own_texts

from failfast_jax import GenerationConfig
from failfast_jax.decoding.unmask import most_confident
from failfast_jax.drafters.specdiff import SpecDiff
from failfast_jax.drafters.wide import Wide
from failfast_jax.errors import OptionError


def test_ties_are_filled_from_the_left():
    confidence = np.asarray([[0.5, 0.9, 0.5, 0.9, 0.5]])
    masked = np.asarray([[True, True, True, False, True]])
    for count, expected in ((0, []), (1, [1]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 1, 2, 4])):
        assert np.flatnonzero(most_confident(confidence, masked, count)[0]).tolist() == expected


def test_one_step_is_one_pass_of_a_fixed_length():
    one = engine().build_drafter(GenerationConfig(method="specdiff", spec_len=6))
    assert isinstance(one, Wide) and one.draft_lengths == (6,) and one.max_draft == 6 and not one.sampled
    assert engine().build_drafter(GenerationConfig(method="specdiff", spec_len=6, acceptance="rejection")).sampled
    several = engine().build_drafter(GenerationConfig(method="specdiff", steps=4))
    assert isinstance(several, SpecDiff) and several.max_draft == 10 and several.steps == 4


def test_the_text_is_the_targets():
    options = {"spec_len": 5, "steps": 2, "max_new_tokens": 30, "ignore_eos": True}
    results = engine().generate([[3, 4, 5], [6] * 20], method="specdiff", temperature=0.8, seed=3, **options)
    assert are_own_texts(engine().target, results, temperature=0.8, seed=3)
    assert not are_own_texts(engine().target, results, temperature=0.8, seed=4)
    for result in results:
        assert len(result.output_ids) == 30
        assert all(entry.passes == 2 and len(entry.drafted) == 5 for entry in result.rounds)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 11}, "--steps 11: must be at most --spec-len 10"),
        ({"steps": 0}, "--steps 0: must be at least 1"),
        ({"method": "failfast", "steps": 2}, "--steps 2: --method failfast has no such option, only specdiff"),
        ({"lookup_min": 3}, "--lookup-min 3: --method specdiff has no such option, only failfast, lookup, suffix"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(OptionError, match=message):
        engine().generate([[3]], **({"method": "specdiff"} | options))
