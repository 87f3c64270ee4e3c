"""SmolLM2 in Hugging Face transformers: the reference for greedy tokens and the baseline for decode speed.

The weights come from the same GGUF file that this library serves, dequantised to float32, so a difference
in tokens or in speed is one of the code and not of the checkpoint. torch, transformers and gguf are
imported inside the functions; nothing else in the library needs torch.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

_INSTALL = "pip install torch transformers gguf"

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def _require(name: str) -> ModuleType:
    """Imports an optional package, or says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(
            f"the transformers reference needs the package {name!r}, which is not installed: {_INSTALL}", name=name
        ) from None


def _hf_name(gguf_name: str) -> str:
    """The transformers parameter name of one llama.cpp tensor.

    Raises:
      ValueError: a tensor that a plain llama decoder does not have (a bias, `rope_freqs`, experts).
    """
    if gguf_name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    layer, _, kind = rest.partition(".")
    if prefix == "blk" and layer.isdigit() and kind in _LAYER_NAMES:
        return f"model.layers.{layer}.{_LAYER_NAMES[kind]}"
    raise ValueError(f"GGUF tensor {gguf_name!r} has no counterpart in a plain llama decoder")


def _undo_rope_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Puts the rows of a q or k projection back in transformers' order.

    llama.cpp rotates adjacent pairs of features (2i, 2i+1), transformers the pairs (i, i + head_dim/2);
    the GGUF converter reorders the rows of each head for the former.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _state_dict(tensors: dict[str, Any], heads: int, kv_heads: int) -> dict[str, Any]:
    """The tensors of a GGUF file, dequantised, by their names in transformers."""
    torch, gguf = _require("torch"), _require("gguf")
    state = {}
    for name, tensor in tensors.items():
        weight = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if name.endswith("attn_q.weight"):
            weight = _undo_rope_permutation(weight, heads)
        elif name.endswith("attn_k.weight"):
            weight = _undo_rope_permutation(weight, kv_heads)
        state[_hf_name(name)] = torch.from_numpy(np.ascontiguousarray(weight))
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return state


def load_smollm2(gguf_path: str | Path) -> LlamaForCausalLM:
    """Builds `LlamaForCausalLM` in float32, on the CPU and in eval mode, from a llama-architecture GGUF file.

    Args:
      gguf_path: the file; any quantisation that the `gguf` package can dequantise.

    Raises:
      ModuleNotFoundError: torch, transformers or gguf is missing; the message has the pip command.
      ValueError: the file is no plain llama decoder (other architecture, scaled rotary embedding, unknown tensor).
    """
    torch, transformers, gguf = _require("torch"), _require("transformers"), _require("gguf")
    reader = gguf.GGUFReader(str(gguf_path))

    def field(key: str, default: Any = None) -> Any:
        entry = reader.get_field(key)
        value = default if entry is None else entry.contents()
        if value is None:
            raise ValueError(f"{gguf_path}: the GGUF metadata lacks the key {key!r}")
        return value

    if field("general.architecture") != "llama":
        raise ValueError(f"{gguf_path}: architecture {field('general.architecture')!r} is not 'llama'")
    if field("llama.rope.scaling.type", "none") != "none":
        raise ValueError(f"{gguf_path}: a scaled rotary embedding is not supported by this reference")

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads = int(field("llama.attention.head_count"))
    kv_heads = int(field("llama.attention.head_count_kv", heads))
    hidden = int(field("llama.embedding_length"))
    theta = float(field("llama.rope.freq_base", 10_000.0))
    config = transformers.LlamaConfig(
        vocab_size=len(field("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=int(field("llama.feed_forward_length")),
        num_hidden_layers=int(field("llama.block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=int(field("llama.context_length")),
        # GGUF stores the epsilon as float32; the shortest decimal is what the original config says.
        rms_norm_eps=float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_theta=theta,
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=int(field("tokenizer.ggml.bos_token_id")),
        eos_token_id=int(field("tokenizer.ggml.eos_token_id")),
        pad_token_id=int(field("tokenizer.ggml.padding_token_id", field("tokenizer.ggml.eos_token_id"))),
        dtype="float32",
    )

    state = _state_dict(tensors, heads, kv_heads)
    model = transformers.LlamaForCausalLM(config).to(torch.float32)
    model.load_state_dict(state, strict=True)
    # Releases of transformers differ in where the rotary base lives; a base that was lost would only show as bad text.
    second = float(model.model.rotary_emb.inv_freq[1])
    expected = theta ** (-2.0 / (hidden // heads))
    if abs(second - expected) > 1e-5 * expected:
        raise ValueError(
            f"transformers {transformers.__version__} did not take the rotary base {theta} from its config"
        )
    return model.eval()


def greedy(
    model: LlamaForCausalLM, prompt_ids: Sequence[int], n: int, *, stop_at_eos: bool = True
) -> tuple[list[int], list[float], float]:
    """Decodes up to `n` tokens greedily with a KV cache, one sequence at a time.

    The loop is what `model.generate(do_sample=False)` computes without its per-step bookkeeping, which makes it
    the faster of the two and so the harder baseline.

    Args:
      model: from `load_smollm2`, on any device.
      prompt_ids: token ids of the prompt, at least one.
      n: how many new tokens at most.
      stop_at_eos: ends after the first end-of-sequence token, which is part of the result; turn it off to time a
        fixed number of tokens.

    Returns:
      The new token ids; for each of them the gap between the two best logits at its step (a small gap means that
      another correct float32 implementation may pick the runner-up); the wall-clock seconds of the prompt's forward
      pass and of the decoding, without the computation of the gaps. `greedy(model, prompt_ids, 1)` times the prompt's
      pass alone.

    Raises:
      ValueError: an empty prompt, or `n` below 1.
    """
    torch = _require("torch")
    if not prompt_ids or n < 1:
        raise ValueError(f"greedy needs a prompt and at least one new token, got {len(prompt_ids)} ids and n={n}")
    eos = model.config.eos_token_id
    stops = set() if not stop_at_eos or eos is None else set(eos) if isinstance(eos, (list, tuple)) else {eos}
    device = model.device

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    ids: list[int] = []
    rows = []
    cache = None
    with torch.inference_mode():
        finish()
        start = time.perf_counter()
        step_input = torch.tensor([list(prompt_ids)], dtype=torch.long, device=device)
        while True:
            output = model(input_ids=step_input, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            row = output.logits[0, -1]
            rows.append(row)
            best = row.argmax()
            ids.append(int(best))
            if len(ids) == n or ids[-1] in stops:
                break
            step_input = best.view(1, 1)
        finish()
        seconds = time.perf_counter() - start
        top = torch.stack(rows).float().topk(2, dim=-1).values
        gaps = (top[:, 0] - top[:, 1]).tolist()
    return ids, gaps, seconds
