"""The compiled round: parts inside a caller's own jit, finished rows, buffers."""

from __future__ import annotations

import functools
import re
import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import VOCAB, diffusion_config, random_model, tiny_config

from failfast_jax.decoding import round
from failfast_jax.decoding.state import FINISHED_EOS, FINISHED_LENGTH, RUNNING
from failfast_jax.drafters import Aligned, Autoregressive, Drafter, Lookup, Reuse, TreeDrafter, Wide
from failfast_jax.drafters.suffix import Suffix

CAPACITY = 128
SPEC_LEN, MAX_SPEC_LEN = 3, 9


@functools.cache
def models() -> SimpleNamespace:
    return SimpleNamespace(
        target=random_model(tiny_config(num_layers=1), seed=1), diffusion=random_model(diffusion_config(), seed=2)
    )


def make_drafter(kind: str) -> Drafter:
    lengths = {"vocab": VOCAB, "spec_len": SPEC_LEN}
    block = lengths | {"model": models().diffusion, "tau": np.float32(0.3), "max_spec_len": MAX_SPEC_LEN}
    return {
        "vanilla": lambda: Drafter(),
        "lookup": lambda: Lookup(max_spec_len=7),
        "suffix": lambda: Suffix(tau=np.float32(0.05), corpus=np.zeros(0, np.int32), max_spec_len=7),
        "wide": lambda: Wide(**block),
        "reuse": lambda: Reuse(model=Wide(**block), max_spec_len=MAX_SPEC_LEN + 1),
        "aligned": lambda: Aligned(**block, threshold=np.float32(0.5), small_block=4),
        "tree": lambda: TreeDrafter(model=Wide(**block, alternatives=2), budget=15),
        "ar": lambda: Autoregressive(model=models().target, **lengths),
    }[kind]()


def prompts(lengths: tuple[int, ...] = (9, 21), seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB - 1, (len(lengths), 24)).astype(np.int32), np.asarray(lengths, np.int32)


def start(target, drafter, plan, tokens, lengths, limits, eos=()):
    state = round.init_state(
        target,
        drafter,
        tokens=tokens,
        prompt_length=lengths,
        max_new_tokens=limits,
        eos=jnp.asarray(round.pad_eos(eos)),
        sampling=round.greedy_sampling(tokens.shape[0]),
        capacity=CAPACITY,
        plan=plan,
    )
    return round.prefill(target, drafter, state, prompt_tokens=tokens.shape[1], plan=plan)


@functools.partial(jax.jit, static_argnames=("plan", "stop", "eos"))
def answer(target, drafter, tokens, lengths, limits, *, plan, stop=None, eos=()):
    """What a caller would write: the parts of a round in a loop and a jit of their own."""

    def body(state):
        proposal, state = round.draft(drafter, state, stop)
        verified, state = round.verify(target, drafter, state, proposal, plan=plan)
        return round.accept(drafter, state, proposal, verified)

    state = start(target, drafter, plan, tokens, lengths, limits, eos)
    return jax.lax.while_loop(lambda s: jnp.any(s.running), body, state)


def outputs(state) -> list[list[int]]:
    rows = zip(np.asarray(state.tokens), np.asarray(state.prompt_length), np.asarray(state.length))
    return [row[begin:end].tolist() for row, begin, end in rows]


@functools.cache
def vanilla_state():
    drafter = Drafter()
    plan = round.make_plan(drafter, platform="cpu")
    return answer(models().target, drafter, *prompts(), np.asarray([30, 40], np.int32), plan=plan)


def test_the_module_docstring_runs():
    tokens, lengths = prompts()
    names = {name: getattr(round, name) for name in dir(round)} | {
        "target": models().target,
        "drafter": make_drafter("vanilla"),
        "prompts": jnp.asarray(tokens),
        "lengths": jnp.asarray(lengths),
        "limits": jnp.asarray([30, 40]),
    }
    example = round.__doc__.split("as they are:\n", 1)[1]
    exec(textwrap.dedent(example), names)
    # The example stops at the model's stop token; vanilla_state() does not.
    for got, whole in zip(outputs(names["state"]), outputs(vanilla_state())):
        assert got == whole[: len(got)] and (len(got) == len(whole) or got[-1] == 1)


# A stopping rule of the caller's own.


def after_two_chunks(chunk):
    return chunk.drafted >= 2 * SPEC_LEN


def mean_below_tau(chunk):
    return chunk.confidence.mean(axis=1) < chunk.tau


