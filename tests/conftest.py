"""Shared by all tests. Its presence puts this folder on the import path, for helpers such as `checkpoint_files`."""

import collections
import ctypes
import functools
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
RARE = bool(os.environ.get("FAILFAST_TEST_RARE"))

# No test reads the source locations that JAX writes into programs.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jax
import jaxtyping
import numpy as np
import type_checks

# This comes before the first import of the package; see the fixture `annotations`.
type_checks.install("failfast_jax")

import xla_flags

xla_flags.suit_the_platform(quick=not OPTIMIZED)

import width_sets
from checkpoint_files import GOLDEN
from hypothesis import settings

from failfast_jax import load_model
from failfast_jax.decoding.width_plan import DEFAULT_WIDTHS
from failfast_jax.policy import cost_book
from failfast_jax.policy.expected_tokens import Costs
from failfast_jax.runtime import model_runtime
from failfast_jax.runtime.model_runtime import DraftSession
from failfast_jax.util import progress
from failfast_jax.util.compile_cache import enable_compile_cache

enable_compile_cache()
# Tracing makes many short-lived objects beside a large heap that stays: collected rarely, and after each file.
gc.freeze()
gc.set_threshold(100_000, 50, 100)
USERS_WIDTHS = DEFAULT_WIDTHS["cpu"]
if not OPTIMIZED:  # a program has a pass of each width in it
    DEFAULT_WIDTHS["cpu"] = width_sets.SUITE
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")


LONGEST = ("test_tpu_compile", "test_tpu_mutants", "test_examples", "test_simulated_tpu", "test_tpu", "test_field")
"""Files that take longest: they run first, so that no worker waits for another at the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders files, and leaves out rare tests unless FAILFAST_TEST_RARE is set."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
    rare = [item for item in items if any(mark.kwargs.get("rare") for mark in item.iter_markers("long"))]
    if rare and not RARE:
        config.hook.pytest_deselected(items=rare)
        items[:] = [item for item in items if item not in set(rare)]


@pytest.fixture(scope="session")
def golden_model():
    """Golden models by folder name, loaded once."""
    return functools.cache(lambda name: load_model(GOLDEN / name))


@pytest.fixture(scope="session", autouse=True)
def same_costs_everywhere():
    """Costs of rounds are constants, except in tests of their measurement."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_book, "measure", cheap_rows)
        patch.setattr(cost_book.CostBook, "path", staticmethod(lambda: None))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_stored_programs():
    """Programs come from JAX's cache, where most outlive a change of the source; except in tests of the store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runtime, "ProgramStore", lambda: None)
        yield


def cheap_rows(session: DraftSession) -> Costs:
    """Costs of which each row adds a hundredth of a step."""
    rows = np.asarray(session.plan.widths, np.float32)
    return Costs(1 + rows / 100, np.float32(0.1), np.int32(0), np.int32(0))


@pytest.fixture
def users_widths():
    """The widths of users; most tests use fewer."""
    return USERS_WIDTHS


@pytest.fixture(scope="module")
def few_widths():
    """Makes few widths for short texts and drafts the default of a file."""
    before, DEFAULT_WIDTHS["cpu"] = DEFAULT_WIDTHS["cpu"], width_sets.SHORT
    yield
    DEFAULT_WIDTHS["cpu"] = before


@pytest.fixture(autouse=True)
def normal_verbosity():
    """Resets the verbosity that a command set."""
    yield
    progress.set_verbosity(progress.NORMAL)


TIMES_CHECKED: collections.Counter = collections.Counter()


@pytest.fixture(autouse=True)
def annotations(request):
    """Checks annotations in the first case of each test; the others run the same code, a fifth faster."""
    TIMES_CHECKED[request.function] += 1
    jaxtyping.config.update("jaxtyping_disable", TIMES_CHECKED[request.function] > 1)


@pytest.fixture
def interrupts():
    """Sets Python's own handler: a process in the background of a shell ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def forget_programs(request):
    """Releases a file's compiled programs after its last test; otherwise a worker grows."""
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    jax.clear_caches()
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # else glibc keeps their memory
