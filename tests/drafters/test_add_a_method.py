"""The page on adding a method, done as it says: its one file and its registration, and nothing else."""

from __future__ import annotations

import json
import re
import shlex
import sys
import types
from pathlib import Path

from checkpoint_files import GOLDEN

from failfast_jax import drafters
from failfast_jax.bench.rows import METHODS as BENCHMARKED
from failfast_jax.generate import main

PAGE = Path(__file__).parents[2] / "docs" / "add-a-method.md"


def block(marker: str) -> str:
    """The code after an HTML comment."""
    (code,) = re.findall(
        rf"<!-- {re.escape(marker)} -->\n```\w+\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    return code


def module_of(code: str, monkeypatch) -> dict:
    """Names that a file with that code defines."""
    module = types.ModuleType("written_by_a_reader")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up
    exec(code, vars(module))
    return vars(module)


def test_one_file_and_its_registration(monkeypatch, capsys):
    module_of(block("file: failfast_jax/drafters/repeat.py"), monkeypatch)
    monkeypatch.setitem(sys.modules, "failfast_jax.drafters.repeat", sys.modules["written_by_a_reader"])
    names: dict = {}
    exec(block("import"), names)
    for method, options in eval(f"{{{block('line')}}}", names).items():
        monkeypatch.setitem(drafters.METHODS, method, options)

    command = shlex.split(block("command"))
    assert command[:3] == ["python", "-m", "failfast_jax.generate"]
    arguments = command[3:]
    arguments[arguments.index("--prompt") : arguments.index("--trace") + 2] = []
    common = ["--target", str(GOLDEN / "qwen2_target_160"), "--token-ids", "7,12,100,5", "--max-new-tokens", "40"]
    assert main([*arguments, *common, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert main(["--method", "vanilla", *common, "--json"]) == 0
    assert result["output_ids"] == json.loads(capsys.readouterr().out)["output_ids"]
    text = list(result["prompt_ids"])
    for entry in result["rounds"]:
        assert entry["drafted"] == text[-4:]
        text += entry["emitted"]
    assert result["method"] == "repeat" and "repeat" in BENCHMARKED


def test_a_stopping_rule(monkeypatch, capsys):
    monkeypatch.chdir(PAGE.parents[1])
    monkeypatch.setattr(drafters, "METHODS", dict(drafters.METHODS))
    names = module_of(block("rule") + block("use") + block("method"), monkeypatch)
    ids, drafted = names["session"].read(names["state"]).ids[0], names["session"].rounds(names["state"])[0].rounds
    assert names["engine"].generate([[7, 12, 100, 5]], method="vanilla", max_new_tokens=32)[0].output_ids == ids
    assert {len(entry.drafted) for entry in drafted} <= {10, 20, 30, 40, 50, 60}
    assert capsys.readouterr().out.startswith(str(ids))
    as_method = ["--method", "mean", "--token-ids", "7,12,100,5", "--json"]
    pair = ["--target", str(GOLDEN / "qwen2_target_160"), "--drafter", str(GOLDEN / "fast_dllm_v2_untied")]
    assert main([*as_method, *pair, "--max-new-tokens", "32"]) == 0
    rounds = json.loads(capsys.readouterr().out)["rounds"]
    assert [len(entry["drafted"]) for entry in rounds] == [len(entry.drafted) for entry in drafted]
