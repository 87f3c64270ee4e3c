"""Records of answers to questions of MATH, made by hand."""

from __future__ import annotations


def answer(setting, method, question, rounds, options=None, decode_s=1.0):
    """An answer; `rounds` are drafted and accepted tokens and drafter passes."""
    detail = [
        {"drafted": n, "accepted": a, "emitted": a + 1, "passes": p, "ids": [7] * n, "confidence": [0.5] * n}
        for n, a, p in rounds
    ]
    tokens = sum(entry["emitted"] for entry in detail) if detail else 12
    own = {
        "kind": "answer",
        "setting": setting,
        "method": method,
        "question": question,
        "options": options or {},
        "detail": detail,
    }
    place = {"dataset": "math500", "repeat": 0, "block": "b", "decode_s": decode_s, "tokens": tokens}
    counts = {"rounds": len(detail) or 12, "drafter_passes": sum(p for *_, p in rounds), "output_ids": [7] * tokens}
    return {**own, **place, **counts, "drafter": {"kind": "other"}}
