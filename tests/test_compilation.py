"""Compile counts, what makes two programs the same, the bounded store of programs, the persistent cache's folder."""

import dataclasses
import functools
import json
import os
import pwd
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN, run_python
from tiny_models import diffusion_config, random_model

from failfast_jax import FailFast
from failfast_jax.errors import OptionError
from failfast_jax.kernels import cpu_kernels
from failfast_jax.runtime import model_runtime, program_store
from failfast_jax.runtime.program_store import ProgramStore
from failfast_jax.util import hardware
from failfast_jax.util.compilation import CompileCounts, Executables, Program, count_compiles, name_of
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


# The store of programs: a second start neither traces nor compiles.

traced = []


def step(state, x, *, factor):
    traced.append(factor)
    return {"sum": state["sum"] * factor + x, "count": state["count"] + 1}


def stepping(factor: int = 2, size: int = 4) -> Program:
    state = {"sum": np.ones(size, np.float32), "count": np.int32(0)}
    return Program(functools.partial(step, factor=factor), (state, np.float32(1)), donate=(0,))


@pytest.fixture
def started(tmp_path, cache_setting, monkeypatch):
    """Runs a program as a new process would; returns how often it was traced, and compiled."""
    monkeypatch.setattr(program_store, "KNOWN_MODULES", (*program_store.KNOWN_MODULES, __name__))
    enable_compile_cache(tmp_path)
    cache_setting()

    def run(program: Program) -> tuple[int, int]:
        jax.clear_caches()
        traced.clear()
        with count_compiles() as counts:
            [compilation] = Executables(store=ProgramStore()).start(program)
            state = compilation(*program.args)
        factor, size = program.function.keywords["factor"], len(program.args[0]["sum"])
        np.testing.assert_array_equal(state["sum"], np.full(size, factor + 1))
        assert state["count"] == 1 and compilation.shapes["sum"].shape == (size,)
        return len(traced), counts.compiles

    return run


def files(folder, suffix: str) -> list:
    return sorted(folder.glob(f"failfast_*.{suffix}"))


def test_a_second_start_traces_and_compiles_nothing(started, tmp_path):
    assert [started(stepping()) for _ in range(2)] == [(1, 1), (0, 0)]
    assert [started(other) for other in (stepping(3), stepping(size=5))] == [(1, 1)] * 2
    assert len(files(tmp_path, "program")) == 3


def test_what_may_change_a_program_is_part_of_its_key(started, monkeypatch):
    started(stepping())
    with jax.default_matmul_precision("highest"):
        assert not ProgramStore().path(stepping()).exists()
    with jax.log_compiles(False):
        assert started(stepping()) == (0, 0)
    for changes in (
        lambda: monkeypatch.setattr(program_store, "_source", lambda: "changed"),
        lambda: monkeypatch.setitem(hardware.CHIPS, "cpu", dataclasses.replace(hardware.CHIPS["TPU v5"], kind="cpu")),
        lambda: monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_of_the_user"),
        lambda: monkeypatch.setattr(cpu_kernels, "processor", lambda: "another machine"),
        lambda: monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(99)),
        lambda: monkeypatch.setattr(program_store.flax, "__version__", "0"),
    ):
        changes()
        assert not ProgramStore().path(stepping()).exists()


def test_programs_of_unknown_things_are_not_stored(started, monkeypatch):
    array = dataclasses.make_dataclass("Holder", ["values"], frozen=True, eq=False)(np.ones(2000))
    for odd in (array, object(), type("Other", (), {"__module__": "elsewhere"}), times):
        monkeypatch.setattr(program_store, "KNOWN_MODULES", ("builtins", "functools", "jax", "numpy", "types"))
        program = Program(functools.partial(identity, odd), stepping().args, donate=(0,))
        assert ProgramStore().path(program) is None
    assert ProgramStore().path(dataclasses.replace(stepping(), donate=())) is None
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
    assert ProgramStore().path(stepping()) is None


def flipped(content: bytes) -> bytes:
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


@pytest.mark.parametrize("damage", [lambda content: content[:50], lambda _: b"", flipped, lambda _: b"../\xff\0\n"])
def test_a_damaged_file_is_replaced(started, tmp_path, damage):
    started(stepping())
    [path] = files(tmp_path, "program")
    whole = path.read_bytes()
    path.write_bytes(damage(whole.rjust(200)))
    assert started(stepping()) == (1, 1) and started(stepping()) == (0, 0)


def test_a_stored_program_is_none_that_jax_supplied(started, tmp_path):
    """XLA does not write such a program whole; another process may have compiled it a moment ago."""
    names = {ProgramStore().named(stepping()).__name__ for _ in range(3)}
    assert len(names) == 3 and all(name.startswith("step_") for name in names)
    started(stepping())
    assert not list(tmp_path.glob("jit_step_*"))


def test_damaged_code_of_a_kernel_is_compiled_anew(started, tmp_path, monkeypatch):
    monkeypatch.setattr(jax.ffi, "register_ffi_target", mock.Mock())

    def code() -> Path:
        monkeypatch.setattr(cpu_kernels, "registered", {})
        cpu_kernels.register("rms_norm", cpu_kernels.vector_lanes())
        [path] = files(tmp_path, "o")
        return path

    whole = code().read_bytes()
    for damaged in (whole[:50], b"", flipped(whole)):
        code().write_bytes(damaged)
        assert code().read_bytes() == whole


