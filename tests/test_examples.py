"""The scripts in `examples/`, on tiny models, and the notebook."""

from __future__ import annotations

import importlib
import json
import runpy

import pytest
from checkpoint_files import GOLDEN

from failfast_jax import FailFast

TARGET, DRAFTER = GOLDEN / "qwen2_target_160", GOLDEN / "fast_dllm_v2_untied"
pytestmark = pytest.mark.long


def test_a_stopping_rule_in_ones_own_jit(monkeypatch, capsys):
    """As its first lines say."""
    monkeypatch.setattr("sys.argv", ["own_jit.py", str(TARGET), str(DRAFTER)])
    actual = runpy.run_path(str(GOLDEN.parents[2] / "examples" / "own_jit.py"), run_name="__main__")
    plain = FailFast(TARGET).generate(actual["PROMPTS"], method="vanilla", max_new_tokens=24)
    lines = [line.partition(": ")[2].split("], ") for line in capsys.readouterr().out.splitlines()]
    assert [json.loads(f"{ids}]") for ids, _ in lines] == [result.output_ids for result in plain]
    lengths = [float(messages.split()[0]) for _, messages in lines]
    assert all(10 <= length < 60 for length in lengths)


@pytest.mark.long(rare=True)
def test_the_figures_of_the_pages(monkeypatch, tmp_path):
    """`docs/figures.py` still draws them; who changes what they show draws them anew."""
    docs = GOLDEN.parents[2] / "docs"
    monkeypatch.syspath_prepend(docs)
    importlib.import_module("figures").main(tmp_path, longest=64)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert drawn.keys() == {"expansion.svg", "rounds.svg", "economics.svg"}
    assert all(text.startswith("<svg") and text.endswith("</svg>\n") for text in drawn.values())
    assert len(drawn["expansion.svg"].splitlines()) == len((docs / "expansion.svg").read_text().splitlines())
    assert drawn["economics.svg"].count('class="kept"') > 5
    assert "rejected" in drawn["rounds.svg"] and drawn["rounds.svg"].count("<rect") > 60


@pytest.mark.long(rare=True)
def test_the_notebook(tmp_path, monkeypatch):
    """Every cell, by its own parameter for small sizes. What it installs is looked up and not installed once more."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    root = GOLDEN.parents[2]
    notebook = nbformat.read(root / "examples" / "failfast.ipynb", as_version=4)
    nbformat.validate(notebook)
    monkeypatch.setenv("FAILFAST_SMALL", "1")
    monkeypatch.setenv("FAILFAST_SOURCE", str(root))
    monkeypatch.setenv("FAILFAST_PIP", "install -q --dry-run --no-deps")
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    messages = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "plain decoding says the same: True" in messages and "drafted tokens accepted (" in messages
    assert "ok      decoding: compiles and runs, with drafts as without" in messages
    pages = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert len(pages) == 1 and "Rounds of an answer" in pages[0]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert (tmp_path / "failfast-replay" / "replay.json").is_file()
    sent = json.loads((tmp_path / "first_ten_minutes.json").read_text(encoding="utf-8"))
    assert sent["dry_run"] and not any("error" in part for part in sent["parts"].values())
