"""A prompt that goes on from another row's caches: text and drafts are those of a prompt that was prefilled whole."""

from __future__ import annotations

import functools

import pytest
from tiers import tiers
from tiny_engines import engine, extended_engine
from tiny_models import fond_eagle

from failfast_jax import FailFast
from failfast_jax.runtime.model_runtime import Request

pytestmark = pytest.mark.usefixtures("few_widths")

CAPACITY = 128


@functools.cache
def drafted_by(kind: str) -> FailFast:
    target = engine().target
    return FailFast.load(target, fond_eagle(target, 7) if kind == "eagle3" else target)


SHORT = {"method": "failfast", "spec_len": 3, "max_spec_len": 6}
KINDS = {
    "wide": (engine, SHORT),
    "aligned": (engine, {"method": "failfast", "schedule": "aligned", "spec_len": 4, "max_spec_len": 8}),
    "tree": (lambda: drafted_by("eagle3"), {"method": "eagle3", "tree_budget": 7}),
    "reuse": (engine, SHORT | {"reuse": True}),
    "suffix": (engine, {"method": "suffix", "max_spec_len": 7}),
    "features": (extended_engine, {"method": "failfast"}),
    "eagle3": (lambda: drafted_by("eagle3"), {"method": "eagle3", "spec_len": 3}),
    "ar": (lambda: drafted_by("ar"), {"method": "ar", "spec_len": 3}),
}
PROMPT = tuple(2 + (number * number) % 5 for number in range(50))


@pytest.mark.parametrize("kind", tiers(KINDS, quick=["wide", "suffix", "eagle3", "ar"], long=None))
def test_the_same_text_and_the_same_drafts(kind):
    make, options = KINDS[kind]
    work = make()
    drafter = work.build_drafter(work.resolve(**options))
    session = work.runtime.session(drafter, batch=1, capacity=CAPACITY)
    first = session.advance(session.prefill([Request(PROMPT, 20)]))
    text = (*PROMPT, *session.read(first).ids[0][:15])
    request = Request((*text, 6, 2, 2, 6, 3), 24)
    begin = session.shared(session.take(first, 0), len(text), len(request.prompt))
    assert len(text) - 24 <= begin < len(text)
    *_, state = session.prefill_onto(session.take(first, 0), request, begin)
    reused, whole = session.advance(state), session.advance(session.prefill([request]))
    assert session.read(reused) == session.read(whole)
    mine, theirs = session.rounds_of(reused, 0), session.rounds(whole)[0]
    assert [entry.drafted for entry in mine.rounds] == [entry.drafted for entry in theirs.rounds]
    assert kind == "suffix" or any(entry.drafted for entry in mine.rounds)
