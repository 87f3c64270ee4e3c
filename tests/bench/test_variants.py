"""Methods, options and sweeps as they stand on the command line."""

import argparse

import pytest

from failfast_jax.bench.run_options import DEFAULTS, read_variants
from failfast_jax.bench.variants import (
    Variant,
    check_common,
    check_labels,
    make_variant,
    parse_method,
    split_methods,
    sweep,
)
from failfast_jax.generation_config import GenerationConfig


def read(methods, sweeps=()):
    return read_variants(argparse.Namespace(**DEFAULTS | {"rows": {}, "methods": methods, "sweep": list(sweeps)}))[0]


def test_options_follow_their_method():
    texts = split_methods("failfast:tau=0.3,spec-len=8,lookup, ar ,lookup")
    assert texts == ["failfast:tau=0.3,spec-len=8", "lookup", "ar"]
    first, second = read(texts[:2])
    assert first == Variant("failfast:tau=0.3,spec_len=8", "failfast", {"tau": 0.3, "spec_len": 8})
    assert second.label == "lookup"
    common = GenerationConfig(temperature=0.7, tau=0.9)
    assert first.config(common) == GenerationConfig(method="failfast", temperature=0.7, tau=0.3, spec_len=8)
    assert second.config(common) == GenerationConfig(method="lookup", temperature=0.7)  # which ignores tau
    check_common(common, [first, second])
    with pytest.raises(ValueError, match="--set tau: lookup ignore it; failfast, ar, suffix take it"):
        check_common(common, [second])
    (every,) = read(["failfast:tau=0.5,block_size=none,exact=true,schedule=aligned"])
    assert every.options == {"tau": 0.5, "block_size": None, "exact": True, "schedule": "aligned"}


def test_vanilla_alone_is_no_comparison():
    with pytest.raises(ValueError, match="--methods: vanilla is what others are compared with, and always runs"):
        read(["vanilla"])


def test_a_corpus_is_no_option_of_the_request():
    variant, *swept = read(["suffix:corpus=64,tau=0.2"], ["suffix:corpus=8|16"])
    assert variant.label == "suffix:corpus=64,tau=0.2" and variant.options == {"corpus": 64, "tau": 0.2}
    assert variant.config(GenerationConfig()) == GenerationConfig(method="suffix", tau=0.2)
    assert [s.options for s in swept] == [{"corpus": 8}, {"corpus": 16}]


def test_sweeps():
    plain, *points = read(["fast-dllm", "ar", "fast-dllm+:threshold=0.5"], ["3:5"])
    assert plain == Variant("fast-dllm", "fast-dllm")
    assert [s.label for s in points[:3]] == ["ar:spec_len=3", "ar:spec_len=4", "ar:spec_len=5"]
    options = {"threshold": 0.5, "spec_len": 3}
    name = "fast-dllm+:threshold=0.5"
    assert points[3] == Variant("fast-dllm:threshold=0.5,spec_len=3", "fast-dllm", options, name)
    assert [s.label for s in read(["ar"])] == ["ar"]
    assert len(parse_method("fast-dllm+")) == 18
    tau = read(["failfast"], ["failfast:tau=0.1|0.45|0.7"])[1:]
    assert [s.options["tau"] for s in tau] == [0.1, 0.45, 0.7] and tau[0].sweep == "failfast:tau"


def test_values_that_no_option_takes():
    good, bad = sweep("a", "failfast", "tau", [0.5, [1]], shown="here")
    assert good.config(GenerationConfig()).options
    with pytest.raises(ValueError, match=r"tau.*\[1\]"):
        bad.config(GenerationConfig())


@pytest.mark.parametrize(
    ("methods", "sweeps", "message"),
    [
        (["quick"], [], "--methods quick: must be among auto"),
        (["failfast:tau"], [], "--methods failfast:tau: tau must be key=value"),
        (["failfast:speed=1"], [], "--methods failfast:speed=1: there is no option 'speed' of failfast"),
        (["lookup:tau=1"], [], "--methods lookup:tau=1: there is no option 'tau' of lookup"),
        (["failfast:tau=x"], [], "failfast:tau=x: --tau 'x': must be a number"),
        (["failfast:tau=2"], [], "failfast:tau=2: --tau 2: must be in [0, 1]"),
        (["failfast:spec_len=1.5"], [], "--spec-len 1.5: must be an integer"),
        (["failfast:exact=maybe"], [], "--exact 'maybe': must be true or false"),
        (["lookup"], ["3:20"], "--sweep 3:20: is for ar and fast-dllm+"),
        (["ar"], ["3:x"], "--sweep 3:x: a range must be FIRST:LAST"),
        ([{"method": "ar", "sweep": None}], [], "sweep must map an option to its values, got None"),
        ([{"method": "ar", "sweep": [3]}], [], "sweep must map an option to its values, got [3]"),
        (["ar"], ["5:3"], "--sweep 5:3: a range must be FIRST:LAST"),
        (["ar"], ["slow:tau=1|2"], "--sweep slow:tau=1|2: must be FIRST:LAST or method:key=values"),
        (["ar"], ["failfast:speed=1|2"], "--sweep failfast:speed=1|2: there is no option 'speed'"),
        (["lookup:corpus=9"], [], "--methods lookup:corpus=9: there is no option 'corpus' of lookup"),
        (["suffix:corpus=0"], [], "suffix:corpus=0: a corpus needs a capacity of 1 to 16777215 tokens"),
    ],
)
def test_bad_methods(methods, sweeps, message):
    with pytest.raises(ValueError) as error:
        for variant in read(methods, sweeps):
            variant.config(GenerationConfig())
    assert message in str(error.value)


def test_labels():
    plain = Variant("ar:spec_len=3", "ar", {"spec_len": 3})
    point = Variant("ar:spec_len=3", "ar", {"spec_len": 3}, "ar")
    assert check_labels([Variant("vanilla", "vanilla"), plain, plain]) == [plain]
    assert check_labels([plain, point]) == [point]
    with pytest.raises(ValueError, match="two variants have this label"):
        check_labels([plain, make_variant("lookup", label="ar:spec_len=3", shown="x")])
