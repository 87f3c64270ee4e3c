"""The timeline's predictions beside what others measured."""

from __future__ import annotations

from pathlib import Path

from failfast_jax.public_data import published_speeds
from failfast_jax.public_data.published_speeds import Measurement, Passes

PAGE = Path(__file__).parents[1] / "docs" / "predictions.md"


def test_by_hand():
    """Four clients. Two devices: a step of 2 ms, a verify of 3, a draft of 1; eight: 1, 1.5 and 0.5.

    4 / 2 ms and 4 / 1 ms plain; 4 * 3 / (3 + 1) ms at the least and 4 * 5 / (1.5 + 0.5) ms at most with drafts; in both
    layouts a round takes two steps, so that 3 to 5 tokens are a speedup of 1.5 to 2.5.
    """
    passes = {2: Passes(plain=2.0, verify=3.0, draft=1.0), 8: Passes(plain=1.0, verify=1.5, draft=0.5)}
    names = {"source": "us", "chip": "TPU", "topology": "v5e:2x4", "target": "qwen3-8b", "drafter": "dspark-qwen3-8b"}
    sizes = {"clients": 4, "context": 100, "verify_rows": 8, "tokens_a_round": (3.0, 5.0)}
    published = {"plain": 1000.0, "drafted": 2000.0, "speedup": 2.0}
    load = Measurement(**names, **sizes, passes_ms=passes, published=published)
    assert load.predicted() == {"plain": (2000, 4000), "drafted": (3000, 10_000), "speedup": (1.5, 2.5)}
    assert load.errors() == {"plain": (2, 4), "drafted": (1.5, 5), "speedup": (0.75, 1.25)}
    *_, plain, drafted, speedup = published_speeds.table([load]).splitlines()
    assert plain.startswith(
        "| us, TPU, qwen3-8b, dspark | 4 | 2 or 8 | plain, tokens/s | 1,000 | 2,000 to 4,000 | 2.00"
    )
    assert drafted.endswith("| with drafts, tokens/s | 2,000 | 3,000 to 10,000 | 1.50 to 5.00 |")
    assert speedup.endswith("| speedup | 2.00 | 1.50 to 2.50 | 0.75 to 1.25 |")


def test_the_page_has_what_the_report_prints():
    assert len(published_speeds.measurements()) >= 3
    page = PAGE.read_text(encoding="utf-8")
    assert published_speeds.table(published_speeds.measurements()) in page
    for source in published_speeds.data()["sources"].values():
        assert source["url"] in page
