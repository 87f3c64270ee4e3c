"""Sessions: rows are independent requests, which come and go while others are decoded."""

from __future__ import annotations

import dataclasses
import functools
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import tiers
from tiny_models import VOCAB, diffusion_config, random_model, tiny_config

from failfast_jax.decoding.decode_state import FINISHED_EOS, FINISHED_LENGTH, RUNNING
from failfast_jax.decoding.stopping import BelowThreshold
from failfast_jax.drafters.block_diffusion import Wide
from failfast_jax.errors import PromptError
from failfast_jax.runtime import model_runtime as runtime_module
from failfast_jax.runtime.model_runtime import Request, RowLog, Runtime, Session

CAPACITY = 128
KINDS = tiers(["wide", "dllm", "spiffy"], quick=["wide", "dllm"], long=None)


@functools.cache
def runtime() -> Runtime:
    context = {"max_position_embeddings": CAPACITY}
    drafter = random_model(diffusion_config(**context), seed=2)
    return Runtime(random_model(tiny_config(num_layers=1, **context), seed=1), drafter)


@functools.cache
def session(kind: str, batch: int) -> Session:
    shape = {"batch": batch, "capacity": CAPACITY}
    if kind in ("dllm", "spiffy"):
        graph = np.asarray([[0, -1, -1, -1], [0, 0, -1, -1], [-1, 0, -1, -1]]) if kind == "spiffy" else None
        options = {"threshold": 0.5, "small_block": 4, "block_cache": True, "graph": graph}
        return runtime().diffusion_session(runtime().drafter_model, **shape, **options)
    rule = BelowThreshold(np.float32(0.3))
    drafter = Wide(model=runtime().drafter_model, vocab=VOCAB, rule=rule, spec_len=3, max_spec_len=6)
    return runtime().session(drafter, **shape)


def finished(kind: str, requests: list[Request]):
    work = session(kind, len(requests))
    state = work.advance(work.prefill(requests))
    return work.read(state), work.rounds(state)


@functools.cache
def alone(kind: str, request: Request) -> tuple[list[int], int, RowLog]:
    """The answer to a request in a batch of its own."""
    progress, (log,) = finished(kind, [request])
    return progress.ids[0], progress.finish[0], log


def assert_as_alone(kind: str, state, requests: list[Request]) -> None:
    work = session(kind, len(requests))
    progress = work.read(state)
    for row, (request, log) in enumerate(zip(requests, work.rounds(state))):
        ids, finish, expected = alone(kind, request)
        assert (progress.ids[row], progress.finish[row]) == (ids, finish)
        assert (log.drafter_passes, log.target_passes) == (expected.drafter_passes, expected.target_passes)
        assert len(log.rounds) == len(expected.rounds)
        for mine, other in zip(log.rounds, expected.rounds):
            np.testing.assert_allclose(mine.confidence, other.confidence, rtol=1e-4)
            assert dataclasses.replace(mine, confidence=other.confidence) == other


any_request = st.builds(
    Request,
    prompt=st.lists(st.integers(2, 6), min_size=1, max_size=24).map(tuple),
    max_new_tokens=st.integers(8, 60),
    temperature=st.sampled_from([0.0, 0.0, 0.7]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 2**32 - 1),
    sequence=st.integers(0, 5),
    eos=st.sampled_from([(), (1,), (3, 7)]),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6)
@given(
    requests=st.lists(any_request, min_size=4, max_size=4),
    row=st.integers(0, 2),
    before=st.integers(0, 9),
    begun=st.integers(0, 4),
)
def test_a_request_that_joins_late_gets_its_answer_alone(kind, requests, row, before, begun):
    """It joins while others decode, freshly prefilled or in the middle of its answer; the others do not change."""
    work, single = session(kind, 3), session(kind, 1)
    rows, late = requests[:3], requests[3]
    state = work.advance(work.prefill(rows), before)
    state = work.insert(state, row, single.advance(single.prefill([late]), begun))
    rows[row] = late
    assert_as_alone(kind, work.advance(state), rows)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_their_own_limits_and_stop_tokens(kind):
    free = alone(kind, Request(prompt=(5, 6, 7), max_new_tokens=40))[0]
    assert len(free) > 8
    requests = [
        Request(prompt=(5, 6, 7), max_new_tokens=40, eos=(free[5],)),
        Request(prompt=(5, 6, 7), max_new_tokens=16),
        Request(prompt=(5, 6, 7), max_new_tokens=40),
    ]
    progress, _ = finished(kind, requests)
    assert progress.ids[0] == free[: free.index(free[5]) + 1]
    assert len(free) > len(progress.ids[1]) >= 8 and progress.ids[1] == free[: len(progress.ids[1])]
    assert progress.ids[2] == free
    assert progress.finish == [FINISHED_EOS, FINISHED_LENGTH, FINISHED_LENGTH]


