"""Records of answers to questions of MATH, made by hand."""

from __future__ import annotations


def answer(setting, method, question, rounds, options=None, decode_s=1.0, **changes):
    """An answer; `rounds` are drafted tokens (their number, or their confidences), accepted ones and drafter passes."""
    drafts = [[0.5] * drafted if isinstance(drafted, int) else drafted for drafted, *_ in rounds]
    detail = [
        {"drafted": len(c), "accepted": a, "emitted": a + 1, "passes": p, "ids": [7] * len(c), "confidence": c}
        for c, (_, a, p) in zip(drafts, rounds)
    ]
    tokens = changes.get("tokens", sum(entry["emitted"] for entry in detail) if detail else 12)
    return {
        "kind": "answer",
        "dataset": "math500",
        "question": question,
        "repeat": 0,
        "setting": setting,
        "block": "b",
        "method": method,
        "options": options or {},
        "drafter": {"kind": "other"},
        "decode_s": decode_s,
        "tokens": tokens,
        "output_ids": [7] * tokens,
        "prompt_ids": [5, 6],
        "prompt_tokens": 2,
        "rounds": len(detail) or tokens,
        "drafted": sum(map(len, drafts)),
        "drafter_passes": sum(passes for *_, passes in rounds),
        "detail": detail,
        **changes,
    }
