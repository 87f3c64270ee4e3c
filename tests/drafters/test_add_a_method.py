"""The page on adding a method, done as it says: its one file and its one line, and nothing else."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

from checkpoint_files import GOLDEN

from failfast_jax import drafters
from failfast_jax.bench.run_options import METHODS as BENCHMARKED
from failfast_jax.generate import main

PAGE = Path(__file__).parents[2] / "docs" / "add-a-method.md"


def block(marker: str) -> str:
    """The code behind an HTML comment."""
    (code,) = re.findall(
        rf"<!-- {re.escape(marker)} -->\n```\w+\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    return code


def test_one_file_and_one_line(tmp_path, monkeypatch, capsys):
    name = "failfast_jax.drafters.repeat"
    (tmp_path / "repeat.py").write_text(block(f"file: {name.replace('.', '/')}.py"))
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    for method, entry in eval(f"{{{block('line')}}}", {"Method": drafters.Method}).items():
        monkeypatch.setitem(drafters.METHODS, method, entry)

    command = shlex.split(block("command"))
    assert command[:3] == ["python", "-m", "failfast_jax.generate"]
    arguments = command[3:]
    arguments[arguments.index("--prompt") : arguments.index("--trace") + 2] = []
    common = ["--target", str(GOLDEN / "qwen2_target_160"), "--token-ids", "7,12,100,5", "--max-new-tokens", "40"]
    try:
        assert main([*arguments, *common, "--json"]) == 0
    finally:
        sys.modules.pop(name, None)
    result = json.loads(capsys.readouterr().out)
    assert main(["--method", "vanilla", *common, "--json"]) == 0
    assert result["output_ids"] == json.loads(capsys.readouterr().out)["output_ids"]
    text = list(result["prompt_ids"])
    for entry in result["rounds"]:
        assert entry["drafted"] == text[-4:]
        text += entry["emitted"]
    assert result["method"] == "repeat" and "repeat" in BENCHMARKED
