"""What users are told of waits and of errors."""

from __future__ import annotations

import logging
import sys
import time

import pytest

from failfast_jax import command, generate, progress


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    progress.set_verbosity(progress.NORMAL)


def watch(monkeypatch, watched: bool = True) -> None:
    """Somebody watches, or nobody, and patience is short."""
    monkeypatch.setattr(progress, "PATIENCE_S", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched, raising=False)


def test_a_long_wait_is_named(monkeypatch, capsys):
    watch(monkeypatch)
    with progress.waiting("reading"):
        time.sleep(0.2)
    monkeypatch.setattr(progress, "PATIENCE_S", 60.0)  # a busy machine takes longer over nothing than 0.05 s
    with progress.waiting("a moment"):
        pass
    assert capsys.readouterr().err.splitlines() == ["reading ...", "reading: 0 s"]


@pytest.mark.parametrize("verbosity, watched", [(progress.QUIET, True), (progress.NORMAL, False)])
def test_silence(monkeypatch, capsys, verbosity, watched):
    progress.set_verbosity(verbosity)
    watch(monkeypatch, watched)
    with progress.waiting("reading"):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""
    assert progress.bar_options()["disable"] is (True if verbosity == progress.QUIET else None)


def test_quiet_says_nothing_but_the_answer(capsys):
    argv = ["--token-ids", "1,2,3", "--max-new-tokens", "2", "--method", "vanilla", "--json"]
    from checkpoint_files import GOLDEN

    assert generate.main([*argv, "--target", str(GOLDEN / "qwen2_target_160"), "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and said.out.startswith('{"prompt_ids"')
    assert generate.main([*argv, "--target", str(GOLDEN / "qwen2_target_160"), "--verbose"]) == 0
    assert logging.getLogger("failfast_jax").level == logging.INFO
    assert "vanilla: 2 tokens" in capsys.readouterr().err


def test_an_unexpected_error_is_a_line(capsys):
    def broken():
        raise KeyError("what nobody thought of")

    assert command.run(broken) == command.UNEXPECTED
    first, second = capsys.readouterr().err.splitlines()
    assert first == "unexpected error: KeyError: 'what nobody thought of'" and "--debug" in second
    with pytest.raises(KeyError):
        command.run(broken, verbosity=progress.DEBUG)
