"""The compiled round: parts inside a caller's own jit, finished rows, buffers."""

from __future__ import annotations

import copy
import functools
import re
import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import tiers
from tiny_models import VOCAB, diffusion_config, fond_eagle, prefilled, random_model, tiny_config

from failfast_jax import decoding
from failfast_jax.decoding import BelowThreshold, CongestionWindow, Drafter
from failfast_jax.decoding.decode_state import FAILED, FINISHED_LENGTH, RUNNING
from failfast_jax.drafters.aligned import Aligned
from failfast_jax.drafters.autoregressive import Autoregressive
from failfast_jax.drafters.block_diffusion import Wide
from failfast_jax.drafters.eagle3 import EagleChain, EagleTree
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.drafters.reuse import Reuse
from failfast_jax.drafters.suffix import Suffix
from failfast_jax.kernels import tpu_attention
from failfast_jax.kernels.attention_window import AttentionCase

CAPACITY = 128
SPEC_LEN, MAX_SPEC_LEN = 3, 9
LIMITS = np.asarray([30, 40], np.int32)


@functools.cache
def models() -> SimpleNamespace:
    return SimpleNamespace(
        target=random_model(tiny_config(num_layers=1), seed=1), diffusion=random_model(diffusion_config(), seed=2)
    )


def make_drafter(kind: str) -> Drafter:
    lengths = {"vocab": VOCAB, "spec_len": SPEC_LEN}
    block = lengths | {
        "model": models().diffusion,
        "rule": BelowThreshold(np.float32(0.3)),
        "max_spec_len": MAX_SPEC_LEN,
    }
    return {
        "vanilla": lambda: Drafter(),
        "lookup": lambda: Lookup(max_spec_len=7),
        "suffix": lambda: Suffix(tau=np.float32(0.05), corpus=np.zeros(0, np.int32), max_spec_len=7),
        "wide": lambda: Wide(**block),
        "reuse": lambda: Reuse(model=Wide(**block), max_spec_len=MAX_SPEC_LEN + 1),
        "aligned": lambda: Aligned(**block, threshold=np.float32(0.5), small_block=4),
        "ar": lambda: Autoregressive(model=models().target, **lengths),
        "eagle chain": lambda: EagleChain(model=fond_eagle(models().target, 7), spec_len=3, max_spec_len=3),
        "eagle tree": lambda: EagleTree(model=fond_eagle(models().target, 7), budget=15, depth=3, top_k=3),
    }[kind]()


def prompts(lengths: tuple[int, ...] = (9, 21), seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB - 1, (len(lengths), 24)).astype(np.int32), np.asarray(lengths, np.int32)


def start(target, drafter, tokens, lengths, limits):
    plan = decoding.make_plan(drafter, platform="cpu")
    return prefilled(target, drafter, plan, tokens, lengths, limits, capacity=CAPACITY)


def step(target, drafter, state):
    """What a caller would write: the parts of a round, in a jit of their own."""
    plan = decoding.make_plan(drafter, platform="cpu")
    proposal, state = decoding.draft(drafter, state)
    verified, state = decoding.verify(target, drafter, state, proposal, plan=plan)
    return decoding.commit(drafter, state, proposal, verified)


@jax.jit
def answer(target, drafter, tokens, lengths, limits):
    state = start(target, drafter, tokens, lengths, limits)
    return jax.lax.while_loop(lambda s: jnp.any(s.running), lambda s: step(target, drafter, s), state)


def outputs(state) -> list[list[int]]:
    rows = zip(np.asarray(state.tokens), np.asarray(state.prompt_length), np.asarray(state.length))
    return [row[begin:end].tolist() for row, begin, end in rows]


@functools.cache
def vanilla_state():
    return answer(models().target, Drafter(), *prompts(), LIMITS)


def test_the_module_docstring_runs():
    tokens, lengths = prompts()
    names = {name: getattr(decoding, name) for name in decoding.__all__} | {
        "jax": jax,
        "jnp": jnp,
        "target": models().target,
        "drafter": make_drafter("vanilla"),
        "tokens": jnp.asarray(tokens),
        "lengths": jnp.asarray(lengths),
        "max_new_tokens": jnp.asarray([30, 40]),
    }
    example = decoding.__doc__.split("like any other:\n", 1)[1]
    exec(textwrap.dedent(example), names)
    # The example stops at the model's stop token; vanilla_state() does not.
    for got, whole in zip(outputs(names["state"]), outputs(vanilla_state())):
        assert got == whole[: len(got)] and (len(got) == len(whole) or got[-1] == 1)


