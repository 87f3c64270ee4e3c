"""The compiled round: parts inside a caller's own jit, finished rows, buffers."""

from __future__ import annotations

import copy
import functools
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import tiers
from tiny_models import VOCAB, diffusion_config, fond_eagle, prefilled, random_model, tiny_config

from failfast_jax import decoding
from failfast_jax.decoding import BelowThreshold, CongestionWindow, Drafter
from failfast_jax.decoding.decode_state import FAILED
from failfast_jax.drafters.aligned import Aligned
from failfast_jax.drafters.autoregressive import Autoregressive
from failfast_jax.drafters.block_diffusion import Wide
from failfast_jax.drafters.eagle3 import EagleTree
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.kernels import tpu_attention
from failfast_jax.kernels.attention_window import AttentionCase

CAPACITY = 128
SPEC_LEN, MAX_SPEC_LEN = 3, 9
LIMITS = np.asarray([30, 40], np.int32)


@functools.cache
def target():
    return random_model(tiny_config(num_layers=1), seed=1)


def make_drafter(kind: str) -> Drafter:
    block = {"model": random_model(diffusion_config(), seed=2), "rule": BelowThreshold(np.float32(0.3))}
    lengths = {"vocab": VOCAB, "spec_len": SPEC_LEN, "max_spec_len": MAX_SPEC_LEN}
    match kind:
        case "lookup":
            return Lookup(max_spec_len=7)
        case "wide":
            return Wide(**block, **lengths)
        case "aligned":
            return Aligned(**block, **lengths, threshold=np.float32(0.5), small_block=4)
        case "ar":
            return Autoregressive(model=target(), **lengths)
        case "eagle tree":
            return EagleTree(model=fond_eagle(target(), 7), budget=15, depth=3, top_k=3)
    return Drafter()


def prompts(lengths: tuple[int, ...] = (9, 21), seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB - 1, (len(lengths), 24)).astype(np.int32), np.asarray(lengths, np.int32)


def start(target, drafter, tokens, lengths, limits):
    plan = decoding.make_plan(drafter, platform="cpu")
    return prefilled(target, drafter, plan, tokens, lengths, limits, capacity=CAPACITY)


@jax.jit
def one_round(target, drafter, state):
    return decoding.step(target, drafter, state, plan=decoding.make_plan(drafter, platform="cpu"))


@jax.jit
def answer(target, drafter, tokens, lengths, limits):
    state = start(target, drafter, tokens, lengths, limits)
    return decoding.generate(target, drafter, state, plan=decoding.make_plan(drafter, platform="cpu"))


def outputs(state) -> list[list[int]]:
    rows = zip(np.asarray(state.tokens), np.asarray(state.prompt_length), np.asarray(state.length))
    return [row[begin:end].tolist() for row, begin, end in rows]


@functools.cache
def vanilla_state():
    return answer(target(), Drafter(), *prompts(), LIMITS)


def test_the_module_docstring_runs():
    tokens, lengths = prompts()
    names = vars(decoding) | {"jax": jax, "jnp": jnp, "target": target(), "drafter": Drafter()}
    names |= {"tokens": jnp.asarray(tokens), "lengths": jnp.asarray(lengths), "max_new_tokens": jnp.asarray(LIMITS)}
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
    state = answer(target(), drafter, *prompts(), LIMITS)
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
    broken = copy.copy(target())
    broken.embed = type(broken.embed)(broken.embed[...].at[poison].set(jnp.nan))
    state = answer(broken, make_drafter("lookup"), tokens, lengths, LIMITS)
    got = outputs(state)
    assert state.finish[0] == FAILED
    assert got[0] == whole[0][: whole[0].index(poison) + 1]


# Finished rows.


@pytest.mark.optimized
def test_a_finished_row_changes_nothing():
    drafter = make_drafter("wide")
    state = jax.jit(start)(target(), drafter, *prompts(), np.asarray([4, 60], np.int32))
    while not (finished := np.asarray(~state.running))[0]:
        state = one_round(target(), drafter, state)
    assert finished.tolist() == [True, False]
    before = jax.device_get(state)
    for _ in range(5):
        state = one_round(target(), drafter, state)
    after = jax.device_get(state)
    assert after.length[1] > before.length[1] and after.log.rounds[1] == before.log.rounds[1] + 5

    def finished_row(state) -> list:
        parts = (state.tokens, state.length, state.finish, state.prompt_length, state.max_length, state.log)
        return [leaf[0] for leaf in jax.tree.leaves(parts) if leaf.ndim]

    jax.tree.map(np.testing.assert_array_equal, finished_row(before), finished_row(after))
    assert after.drafter.cached[0] == before.drafter.cached[0]
    caches = (
        (before.target, after.target, before.length[0] - 1),
        (before.drafter.cache, after.drafter.cache, before.drafter.cached[0]),
    )
    for old, new, kept in caches:
        for one, other in zip((*old.k, *old.v), (*new.k, *new.v)):
            np.testing.assert_array_equal(other[0, :, :kept], one[0, :, :kept])


