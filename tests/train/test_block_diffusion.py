"""The block-diffusion training objective: against a dense reference, and against what the drafter sees."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import VOCAB, diffusion_config, random_model, tiny_config

from failfast_jax.decoding.state import Committed
from failfast_jax.drafters.wide import Wide
from failfast_jax.models.rope import rotary, rotated_heads
from failfast_jax.models.transformer import Decoder
from failfast_jax.train.block_diffusion import Corruption, Settings, corrupt, forward_pair, loss

MASK = VOCAB - 1
BLOCK, WIDTH = 8, 24

# Compiling takes most of the time here, and of that the optimisations most.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def model(block: int = BLOCK, **changes) -> Decoder:
    """Two layers with grouped queries, unless `changes` says otherwise."""
    return random_model(diffusion_config(block, **{"num_layers": 2, "num_kv_heads": 2, **changes}), seed=5, gain=1.5)


def random_tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, MASK, shape).astype(np.int32)


def text_batch(teacher: int | None = None) -> dict[str, np.ndarray]:
    """Prompts and answers that end inside blocks, at their ends and nowhere (no answer)."""
    batch = {
        "tokens": random_tokens(4, WIDTH),
        "prompt_length": np.asarray([3, 8, 13, 6], np.int32),
        "length": np.asarray([WIDTH, 21, 16, 6], np.int32),
    }
    if teacher:
        noise = np.random.default_rng(9).standard_normal((4, WIDTH, teacher))
        batch["teacher_logits"] = 2 * noise.astype(np.float32)
    return batch


def visible(length: int, block: int, live: int) -> np.ndarray:
    """The rule, pair by pair: bool `[2L, 2L]` over the noised copy followed by the clean one."""
    mask = np.zeros((2 * length, 2 * length), bool)
    for row in range(2 * length):
        for column in range(2 * length):
            i, j = row % length, column % length
            clean_row, clean_column = row >= length, column >= length
            if j >= live:
                sees = False
            elif clean_row:
                sees = clean_column and i // block >= j // block
            elif clean_column:
                sees = j // block < i // block
            else:
                sees = i // block == j // block
            mask[row, column] = sees
    return mask


def dense_pair(model: Decoder, noised, clean, live) -> tuple[jax.Array, jax.Array]:
    """`forward_pair` as one ordinary transformer over the joined copies; `live` is one number a text."""
    copies, length = noised.shape
    config = model.config
    clean = jnp.tile(clean, (copies // clean.shape[0], 1))
    mask = np.stack([visible(length, config.block_size, int(n)) for n in np.tile(live, copies // len(live))])
    cos, sin = rotary(config, jnp.tile(jnp.arange(length), 2)[None])
    x = model.embed[...][jnp.concatenate([noised, clean], axis=1)]
    for layer in model.layers:
        q, k, v = rotated_heads(layer.attention.heads(layer.input_norm(x)), cos, sin)
        k, v = (jnp.repeat(y, config.num_heads // config.num_kv_heads, axis=2) for y in (k, v))
        scores = jnp.einsum("bqnh,btnh->bnqt", q, k) * config.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
        x = x + layer.attention.output(jnp.einsum("bnqt,btnh->bqnh", weights, v))
        x = x + layer.mlp(layer.post_norm(x))
    x = model.norm(x)
    return x[:, :length], x[:, length:]


def corrupted_batch(model: Decoder, batch, key, corruption: Corruption):
    """What `loss` draws: clean tokens with masks for padding, noised ones, and where these are masked."""
    columns, lengths = np.arange(batch["tokens"].shape[1]), batch["length"][:, None]
    tokens = np.where(columns < lengths, batch["tokens"], MASK)
    maskable = (columns >= batch["prompt_length"][:, None]) & (columns < lengths)
    noised, masked = draw(key, tokens, maskable, MASK, model.config.block_size, corruption)
    return tokens, np.asarray(noised), np.asarray(masked)


def whole_blocks(lengths: np.ndarray) -> np.ndarray:
    return -(-lengths // BLOCK) * BLOCK


def dense_value_and_grad(model: Decoder, batch, key, settings: Settings):
    """`loss` from a list of labels made in Python, and its gradients. Only `corrupt` is shared with it."""
    tokens, noised, masked = corrupted_batch(model, batch, key, settings.corruption)
    live = whole_blocks(batch["length"]) if settings.fill_last_block else batch["length"]
    sources, labels, weights, teacher = [], [], [], []
    for b, row in enumerate(masked):
        for i in np.nonzero(row)[0]:
            rank = row[i // BLOCK * BLOCK : i + 1].sum()
            sources.append((int(i % BLOCK == 0), b, i - 1))  # 0: the noised copy, 1: the clean one
            labels.append(tokens[b % len(tokens), i])
            gamma = settings.position_decay
            weights.append(1.0 if gamma is None else np.exp(-(rank - 1) / gamma))
            if settings.kl_weight:
                said = batch["teacher_logits"][b % len(tokens), i - 1].astype(np.float64)[:MASK]
                teacher.append(np.exp(said) / np.exp(said).sum())
    index, weights = tuple(np.transpose(sources)), np.asarray(weights, np.float32)
    weights /= weights.sum()

    def value(model):
        rows = jnp.stack(dense_pair(model, noised, tokens, live))[index]
        scores = jax.nn.log_softmax(model.logits_of(rows).at[:, MASK].set(-jnp.inf))
        terms = -(1 - settings.kl_weight) * scores[np.arange(len(labels)), np.asarray(labels)]
        if settings.kl_weight:
            p = np.asarray(teacher)
            terms += settings.kl_weight * jnp.sum(p * (np.log(p) - scores[:, :MASK]), axis=-1)
        return jnp.sum(weights * terms)

    return quick_jit(jax.value_and_grad(value))(model)


value_and_grad = quick_jit(jax.value_and_grad(loss, has_aux=True), static_argnums=3)
value_of = quick_jit(loss, static_argnums=3)
draw = quick_jit(corrupt, static_argnums=(3, 4, 5))


def assert_gradients_close(got, expected, tolerance: float = 1e-5) -> None:
    """Every parameter's gradient, relative to its own scale."""
    got, expected = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, expected))
    assert len(got) == len(expected) > 10
    for (path, one), (_, other) in zip(got, expected):
        scale = float(jnp.abs(other).max())
        assert scale > 0, jax.tree_util.keystr(path)
        np.testing.assert_allclose(one, other, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))


