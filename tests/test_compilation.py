"""Compile counts, what makes two programs the same, the bounded store of programs, the persistent cache's folder."""

import dataclasses
import functools
import os
import pwd
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN
from tiny_models import diffusion_config, random_model

from failfast_jax import FailFast
from failfast_jax.errors import OptionError
from failfast_jax.util import hardware
from failfast_jax.util.compilation import CompileCounts, Executables, Program, count_compiles
from failfast_jax.util.compile_cache import enable_compile_cache


def times(x, *, factor):
    return x * factor


def program(factor: int) -> Program:
    return Program(functools.partial(times, factor=factor), (np.float32(0),))


def test_programs_are_compiled_once_and_the_oldest_dropped():
    programs = Executables(limit=2)
    [double] = programs.start(program(2))
    assert (double.shapes.shape, double.shapes.dtype) == ((), jnp.float32)  # known before it is compiled
    assert float(double.wait()(np.float32(3))) == 6
    with count_compiles() as compiled:
        assert programs.start(program(2))[0] is double and compiled.requests == 0
        others = programs.start(program(3), program(4))
        [again] = programs.start(program(2))
        for started in (*others, again):
            started.wait()
    assert again is not double and compiled.requests == 3


# What makes two programs the same.


@dataclasses.dataclass(frozen=True)
class Scale:
    factor: float

    def __call__(self, x):
        return x * self.factor


@functools.cache
def small_model(**changes):
    return random_model(diffusion_config(**changes), seed=2)


def identity(x):
    return x


def key_of(*args, function=identity):
    return Program(function, args).key


def test_equal_programs_have_equal_keys():
    assert program(2).key == program(2).key
    assert key_of(np.zeros(3, np.float32)) == key_of(jnp.ones(3)) == key_of(jax.ShapeDtypeStruct((3,), np.float32))
    assert key_of(small_model()) == key_of(random_model(diffusion_config(), seed=3))
    others = small_model(block_size=16), small_model(num_layers=2), (np.zeros(3),)
    keys = [key_of(x) for x in (np.zeros(3), np.zeros(4), np.zeros((3, 1)), np.zeros(3, np.int32), *others)]
    assert len({key_of(small_model()), *keys}) == len(keys) + 1


def test_bound_values_are_part_of_the_key():
    bound = functools.partial(functools.partial, times)
    functions = [bound(factor=2), bound(factor=3), bound(factor=1), bound(factor=True), bound(factor=Scale)]
    functions += [bound(factor=times), Scale(2.0), Scale(3.0), identity, times]
    keys = [key_of(np.float32(0), function=function) for function in functions]
    assert len(set(keys)) == len(keys)
    assert key_of(np.float32(0), function=bound(factor=2)) == keys[0]


def test_a_function_that_may_depend_on_more_is_refused():
    factor = 2
    for function, named in (
        (lambda x: x * factor, "factor"),
        (functools.partial(times, factor=np.ones(2)), "'factor'"),
        (small_model().logits, "functools.partial"),
    ):
        with pytest.raises(TypeError, match=named):
            key_of(np.float32(0), function=function)


def fails(x):
    raise ValueError(f"untraceable: {x.shape}")


def test_a_program_that_cannot_be_traced_is_not_kept():
    programs = Executables()
    for _ in range(2):
        with pytest.raises(ValueError, match="untraceable"):
            programs.start(Program(fails, (np.zeros(2),)))


# The persistent cache.


def matmul(x):
    return x @ x + 41


@pytest.fixture
def cache_setting():
    """Restores JAX's setting of the cache."""
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_compilation_cache_dir
    yield compilation_cache.reset_cache
    enable_compile_cache(before)
    compilation_cache.reset_cache()


def multiply() -> CompileCounts:
    """Compiles a program as a new process would; returns what was counted."""
    with count_compiles() as counts:
        Executables().start(Program(matmul, (np.ones((8, 8), np.float32),)))[0].wait()
    jax.clear_caches()
    return counts


