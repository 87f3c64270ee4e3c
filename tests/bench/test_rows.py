"""Rows of a comparison from text and from YAML."""

import pytest

from failfast_jax.bench.rows import Row, check_common, for_size, merge_rows
from failfast_jax.bench.run_config import RunConfig
from failfast_jax.generation_config import GenerationConfig


def rows(methods=None, sweep=(), entries=(), set=(), target=None):
    """Rows of `--methods`, `--sweep` and `--set`, beside a file's `methods`."""
    return RunConfig(methods=methods, sweep=sweep, rows=entries, set=set, target=target).chosen_rows()


def test_options_follow_their_method():
    first, second, third = rows("failfast:tau=0.3,spec-len=8,lookup, ar ,lookup")
    assert first == Row("failfast:tau=0.3,spec_len=8", "failfast", {"tau": 0.3, "spec_len": 8})
    assert (second.label, third.label) == ("lookup", "ar")
    common = GenerationConfig(temperature=0.7, tau=0.9)
    assert first.config(common) == GenerationConfig(method="failfast", temperature=0.7, tau=0.3, spec_len=8)
    assert second.config(common) == GenerationConfig(method="lookup", temperature=0.7)  # which ignores tau
    check_common(common, [first, second])
    with pytest.raises(ValueError, match="--set tau: lookup ignore it; failfast, ar, suffix take it"):
        check_common(common, [second])
    (every,) = rows("failfast:tau=0.5,block_size=none,exact=true,schedule=aligned")
    assert every.options == {"tau": 0.5, "block_size": None, "exact": True, "schedule": "aligned"}


def test_a_corpus_is_no_option_of_the_request():
    row, *points = rows("suffix:corpus=64,tau=0.2", ("suffix:corpus=8|16",))
    assert row.label == "suffix:corpus=64,tau=0.2" and row.options == {"corpus": 64, "tau": 0.2}
    assert row.config(GenerationConfig()) == GenerationConfig(method="suffix", tau=0.2)
    assert [point.options for point in points] == [{"corpus": 8}, {"corpus": 16}]


def test_sweeps_are_products():
    """The same from a flag and from a file; labels spell the point, and a labelled row names its sweep."""
    points = rows("fast-dllm:block_size=32,spec_len=3:5,threshold=0.5|0.9,lookup")
    assert [p.label for p in points][::3] == [
        "fast-dllm:block_size=32,spec_len=3,threshold=0.5",
        "fast-dllm:block_size=32,spec_len=4,threshold=0.9",
        "lookup",
    ]
    assert {p.sweep for p in points} == {"fast-dllm:block_size=32,spec_len,threshold", ""} and len(points) == 7
    swept = {"spec_len": "3:5", "threshold": [0.5, 0.9]}
    entry = {"method": "fast-dllm", "options": {"block_size": 32}, "sweep": swept}
    assert rows(entries=(entry, "lookup")) == points
    named = rows(entries=({**entry, "label": "fixed"},))
    assert [p.options for p in named] == [p.options for p in points[:6]]
    assert named[0].label == "fixed:spec_len=3,threshold=0.5" and {p.sweep for p in named} == {"fixed"}
    assert rows("failfast", ("failfast:tau=0.1|0.45",))[1:] == rows("failfast:tau=0.1|0.45")


FILE = (
    {"method": "ar", "label": "fixed", "sweep": {"spec_len": "3:20"}},
    {"method": "failfast", "label": "paper", "options": {"tau": {"7B": 0.5, "other": 0.4}, "spec_len": 10}},
    "lookup",
)