SETTINGS = {
    "plain": Settings(),
    "recipe": Settings(corruption=Corruption(complementary=True), position_decay=4.0),
    "mixed, kl": Settings(
        corruption=Corruption("mixed", draft_fraction=0.4, complementary=True), kl_weight=0.3, head_chunk=20
    ),
    "draft, ends at length": Settings(
        corruption=Corruption("draft"), position_decay=0.01, fill_last_block=False, remat=False
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradients_equal_the_dense_reference(name):
    settings = SETTINGS[name]
    batch, key = text_batch(VOCAB if settings.kl_weight else None), jax.random.key(2)
    (got, metrics), gradients = value_and_grad(model(), batch, key, settings)
    expected, expected_gradients = dense_value_and_grad(model(), batch, key, settings)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    share, kl = settings.kl_weight, metrics["kl"] if settings.kl_weight else 0.0
    np.testing.assert_allclose(got, (1 - share) * metrics["cross_entropy"] + share * kl, rtol=1e-6)
    assert_gradients_close(gradients, expected_gradients)


def test_mask_rule_by_perturbation():
    """One layer, so that a row changes exactly where it sees a changed token, or is it."""
    length, live, net = 12, 6, model(4, num_layers=1)
    noised, clean = random_tokens(2, length, seed=1)
    swapped = np.stack([np.concatenate([noised, clean])] * (2 * length + 1))
    for column in range(2 * length):
        swapped[column, column] = (swapped[column, column] + 7) % MASK
    hidden = quick_jit(forward_pair)(net, swapped[:, :length], swapped[:, length:], np.full(2 * length + 1, live))
    rows = np.concatenate(hidden, axis=1)
    changed = (rows[:-1] != rows[-1]).any(-1).T  # [row, column]
    np.testing.assert_array_equal(changed, visible(length, 4, live) | np.eye(2 * length, dtype=bool))


def test_copies_of_a_text_share_its_clean_copy():
    noised, clean = random_tokens(6, WIDTH, seed=1), random_tokens(2, WIDTH, seed=2)
    lengths = np.asarray([20, 24], np.int32)
    pair = quick_jit(forward_pair)
    together, clean_rows = pair(model(), noised, clean, lengths)
    one_each, tiled = pair(model(), noised, np.tile(clean, (3, 1)), np.tile(lengths, 3))
    np.testing.assert_allclose(together, one_each, atol=2e-6)
    np.testing.assert_allclose(np.tile(clean_rows, (3, 1, 1)), tiled, atol=2e-6)


# Inference.


def drafting_texts() -> tuple[np.ndarray, np.ndarray]:
    """One text for each number of clean leading tokens in its last block: clean, and with masks behind them."""
    clean = np.tile(random_tokens(1, WIDTH, seed=4), (BLOCK, 1))
    front = WIDTH - BLOCK + np.arange(BLOCK)
    return clean, np.where(np.arange(WIDTH) < front[:, None], clean, MASK)


def test_noised_rows_are_what_the_drafter_computes():
    clean, text = drafting_texts()
    noised = text.copy()
    noised[:, : WIDTH - BLOCK] = MASK  # earlier blocks are read from the clean copy alone
    net, start = model(), WIDTH - BLOCK
    noised_rows, clean_rows = quick_jit(forward_pair)(net, noised, clean)

    @quick_jit
    def windows(net, text):
        """The last block over a cache of the blocks in front of it, as `Wide` runs it."""
        cache = net.init_cache(BLOCK, 128)
        zeros = jnp.zeros(BLOCK, jnp.int32)
        prefix, cache, _ = net.window(text[:, :start], cache, zeros, start)
        last, _, _ = net.window(text[:, start:], cache, zeros + start, WIDTH)
        return prefix, last

    prefix, last = windows(net, text)
    np.testing.assert_allclose(noised_rows[:, start:], last, atol=5e-6)
    np.testing.assert_allclose(clean_rows[:, :start], prefix, atol=5e-6)
    forward = quick_jit(Decoder.forward)(net, text)
    np.testing.assert_allclose(net.logits_of(noised_rows[:, start:]), forward[:, start:], atol=2e-5)
    np.testing.assert_allclose(net.logits_of(clean_rows[:, :start]), forward[:, :start], atol=2e-5)


def test_labels_are_scored_by_the_rows_that_draft_them():
    """Labels that are what `Wide` drafts into a block of masks cost `-log(confidence)` each."""
    net = model(num_layers=1)
    drafter = Wide(model=net, tau=np.float32(0), vocab=VOCAB, spec_len=BLOCK, max_spec_len=BLOCK)
    start = WIDTH - BLOCK
    committed = Committed(
        tokens=np.pad(random_tokens(1, start, seed=4), ((0, 0), (0, 128 - start))),
        length=np.asarray([start], np.int32),
        prompt_length=np.asarray([start], np.int32),
        room=np.asarray([BLOCK], np.int32),
        running=np.ones(1, bool),
        eos=np.full(8, -1, np.int32),
    )
    draft, _ = quick_jit(
        lambda d, c: d.draft(d.prefill(d.init(1, 128), c, jnp.int32(0), start, jnp.zeros((1, start, 0, 16))), c)
    )(drafter, committed)
    text = np.concatenate([committed.tokens[:, :start], draft.tokens[:, :BLOCK]], axis=1)
    # A key that masks the whole block.
    settings, confidence = Settings(corruption=Corruption("draft")), np.asarray(draft.confidence[0, :BLOCK])
    batch = {"tokens": text, "prompt_length": np.asarray([start]), "length": np.asarray([WIDTH])}
    key = next(
        key
        for key in map(jax.random.key, range(100))
        if draw(key, text, np.arange(WIDTH)[None] >= start, MASK, BLOCK, settings.corruption)[1].sum() == BLOCK
    )
    value, metrics = value_of(net, batch, key, settings)
    np.testing.assert_allclose(value, -np.log(confidence).mean(), rtol=1e-5)
    assert metrics["accuracy"] == 1 and metrics["labels"] == BLOCK


# Corruption.


@functools.cache
def corrupted(kind: str, complementary: bool, seed: int = 0):
    """Tokens, maskable positions, noised tokens and masks of 200 texts of 4 blocks."""
    tokens = random_tokens(200, 4 * BLOCK, seed=seed)
    rng = np.random.default_rng(seed)
    bounds = np.sort(rng.integers(0, 4 * BLOCK + 1, (200, 2)), axis=1)
    bounds[:20] = 0, 4 * BLOCK
    columns = np.arange(4 * BLOCK)
    maskable = (columns >= bounds[:, :1]) & (columns < bounds[:, 1:])
    noised, masked = draw(jax.random.key(seed), tokens, maskable, MASK, BLOCK, Corruption(kind, 0.5, complementary))
    return tokens, maskable, np.asarray(noised), np.asarray(masked)


def blocks_of(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, BLOCK)


def is_draft(maskable: np.ndarray, masked: np.ndarray) -> np.ndarray:
    """Whether a block's masks are all of its maskable positions behind the first mask."""
    return (masked == (maskable & (np.cumsum(masked, -1) > 0))).all(-1)


@pytest.mark.parametrize("complementary", [False, True])
@pytest.mark.parametrize("kind", ["random", "draft", "mixed"])
def test_corruption_only_masks_answers(kind, complementary):
    tokens, maskable, noised, masked = corrupted(kind, complementary)
    copies = 2 if complementary else 1
    tokens, maskable = np.tile(tokens, (copies, 1)), np.tile(maskable, (copies, 1))
    assert not (masked & ~maskable).any()
    np.testing.assert_array_equal(noised, np.where(masked, MASK, tokens))
    first = blocks_of(masked[:200]).any(-1)
    np.testing.assert_array_equal(first, blocks_of(maskable[:200]).any(-1))  # no block without a label


def test_random_noise_levels_are_uniform():
    _, maskable, _, masked = corrupted("random", False)
    full = blocks_of(maskable).all(-1)
    counts = np.bincount(blocks_of(masked)[full].sum(-1), minlength=BLOCK + 1)
    # Masks in a block of D at a uniform level: uniform over 0 .. D, and here 0 counts as 1.
    expected = np.full(BLOCK + 1, full.sum() / (BLOCK + 1))
    expected[:2] = 0, 2 * expected[0]
    assert (np.abs(counts - expected) <= 4 * np.sqrt(expected)).all()
    assert not is_draft(blocks_of(maskable), blocks_of(masked)).all()


@pytest.mark.parametrize("complementary", [False, True])
def test_draft_like_corruption_is_a_clean_prefix_then_masks(complementary):
    _, maskable, _, masked = corrupted("draft", complementary)
    maskable = blocks_of(np.tile(maskable, (1 + complementary, 1)))
    masked = blocks_of(masked)
    assert is_draft(maskable, masked).all()
    full = maskable.all(-1)
    counts = np.bincount(masked[full].sum(-1), minlength=BLOCK + 1)
    expected = full.sum() / BLOCK
    assert counts[0] == 0 and (np.abs(counts[1:] - expected) <= 4 * np.sqrt(expected)).all()


def test_complements_partition_the_answer():
    _, maskable, _, masked = corrupted("random", True)
    np.testing.assert_array_equal(masked[:200] ^ masked[200:], maskable)
    assert not (masked[:200] & masked[200:]).any()


def test_mixed_blocks_are_of_either_kind():
    _, maskable, _, masked = corrupted("mixed", True)
    maskable, one, two = blocks_of(maskable), blocks_of(masked[:200]), blocks_of(masked[200:])
    partition = ((one ^ two) == maskable).all(-1)
    drafts = is_draft(maskable, one) & is_draft(maskable, two)
    assert (partition | drafts).all()
    full = maskable.all(-1)
    assert 0.35 < drafts[full].mean() < 0.65
    everything = [corrupted(kind, True)[3] for kind in ("random", "draft")]
    assert not any((masked == other).all() for other in everything)


def test_corruption_is_a_function_of_the_key():
    text = random_tokens(3, WIDTH), np.ones((3, WIDTH), bool)
    masks = [np.asarray(draw(jax.random.key(seed), *text, MASK, BLOCK, Corruption())[1]) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(masks[0], masks[1])
    assert (masks[0] != masks[2]).any()


# What must not matter.


@pytest.mark.parametrize("name", ["mixed, kl", "draft, ends at length"])
def test_padding_is_invisible(name):
    """Neither its tokens nor how much of it there is, and a text without an answer teaches nothing."""
    settings, batch = SETTINGS[name], text_batch(VOCAB)
    other = dict(batch)
    padding = np.arange(WIDTH) >= batch["length"][:, None]
    # The mask token and ids outside the vocabulary, too.
    other["tokens"] = np.where(padding, np.resize([MASK, -1, 5, VOCAB + 3], padding.shape), batch["tokens"])
    other["teacher_logits"] = np.where(padding[..., None], np.inf, batch["teacher_logits"])
    other["tokens"][3, :6] = 11
    key = jax.random.key(3)
    (one, metrics), gradients = value_and_grad(model(), batch, key, settings)
    (two, _), other_gradients = value_and_grad(model(), other, key, settings)
    assert one == two and np.isfinite(one)
    assert metrics["labels"] > 0
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(other_gradients)):
        np.testing.assert_array_equal(a, b)


def test_length_hides_what_follows():
    noised, clean = random_tokens(2, WIDTH, seed=1), random_tokens(2, WIDTH, seed=2)
    lengths = np.asarray([13, 16], np.int32)
    pair = quick_jit(forward_pair)
    behind = np.arange(WIDTH) >= lengths[:, None]
    rows = [
        pair(model(), noised, clean, lengths),
        pair(model(), np.where(behind, 1, noised), np.where(behind, 2, clean), lengths),
    ]
    for one, two in zip(*rows):
        np.testing.assert_array_equal(np.asarray(one)[~behind], np.asarray(two)[~behind])
    alone = pair(model(), noised[1:, :16], clean[1:, :16])
    for padded, short in zip(rows[0], alone):
        np.testing.assert_allclose(padded[1, :16], short[0], atol=5e-6)


def test_remat_and_head_chunks_change_nothing():
    """192 rows: in ten chunks of which the last is not full, at once, and in one chunk that is too long."""
    settings, batch, key = SETTINGS["mixed, kl"], text_batch(VOCAB), jax.random.key(1)
    assert settings.remat and settings.head_chunk == 20
    plain = dataclasses.replace(settings, remat=False, head_chunk=None)
    (expected, expected_metrics), expected_gradients = value_and_grad(model(), batch, key, plain)
    results = [value_and_grad(model(), batch, key, settings)]
    assert_gradients_close(results[0][1], expected_gradients, 2e-6)
    results.append((value_of(model(), batch, key, dataclasses.replace(settings, head_chunk=1000)), None))
    for (value, metrics), _ in results:
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        for name in expected_metrics:
            np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-6, err_msg=name)


# Metrics and edges.


@functools.partial(quick_jit, static_argnums=3)
def dense_hidden(model, noised, tokens, live: tuple[int, ...]):
    return dense_pair(model, noised, tokens, np.asarray(live))


def test_metrics():
    """Against argmaxes and masks counted here."""
    batch, key, settings = text_batch(), jax.random.key(6), Settings()
    live = tuple(whole_blocks(batch["length"]).tolist())
    # Some labels are what the drafter says, so that there is something to count.
    tokens, noised, masked = corrupted_batch(model(), batch, key, Corruption())

    def guesses():
        logits = np.array(model().logits_of(jnp.stack(dense_hidden(model(), noised, tokens, live))))
        logits[..., MASK] = -np.inf
        return logits.argmax(-1)

    said = guesses()
    for b, i in zip(*np.nonzero(masked)):
        # The last block's tokens are behind everything that predicts them.
        if i // BLOCK == (batch["length"][b] - 1) // BLOCK and (i % 2 == 0 or i % BLOCK == 0):
            batch["tokens"][b, i] = tokens[b, i] = said[int(i % BLOCK == 0), b, i - 1]
    (_, metrics), _ = value_and_grad(model(), batch, key, settings)
    said, seen = guesses(), set()
    right, right_first = 0, 0
    for b, i in zip(*np.nonzero(masked)):
        hit = said[int(i % BLOCK == 0), b, i - 1] == tokens[b, i]
        right += hit
        if (b, i // BLOCK) not in seen:
            seen.add((b, i // BLOCK))
            right_first += hit
    assert 0 < right_first < right < masked.sum()
    assert metrics["labels"] == masked.sum() and metrics["firsts"] == len(seen)
    np.testing.assert_allclose(metrics["accuracy"], right / masked.sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics["first_accuracy"], right_first / len(seen), rtol=1e-6)


@pytest.mark.parametrize("agrees", [True, False])
def test_divergence_from_a_teacher(agrees):
    """A teacher with the drafter's own logits, over the ids that a target without a mask token has."""
    batch, key = text_batch(), jax.random.key(6)
    tokens, noised, _ = corrupted_batch(model(), batch, key, Corruption())
    noised_rows, clean_rows = dense_hidden(model(), noised, tokens, tuple(whole_blocks(batch["length"]).tolist()))
    ends = (np.arange(WIDTH) % BLOCK == BLOCK - 1)[:, None]
    teacher = np.array(model().logits_of(jnp.where(ends, clean_rows, noised_rows)))[..., :MASK]
    batch["teacher_logits"] = teacher if agrees else teacher * 1.5
    value, metrics = value_of(model(), batch, key, Settings(kl_weight=1.0))
    assert value == metrics["kl"]
    assert abs(value) < 1e-6 if agrees else value > 1e-3


def test_a_batch_without_answers():
    batch = text_batch() | {"prompt_length": np.full(4, WIDTH, np.int32)}
    (value, metrics), gradients = value_and_grad(model(), batch, jax.random.key(0), Settings())
    assert value == 0 and metrics["labels"] == 0 and metrics["accuracy"] == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


def test_the_first_token_and_the_mask_token_are_no_labels():
    batch = text_batch() | {"prompt_length": np.zeros(4, np.int32)}
    batch["tokens"][:, 9] = MASK
    (value, metrics), _ = value_and_grad(model(), batch, jax.random.key(0), SETTINGS["recipe"])
    assert metrics["labels"] == sum(batch["length"] - 1) - sum(batch["length"] > 9)
    assert np.isfinite(value)


def test_errors():
    net, key = model(), jax.random.key(0)
    tokens = random_tokens(2, 20)
    with pytest.raises(ValueError, match=r"length 20 .* block size 8"):
        forward_pair(net, tokens, tokens)
    with pytest.raises(ValueError, match=r"length 20 .* block size 8"):
        corrupt(key, tokens, tokens > 0, MASK, BLOCK, Corruption())
    batch = {"tokens": tokens, "prompt_length": np.asarray([1, 1]), "length": np.asarray([20, 20])}
    with pytest.raises(ValueError, match=r"length 20 .* block size 8"):
        loss(net, batch, key, Settings())
    with pytest.raises(ValueError, match=r"\(3, 24\) do not fit .* \(2, 24\)"):
        forward_pair(net, random_tokens(3, WIDTH), random_tokens(2, WIDTH))
    with pytest.raises(ValueError, match="teacher_logits"):
        loss(net, text_batch(), key, Settings(kl_weight=0.1))
    with pytest.raises(ValueError, match=rf"{VOCAB + 1} ids .* {VOCAB}"):
        loss(net, text_batch(VOCAB + 1), key, Settings(kl_weight=0.1))
    with pytest.raises(ValueError, match="mask_token_id"):
        loss(random_model(tiny_config()), text_batch(), key, Settings())
    for make, name in (
        (lambda: Corruption("noise"), "noise"),
        (lambda: Corruption(draft_fraction=1.5), "draft_fraction"),
        (lambda: Settings(position_decay=0.0), "position_decay"),
        (lambda: Settings(kl_weight=2.0), "kl_weight"),
        (lambda: Settings(head_chunk=0), "head_chunk"),
    ):
        with pytest.raises(ValueError, match=name):
            make()
