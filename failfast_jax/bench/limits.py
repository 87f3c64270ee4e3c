"""What memory bandwidth alone allows, at the acceptance that the paper measured.

At batch 1 a forward pass of a large model lasts as long as its weights and the live cache take to arrive from memory,
however many rows it has. From the sizes of the models and the paper's statistics the greatest possible speedup
follows. Nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from failfast_jax.bench.public_models import CONFIGS, pass_bytes, weight_bytes
from failfast_jax.bench.published import CHUNK, DATASETS, Law, Statistics, published_for
from failfast_jax.tables import markdown

PASSES = 1.7
"""Drafter passes a round for which the project's limits are stated; the paper's own code spends 3.1 to 3.6."""
CONTEXT = 1024


def speedup_limit(accepted: float, passes: float, target: float, drafter: float) -> float:
    """Greatest speedup over plain decoding.

    Args:
      accepted: mean accepted tokens a round; a round emits one more.
      passes: mean drafter passes a round, beside one pass of the target.
      target: cost of a pass of the target, in bytes or any other unit.
      drafter: cost of a pass of the drafter, in the same unit.
    """
    return (accepted + 1) * target / (target + passes * drafter)


def ladder_speedup(law: Law, verify: Mapping[int, float], step: float, drafter: float, batch: int = 1) -> float:
    """Speedup over plain decoding where a round is charged the narrowest verify that holds its longest draft.

    Args:
      law: of the rounds of each of `batch` sequences that advance together; one pass of the drafter a chunk.
      verify: cost of a pass of the target by its rows, which are one more than the draft; the widest serves the rest.
      step: cost of a step of plain decoding.
      drafter: cost of a pass of the drafter.
    """
    longest = np.diff(np.cumsum(law.chunks()) ** batch, prepend=0.0)
    spent = 0.0
    for chunks, share in enumerate(longest, 1):
        rows = min((width for width in verify if width > CHUNK * chunks), default=max(verify))
        spent += share * (verify[rows] + chunks * drafter)
    return (law.accepted() + 1) * step / spent


def papers_speedup(statistics: Statistics) -> float:
    """What the paper publishes: its statistics and its authors' latency constants, which are modelled, too."""
    return speedup_limit(
        statistics.mean_accepted, statistics.drafter_passes, statistics.target_step_ms, statistics.drafter_pass_ms
    )


def table() -> str:
    """The predictions as Markdown."""
    head = ["target", "dataset", "accepted / drafted", "paper's speedup", f"limit, {PASSES} passes"]
    head += ["limit, paper's passes", f"limit, one pass a chunk, context {CONTEXT}"]
    rows, drafter = [], CONFIGS["fast-dllm-v2-1.5b"]
    for name in ("qwen2.5-32b", "qwen2.5-14b", "qwen2.5-7b"):
        weights = weight_bytes(CONFIGS[name]), weight_bytes(drafter)
        read = pass_bytes(CONFIGS[name], CONTEXT), pass_bytes(drafter, CONTEXT)
        for dataset in DATASETS:
            found = published_for(name, dataset)
            accepted, passes = found.mean_accepted, found.drafter_passes
            # `wide` spends one pass a chunk: commits ride along.
            chunks = found.mean_speculated / CHUNK
            row = [name, dataset + ("" if found.same_target else " (14B's)"), f"{accepted} / {found.mean_speculated}"]
            row += [f"{papers_speedup(found):.2f}", f"{speedup_limit(accepted, PASSES, *weights):.2f}"]
            row += [f"{speedup_limit(accepted, passes, *weights):.2f} ({passes})"]
            row += [f"{speedup_limit(accepted, chunks, *read):.2f} ({chunks:.2f})"]
            rows.append(row)
    return markdown(head, rows)
