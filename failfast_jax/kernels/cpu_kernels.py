"""The kernels of `cpu_kernels.c`, compiled for the processor at hand and known to XLA.

Pallas has no backend for CPU, and XLA's own products pack a weight anew at every call. The package ships the C file as
LLVM text (`compile_cpu_kernels`), which llvmlite compiles here: no compiler needs to be installed. XLA calls the
kernels like its own operations, through `jax.ffi`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.resources
import platform
import re
import threading
from collections.abc import Callable

import jax
import llvmlite
import llvmlite.binding as llvm

from failfast_jax.util.compile_cache import cache_folder, read_stored, store

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of weights and caches. Sums are float32."""
NO_UNIT = "a processor without AVX2 and FMA, AVX-512 or NEON"
MAX_WIDTH = 128
"""Maximum rows of a decode window. Above it products are bound by arithmetic, and XLA's are as fast."""
CHUNK = 256
"""Cache slots per partial sum; equals CHUNK in `cpu_kernels.c`."""
STEP = 16
"""Capacities must be a multiple of this; equals STEP in `cpu_kernels.c`."""
PREFIX = "failfast_"

_features = functools.cache(llvm.get_host_cpu_features)
registered: dict[tuple[str, int], llvm.ExecutionEngine] = {}
"""By the name and constants of a kernel that XLA knows, such as "blocks_int8 code_bits=4", and lanes: the owner of its
code, which XLA's programs call until the process ends."""
_lock = threading.Lock()


def vector_lanes() -> int | None:
    """Float32 numbers in a vector register; None where kernels would not be faster than XLA's."""
    if platform.machine() in ("aarch64", "arm64"):
        return 4
    features = _features()
    if features.get("avx512f"):
        return 16
    return 8 if features.get("avx2") and features.get("fma") else None


def processor() -> str:
    """Name and instruction sets of the processor that kernels are compiled for, and the compiler's version."""
    return "\n".join((llvm.get_host_cpu_name(), _features().flatten(), llvmlite.__version__))


def integer_lanes() -> int | None:
    """Lanes of the kernels for blocks: 8 on AVX-512 without VNNI, else `vector_lanes()`."""
    lanes = vector_lanes()
    return 8 if lanes == 16 and not _features().get("avx512vnni") else lanes


def call(
    kernel: str, *shapes: jax.ShapeDtypeStruct, aliases: dict[int, int] | None = None, **constants: int
) -> Callable[..., list[jax.Array]]:
    """A call of a kernel by its name in `cpu_kernels.c`, without prefix; `jax.vmap` makes it one call per element.

    Args:
      shapes: shapes and dtypes of the results.
      aliases: arguments by number that results by number take the place of.
      constants: by the names that the C file has for them; 0 if missing.

    Raises:
      FileNotFoundError: `vector_lanes()` is None; ask the kernel's module first.
    """
    lanes = integer_lanes() if kernel.startswith("blocks") else vector_lanes()
    target = register(" ".join([kernel, *(f"{name}={constants[name]}" for name in sorted(constants))]), lanes)
    return jax.ffi.ffi_call(target, list(shapes), vmap_method="sequential", input_output_aliases=aliases)


def register(kernel: str, lanes: int) -> str:
    """Makes a kernel, named as in `registered`, known to XLA, for vectors of `lanes` numbers; returns XLA's name."""
    name = re.sub(r"\W+", "_", f"{PREFIX}{kernel}_{lanes}")
    with _lock:
        if (kernel, lanes) not in registered:
            registered[kernel, lanes] = _compiled(kernel, lanes, name)
    return name


def _compiled(kernel: str, lanes: int, name: str) -> llvm.ExecutionEngine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=_features().flatten(), opt=3
    )
    text = importlib.resources.files(__package__).joinpath(f"cpu_kernels_{lanes}.ll").read_text(encoding="utf-8")
    # Other kernels are made internal, and go: compiling all of them takes seconds.
    function, *values = kernel.split()
    text = re.sub(rf"^define ptr @(?!{PREFIX}{function}\()", "define internal ptr @", text, flags=re.M)
    constants = dict(value.split("=") for value in values)
    text = re.sub(
        r"^@(\w+) = external constant i64",
        lambda match: f"@{match[1]} = internal constant i64 {constants.get(match[1], 0)}",
        text,
        flags=re.M,
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(_object_code(text, machine)))
    engine.finalize_object()
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    address = engine.get_function_address(PREFIX + function)
    jax.ffi.register_ffi_target(name, capsule(address, None, None), platform="cpu")
    return engine


def _object_code(text: str, machine: llvm.TargetMachine) -> bytes:
    """Compiles LLVM text, or reads what was compiled from it before: it lies beside JAX's compiled programs."""
    digest = hashlib.sha256(f"{text}\n{processor()}".encode()).hexdigest()
    folder = cache_folder()
    path = folder and folder / f"{PREFIX}{digest}.o"
    if path and (code := read_stored(path)):
        return code
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = False  # only loops marked UNROLL are unrolled: halves the compile time
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    code = machine.emit_object(module)
    if path:
        store(path, code)
    return code