def test_the_sequence_keys_the_noise_and_the_row_does_not():
    request = {"prompt": (5, 6, 7), "max_new_tokens": 20, "temperature": 1.0, "seed": 3}
    requests = [Request(**request, sequence=sequence) for sequence in (4, 0, 4)]
    progress, _ = finished("wide", requests)
    assert progress.ids[0] == progress.ids[2] != progress.ids[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_may_end_with_the_first_row_that_finishes(kind):
    work = session(kind, 3)
    requests = [Request(prompt=(5, 6, 7), max_new_tokens=limit) for limit in (40, 8, 24)]
    state, running = work.prefill(requests), [3]
    while running[-1]:
        state = work.advance(state, until_any=True)
        running.append(work.read(state).finish.count(RUNNING))
        assert running[-1] < running[-2]
    assert len(running) >= 3
    assert_as_alone(kind, state, requests)


def test_rows_are_taken_and_ended():
    work, single = session("wide", 3), session("wide", 1)
    requests = [Request(prompt=(row + 2,) * 5, max_new_tokens=30) for row in range(3)]
    state = work.advance(work.prefill(requests), 3)
    taken = work.take(state, 1)
    assert single.rounds(taken) == [work.rounds_of(state, 1)] == work.rounds(state)[1:2]
    state = work.end(state, {0, 2})
    assert work.read(state).finish == [FINISHED_LENGTH, RUNNING, FINISHED_LENGTH]
    before = work.read(state).ids
    state = work.advance(state)
    assert [len(ids) for ids in work.read(state).ids][::2] == [len(before[0]), len(before[2])]
    assert_as_alone("wide", single.advance(taken), requests[1:2])
    assert work.read(state).ids[1] == alone("wide", requests[1])[0]


def test_plans_that_differ_in_their_prefill_share_the_loop():
    """As with `--exact` and without: the loop is the largest program by far."""
    work = session("wide", 1)
    plan = dataclasses.replace(work.plan, prefill_widths=work.plan.prefill_widths[:1])
    other = runtime().session(work.drafter, batch=1, capacity=CAPACITY, plan=plan)
    assert other.plan != work.plan and other.compile_loop() is work.compile_loop()


def test_requests_that_cannot_be_served():
    work, single = session("wide", 3), session("wide", 1)
    request = Request(prompt=(2, 3), max_new_tokens=8)
    with pytest.raises(ValueError, match="2 requests for 3 rows"):
        work.prefill([request] * 2)
    with pytest.raises(PromptError, match="a prompt of 129 tokens: must have 1 to 128"):
        single.prefill([Request(prompt=(2,) * 129, max_new_tokens=8)])
    with pytest.raises(ValueError, match="at most 8 stop tokens"):
        single.prefill([Request(prompt=(2,), max_new_tokens=8, eos=tuple(range(9)))])
    state = work.prefill([request] * 3)
    with pytest.raises(ValueError, match="row 3: there are 3"):
        work.insert(state, 3, single.prefill([request]))


def test_the_example_at_the_modules_top_runs():
    example = textwrap.dedent(runtime_module.__doc__.split("token ids out.\n", 1)[1].split("\nA `Session`")[0])
    context = {"max_position_embeddings": 640}
    names = vars(runtime_module) | {"Wide": Wide, "BelowThreshold": BelowThreshold, "RUNNING": RUNNING}
    names["target"] = random_model(tiny_config(num_layers=1, **context), seed=1)
    names["drafter_model"] = random_model(diffusion_config(**context), seed=2)
    names["prompts"] = [[2 + row, 3, 4] for row in range(4)]
    exec(example, names)
    assert [len(ids) for ids in names["answers"]] == [256] * 4
