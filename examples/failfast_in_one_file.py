"""FailFast in one file: Algorithm 1 of "Fail Fast, Win Big" with Qwen2.5 and Fast-dLLM v2, in plain JAX.

    python examples/failfast_in_one_file.py TARGET DRAFTER --prompt "Why is the sky blue?"
    python examples/failfast_in_one_file.py TARGET DRAFTER --token-ids 3,14,15

TARGET is a folder with an autoregressive Qwen2.5 model, DRAFTER one with a Fast-dLLM v2 model, both as Hugging Face
stores them. The answer is the target's own, token for token (where two tokens score almost the same, a pass over many
rows may round otherwise than a pass over one); the drafter only makes it arrive sooner. One sequence, greedy. Written
to be read from top to bottom, and to be changed. `failfast_jax` adds batches, sampling, other drafters, sharding and
kernels; `tests/test_one_file.py` compares its rounds with those of this file.

The idea. The target reads all its weights for each token that it writes, but checks sixty tokens at the same price.
The drafter, a small block-diffusion model, fills ten masked positions in one pass. A round is

    1. draft    fill a chunk of N masks; while each token of the newest chunk is confident enough, fill another chunk
    2. verify   run the target once over the draft: at each position it says which token it would have written
    3. accept   keep the longest prefix of the draft that agrees, and one more token, which is the target's own

Notation: W rows of a window, S slots of a cache, E hidden size, H query heads, K key and value heads, h their size,
V vocabulary, D block, N chunk.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

# -- Models ------------------------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """The part of `config.json` that the arithmetic depends on."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    theta: float  # base of the rotary embedding
    epsilon: float  # of RMSNorm
    block: int  # D: positions that see each other in both directions; 1: autoregressive
    mask_token: int | None  # of the drafter
    eos: tuple[int, ...]  # tokens that end an answer


class Cache(NamedTuple):
    """Keys and values of positions 0 .. S-1. Slots from some position on hold leftovers: see `forward`."""

    keys: jax.Array  # [layers, S, K, h]
    values: jax.Array  # [layers, S, K, h]


def read_model(folder: Path, dtype: str) -> tuple[Config, dict[str, jax.Array]]:
    """Reads a folder: its configuration, and its weights under the names that they have in the files."""
    raw = json.loads((folder / "config.json").read_text())
    if raw.get("model_type") not in ("qwen2", "Fast_dLLM_Qwen"):
        raise SystemExit(f"{folder}: model_type {raw.get('model_type')!r}; this file reads qwen2 and Fast_dLLM_Qwen")
    rope = raw.get("rope_parameters") or {}
    if raw.get("rope_scaling") or rope.get("rope_type", "default") != "default" or raw.get("use_sliding_window"):
        raise SystemExit(f"{folder}: scaled rotary embeddings and sliding windows are left out of this file")
    diffusion = raw["model_type"] == "Fast_dLLM_Qwen"
    generation = folder / "generation_config.json"  # chat models name the end of a turn here
    eos = (raw | (json.loads(generation.read_text()) if generation.exists() else {})).get("eos_token_id")
    config = Config(
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_size=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        theta=float(raw.get("rope_theta") or rope.get("rope_theta", 1e4)),
        epsilon=raw["rms_norm_eps"],
        block=raw["bd_size"] if diffusion else 1,
        mask_token=raw["mask_token_id"] if diffusion else None,
        eos=tuple(eos) if isinstance(eos, list) else (eos,) if eos is not None else (),
    )
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="flax") as tensors:
            weights |= {name: tensors.get_tensor(name).astype(dtype) for name in tensors.keys()}
    if raw.get("tie_word_embeddings"):  # the embedding is also the head
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return config, weights


