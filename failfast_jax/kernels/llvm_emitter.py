"""LLVM IR for CPU kernels: loops, vectors, sums over lanes, and XLA's calling convention (`threads` shares work out).

Pallas has no backend for CPU, and XLA's own products pack a weight anew at every call. What is emitted here is compiled
for the machine it runs on (by llvmlite: no compiler needs to be installed), and XLA calls it like one of its own
operations, through `jax.ffi`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import platform
import threading
from collections.abc import Callable, Sequence

import jax
import llvmlite.binding as llvm
from llvmlite import ir

TARGETS = "failfast"
"""Prefix of exported symbol names."""
BYTE, INT, LONG, FLOAT, POINTER = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.PointerType()
NULL = ir.Constant(POINTER, None)
ELEMENTS = {"float32": FLOAT, "bfloat16": ir.IntType(16), "float16": ir.HalfType(), "int8": BYTE}
CACHE_LINE, AHEAD = 64, 8192
"""Bytes that memory gives at a time, and that should be on their way: the processor's own fetching ends with a page."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
"""Types of what lies in memory; sums are float32."""


@dataclasses.dataclass(frozen=True)
class VectorUnit:
    """Sizes of a core's vector registers."""

    lanes: int
    """Float32 numbers in a vector."""
    registers: int


_features = functools.cache(llvm.get_host_cpu_features)


def vector_unit() -> VectorUnit | None:
    """This machine's, or None where kernels would not be faster than XLA's: without fused multiply-add."""
    features = _features()
    if platform.machine() in ("aarch64", "arm64"):
        return VectorUnit(lanes=4, registers=32)
    if features.get("avx512f"):
        return VectorUnit(lanes=16, registers=32)
    return VectorUnit(lanes=8, registers=16) if features.get("avx2") and features.get("fma") else None


def _vector(type_: ir.Type, lanes: int) -> ir.Type:
    return type_ if lanes == 1 else ir.VectorType(type_, lanes)


def constant(value: int) -> ir.Constant:
    """A 64-bit integer: a size, an index, an offset."""
    return ir.Constant(LONG, value)


def vector(values: Sequence[float] | Sequence[int], type_: ir.Type = FLOAT) -> ir.Constant:
    """One lane of each value."""
    return ir.Constant(ir.VectorType(type_, len(values)), list(values))