def test_rows_of_a_file():
    """`ROW:key=value` changes a row and says so in its label; `--set ROW:key=value` changes the row itself."""
    assert len(rows(entries=FILE)) == 18 + 2
    first, second = rows("paper,paper:tau=0.3,spec_len=none", entries=FILE, target="x-7B")
    assert first == Row("paper", "failfast", {"tau": 0.5, "spec_len": 10})
    assert second == Row("paper:tau=0.3", "failfast", {"tau": 0.3, "spec_len": None})
    assert rows("fixed:spec_len=4", entries=FILE) == [Row("fixed:spec_len=4", "ar", {"spec_len": 4})]
    assert rows("fixed", entries=FILE, set=("fixed:spec_len=4",)) == [Row("fixed", "ar", {"spec_len": 4})]
    assert len(rows("fixed", entries=FILE, set=("fixed:spec_len=4|5",))) == 2
    around = rows("paper", ("paper:spec_len=8|9",), FILE, ("paper:tau=0.2",))
    assert [(r.label, r.options["tau"]) for r in around] == [
        (label, 0.2) for label in ("paper", "paper:spec_len=8", "paper:spec_len=9")
    ]
    assert [row.label for row in rows("fast-dllm:spec_len=8", entries=FILE)] == ["fast-dllm:spec_len=8"]


@pytest.mark.parametrize("target, value", [("a/Qwen2.5-14B-x", 3), ("/m/qwen2.5-7b-it-4bit", 2), (None, 9), ("x", 9)])
def test_sizes(target, value):
    assert for_size({"tau": {"7B": 2, "14B": 3, "other": 9}, "n": 1}, target, "row") == {"tau": value, "n": 1}


@pytest.mark.parametrize(
    ("methods", "more", "message"),
    [
        ("quick", {}, "--methods quick: there is no such row; rows: auto"),
        ("vanilla", {}, "--methods: vanilla is what others are compared with"),
        ("failfast:tau", {}, "--methods failfast:tau: tau must be key=value"),
        ("failfast:speed=1", {}, "--methods failfast:speed=1: there is no option 'speed' of failfast"),
        ("failfast:tau=2", {}, "failfast:tau=2: --tau 2: must be in [0, 1]"),
        ("ar:spec_len=5:3", {}, "--methods ar:spec_len=5:3: 5:3: a range must be FIRST:LAST"),
        ("ar:spec_len=1:900,tau=0|1", {}, "ar: a sweep has at most 1000 points"),
        ("lookup:corpus=9", {}, "--methods lookup:corpus=9: there is no option 'corpus' of lookup"),
        ("suffix:corpus=0", {}, "suffix:corpus=0: a corpus needs a capacity of 1 to 8388607 tokens"),
        (None, {"sweep": {"spec_len": 200}}, "sweep: spec_len: must be a list, or a range in quotes"),
        (None, {"options": {"speed": 1}}, "there is no option 'speed' of ar"),
        (None, {"method": "quick"}, "methods: --method quick: must be"),
        (None, {"label": "x", "options": {"tau": {"7B": 1}}}, "x: tau: known for 7B; this target: None"),
        ("failfast", {"sweep": ("slow:tau=1|2",)}, "--sweep slow:tau=1|2: there is no such row"),
        ("failfast", {"sweep": ("failfast:speed=1|2",)}, "--sweep failfast:speed=1|2: there is no option 'speed'"),
        ("failfast", {"set": ("wide:tau=1",)}, "--set wide:tau=1: there is no such row; rows: failfast"),
        ("failfast", {"set": ("failfast:speed=1",)}, "--set failfast:speed=1: there is no option 'speed' of failfast"),
        ("failfast", {"set": ("speed=1",)}, "--set: there is no option 'speed'; options: temperature, "),
    ],
)
def test_bad_rows(methods, more, message):
    """Flags, or without `--methods` a file's entry."""
    with pytest.raises(ValueError) as error:
        rows(entries=({"method": "ar", **more},)) if methods is None else rows(methods, **more)
    assert message in str(error.value)


def test_labels():
    plain = Row("ar:spec_len=3", "ar", {"spec_len": 3})
    point = Row("ar:spec_len=3", "ar", {"spec_len": 3}, "ar")
    assert merge_rows([Row("vanilla", "vanilla"), plain, plain]) == [plain]
    assert merge_rows([plain, point]) == [point]
    with pytest.raises(ValueError, match="two rows have this label"):
        merge_rows([plain, Row("ar:spec_len=3", "lookup")])