def test_a_cache_hit_is_no_compilation(tmp_path, cache_setting):
    assert enable_compile_cache(tmp_path / "cache") == tmp_path / "cache"
    jax.clear_caches()
    cache_setting()
    counts = [multiply() for _ in range(2)]
    assert [(each.compiles, each.cache_hits) for each in counts] == [(1, 0), (0, 1)]


def test_an_engine_takes_the_cache_that_it_is_given(tmp_path, cache_setting):
    for options in ({"compile_cache": tmp_path}, {}):
        FailFast.load(GOLDEN / "qwen2_target_160", **options)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)


def test_cache_folder(tmp_path, cache_setting, monkeypatch):
    monkeypatch.setenv("FAILFAST_COMPILE_CACHE", str(tmp_path / "named"))
    assert enable_compile_cache() == tmp_path / "named"
    assert enable_compile_cache("off") is None and jax.config.jax_compilation_cache_dir is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("FAILFAST_COMPILE_CACHE", "")  # as if it were not set
    assert enable_compile_cache() == tmp_path / "xdg" / "failfast_jax"
    (tmp_path / "file").write_text("")
    for folder, named in ((tmp_path / "file" / "sub", "compile cache .*file"), (" ", "--compile-cache")):
        with pytest.raises(OptionError, match=named):
            enable_compile_cache(folder)
    monkeypatch.setenv("FAILFAST_COMPILE_CACHE", " ")
    with pytest.raises(OptionError, match="FAILFAST_COMPILE_CACHE: "):
        enable_compile_cache()


@pytest.mark.parametrize("home", [None, "relative", "/proc", "/dev/null"])
def test_a_home_that_cannot_be_written_is_a_warning(home, tmp_path, cache_setting, monkeypatch, caplog):
    """Also that of a user without a name; a folder that somebody asked for is an error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pwd, "getpwuid", mock.Mock(side_effect=KeyError))
    for name in ("FAILFAST_COMPILE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # as if it were not set
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    jax.config.update("jax_compilation_cache_dir", None)
    assert enable_compile_cache() is None and jax.config.jax_compilation_cache_dir is None
    with pytest.raises(ValueError, match="^compile cache /proc/cache: "):
        enable_compile_cache("/proc/cache")
    [record] = caplog.records
    assert record.levelname == "WARNING" and "--compile-cache" in record.getMessage()
    assert not list(tmp_path.iterdir())


# Options of the compiler.


def test_programs_are_compiled_with_the_options_of_their_device(monkeypatch, caplog):
    """Options that the compiler lacks are left out, and logged once."""

    def options(**changes):
        chip = dataclasses.replace(hardware.CHIPS["TPU7x"], compiler_options=changes)
        monkeypatch.setitem(hardware.CHIPS, "cpu", chip)
        return hardware.compiler_options

    options(xla_cpu_enable_fast_math="no truth value")
    [started] = Executables().start(program(5))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no truth value"):
        started.wait()
    known = {"xla_cpu_enable_fast_math": False}
    assert options(**known)(jax.devices()[0]) == known
    unknown = options(xla_no_such_option="1", **known)
    for _ in range(2):
        assert unknown(jax.devices()[0]) == known
    [record] = caplog.records
    assert record.getMessage().startswith("TPU7x: ") and "xla_no_such_option" in record.getMessage()
    Executables().start(program(5))[0].wait()
    elsewhere = types.SimpleNamespace(device_kind="cpu")
    assert unknown(elsewhere) == {"xla_no_such_option": "1", **known}


def test_libtpu_is_told_about_the_chips_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--of_the_user=1")
    (tmp_path / "0000:00:04.0").mkdir()
    (tmp_path / "0000:00:04.0" / "device").write_text("0x006f\n")
    hardware.tell_libtpu(tmp_path)
    assert os.environ["LIBTPU_INIT_ARGS"] == "--of_the_user=1"
    (tmp_path / "0000:00:04.0" / "device").write_text("0x0076\n")
    for _ in range(2):
        hardware.tell_libtpu(tmp_path)
        assert os.environ["LIBTPU_INIT_ARGS"] == "--of_the_user=1 " + hardware.CHIPS["TPU7x"].init_args
