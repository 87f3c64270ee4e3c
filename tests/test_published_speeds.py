"""The timeline's predictions beside what others measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from failfast_jax.public_data import published_speeds
from failfast_jax.public_data.model_shapes import CONFIGS, READERS
from failfast_jax.public_data.published_speeds import Measurement, Passes

PAGE = Path(__file__).parents[1] / "docs" / "predictions.md"


def measured(**changes) -> Measurement:
    """Four clients. Two devices: a step of 2 ms, a verify of 3, a draft of 1; eight: 1, 1.5 and 0.5."""
    passes = {2: Passes(plain=2.0, verify=3.0, draft=1.0), 8: Passes(plain=1.0, verify=1.5, draft=0.5)}
    names = {"source": "us", "chip": "TPU", "topology": "v5e:2x4", "target": "qwen3-8b", "drafter": "dspark-qwen3-8b"}
    load = {"clients": 4, "context": 100, "verify_rows": 8, "tokens_a_round": (3.0, 5.0), "passes_ms": passes}
    published = {"plain": 1000.0, "drafted": 2000.0, "speedup": 2.0}
    return Measurement(**{**names, **load, "published": published} | changes)


def test_by_hand():
    """4 / 2 ms and 4 / 1 ms plain; 4 * 3 / (3 + 1) ms at the least and 4 * 5 / (1.5 + 0.5) ms at most with drafts; in
    both layouts a round takes two steps, so that 3 to 5 tokens are a speedup of 1.5 to 2.5."""
    found = measured()
    assert found.predicted() == {"plain": (2000, 4000), "drafted": (3000, 10_000), "speedup": (1.5, 2.5)}
    assert found.errors() == {"plain": (2, 4), "drafted": (1.5, 5), "speedup": (0.75, 1.25)}
    *_, plain, drafted, speedup = published_speeds.table([found]).splitlines()
    assert (
        plain == "| us, TPU, qwen3-8b, dspark | 4 | 2 or 8 | plain, tokens/s | 1,000 | 2,000 to 4,000 | 2.00 to 4.00 |"
    )
    assert drafted.endswith("| with drafts, tokens/s | 2,000 | 3,000 to 10,000 | 1.50 to 5.00 |")
    assert speedup.endswith("| speedup | 2.00 | 1.50 to 2.50 | 0.75 to 1.25 |")


@pytest.mark.parametrize("found", published_speeds.measurements(), ids=lambda m: f"{m.source}-{m.clients}")
def test_what_is_published(found):
    """Three loads, each with its source, what was assumed, and figures that agree with one another."""
    source = published_speeds.data()["sources"][found.source]
    assert source["url"].startswith("https://") and source["says"] and source["assumed"]
    assert READERS[found.drafter][0] == found.target and found.target in CONFIGS
    figures = found.published
    # A mean of speedups is not the ratio of means; of one load they are the same.
    assert figures["drafted"] / figures["plain"] == pytest.approx(figures["speedup"], rel=0.15)
    # A round can be no faster than a step.
    assert found.tokens_a_round[1] >= figures["speedup"]
    for passes in found.passes_ms.values():
        assert 0 < passes.draft < passes.verify and passes.plain <= passes.verify


def test_the_page_has_what_the_report_prints():
    assert len(published_speeds.measurements()) >= 3
    page = PAGE.read_text(encoding="utf-8")
    assert published_speeds.table(published_speeds.measurements()) in page
    for source in published_speeds.data()["sources"].values():
        assert source["url"] in page