# Stopping rules.


def test_a_rule_learns_from_earlier_rounds():
    # The model drafts for itself, so that whole drafts are accepted now and then.
    drafter = Autoregressive(
        model=random_model(tiny_config(num_layers=1), seed=1, gain=3.0),
        vocab=VOCAB,
        rule=CongestionWindow(first=4, least=2, most=9, increase=1.8),
        spec_len=SPEC_LEN,
        max_spec_len=MAX_SPEC_LEN,
    )
    state = answer(models().target, drafter, *prompts(), LIMITS)
    assert outputs(state) == outputs(vanilla_state())
    log = jax.device_get(state.log)
    for row in range(2):
        lengths, window = log.draft_length[row, : log.rounds[row]].tolist(), 4
        for drafted, accepted in zip(lengths, log.accepted[row].tolist()):
            assert drafted == min(-(-window // SPEC_LEN) * SPEC_LEN, MAX_SPEC_LEN)
            window = min(max(int(window * 1.8) if accepted == drafted else accepted, 2), 9)
        assert len(set(lengths)) > 1


# Faults.


def test_nan_ends_a_sequence_in_front_of_it():
    """The target's logits are NaN where it reads a token: everything in front of that is the text of before."""
    whole = outputs(vanilla_state())
    poison = whole[0][7]
    tokens, lengths = prompts()
    tokens = np.where(np.arange(24) < lengths[:, None], tokens, 0)
    assert poison not in tokens[0]
    target = copy.copy(models().target)
    target.embed = type(target.embed)(target.embed[...].at[poison].set(jnp.nan))
    state = answer(target, make_drafter("lookup"), tokens, lengths, LIMITS)
    got = outputs(state)
    assert state.finish[0] == FAILED
    assert got[0] == whole[0][: whole[0].index(poison) + 1]


# Finished rows.


@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["wide", "lookup"])
def test_a_finished_row_changes_nothing(kind):
    drafter, target = make_drafter(kind), models().target
    one_round = jax.jit(step)
    state = jax.jit(start)(target, drafter, *prompts(), np.asarray([4, 60], np.int32))
    while not (finished := np.asarray(~state.running))[0]:
        state = one_round(target, drafter, state)
    assert finished.tolist() == [True, False]
    before = jax.device_get(state)
    for _ in range(5):
        state = one_round(target, drafter, state)
    after = jax.device_get(state)
    assert after.length[1] > before.length[1] and after.log.rounds[1] == before.log.rounds[1] + 5

    def finished_row(state) -> list:
        parts = (state.tokens, state.length, state.finish, state.prompt_length, state.max_length, state.log)
        return [leaf[0] for leaf in jax.tree.leaves(parts) if leaf.ndim]

    jax.tree.map(np.testing.assert_array_equal, finished_row(before), finished_row(after))
    cached = before.length[0] - 1
    for new, old in zip((*after.target.k, *after.target.v), (*before.target.k, *before.target.v)):
        np.testing.assert_array_equal(new[0, :, :cached], old[0, :, :cached])
    if kind == "wide":
        assert after.drafter.cached[0] == before.drafter.cached[0]
        kept = before.drafter.cached[0]
        for new, old in zip(after.drafter.cache.k, before.drafter.cache.k):
            np.testing.assert_array_equal(new[0, :, :kept], old[0, :, :kept])


def test_a_request_without_room_is_finished_from_the_start():
    state = jax.jit(start)(models().target, Drafter(), *prompts(), np.asarray([0, 1], np.int32))
    assert state.finish.tolist() == [FINISHED_LENGTH, RUNNING]


# Buffers.


def compiled_loop(kind: str, batch: int, donate: bool = True):
    drafter, target = make_drafter(kind), random_model(tiny_config(num_layers=2))
    plan = decoding.make_plan(drafter, platform="cpu")
    tokens, lengths = prompts((9,) * batch)
    state = jax.eval_shape(lambda: start(target, drafter, tokens, lengths, lengths))
    loop = jax.jit(
        lambda t, d, s, n: decoding.generate(t, d, s, n, plan=plan), donate_argnums=(2,) if donate else ()
    ).lower(target, drafter, state, np.int32(0))
    return loop.compile(), state


def large_copies(hlo: str, state) -> list[str]:
    """Instructions that copy an array of the shape of a cache or of a log."""
    names = {"float32": "f32", "int32": "s32"}
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim >= 3]
    shapes = {f"{names[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]" for leaf in leaves}
    copies = [line.strip() for line in hlo.splitlines() if re.search(r"= [^=]* copy(-start)?\(", line)]
    return [line for line in copies if any(shape in line.split(" copy")[0] for shape in shapes)]