class Emitter(ir.IRBuilder):
    """An `IRBuilder` with what kernels repeat."""

    def loop(self, end, step, body: Callable, carried: Sequence = (), begin=None) -> list:
        """`for i in range(begin, end, step): carried = body(i, carried)`.

        Returns:
          The carried values after the last turn.
        """
        before = self.block
        head, inside, after = (self.append_basic_block() for _ in range(3))
        self.branch(head)
        self.position_at_end(head)
        index, *values = (self.phi(type_) for type_ in (LONG, *(value.type for value in carried)))
        for phi, value in zip((index, *values), (constant(0) if begin is None else begin, *carried)):
            phi.add_incoming(value, before)
        self.cbranch(self.icmp_signed("<", index, end), inside, after)
        self.position_at_end(inside)
        new = body(index, values) or ()
        following = self.add(index, constant(step) if isinstance(step, int) else step)
        for phi, value in zip((index, *values), (following, *new)):
            phi.add_incoming(value, self.block)
        self.branch(head)
        self.position_at_end(after)
        return values

    def c_function(self, name: str, type_, *arguments):
        """Calls a function of C's, such as `malloc`."""
        kind = ir.FunctionType(type_, [argument.type for argument in arguments])
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return self.call(function, arguments)

    def least(self, a, b):
        """The smaller of two integers."""
        return self.select(self.icmp_signed("<", a, b), a, b)

    def most(self, a, b):
        """The larger of two integers."""
        return self.select(self.icmp_signed(">", a, b), a, b)

    def element(self, pointer, index, type_=FLOAT):
        """Address of an element of an array."""
        address = self.gep(pointer, [index], source_etype=type_)
        address.type = POINTER  # llvmlite would have it typed, and refuse to store a vector there
        return address

    def field(self, pointer, offset: int, type_=POINTER):
        """Loads the value at a byte offset from a pointer."""
        return self.load(self.element(pointer, constant(offset), BYTE), typ=type_)

    def floats(self, pointer, lanes: int, dtype: str = "float32"):
        """Loads `lanes` elements of a type of `ELEMENTS` as float32, which holds each exactly; one: a scalar."""
        type_ = ELEMENTS[dtype]
        loaded = self.load(pointer, typ=_vector(type_, lanes), align=BYTES[dtype])
        integers, floats = _vector(INT, lanes), _vector(FLOAT, lanes)
        if dtype == "int8":
            return self.sitofp(self.sext(loaded, integers), floats)
        if dtype == "bfloat16":  # the upper half of a float32
            sixteen = vector([16] * lanes, INT) if lanes > 1 else ir.Constant(INT, 16)
            return self.bitcast(self.shl(self.zext(loaded, integers), sixteen), floats)
        if dtype == "float16":
            return self.fpext(loaded, floats)
        return loaded

    def intrinsic(self, name: str, type_, *arguments):
        """LLVM's own function of that name for vectors or scalars of float32."""
        of = arguments[0].type
        full = f"llvm.{name}.{f'v{of.count}' if isinstance(of, ir.VectorType) else ''}f32"
        kind = ir.FunctionType(type_, [argument.type for argument in arguments])
        function = self.module.globals.get(full) or ir.Function(self.module, kind, full)
        return self.call(function, arguments)

    def multiply_add(self, a, b, c):
        """`a * b + c`, rounded once."""
        return self.intrinsic("fma", c.type, a, b, c)

    def repeated(self, scalar, lanes: int):
        """A vector that holds a scalar in every lane."""
        empty = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        first = self.insert_element(empty, scalar, ir.Constant(INT, 0))
        return self.shuffle_vector(first, first, vector([0] * lanes, INT))

    def exponential(self, x):
        """e to the power of each lane of `x <= 0`, to about one unit in the last place (Cephes' polynomial).

        The lanes below -87 are as those at -87, 1e-38.
        """
        lanes = x.type.count

        def number(value: float):
            return vector([value] * lanes)

        x = self.intrinsic("maxnum", x.type, x, number(-87.0))
        turns = self.intrinsic("rint", x.type, self.fmul(x, number(1.4426950408889634)))
        rest = self.multiply_add(turns, number(-0.693359375), x)
        rest = self.multiply_add(turns, number(2.12194440e-4), rest)
        series = number(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            series = self.multiply_add(series, rest, number(factor))
        value = self.fadd(self.multiply_add(series, self.fmul(rest, rest), rest), number(1.0))
        integers = ir.VectorType(INT, lanes)
        power = self.shl(self.fptosi(turns, integers), vector([23] * lanes, INT))
        return self.bitcast(self.add(self.bitcast(value, integers), power), x.type)

    def ask_ahead(self, pointer, size: int, ahead: int = AHEAD) -> None:
        """Prefetches the bytes `ahead` of the `size` bytes that are read now, into a core's second cache."""
        name, kind = "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [POINTER, INT, INT, INT])
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        read, second_cache, data = (ir.Constant(INT, value) for value in (0, 2, 1))
        for offset in range(ahead, ahead + size, CACHE_LINE):
            self.call(function, [self.element(pointer, constant(offset), BYTE), read, second_cache, data])

    def sums(self, vectors: Sequence) -> list:
        """The sum over the lanes of each vector, many at once.

        Halves are added until one number is left, in an order that does not depend on the other vectors.

        Returns:
          Vectors whose lanes are the sums, in order; those of the last one may be more than there are sums.
        """
        lanes = vectors[0].type.count
        if len(vectors) > lanes:
            return self.sums(vectors[:lanes]) + self.sums(vectors[lanes:])
        level, size = [(vector, 1) for vector in vectors], lanes
        while size > 1:
            level = [self._halved(level[at : at + 2], lanes, size) for at in range(0, len(level), 2)]
            size //= 2
        return [level[0][0]]

    def _halved(self, pair: list, lanes: int, size: int) -> tuple:
        """One vector of the sums of halves of the blocks of `size` lanes of one or two vectors, and how many there are.

        Args:
          pair: vectors, and the blocks of each.
        """
        starts = [which * lanes + block * size for which, (_, blocks) in enumerate(pair) for block in range(blocks)]

        def half(begin: int):
            chosen = [start + begin + lane for start in starts for lane in range(size // 2)]
            chosen += [0] * (lanes - len(chosen))
            return self.shuffle_vector(pair[0][0], pair[-1][0], vector(chosen, INT))

        return self.fadd(half(0), half(size // 2)), len(starts)

    def transposed(self, vectors: Sequence) -> list:
        """As many vectors as each has lanes: lane i of vector j as lane j of vector i."""
        lanes, vectors = len(vectors), list(vectors)
        size = lanes // 2
        while size:  # blocks of that size change places across the diagonal
            for upper in (at for at in range(lanes) if not at & size):
                pair = vectors[upper], vectors[upper + size]
                low = [lane if not lane & size else lanes + lane - size for lane in range(lanes)]
                high = [lane + size if not lane & size else lanes + lane for lane in range(lanes)]
                swapped = (self.shuffle_vector(*pair, vector(lanes_, INT)) for lanes_ in (low, high))
                vectors[upper], vectors[upper + size] = swapped
            size //= 2
        return vectors

    def lane(self, vector_, index: int):
        """One number of a vector."""
        return self.extract_element(vector_, ir.Constant(INT, index))

    def part(self, vector_, begin: int, count: int):
        """Some neighbouring lanes of a vector."""
        return self.shuffle_vector(vector_, vector_, vector(range(begin, begin + count), INT))


def internal_function(
    module: ir.Module, name: str, arguments: Sequence[ir.Type], *, inline: bool = False
) -> tuple[ir.Function, Emitter]:
    """A function without a result that other functions of a module call, and the emitter of its body."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), list(arguments)), name)
    function.linkage = "internal"
    if not inline:
        function.attributes.add("noinline")
    return function, Emitter(function.append_basic_block())


# Byte offsets in the structures of XLA's `ffi/api/c_api.h`, and the version of that interface whose layout this is.
FFI_MAJOR = 0
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGUMENTS, FRAME_RESULTS = 8, 16, 24, 72, 112
API_MINOR, API_DESTROY_ERROR, API_SCHEDULE, API_THREADS = 36, 64, 136, 144
EXTENSION_TYPE, EXTENSION_METADATA, METADATA_MAJOR, METADATA_MINOR = 8, 24, 24, 28
METADATA = 1
"""Type of the extension by which XLA asks which version a handler speaks."""
BUFFER_DATA, BUFFER_DIMENSIONS = 24, 40


class Array:
    """An argument or a result of a call."""

    def __init__(self, emitter: Emitter, buffer: ir.Value):
        # Read where the array is first named, so that all of its uses come later.
        self.emitter = emitter
        self.data = emitter.field(buffer, BUFFER_DATA)
        self.sizes = emitter.field(buffer, BUFFER_DIMENSIONS)

    def size(self, axis: int) -> ir.Value:
        """The length of an axis."""
        return self.emitter.field(self.sizes, axis * 8, LONG)

    def integer(self) -> ir.Value:
        """The one number of an int32 array, widened."""
        return self.emitter.sext(self.emitter.load(self.data, typ=INT), LONG)


@dataclasses.dataclass(frozen=True)
class Call:
    """The call frame that XLA hands to a handler."""

    emitter: Emitter
    frame: ir.Value

    def input(self, index: int) -> Array:
        """An argument."""
        return Array(self.emitter, self.emitter.field(self.emitter.field(self.frame, FRAME_ARGUMENTS), index * 8))

    def output(self, index: int = 0) -> Array:
        """A result."""
        return Array(self.emitter, self.emitter.field(self.emitter.field(self.frame, FRAME_RESULTS), index * 8))

    def structure(self, *values) -> ir.Value:
        """Makes the argument of one of XLA's functions: a structure with its size and no extension."""
        values = [constant(8 * (2 + len(values))), NULL, *values]
        place = self.emitter.alloca(LONG, constant(len(values)))
        for index, value in enumerate(values):
            self.emitter.store(value, self.emitter.element(place, constant(index * 8), BYTE))
        return place

    def ask(self, function: int, structure: ir.Value) -> ir.Value:
        """Calls one of XLA's functions; whether it failed."""
        emitter, kind = self.emitter, ir.FunctionType(POINTER, [POINTER]).as_pointer()
        functions = emitter.field(self.frame, FRAME_API)
        error = emitter.call(emitter.field(functions, function, kind), [structure])
        failed = emitter.icmp_unsigned("!=", error, NULL)
        with emitter.if_then(failed, likely=False):
            kind = ir.FunctionType(ir.VoidType(), [POINTER]).as_pointer()
            emitter.call(emitter.field(functions, API_DESTROY_ERROR, kind), [self.structure(error)])
        return failed

    def threads(self) -> ir.Value:
        """The number of threads that XLA computes with."""
        count = self.emitter.alloca(LONG)
        self.emitter.store(constant(1), count)
        self.ask(API_THREADS, self.structure(self.context, count))
        return self.emitter.load(count, typ=LONG)

    @property
    def context(self) -> ir.Value:
        """The context that XLA's functions take."""
        return self.emitter.field(self.frame, FRAME_CONTEXT)


def handler(module: ir.Module, body: Callable[[Call], None]) -> None:
    """Emits a function that XLA can call, named like its module."""
    function = ir.Function(module, ir.FunctionType(POINTER, [POINTER]), module.name)
    emitter = Emitter(function.append_basic_block())
    (frame,) = function.args
    extension = emitter.field(frame, FRAME_EXTENSION)
    with emitter.if_then(emitter.icmp_unsigned("!=", extension, NULL)):
        kind = emitter.field(extension, EXTENSION_TYPE, INT)
        with emitter.if_then(emitter.icmp_signed("==", kind, ir.Constant(INT, METADATA))):
            # When it is registered, XLA asks which version it speaks: minor versions move nothing that is read here.
            metadata = emitter.field(extension, EXTENSION_METADATA)
            minor = emitter.field(emitter.field(frame, FRAME_API), API_MINOR, INT)
            emitter.store(ir.Constant(INT, FFI_MAJOR), emitter.element(metadata, constant(METADATA_MAJOR), BYTE))
            emitter.store(minor, emitter.element(metadata, constant(METADATA_MINOR), BYTE))
            emitter.ret(NULL)
    body(Call(emitter, frame))
    emitter.ret(NULL)


def _machine() -> llvm.TargetMachine:
    """A new one: the engine that it is given to owns it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = _features().flatten()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3
    )


_engines: list[llvm.ExecutionEngine] = []
"""They own the compiled code, which XLA's programs call until the process ends."""


def _register(module: ir.Module) -> None:
    """Compiles a module for this machine and makes its handler known to JAX as an FFI target, all of one name."""
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    machine = _machine()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    _engines.append(engine)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    address = engine.get_function_address(module.name)
    jax.ffi.register_ffi_target(module.name, capsule(address, None, None), platform="cpu")


_lock = threading.Lock()


def registered(make: Callable[..., ir.Module], *arguments) -> str:
    """Name of the FFI target that a module is, compiled once."""
    with _lock:
        return _compiled(TARGETS, make, *arguments)


@functools.cache
def _compiled(names: str, make: Callable[..., ir.Module], *arguments) -> str:
    module = make(*arguments)
    _register(module)
    return module.name


def call(name: str, *shapes: jax.ShapeDtypeStruct) -> Callable[..., list[jax.Array]]:
    """A call of an FFI target, of which `jax.vmap` makes one call after the other."""
    return jax.ffi.ffi_call(name, list(shapes), vmap_method="sequential")
