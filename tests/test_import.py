"""Importing the package and making an engine change nothing in a process; what commands set there, a function sets."""

from __future__ import annotations

import importlib
import json
import tomllib
from pathlib import Path

import jax
import pytest
from checkpoint_files import GOLDEN, default_target, run_python

import failfast_jax
from failfast_jax.util import compile_cache

ROOT = Path(__file__).parents[1]

COMPARE = """
import json, logging, os, signal, sys, warnings
import jax, jax.monitoring
from jax._src import monitoring

def process():
    listeners = [name for name in vars(monitoring) if name.startswith("_") and name.endswith("_listeners")]
    return {
        "environment": dict(os.environ),
        "signals": {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "configuration": {name: repr(value) for name, value in jax.config.values.items()},
        "listeners": {name: len(getattr(monitoring, name)) for name in listeners},
        "hooks": [repr(hook) for hook in (sys.excepthook, sys.unraisablehook, warnings.formatwarning)],
        "streams": [sys.stdout.errors, sys.stderr.errors],
        "logging": [logging.root.level, len(logging.root.handlers)],
        "folder": os.getcwd(),
    }

before = process()
changed = lambda: [name for name, value in process().items() if value != before[name]]
found = {}
import failfast_jax
found["package"] = changed()
import failfast_jax.generate, failfast_jax.chat, failfast_jax.serve, failfast_jax.doctor
found["commands"] = changed()
engine = failfast_jax.FailFast.load(*sys.argv[1:])
found["engine"] = changed()
prompt = [7, 12, 100, 5] if engine.tokenizer is None else "Hello"
[result] = engine.generate([prompt], method="vanilla", max_new_tokens=4)
found["answer"] = changed()
events = engine.stream([prompt], method="vanilla", max_new_tokens=4)
next(events)
found["left stream"] = [events.close(), changed()][1]
print(json.dumps([found, result.stats.compiles, result.stats.cache_hits]))
"""
STEPS = ["package", "commands", "engine", "answer", "left stream"]


def compared(*models: object) -> None:
    done = run_python("-c", COMPARE, *models, LIBTPU_INIT_ARGS="--of_the_user=1")
    assert done.returncode == 0, done.stderr
    changes, compiles, hits = json.loads(done.stdout)
    assert changes == {step: [] for step in STEPS}
    assert compiles > 0 and hits == 0  # counted all the same; there is no cache


def test_a_program_that_imports_us_keeps_its_process():
    compared(GOLDEN / "qwen2_target_160")


@pytest.mark.long
def test_a_program_that_loads_a_tokenizer_does_too():
    compared(default_target())


def test_every_name_of_the_package_is_there():
    assert set(failfast_jax.__all__) <= set(dir(failfast_jax))
    for name in failfast_jax.__all__:
        value = getattr(failfast_jax, name)
        assert name == "__version__" or getattr(importlib.import_module(value.__module__), name) is value
    with pytest.raises(AttributeError, match="has no attribute 'Slow'"):
        getattr(failfast_jax, "Slow")  # noqa: B009


@pytest.mark.parametrize("name", ["generate", "chat", "serve", "bench", "train", "doctor"])
def test_installed_scripts(name, capsys):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert len(scripts) == 6
    module, function = scripts["failfast" if name == "generate" else f"failfast-{name}"].split(":")
    with pytest.raises(SystemExit, match="0"):
        getattr(importlib.import_module(module), function)(["--version"])
    assert capsys.readouterr().out.startswith("failfast-jax ")


def test_an_engine_takes_the_cache_that_it_is_told(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        failfast_jax.FailFast.load(GOLDEN / "qwen2_target_160", compile_cache=tmp_path)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        failfast_jax.FailFast.load(GOLDEN / "qwen2_target_160")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    finally:
        compile_cache.enable_compile_cache(before)