def norm(x, weight, epsilon):
    """RMSNorm over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + epsilon)).astype(x.dtype) * weight


def rotate(x, position, theta):
    """Rotary embedding of `x [W, heads, h]` at `position [W]`: halves of a head are the parts of complex numbers."""
    half = x.shape[-1] // 2
    angle = position[:, None, None] / theta ** (jnp.arange(half, dtype=jnp.float32) / half)  # [W, 1, h / 2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def forward(config: Config, weights, tokens, start, cache: Cache):
    """Runs a window of W tokens at positions start .. start + W - 1.

    The window has a static width; padding fills its end, and nobody reads those rows. Keys and values are written into
    the cache first. Then a row at position i sees slot j if j's block does not come after i's, j // D <= i // D: with
    D = 1, the target, the causal mask. With D = 4 and a window that starts at 4 (1: visible):

        slot       0 1 2 3   4 5 6 7   8 9 ..
        row 4      1 1 1 1   1 1 1 1   0 0      a block sees all of itself, masks included, and what lies before it
        row 7      1 1 1 1   1 1 1 1   0 0

    Padding and leftovers lie after the rows that are read, so these do not see them, and each slot is written again
    before a row at or after its block is read.

    Returns:
      Hidden states `[W, E]` after the last norm, and the cache.
    """
    width, slots = tokens.shape[0], cache.keys.shape[1]
    position = start + jnp.arange(width)
    slot = jnp.arange(slots)
    visible = slot // config.block <= position[:, None] // config.block  # [W, S]
    heads, kv_heads, size = config.heads, config.kv_heads, config.head_size
    keys, values = cache
    x = weights["model.embed_tokens.weight"][tokens]  # [W, E]
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        w = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        y = norm(x, w["input_layernorm.weight"], config.epsilon)  # [W, E]
        q, k, v = (
            (y @ w[f"self_attn.{name}_proj.weight"].T + w[f"self_attn.{name}_proj.bias"]).reshape(width, -1, size)
            for name in "qkv"
        )  # [W, H, h], [W, K, h], [W, K, h]
        q, k = rotate(q, position, config.theta), rotate(k, position, config.theta)
        keys = jax.lax.dynamic_update_slice(keys, k[None], (layer, start, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v[None], (layer, start, 0, 0))
        # H / K query heads share one head of keys and values: g counts them.
        q = q.reshape(width, kv_heads, heads // kv_heads, size)
        scores = jnp.einsum("wkgh,skh->kgws", q, keys[layer], preferred_element_type=jnp.float32) / size**0.5
        attention = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), -1).astype(x.dtype)
        mixed = jnp.einsum("kgws,skh->wkgh", attention, values[layer]).reshape(width, heads * size)
        x = x + mixed @ w["self_attn.o_proj.weight"].T
        y = norm(x, w["post_attention_layernorm.weight"], config.epsilon)
        gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
        x = x + (jax.nn.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"], config.epsilon), Cache(keys, values)


def logits_of(weights, hidden):
    """Scores of the vocabulary, `[rows, V]`, in float32."""
    return jnp.matmul(hidden, weights["lm_head.weight"].T, preferred_element_type=jnp.float32)


def empty_cache(config: Config, slots: int, dtype) -> Cache:
    """Room for `slots` positions."""
    shape = (config.layers, slots, config.kv_heads, config.head_size)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


# -- One round ---------------------------------------------------------------------------------------------------------


class Options(NamedTuple):
    """Settings of Algorithm 1, with the paper's values."""

    chunk: int = 10  # N, tokens filled in one pass
    longest: int = 60  # a draft never has more tokens
    tau: float = 0.45  # a draft grows while each token of its newest chunk is at least so probable


class Draft(NamedTuple):
    """A draft while it grows. `confidence` is the probability of each drafted token among all but the mask."""

    text: jax.Array  # Int[S]: committed tokens, then drafted ones, then leftovers
    length: jax.Array  # drafted tokens, d
    confidence: jax.Array  # Float[longest]
    passes: jax.Array  # forward passes so far
    stored: jax.Array  # the drafter's cache is final for the positions before it, whole blocks
    confident: jax.Array  # whether the newest chunk was
    cache: Cache


