"""Shared by all tests. Its presence puts this folder on the import path, for helpers such as `checkpoint_files`."""

import ctypes
import gc
import os
import signal
from pathlib import Path

import pytest

# Compiled programs outlive the run; the variable moves the folder or turns the cache off.
os.environ.setdefault(
    "FAILFAST_COMPILE_CACHE",
    str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "failfast_jax_tests"),
)

# Programs compile quickly (`xla_flags`). With FAILFAST_TEST_OPTIMIZED=1 they are those that users run.
OPTIMIZED = bool(os.environ.get("FAILFAST_TEST_OPTIMIZED"))

# Where a line of a program came from is looked at by nobody here, and written into every one.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jax
import numpy as np
import type_checks

# Annotations are checked in every test: this comes before the first import of the package.
type_checks.install("failfast_jax")

import xla_flags

xla_flags.suit_the_platform(quick=not OPTIMIZED)

from checkpoint_files import GOLDEN
from hypothesis import settings

from failfast_jax import load_model
from failfast_jax.decoding import width_plan
from failfast_jax.policy import cost_book
from failfast_jax.policy.expected_tokens import Costs
from failfast_jax.util import compilation, progress
from failfast_jax.util.compilation import enable_compile_cache

enable_compile_cache()
counting = compilation.count_compiles()
counting.__enter__()  # to the end, for tests that compare counts
# Tracing makes many short-lived objects beside a large heap that stays: collected rarely, and behind each file.
gc.freeze()
gc.set_threshold(100_000, 50, 100)
USERS_WIDTHS = {"CPU_LADDER": width_plan.CPU_LADDER, "CPU_PREFILL_WIDTHS": width_plan.CPU_PREFILL_WIDTHS}
if not OPTIMIZED:  # a program has a pass of each width in it
    width_plan.CPU_LADDER, width_plan.CPU_PREFILL_WIDTHS = (1, 16, 64), (32, 128)
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def golden_model():
    """Golden models by folder name, loaded once."""
    models = {}

    def get(name: str):
        if name not in models:
            models[name] = load_model(GOLDEN / name)
        return models[name]

    return get


@pytest.fixture(scope="session", autouse=True)
def same_costs_everywhere(request):
    """What rounds cost is not measured, but for tests of that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_book, "measure", lambda session: cheap_rows(session.plan.widths))
        patch.setattr(cost_book.CostBook, "path", staticmethod(lambda: None))
        yield


def cheap_rows(widths: tuple[int, ...]) -> Costs:
    """A row costs a hundredth of a step."""
    rows = np.asarray(widths, np.float32)
    return Costs(1 + rows / 100, np.float32(0.1), np.int32(0), np.int32(0))


@pytest.fixture
def users_widths(monkeypatch):
    """Widths as users have them; most tests have fewer."""
    for name, widths in USERS_WIDTHS.items():
        monkeypatch.setattr(width_plan, name, widths)


@pytest.fixture(scope="module")
def few_widths():
    """Widths that suit short texts and drafts: each is compiled, and checked under `exact`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(width_plan, "CPU_LADDER", (1, 8, 16))
        patch.setattr(width_plan, "CPU_PREFILL_WIDTHS", (32,))
        patch.setattr(width_plan, "EXACT_WIDTH", 24)
        yield


@pytest.fixture(autouse=True)
def said_as_usual():
    """What a command was told to say or not to say is not told to the next test."""
    yield
    progress.set_verbosity(progress.NORMAL)


@pytest.fixture
def interrupts():
    """Python's own handler: who is started in the background of a shell ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def forget_programs(request):
    """Lets go of a file's compiled programs behind its last test: they are what makes a worker grow."""
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    jax.clear_caches()
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # else glibc keeps what they were