@pytest.mark.optimized
@pytest.mark.parametrize(
    "kind, batch",
    tiers(
        [("wide", 2), ("eagle chain", 2), ("eagle tree", 2), ("ar", 1), ("lookup", 1)],
        quick=[("wide", 2), ("eagle tree", 2)],
        long=[("lookup", 1)],
    ),
)
def test_caches_and_logs_are_never_copied(kind, batch):
    program, state = compiled_loop(kind, batch)
    assert large_copies(program.as_text(), state) == []
    donated = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert program.memory_analysis().alias_size_in_bytes >= donated


@pytest.mark.optimized
def test_copies_would_be_noticed():
    program, state = compiled_loop("vanilla", 1, donate=False)
    assert len(large_copies(program.as_text(), state)) >= 4  # keys and values of two layers


# Plans.


@pytest.mark.parametrize("kind", ["vanilla", "lookup", "suffix", "wide", "reuse", "aligned", "ar"])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("exact", [False, True])
def test_plans_hold_every_draft(kind, platform, exact):
    drafter = make_drafter(kind)
    plan = decoding.make_plan(drafter, platform=platform, exact=exact)
    assert list(plan.widths) == sorted(set(plan.widths))
    assert plan.constant is exact
    if exact:
        assert plan.widths == plan.prefill_widths == (72,)
    else:
        assert plan.widths[-1] > drafter.max_draft
    assert all(width % drafter.shape.chunk_multiple == 0 for width in plan.drafter_prefill_widths)


@pytest.mark.parametrize(
    "platform, longest, widths",
    [("tpu", 60, (16, 64)), ("tpu", 20, (16, 24)), ("tpu", 80, (16, 64, 88)), ("gpu", 60, (64,))],
)
def test_a_tpu_verifies_at_a_few_widths(platform, longest, widths):
    drafter = make_drafter("wide").replace(spec_len=10, max_spec_len=longest)
    assert decoding.make_plan(drafter, platform=platform).widths == widths
    assert decoding.make_plan(drafter, platform=platform, exact=True).widths == (72,)
    assert decoding.make_plan(Drafter(), platform=platform).widths == (8,)
    assert all(
        tpu_attention.refuses(AttentionCase(jnp.bfloat16, 128, 40, 8, capacity=512, width=w)) is None for w in widths
    )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("platform, tile", [("cpu", 128), ("gpu", 128), ("tpu", 512)])
def test_buffers_are_whole_tiles_of_the_kernel(exact, platform, tile):
    drafter = make_drafter("wide")
    plan = decoding.make_plan(drafter, platform=platform, exact=exact)
    buffer = decoding.buffer_length(8192, drafter, plan)
    assert buffer == 8192 + tile
    for group, kv_heads in ((5, 1), (7, 1), (6, 2), (5, 8)):  # of Qwen2.5 on several devices and on one
        assert (
            tpu_attention.tiles_of(capacity=buffer, width=64, group=group, kv_heads=kv_heads, head_dim=128)[1] == tile
        )


@pytest.mark.parametrize("kind", ["wide", "vanilla"])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("length", [1, 2, 33, 34, 129, 1000])
def test_prefill_covers_all_but_the_last_token(kind, exact, length):
    drafter = make_drafter(kind)
    plan = decoding.make_plan(drafter, platform="cpu", exact=exact)
    buffer = decoding.buffer_length(length + 1, drafter, plan)
    calls = decoding.prefill_schedule(length, drafter, plan, buffer)
    for part in ("target", "drafter") if drafter.shape.has_model else ("target",):
        starts, at = [], 0
        for begin, chunk in calls:
            if part in chunk["parts"]:
                assert begin == at and begin + chunk["width"] <= buffer
                starts.append(begin)
                at += chunk["width"]
        assert length - 1 <= at
        assert not starts or starts[-1] < length - 1


def test_a_prompt_buffer_beyond_the_capacity_is_refused():
    with pytest.raises(ValueError, match="exceeds the capacity"):
        start(models().target, Drafter(), np.zeros((1, CAPACITY + 1), np.int32), *np.ones((2, 1), np.int32))
