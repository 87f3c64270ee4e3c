"""Messages of waits and of errors: bars, lines in a file, silence."""

from __future__ import annotations

import logging
import sys
import time

import pytest
import tqdm.std as tqdm_module
from checkpoint_files import GOLDEN

from failfast_jax import generate
from failfast_jax.util import command_line, progress


def watch(monkeypatch, watched: bool = True) -> None:
    """Somebody watches, or nobody, and patience is short."""
    monkeypatch.setattr(progress, "PATIENCE_S", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched, raising=False)


@pytest.mark.parametrize("watched", [True, False])
def test_a_long_wait_is_named(watched, monkeypatch, capsys):
    """In a file only if it takes a minute."""
    watch(monkeypatch, watched)
    monkeypatch.setattr(progress, "MINUTE_S", 0.1)
    with progress.waiting("reading"):
        time.sleep(0.3)
    with progress.waiting("prefill", in_files=False):
        time.sleep(0.3)
    monkeypatch.setattr(progress, "PATIENCE_S", 60.0)  # a busy machine takes longer over nothing than 0.05 s
    monkeypatch.setattr(progress, "MINUTE_S", 60.0)
    with progress.waiting("a moment"):
        pass
    prefill = ["prefill ...", "prefill: 0 s"] * watched
    assert capsys.readouterr().err.splitlines() == ["reading ...", "reading: 0 s", *prefill]


@pytest.mark.parametrize("verbosity, watched", [(progress.QUIET, True), (progress.NORMAL, False)])
def test_silence(monkeypatch, capsys, verbosity, watched):
    progress.set_verbosity(verbosity)
    watch(monkeypatch, watched)
    with progress.waiting("reading"):
        time.sleep(0.2)
    assert list(progress.progress_bar("counting", "sheep", range(3))) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_lines_stand_above_a_bar(monkeypatch, capsys):
    watch(monkeypatch)
    with progress.progress_bar("counting", "sheep", total=2) as bar:
        bar.update()
        with progress.waiting("compiling"):
            time.sleep(0.2)
        handler = progress.LogHandler()
        handler.handle(logging.makeLogRecord({"msg": "a wolf", "levelname": "INFO"}))
        warnings = command_line.run(lambda: __import__("warnings").warn("a fox", stacklevel=1))
    text = capsys.readouterr().err
    assert "\rcompiling ...\n" in text and "1/2" in text and warnings == 0
    assert "\rINFO: a wolf\n" in text and "\rWARNING: a fox\n" in text


def test_an_error_ends_the_bar_that_it_leaves_open(monkeypatch, capsys):
    watch(monkeypatch)

    def work():
        for _ in progress.progress_bar("counting", "sheep", range(3)):
            raise ValueError("a wolf")

    assert command_line.run(work) == command_line.USAGE_ERROR
    assert capsys.readouterr().err.endswith("\nerror: a wolf\n")


def test_a_file_gets_a_line_now_and_then(monkeypatch, capsys):
    """Only work that takes long has lines, among other messages; the last one has the end."""
    watch(monkeypatch, False)
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(tqdm_module, "time", lambda: now[0])
    list(progress.progress_bar("a moment", "sheep", range(3)))
    with progress.progress_bar("counting", "sheep", total=10) as bar:
        for count in range(10):
            now[0] += 25.0
            bar.update()
            bar.set_postfix(loss=count)
            if count == 5:
                progress.note("something happened")
    lines = capsys.readouterr().err.splitlines()
    counts = [line.split()[2] for line in lines if line.startswith("counting: ")]
    assert counts == ["3/10", "6/10", "9/10", "10/10"] and len(lines) == 5
    assert "something happened" in lines


def test_quiet_says_nothing_but_the_answer(capsys):
    flags = ["--token-ids", "1,2,3", "--max-new-tokens", "2", "--method", "vanilla", "--json"]
    flags += ["--target", str(GOLDEN / "qwen2_target_160")]
    assert generate.main([*flags, "--quiet"]) == 0
    output = capsys.readouterr()
    assert output.err == "" and output.out.startswith('{"prompt_ids"')
    assert generate.main([*flags, "--verbose"]) == 0
    assert logging.getLogger("failfast_jax").level == logging.INFO
    assert "vanilla: 2 tokens" in capsys.readouterr().err