@functools.cache
def wide_state(stop):
    drafter = make_drafter("wide")
    plan = round.make_plan(drafter, platform="cpu")
    return answer(models().target, drafter, *prompts(), np.asarray([30, 40], np.int32), plan=plan, stop=stop)


def drafts(state) -> list[np.ndarray]:
    """Confidences of every draft."""
    log = jax.device_get(state.log)
    return [
        log.confidence[row, index, : log.draft_length[row, index]]
        for row in range(log.rounds.shape[0])
        for index in range(log.rounds[row])
    ]


def expected_length(confidence: np.ndarray, go_on) -> int:
    """Length that a rule gives, from the confidences of a draft that is at least as long."""
    for end in range(SPEC_LEN, MAX_SPEC_LEN + 1, SPEC_LEN):
        if not go_on(confidence[:end]):
            return end
    return MAX_SPEC_LEN


RULES = {
    None: lambda c: (c[-SPEC_LEN:] >= np.float32(0.3)).all(),
    after_two_chunks: lambda c: len(c) < 2 * SPEC_LEN,
    mean_below_tau: lambda c: c[-SPEC_LEN:].mean() >= 0.3,
}


@pytest.mark.parametrize("stop", RULES)
def test_a_stopping_rule_inside_the_callers_jit(stop):
    state = wide_state(stop)
    assert outputs(state) == outputs(vanilla_state())
    lengths = [len(confidence) for confidence in drafts(state)]
    assert lengths == [expected_length(confidence, RULES[stop]) for confidence in drafts(state)]


def test_rules_differ():
    lengths = {tuple(len(c) for c in drafts(wide_state(stop))) for stop in RULES}
    assert len(lengths) == len(RULES)


@pytest.mark.parametrize("kind", ["lookup", "suffix", "ar", "vanilla"])
def test_drafters_that_do_not_expand_take_no_rule(kind):
    drafter = make_drafter(kind)
    plan = round.make_plan(drafter, platform="cpu")
    state = jax.eval_shape(lambda: start(models().target, drafter, plan, *prompts(), np.asarray([9, 9], np.int32)))
    with pytest.raises(ValueError, match="does not expand its drafts"):
        jax.eval_shape(lambda s: round.draft(drafter, s, after_two_chunks), state)


# Finished rows.


@pytest.mark.parametrize("kind", ["wide", "lookup"])
def test_a_finished_row_changes_nothing(kind):
    drafter, target = make_drafter(kind), models().target
    plan = round.make_plan(drafter, platform="cpu")
    begin = jax.jit(lambda t, d, *inputs: start(t, d, plan, *inputs))
    step = jax.jit(lambda t, d, s: round.step(t, d, s, plan=plan))
    state = begin(target, drafter, *prompts(), np.asarray([4, 60], np.int32))
    while not (finished := np.asarray(~state.running))[0]:
        state = step(target, drafter, state)
    assert finished.tolist() == [True, False]
    before = jax.device_get(state)
    for _ in range(5):
        state = step(target, drafter, state)
    after = jax.device_get(state)
    assert after.length[1] > before.length[1] and after.log.rounds[1] == before.log.rounds[1] + 5
    for name in ("tokens", "length", "finish", "prompt_length", "max_length"):
        np.testing.assert_array_equal(getattr(after, name)[0], getattr(before, name)[0], err_msg=name)
    for name in ("drafted", "confidence", "draft_length", "accepted", "emitted", "passes", "rounds"):
        np.testing.assert_array_equal(getattr(after.log, name)[0], getattr(before.log, name)[0], err_msg=name)
    assert not after.log.draft_length[0, before.log.rounds[0] :].any()
    cached = before.length[0] - 1
    for new, old in zip((*after.target.k, *after.target.v), (*before.target.k, *before.target.v)):
        np.testing.assert_array_equal(new[0, :, :cached], old[0, :, :cached])
    if kind == "wide":
        assert after.drafter.cached[0] == before.drafter.cached[0]
        kept = before.drafter.cached[0]
        for new, old in zip(after.drafter.cache.k, before.drafter.cache.k):
            np.testing.assert_array_equal(new[0, :, :kept], old[0, :, :kept])


