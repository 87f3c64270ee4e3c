"""SmolLM2 in Hugging Face transformers: the reference for greedy tokens and the baseline for decode speed.

The weights come from the same GGUF file that this library serves. Nothing else in the library needs torch.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def load_smollm2(gguf_path: str | Path) -> Any:
    """Returns a `LlamaForCausalLM` in float32, on the CPU and in eval mode, from a llama-architecture GGUF file.

    Raises:
      ModuleNotFoundError: a package is missing; the message has the pip command.
    """
    names = ("torch", "transformers", "gguf", "accelerate")
    try:
        torch, transformers, *_ = map(importlib.import_module, names)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the transformers reference needs the package {error.name!r}, which is not installed: "
            f"pip install {' '.join(names)}",
            name=error.name,
        ) from None
    path = Path(gguf_path)
    return transformers.LlamaForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, trust_remote_code=False
    ).eval()


def greedy(
    model: Any, prompt_ids: Sequence[int], n: int, *, stop_at_eos: bool = True
) -> tuple[list[int], list[float], float]:
    """Decodes up to `n` (at least 1) tokens greedily with a KV cache, one sequence at a time.

    The loop computes the same as `model.generate(do_sample=False)` without its bookkeeping: a harder baseline.

    Args:
      model: from `load_smollm2`.
      stop_at_eos: ends after the first end-of-sequence token, which is part of the result.

    Returns:
      The new token ids; per token the gap between the two best logits (a small one means that another correct float32
      implementation may pick the runner-up); the seconds of prefill and decoding, without the gaps.
    """
    import torch

    eos = model.config.eos_token_id if stop_at_eos else None
    stops = eos if isinstance(eos, list) else [eos]
    ids: list[int] = []
    rows, cache = [], None
    with torch.inference_mode():
        start = time.perf_counter()
        step_input = torch.tensor([list(prompt_ids)], dtype=torch.long)
        while len(ids) < n and not (ids and ids[-1] in stops):
            output = model(input_ids=step_input, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            rows.append(output.logits[0, -1])
            step_input = rows[-1].argmax().view(1, 1)
            ids.append(int(step_input))
        seconds = time.perf_counter() - start
        top = torch.stack(rows).float().topk(2, dim=-1).values
    return ids, (top[:, 0] - top[:, 1]).tolist(), seconds