# Buffers.


def compiled_loop(kind: str, batch: int, donate: bool = True):
    drafter, model = make_drafter(kind), random_model(tiny_config())
    plan = decoding.make_plan(drafter, platform="cpu")
    tokens, lengths = prompts((9,) * batch)
    state = jax.eval_shape(lambda: start(model, drafter, tokens, lengths, lengths))
    loop = jax.jit(
        lambda t, d, s, n: decoding.generate(t, d, s, n, plan=plan), donate_argnums=(2,) if donate else ()
    ).lower(model, drafter, state, np.int32(0))
    return loop.compile(), state


def large_copies(hlo: str, state) -> list[str]:
    """Instructions that copy an array of the shape of a cache or of a log."""
    names = {"float32": "f32", "int32": "s32"}
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim >= 3 and leaf.size]
    shapes = {f"{names[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]" for leaf in leaves}
    copies = [line.strip() for line in hlo.splitlines() if re.search(r"= [^=]* copy(-start)?\(", line)]
    return [line for line in copies if any(shape in line.split(" copy")[0] for shape in shapes)]


@pytest.mark.optimized
@pytest.mark.parametrize(
    "kind, batch",
    tiers([("wide", 2), ("eagle tree", 2), ("ar", 1), ("lookup", 1)], quick=[("wide", 2), ("eagle tree", 2)]),
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


@pytest.mark.parametrize("kind", ["vanilla", "wide", "aligned"])
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
    tile = 512 if platform == "tpu" else 128
    buffer = decoding.buffer_length(8192, drafter, plan)
    assert buffer % tile == 0 and 8192 < buffer <= 8192 + 2 * tile


@pytest.mark.parametrize(
    "platform, longest, widths",
    [
        ("cpu", 60, (16, 32, 64)),
        ("tpu", 60, (16, 64)),
        ("tpu", 20, (16, 24)),
        ("tpu", 80, (16, 64, 88)),
        ("gpu", 60, (64,)),
    ],
)
def test_a_platform_verifies_at_a_few_widths(platform, longest, widths, users_widths):
    drafter, choice = make_drafter("wide").replace(spec_len=10, max_spec_len=longest), {"platform": platform}
    if platform == "cpu":
        choice["widths"] = users_widths
    assert decoding.make_plan(drafter, **choice).widths == widths
    for width in widths if platform == "tpu" else ():
        assert tpu_attention.refusal(AttentionCase(jnp.bfloat16, 128, 40, 8, capacity=512, width=width)) is None


@pytest.mark.parametrize("group, kv_heads", [(5, 1), (7, 1), (6, 2), (5, 8)])
def test_buffers_are_whole_tiles_of_the_kernel(group, kv_heads):
    """Heads of Qwen2.5 on several devices and on one."""
    case = {"width": 64, "group": group, "kv_heads": kv_heads, "head_dim": 128}
    for capacity, tile in ((8192 + 128, 128), (8192 + 512, 512)):
        assert tpu_attention.tiles_of(capacity=capacity, **case)[1] == tile


@pytest.mark.parametrize("kind", ["wide", "vanilla"])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("length", [1, 2, 33, 34, 129, 1000])
def test_prefill_covers_all_but_the_last_token(kind, exact, length):
    drafter = make_drafter(kind)
    plan = decoding.make_plan(drafter, platform="cpu", exact=exact)
    buffer = decoding.buffer_length(length + 1, drafter, plan)
    calls = decoding.prefill_schedule(length, drafter, plan, buffer)
    for part in ("target", "drafter") if drafter.shape.has_model else ("target",):
        chunks, end = [(begin, chunk["width"]) for begin, chunk in calls if part in chunk["parts"]], 0
        for begin, width in chunks:
            assert begin == end and begin < length - 1
            end += width
        assert length - 1 <= end <= buffer


def test_a_prompt_buffer_beyond_the_capacity_is_refused():
    with pytest.raises(ValueError, match="exceeds the capacity"):
        start(target(), Drafter(), np.zeros((1, CAPACITY + 1), np.int32), *np.ones((2, 1), np.int32))