def draft_window(options: Options, block: int) -> int:
    """Rows of a drafter pass: whole blocks, enough for the widest one.

    The first pass of a round begins with the block that the round before could not store, at most D - 1 positions
    before its first token. Since then at most `longest` + 1 tokens were committed, and N - 1 rows follow the last of
    them. With D = 32, N = 10, longest = 60: 31 + 61 + 9 = 101 positions, which are 4 blocks or 128 rows.
    """
    return -(-(block - 1 + options.longest + 1 + options.chunk - 1) // block) * block


def expand(config: Config, weights, options: Options, committed, draft: Draft) -> Draft:
    """One step of Algorithm 1: a single pass fills the next chunk of N masks, which this draft does not revise.

    Fast-dLLM v2 shifts tokens: the row at position i predicts token i + 1. So the token at position L + d comes from
    the row before it. The window begins at `stored`: on the first pass of a round where the last round left off, after
    that with the block of position L. An example with D = 4, N = 3, L = 6 committed tokens (a .. f), d = 0, stored = 4:

        position        4 5 | 6 7 |  8 9 ..
        input           e f | _ _ |  _ _ ..      _: mask; those from 8 on are padding, which rows 5 to 7 do not see
        rows read         5   6 7                they predict positions 6, 7 and 8
    """
    block, chunk = config.block, options.chunk
    first = committed + draft.length  # position of the chunk's first token
    position = draft.stored + jnp.arange(draft_window(options, block))
    tokens = jax.lax.dynamic_slice(draft.text, (draft.stored,), position.shape)
    tokens = jnp.where(position < first, tokens, config.mask_token)
    hidden, cache = forward(config, weights, tokens, draft.stored, draft.cache)
    rows = jax.lax.dynamic_slice_in_dim(hidden, first - 1 - draft.stored, chunk)
    logits = logits_of(weights, rows).at[:, config.mask_token].set(-jnp.inf)  # a mask is no proposal
    confidence = jax.nn.softmax(logits, -1).max(-1)  # [N]
    return Draft(
        text=jax.lax.dynamic_update_slice(draft.text, jnp.argmax(logits, -1).astype(draft.text.dtype), (first,)),
        length=draft.length + chunk,
        confidence=jax.lax.dynamic_update_slice(draft.confidence, confidence, (draft.length,)),
        passes=draft.passes + 1,
        # Blocks whose tokens are all committed were just run as they will stay: their keys and values are final. The
        # block of position L still holds masks or drafted tokens, and is run again.
        stored=committed // block * block,
        confident=jnp.all(confidence >= options.tau),
        cache=cache,
    )


def make_draft(config: Config, weights, options: Options, text, committed, stored, cache: Cache) -> Draft:
    """Algorithm 1. Fail fast: one pass per chunk, never a second look. Win big: while all is confident, one more."""
    zero = jnp.int32(0)
    draft = Draft(text, zero, jnp.zeros(options.longest), zero, stored, jnp.bool_(True), cache)
    return jax.lax.while_loop(
        lambda draft: draft.confident & (draft.length + options.chunk <= options.longest),
        functools.partial(expand, config, weights, options, committed),
        draft,
    )


def verify(config: Config, weights, options: Options, text, committed, drafted, cache: Cache):
    """One pass of the target over the last committed token and the draft; its own choices, and how many agree.

    With 6 committed tokens and a draft x y z, of which the target agrees with x alone:

        window       f  x  y  z  padding       positions 5 6 7 8 ..
        picks        x  Y  ?  ?                row i says what follows position i, given the text up to it
        agrees       1  0  .                   x = x, y != Y
        accepted     1; the round emits picks[:2] = x Y. What comes after a mistake is worth nothing.

    The cache of the target then also holds y and z: the next round overwrites them before it reads a row so far on.
    """
    window = jax.lax.dynamic_slice(text, (committed - 1,), (1 + options.longest,))
    hidden, cache = forward(config, weights, window, committed - 1, cache)
    picks = jnp.argmax(logits_of(weights, hidden), -1).astype(text.dtype)  # [1 + longest]
    agrees = (window[1:] == picks[:-1]) & (jnp.arange(options.longest) < drafted)
    return picks, jnp.cumprod(agrees).sum(), cache


# -- The loop ----------------------------------------------------------------------------------------------------------


class Log(NamedTuple):
    """All rounds."""

    drafted: jax.Array  # Int[rounds, longest]
    confidence: jax.Array  # Float[rounds, longest]
    length: jax.Array  # Int[rounds]: drafted tokens; what follows them in their row are leftovers
    accepted: jax.Array  # Int[rounds]: drafted tokens that the target agrees with, before the answer is cut
    emitted: jax.Array  # Int[rounds]
    passes: jax.Array  # Int[rounds]: of the drafter


class State(NamedTuple):
    text: jax.Array  # Int[S]
    committed: jax.Array  # L, tokens that are final
    stored: jax.Array  # see `Draft`
    rounds: jax.Array
    done: jax.Array
    target_cache: Cache
    drafter_cache: Cache
    log: Log


def prefill(config: Config, weights, text, count, width: int, cache: Cache) -> Cache:
    """Caches the first `count` positions, a window at a time. Later rows are padding."""

    def chunk(index, cache):
        tokens = jax.lax.dynamic_slice(text, (index * width,), (width,))
        return forward(config, weights, tokens, index * width, cache)[1]

    return jax.lax.fori_loop(0, (count + width - 1) // width, chunk, cache)


@functools.partial(jax.jit, static_argnames=("target", "drafter", "options", "new"))
def generate(
    target: Config, target_weights, drafter: Config, drafter_weights, text, prompt, options: Options, new: int
):
    """Prompt to answer, as one compiled program: prefill, then rounds until the answer ends.

    `text` is Int[S]: the prompt, of `prompt` tokens, and room. The answer has at most `new` tokens.
    Returns the text, its length, the number of rounds, and their log.
    """
    slots, width = text.shape[0], draft_window(options, drafter.block)
    eos = jnp.asarray(target.eos or (-1,), text.dtype)
    zeros, table = jnp.zeros(new, jnp.int32), jnp.zeros((new, options.longest))

    def step(state: State) -> State:
        # 1. Draft.
        at, caches = state.committed, (state.target_cache, state.drafter_cache)
        draft = make_draft(drafter, drafter_weights, options, state.text, at, state.stored, caches[1])
        # 2. Verify, and count the tokens that agree.
        picks, accepted, cache = verify(target, target_weights, options, draft.text, at, draft.length, caches[0])
        # 3. Commit the accepted tokens and one more: all are the target's picks. Cut after a stop token, and at `new`.
        stops = jnp.isin(picks, eos)
        until_stop = jnp.where(stops.any(), jnp.argmax(stops) + 1, len(picks))
        emitted = jnp.minimum(jnp.minimum(accepted + 1, until_stop), prompt + new - at)
        drafted = jax.lax.dynamic_slice(draft.text, (at,), (options.longest,))
        row = Log(drafted, draft.confidence, draft.length, accepted, emitted, draft.passes)
        return State(
            text=jax.lax.dynamic_update_slice(draft.text, picks, (at,)),
            committed=at + emitted,
            stored=draft.stored,
            rounds=state.rounds + 1,
            done=stops[emitted - 1] | (at + emitted >= prompt + new),
            target_cache=cache,
            drafter_cache=draft.cache,
            log=jax.tree.map(lambda column, value: column.at[state.rounds].set(value), state.log, row),
        )

    # The target caches all of the prompt but its last token, with which the first round begins; the drafter caches
    # whole blocks before that of the last token, whose row its first pass reads.
    dtype, stored = target_weights["model.norm.weight"].dtype, (prompt - 1) // drafter.block * drafter.block
    target_cache = prefill(target, target_weights, text, prompt - 1, 128, empty_cache(target, slots, dtype))
    drafter_cache = prefill(drafter, drafter_weights, text, stored, width, empty_cache(drafter, slots, dtype))
    log = Log(table.astype(jnp.int32), table, zeros, zeros, zeros, zeros)
    state = State(text, prompt, stored, jnp.int32(0), jnp.bool_(False), target_cache, drafter_cache, log)
    state = jax.lax.while_loop(lambda state: ~state.done, step, state)
    return state.text, state.committed, state.rounds, state.log


def answer(target_folder: Path, drafter_folder: Path, prompt: list[int], new: int, options: Options, dtype: str):
    """The target's greedy answer to a prompt of token ids, and its rounds as dictionaries."""
    target, target_weights = read_model(Path(target_folder), dtype)
    drafter, drafter_weights = read_model(Path(drafter_folder), dtype)
    if not 1 <= options.chunk <= options.longest:
        raise SystemExit(f"--spec-len {options.chunk} must lie between 1 and --max-spec-len {options.longest}")
    if not prompt or new < 1:
        raise SystemExit(f"a prompt of {len(prompt)} tokens and --max-new-tokens {new}: both must be at least 1")
    vocabulary = min(len(w["model.embed_tokens.weight"]) for w in (target_weights, drafter_weights))
    if not all(0 <= token < vocabulary for token in prompt):  # JAX would clamp it
        raise SystemExit(f"a token id of the prompt is not in the vocabulary, 0 to {vocabulary - 1}")
    # No window may reach beyond the buffers: JAX would move it back, without a word.
    room = max(128, draft_window(options, drafter.block)) + options.longest
    text = np.zeros(-(-(len(prompt) + new + room) // 128) * 128, np.int32)
    text[: len(prompt)] = prompt
    text, length, rounds, log = jax.device_get(
        generate(target, target_weights, drafter, drafter_weights, text, len(prompt), options, new)
    )
    rows, ends = [], len(prompt) + np.cumsum(log.emitted)
    for r in range(rounds):
        drafted, confidence = (x[r, : log.length[r]].tolist() for x in (log.drafted, log.confidence))
        emitted = text[ends[r] - log.emitted[r] : ends[r]].tolist()
        counts = {"accepted": int(log.accepted[r]), "passes": int(log.passes[r])}
        rows.append({"drafted": drafted, "confidence": confidence, "emitted": emitted, **counts})
    return text[len(prompt) : length].tolist(), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="a user's message; needs the target's tokenizer")
    source.add_argument("--token-ids", help="the prompt as numbers, separated by commas")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--spec-len", type=int, default=10, help="N, tokens drafted per pass")
    parser.add_argument("--max-spec-len", type=int, default=60, help="longest draft")
    parser.add_argument("--tau", type=float, default=0.45, help="confidence below which a draft stops growing")
    parser.add_argument("--dtype", default="float32", help="of the weights and activations")
    args = parser.parse_args()
    if args.token_ids is not None:
        tokenizer, prompt = None, [int(word) for word in args.token_ids.split(",") if word]
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.target)
        message = [{"role": "user", "content": args.prompt}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    options = Options(args.spec_len, args.max_spec_len, args.tau)
    ids, rounds = answer(args.target, args.drafter, prompt, args.max_new_tokens, options, args.dtype)
    for number, row in enumerate(rounds, 1):
        lowest = min(row["confidence"], default=1)
        counts = f"{len(row['drafted']):2} drafted in {row['passes']} passes, lowest confidence {lowest:.2f}"
        print(f"round {number:3}: {counts}, {row['accepted']:2} accepted, emitted {row['emitted']}")
    print(tokenizer.decode(ids) if tokenizer else ids)


if __name__ == "__main__":
    main()
