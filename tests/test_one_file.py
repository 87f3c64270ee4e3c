"""`examples/failfast_in_one_file.py` against the engine: the same drafts, confidences, accepted counts and text."""

from __future__ import annotations

import ast
import importlib

import numpy as np
import pytest
from checkpoint_files import GOLDEN

from failfast_jax import FailFast, GenerationConfig

EXAMPLES = GOLDEN.parents[2] / "examples"
PAIRS = [("qwen2_target_160", "fast_dllm_v2_untied"), ("qwen2_target_211", "fast_dllm_v2_tied")]
# One token, a block that repeats itself, a block and a token, and two blocks.
PROMPTS = [[3], [7, 8, 9, 10] * 8, list(range(3, 36)), [(7 * i * i + 3) % 150 for i in range(64)]]


@pytest.fixture
def one_file(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("failfast_in_one_file")


@pytest.mark.parametrize(
    "pair, spec_len, max_spec_len, tau",
    [(PAIRS[1], 4, 24, 0.2), pytest.param(PAIRS[0], 10, 60, 0.45, marks=pytest.mark.long)],
)
def test_its_rounds_are_the_engines(one_file, pair, spec_len, max_spec_len, tau):
    target, drafter = (GOLDEN / name for name in pair)
    lengths = {"spec_len": spec_len, "max_spec_len": max_spec_len}
    engine, config = FailFast(target, drafter), GenerationConfig("failfast", max_new_tokens=40, tau=tau, **lengths)
    options = one_file.Options(spec_len, max_spec_len, tau)
    rounds = extended = 0
    for prompt in PROMPTS:
        (result,) = engine.generate([prompt], config)
        ids, rows = one_file.answer(target, drafter, prompt, 40, options, "float32")
        assert ids == result.output_ids
        assert len(rows) == len(result.rounds)
        for row, expected in zip(rows, result.rounds):
            assert row["drafted"] == list(expected.drafted)
            np.testing.assert_allclose(row["confidence"], expected.confidence, atol=1e-4)
            assert row["accepted"] == expected.accepted
            assert row["emitted"] == list(expected.emitted)
            assert row["passes"] == expected.passes
            extended += row["passes"] > 1
        rounds += len(rows)
    assert rounds > 60 and extended > 0


def test_it_stands_alone_on_a_page(one_file, capsys, monkeypatch):
    """No import of the package, at most 400 lines; and its `main` prints each round and the answer."""
    text = (EXAMPLES / "failfast_in_one_file.py").read_text()
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert not any(name.startswith("failfast_jax") for name in names)
    assert len(text.splitlines()) <= 400
    target, drafter = (str(GOLDEN / name) for name in PAIRS[0])
    command = ["failfast_in_one_file.py", target, drafter, "--token-ids", "3,14,15,92,65,35", "--max-new-tokens", "48"]
    monkeypatch.setattr("sys.argv", command)
    one_file.main()
    *rounds, answer = capsys.readouterr().out.splitlines()
    assert ast.literal_eval(answer)[-1] == 159  # the stop token
    assert [line.split(":")[0].split() for line in rounds] == [["round", str(n + 1)] for n in range(len(rounds))]
    bad = {("3,160", "9"): "not in the vocabulary", ("", "9"): "a prompt of 0 tokens", ("3", "0"): "--max-new-tokens 0"}
    for (ids, new), message in bad.items():
        monkeypatch.setattr("sys.argv", [*command[:3], "--token-ids", ids, "--max-new-tokens", new])
        with pytest.raises(SystemExit, match=message):
            one_file.main()
