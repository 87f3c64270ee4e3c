"""Methods, options and sweeps as they stand on the command line."""

import pytest

from failfast_jax.bench.variants import (
    Variant,
    check_common,
    check_labels,
    make_variant,
    parse_methods,
    parse_options,
    parse_values,
    split_methods,
)
from failfast_jax.config import GenerationConfig


def test_options_follow_their_method():
    assert split_methods("failfast:tau=0.3,spec-len=8,lookup, ar ,lookup") == [
        "failfast:tau=0.3,spec-len=8",
        "lookup",
        "ar",
    ]
    (first, second), sweeps = parse_methods(["failfast:tau=0.3,spec-len=8", "lookup"])
    assert first == Variant("failfast:tau=0.3,spec_len=8", "failfast", {"tau": 0.3, "spec_len": 8})
    assert second.label == "lookup" and not sweeps
    common = GenerationConfig(temperature=0.7, tau=0.9)
    assert first.config(common) == GenerationConfig(method="failfast", temperature=0.7, tau=0.3, spec_len=8)
    assert second.config(common) == GenerationConfig(method="lookup", temperature=0.7)  # which ignores tau
    check_common(common, [first, second])
    with pytest.raises(ValueError, match="--set tau: lookup ignore it; failfast, ar, suffix take it"):
        check_common(common, [second])
    with pytest.raises(ValueError, match="--methods lookup:tau=1: lookup ignores tau; failfast, ar, suffix take it"):
        parse_methods(["lookup:tau=1"])


def test_a_corpus_is_no_option_of_the_request():
    (variant,), (sweep,) = parse_methods(["suffix:corpus=64,tau=0.2"], ["suffix:corpus=8|16"])
    assert variant.label == "suffix:corpus=64,tau=0.2" and variant.options == {"corpus": 64, "tau": 0.2}
    assert variant.config(GenerationConfig()) == GenerationConfig(method="suffix", tau=0.2)
    assert [s.options for s in sweep.variants()] == [{"corpus": 8}, {"corpus": 16}]
    with pytest.raises(ValueError, match="--set corpus=9: there is no option 'corpus'"):
        parse_options([("--set corpus=9", "corpus=9")])


def test_sweeps():
    variants, (ar, plus) = parse_methods(["ar", "fast-dllm", "fast-dllm+:threshold=0.5"], ["3:5"])
    assert [s.label for s in variants] == ["fast-dllm"]
    assert [s.label for s in ar.variants()] == ["ar:spec_len=3", "ar:spec_len=4", "ar:spec_len=5"]
    assert plus.variants()[0] == Variant(
        "fast-dllm:threshold=0.5,spec_len=3",
        "fast-dllm",
        {"threshold": 0.5, "spec_len": 3},
        "fast-dllm+:threshold=0.5",
    )
    assert [s.label for s in parse_methods(["ar"])[0]] == ["ar"]
    assert len(parse_methods(["fast-dllm+"])[1][0].values) == 18
    _, (tau,) = parse_methods(["failfast"], ["failfast:tau=0.1|0.45|0.7"])
    assert tau.values == (0.1, 0.45, 0.7) and tau.name == "failfast:tau"
    assert parse_values("x", "spec_len", "4:12:4") == (4, 8, 12)


@pytest.mark.parametrize(
    ("methods", "sweeps", "message"),
    [
        (["quick"], [], "--methods quick: must be among failfast"),
        (["failfast:tau"], [], "--methods failfast:tau: must be key=value"),
        (["failfast:speed=1"], [], "--methods failfast:speed=1: there is no option 'speed'"),
        (["failfast:tau=x"], [], "--methods failfast:tau=x: must be a number"),
        (["failfast:tau=1,tau=0"], [], "tau was given before"),
        (["lookup"], ["3:20"], "--sweep 3:20: sweeps the draft length of ar and fast-dllm+"),
        (["ar"], ["3:x"], "--sweep 3:x: a range must be FIRST:LAST"),
        (["ar"], ["5:3"], "--sweep 5:3: the range holds no value"),
        (["ar"], ["3:4", "5:6"], "--sweep 5:6: a range of draft lengths was given before (3:4)"),
        (["ar"], ["slow:tau=1|2"], "--sweep slow:tau=1|2: must be FIRST:LAST or method:key=values"),
        (["lookup:corpus=9"], [], "--methods lookup:corpus=9: only suffix drafts from a corpus, not lookup"),
        (["suffix:corpus=0"], [], "--methods suffix:corpus=0: corpus must be a number of tokens from 1 to 16777215"),
        (["ar"], ["failfast:speed=1|2"], "--sweep failfast:speed=1|2: there is no option 'speed'"),
    ],
)
def test_bad_methods(methods, sweeps, message):
    with pytest.raises(ValueError) as error:
        parse_methods(methods, sweeps)
    assert message in str(error.value)


def test_labels():
    plain, point = (
        Variant("ar:spec_len=3", "ar", {"spec_len": 3}),
        Variant("ar:spec_len=3", "ar", {"spec_len": 3}, "ar"),
    )
    assert check_labels([Variant("vanilla", "vanilla"), plain, plain]) == [plain]
    assert check_labels([plain, point]) == [point]
    with pytest.raises(ValueError, match="two variants have this label"):
        check_labels([plain, make_variant("lookup", label="ar:spec_len=3", shown="x")])
    with pytest.raises(ValueError, match=r"failfast:tau=2.0: --tau 2.0: must be in \[0, 1\]"):
        make_variant("failfast", {"tau": 2.0}, shown="x").config(GenerationConfig())