def test_reasons_to_finish():
    free = outputs(vanilla_state())
    stop_token = free[0][5]
    drafter = Drafter()
    plan = round.make_plan(drafter, platform="cpu")
    limits = np.asarray([30, 2], np.int32)
    state = answer(models().target, drafter, *prompts(), limits, plan=plan, eos=(stop_token,))
    assert outputs(state)[0] == free[0][: free[0].index(stop_token) + 1]
    assert state.finish[0] == FINISHED_EOS
    if stop_token not in free[1][:2]:
        assert outputs(state)[1] == free[1][:2] and state.finish[1] == FINISHED_LENGTH


def test_a_request_without_room_is_finished_from_the_start():
    drafter = Drafter()
    plan = round.make_plan(drafter, platform="cpu")
    state = jax.jit(lambda: start(models().target, drafter, plan, *prompts(), np.asarray([0, 1], np.int32)))()
    assert state.finish.tolist() == [FINISHED_LENGTH, RUNNING]


# Buffers.


def compiled_loop(kind: str, batch: int, donate: bool = True):
    drafter, target = make_drafter(kind), random_model(tiny_config(num_layers=2))
    plan = round.make_plan(drafter, platform="cpu")
    tokens, lengths = prompts((9,) * batch)
    state = jax.eval_shape(lambda: start(target, drafter, plan, tokens, lengths, lengths))
    loop = jax.jit(
        lambda t, d, s, n: round.generate(t, d, s, n, plan=plan), donate_argnums=(2,) if donate else ()
    ).lower(target, drafter, state, np.int32(0))
    return loop.compile(), state


def large_copies(hlo: str, state) -> list[str]:
    """Instructions that copy an array of the shape of a cache or of a log."""
    names = {"float32": "f32", "int32": "s32"}
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim >= 3]
    shapes = {f"{names[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]" for leaf in leaves}
    copies = [line.strip() for line in hlo.splitlines() if re.search(r"= [^=]* copy(-start)?\(", line)]
    return [line for line in copies if any(shape in line.split(" copy")[0] for shape in shapes)]


@pytest.mark.parametrize("kind, batch", [("wide", 2), ("tree", 2), ("ar", 1), ("lookup", 1)])
def test_caches_and_logs_are_never_copied(kind, batch):
    program, state = compiled_loop(kind, batch)
    assert large_copies(program.as_text(), state) == []
    donated = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert program.memory_analysis().alias_size_in_bytes >= donated


def test_copies_would_be_noticed():
    program, state = compiled_loop("vanilla", 1, donate=False)
    assert len(large_copies(program.as_text(), state)) >= 4  # keys and values of two layers


# Plans.


@pytest.mark.parametrize("kind", ["vanilla", "lookup", "suffix", "wide", "reuse", "aligned", "ar", "tree"])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("exact", [False, True])
def test_plans_hold_every_draft(kind, platform, exact):
    drafter = make_drafter(kind)
    plan = round.make_plan(drafter, platform=platform, exact=exact)
    assert list(plan.widths) == sorted(set(plan.widths))
    assert plan.constant is exact
    if exact:
        assert plan.widths == plan.prefill_widths == (round.EXACT_WIDTH,)
    else:
        assert plan.widths[-1] > drafter.max_draft
    assert all(width % drafter.chunk_multiple == 0 for width in plan.drafter_prefill_widths)


@pytest.mark.parametrize("kind", ["wide", "vanilla"])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("length", [1, 2, 33, 34, 129, 1000])
def test_prefill_covers_all_but_the_last_token(kind, exact, length):
    drafter = make_drafter(kind)
    plan = round.make_plan(drafter, platform="cpu", exact=exact)
    buffer = round.buffer_length(length + 1, drafter, plan)
    calls = round.prefill_schedule(length, drafter, plan, buffer)
    for part in ("target", "drafter") if drafter.has_model else ("target",):
        mine = [call for call in calls if part in call.parts]
        at = 0
        for call in mine:
            assert call.start == at and call.start + call.width <= buffer
            at += call.width
        assert length - 1 <= at
        assert not mine or mine[-1].start < length - 1


def test_too_many_stop_tokens_are_refused():
    with pytest.raises(ValueError, match="at most 8 stop tokens"):
        round.pad_eos(tuple(range(9)))


def test_a_prompt_buffer_beyond_the_capacity_is_refused():
    drafter = Drafter()
    plan = round.make_plan(drafter, platform="cpu")
    with pytest.raises(ValueError, match="exceeds the capacity"):
        start(models().target, drafter, plan, np.zeros((1, CAPACITY + 1), np.int32), *np.ones((2, 1), np.int32))
