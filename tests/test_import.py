"""Importing the package and making an engine change nothing in a process; what commands set there, a function sets."""

from __future__ import annotations

import importlib
import json

import pytest
from checkpoint_files import hf_folder, run_python
from fuzzed_inputs import write_tokenizer

import failfast_jax

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

before, changes = process(), []
for step in sys.argv[1:]:
    exec(step)
    changes += [(step, name) for name, value in process().items() if value != before[name]]
print(json.dumps([changes, result.stats.compiles, result.stats.cache_hits]))
"""


def test_a_program_that_imports_us_keeps_its_process(tmp_path):
    hf_folder(tmp_path, "qwen2_untied")
    write_tokenizer(tmp_path)
    steps = (
        "import failfast_jax",
        "import failfast_jax.generate, failfast_jax.chat, failfast_jax.serve, failfast_jax.doctor",
        f"engine = failfast_jax.FailFast.load({str(tmp_path)!r})",
        "[result] = engine.generate(['Hello'], method='vanilla', max_new_tokens=4)",
        "next(engine.stream(['Hello'], method='vanilla', max_new_tokens=4))  # is closed before its end",
    )
    done = run_python("-c", COMPARE, *steps, LIBTPU_INIT_ARGS="--of_the_user=1")
    assert done.returncode == 0, done.stderr
    changes, compiles, hits = json.loads(done.stdout)
    assert changes == [] and compiles > 0 and hits == 0  # counted all the same; there is no cache


def test_every_name_of_the_package_is_there():
    assert set(failfast_jax.__all__) <= set(dir(failfast_jax))
    for name in failfast_jax.__all__:
        value = getattr(failfast_jax, name)
        assert name == "__version__" or getattr(importlib.import_module(value.__module__), name) is value
    with pytest.raises(AttributeError, match="has no attribute 'Slow'"):
        getattr(failfast_jax, "Slow")  # noqa: B009