def test_files_that_are_not_read_for_long_are_removed(started, tmp_path):
    started(stepping())
    digest = "0123456789abcdef" * 4
    stored = [f"failfast_{digest}.{end}" for end in ("program", "o", "o.9f.part")]
    names = ["failfast_costs.json", "failfast_notes.program", *stored, f"failfast_{digest[::-1]}.program"]
    for name in names:
        (tmp_path / name).touch()
    [used] = [path for path in files(tmp_path, "program") if path.name not in names]
    for path in (*(tmp_path / name for name in names[:-1]), used):
        os.utime(path, times=(0, 0))
    assert started(stepping()) == (0, 0) and started(stepping(3)) == (1, 1)
    assert {name for name in names if (tmp_path / name).exists()} == {*names} - {*stored} and used.exists()


def test_a_cache_that_is_switched_off_stores_nothing(started, tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert [started(stepping()) for _ in range(2)] == [(1, 1)] * 2 and not files(tmp_path, "*")
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["factor"])
@dataclasses.dataclass
class Holder:
    factor: float


def test_equal_numbers_of_other_types_are_other_programs(started):
    programs = [Program(identity, ({"holder": Holder(factor)},), donate=(0,)) for factor in (1, 1.0, True, 2)]
    assert None not in (paths := {ProgramStore().path(program) for program in programs}) and len(paths) == 4


def test_a_program_of_another_source_is_stored_too(started, tmp_path, monkeypatch):
    started(stepping())
    monkeypatch.setattr(program_store, "_source", lambda: "changed")
    assert [started(stepping()) for _ in range(2)] == [(1, 1), (0, 0)]
    assert len(files(tmp_path, "program")) == 2


DEVICES = """
import jax, numpy as np, test_compilation as tests
from jax.sharding import Mesh, NamedSharding, PartitionSpec
tests.program_store.KNOWN_MODULES += ("test_compilation",)
first, second = jax.devices()
meshes = [NamedSharding(Mesh(devices, "x"), PartitionSpec("x")) for devices in ([first, second], [second, first])]
for expected in (1, 0):
    jax.clear_caches()
    for place in (None, second, *meshes):
        program = tests.stepping()
        if place is not None:
            program.args[0]["sum"] = jax.device_put(program.args[0]["sum"], place)
        tests.traced.clear()
        [compilation] = tests.Executables(store=tests.ProgramStore()).start(program)
        result = compilation(*program.args)["sum"]
        assert place is None or result.sharding._device_assignment == program.args[0]["sum"].sharding._device_assignment
        print(len(tests.traced), result.tolist())
"""


@pytest.mark.long
def test_a_stored_program_runs_on_the_devices_of_its_arguments(tmp_path):
    """One of two devices, the other, both, and both in another order."""
    flags = "--xla_force_host_platform_device_count=2"
    run = run_python("-c", DEVICES, XLA_FLAGS=flags, JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    assert run.stdout.splitlines() == [f"{traces} {[3.0] * 4}" for traces in (1, 0) for _ in range(4)], run.stderr
    assert len(files(tmp_path, "program")) == 4


TWO = """
import importlib, json, sys, time
sys.path.insert(0, sys.argv[1])
tests = importlib.import_module("test_compilation")
from failfast_jax.runtime import program_store
program_store.KNOWN_MODULES += ("test_compilation",)
tests.enable_compile_cache(sys.argv[2])
time.sleep(max(float(sys.argv[3]) - time.time(), 0))
with tests.count_compiles() as counts:
    [program] = tests.Executables(store=tests.ProgramStore()).start(tests.stepping())
    print(json.dumps([program(*tests.stepping().args)["sum"].tolist(), len(tests.traced)]))
"""


@pytest.mark.long
def test_two_processes_may_start_at_once(tmp_path):
    """Both compile; whichever writes last, the third reads a whole file."""
    for count, expected in ((2, 1), (1, 0)):
        at = str(time.time() + 20 * (count - 1))
        with ThreadPoolExecutor(count) as pool:
            runs = [pool.submit(run_python, "-c", TWO, Path(__file__).parent, str(tmp_path), at) for _ in range(count)]
        for run in runs:
            assert run.result().returncode == 0, run.result().stderr
            assert json.loads(run.result().stdout) == [[3.0] * 4, expected]
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".program", "")]


@pytest.mark.long
def test_a_second_start_of_an_engine_traces_its_empty_state_alone(tmp_path, cache_setting, monkeypatch):
    """Its programs call kernels; the same text is written."""
    compiling, traces, texts = Executables._compiling, [], []  # noqa: SLF001

    def compiled(self, path, program):
        traces.append(name_of(program.function))
        return compiling(self, path, program)

    monkeypatch.setattr(Executables, "_compiling", compiled)
    monkeypatch.setattr(model_runtime, "ProgramStore", ProgramStore)
    for expected in (["the start", "the loop over rounds", "prefill"], ["the start"]):
        jax.clear_caches()
        traces.clear()
        engine = FailFast.load(GOLDEN / "qwen2_target_160", compile_cache=tmp_path)
        texts += [engine.generate([[5, 6, 7, 5, 6]], method="lookup", max_new_tokens=20)[0].output_ids]
        assert traces == expected
    assert texts[0] == texts[1]


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
