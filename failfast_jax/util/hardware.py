"""The machine that a process runs on, and the numbers that depend on the kind of device."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import logging
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from failfast_jax.errors import DeviceMemoryError, OptionError
from failfast_jax.util.values import asset

logger = logging.getLogger("failfast_jax")

PCI = Path("/sys/bus/pci/devices")
VENDORS = {"tpu": "0x1ae0", "gpu": "0x10de"}
"""Vendors of JAX's platforms on the PCI bus: Google and NVIDIA."""
INSTALL = {
    "tpu": 'pip install "failfast-jax[tpu]", or -e ".[tpu]" in a checkout',
    "gpu": 'pip install "failfast-jax[cuda]", or -e ".[cuda]" in a checkout (driver 580 or later; "cuda12": 525)',
}


def machine() -> dict[str, Any]:
    """Describes the machine on which figures are measured."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line for line in info.read_text().splitlines() if line.startswith("model name"))
        model = next(lines, model).split(":")[-1].strip()
    return {
        "device": str(jax.devices()[0].device_kind),
        "processor": model,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def free_memory() -> int:
    """Returns the free bytes of the first device."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    info = Path("/proc/meminfo")
    if info.exists():
        line = next((line for line in info.read_text().splitlines() if line.startswith("MemAvailable:")), None)
        if line is not None:
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def release_memory() -> None:
    """Gives memory that was freed back to the system: of XLA's work on a large program, glibc keeps hundreds of MB."""
    with contextlib.suppress(AttributeError, OSError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


def bytes_on_a_device(tree: Any) -> int:
    """Returns the bytes of a pytree of arrays or shapes on each device that it is spread over."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    places = [getattr(leaf, "sharding", None) for leaf in leaves]
    shapes = [leaf.shape if place is None else place.shard_shape(leaf.shape) for leaf, place in zip(leaves, places)]
    return sum(array_bytes(jax.ShapeDtypeStruct(shape, leaf.dtype)) for shape, leaf in zip(shapes, leaves))


def array_bytes(array: Any) -> int:
    """Returns the bytes of an array or a shape; numbers of 4 bits are stored in pairs."""
    return -(-array.size * jax.dtypes.itemsize_bits(array.dtype) // 8)


@contextlib.contextmanager
def explain_out_of_memory(
    doing: str,
    needs: Callable[[], Mapping[str, int]] = dict,
    layouts: Callable[[int], Mapping[str, int]] = lambda needed: {},
) -> Iterator[None]:
    """Inside, XLA's out-of-memory error is replaced by one that names the parts in memory and the remedies.

    Args:
      needs: returns bytes on one device, by part.
      layouts: returns bytes of all parts on one device, by a flag that makes them fewer, given those of `needs`.

    Raises:
      DeviceMemoryError: XLA ran out of memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        device = jax.devices()[0]
        size = (device.memory_stats() or {}).get("bytes_limit")
        limit = size or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        needed = needs()
        parts = ", ".join(f"{name} {number / 1e9:.2f} GB" for name, number in needed.items())
        smaller = layouts(sum(needed.values())).items()
        fitting = [f"{flag} ({number / 1e9:.2f} GB)" for flag, number in smaller if number < limit]
        choice = f"choose {' or '.join(fitting)}, " if fitting else ""
        raise DeviceMemoryError(
            f"{doing}: does not fit the memory of a {device.device_kind}{f', {size / 1e9:.1f} GB' if size else ''}"
            f"{f' ({parts}, and what programs need besides)' if parts else ''}. Lower --max-seq-len, --max-new-tokens "
            f"or the batch, {choice}or spread the models over more devices with --tensor-parallel. "
            f"XLA says: {str(error).strip().splitlines()[0][:300]}"
        ) from error


def bandwidth(nbytes: int, repeats: int = 5, turns: int = 10) -> dict[str, float]:
    """Measures bytes per second: `copy` reads an array and writes it back in place, `read` sums it.

    Takes the best of `repeats` measurements of `turns` calls each.
    """
    array = jnp.ones((nbytes // 4 // 1024, 1024), jnp.float32)
    rewrite = jax.jit(lambda x: (1 - x, ()), donate_argnums=0)
    total = jax.jit(lambda x: x.sum(axis=1))
    out = {}
    for name, program, moved in (("copy", rewrite, 2 * nbytes), ("read", lambda x: (x, total(x)), nbytes)):
        array, _ = jax.block_until_ready(program(array))
        best = np.inf
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(turns):
                array, result = program(array)
            jax.block_until_ready((array, result))
            best = min(best, (time.perf_counter() - start) / turns)
        out[name] = moved / best
    return out


def is_present(kind: str, bus: Path = PCI) -> bool:
    """True if a device of the kind `tpu` or `gpu` is on this machine's PCI bus."""
    return any(path.read_text().strip() == VENDORS[kind] for path in bus.glob("*/vendor"))


def check_platforms() -> None:
    """Checks JAX_PLATFORMS before JAX looks for devices.

    Raises:
      OptionError: JAX_PLATFORMS names a TPU and there is none.
    """
    platforms = jax.config.jax_platforms or ""
    # In containers without a visible bus libtpu itself looks for the chips.
    if "tpu" in platforms.split(",") and any(PCI.glob("*")) and not is_present("tpu"):
        raise OptionError(f"JAX_PLATFORMS={platforms}: no TPU is on this machine's PCI bus; {_advice(platforms)}")


def no_device(error: Exception) -> str | None:
    """Returns the message for an error that JAX raised because it has no devices; None for any other error."""
    if not isinstance(error, RuntimeError | AssertionError):
        return None
    if "Unable to initialize backend" not in str(error):  # JAX repeats its message only if no platform works
        try:
            jax.devices()
            return None
        except (RuntimeError, AssertionError) as refusal:
            error = refusal
    reason = (str(error).strip() or "no such device is visible").splitlines()[0]
    reason = re.sub(r" \((?:set JAX_PLATFORMS|you may need)[^()]*\)$", "", reason).rstrip(".")
    if platforms := jax.config.jax_platforms:
        return f"JAX_PLATFORMS={platforms}: JAX cannot use it ({reason}); {_advice(platforms)}"
    return f"JAX cannot use this machine's devices ({reason}); set JAX_PLATFORMS=cpu to go on without them"


def _advice(platforms: str) -> str:
    for name, kind in {"cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}.items():
        if name in platforms.lower().split(","):
            return f"on a machine with a {kind.upper()} {INSTALL[kind]}; else unset JAX_PLATFORMS"
    return "unset JAX_PLATFORMS to run on the devices of this machine"


# -- TPUs, as the compiler sees them -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device as the compiler sees it: a chip, or one of the two cores of a TPU7x chip. Public specifications."""

    kind: str
    hbm_gb: float
    bandwidth: float
    """Bytes per second."""
    clock: float
    """Cycles per second: peak operations over those of the matrix units per cycle."""
    ici: float
    """Bytes per second between chips, all links together."""
    links: int
    streaming: float
    """Share of the bandwidth at which the compiler expects to stream weights: read from its estimates of large matrix
    products (TPU7x: assumed to be v5p's)."""
    compiler_options: dict[str, str | bool] = dataclasses.field(default_factory=dict, hash=False)
    """Options of XLA for every program."""
    init_args: str = ""
    """Flags of libtpu, read when it is loaded."""
    pci_device: str = ""


CHIPS = {kind: Chip(kind, **fields) for kind, fields in asset("chips.toml").items()}


def tell_libtpu(bus: Path = PCI) -> None:
    """Adds the arguments that chips on this machine's bus need to LIBTPU_INIT_ARGS, unless the user has set them.

    Commands do so by themselves. Other programs on a TPU7x are slower without it. No effect once JAX has devices.

    Args:
      bus: folder of its devices.
    """
    # An argument that another chip's libtpu does not know would end the process.
    devices = {path.read_text().strip() for path in bus.glob("*/device")}
    for chip in CHIPS.values():
        arguments = os.environ.get("LIBTPU_INIT_ARGS", "")
        if chip.pci_device in devices and chip.init_args.split("=")[0] not in arguments:
            os.environ["LIBTPU_INIT_ARGS"] = f"{arguments} {chip.init_args}".strip()


def compiler_options(device: Any) -> dict[str, str | bool]:
    """Returns options of `jax.stages.Lowered.compile` for a device: those of its chip that this version of the compiler
    knows; the others are logged. For a device that is not present, and only compiled for: all options."""
    chip = CHIPS.get(device.device_kind)
    if chip is None:
        return {}
    if device not in jax.devices():
        return dict(chip.compiler_options)
    with _asking:
        return dict(_known(chip.kind, tuple(chip.compiler_options.items())))


_asking = threading.Lock()


@functools.cache
def _known(kind: str, options: tuple[tuple[str, str | bool], ...]) -> tuple[tuple[str, str | bool], ...]:
    trial = jax.jit(lambda: jnp.int32(0)).lower()
    try:
        trial.compile(compiler_options=dict(options))
        return options
    except jax.errors.JaxRuntimeError as error:
        unknown = re.search(r"No such compile option: '(\w+)'", str(error))
        if unknown is None:
            raise
    name = unknown[1]
    logger.warning("%s: this XLA does not know the option %s; programs may be slower for it", kind, name)
    return _known(kind, tuple(option for option in options if option[0] != name))


HOP_S = 1e-6
"""Assumed latency of a message between neighbours; the compiler has no figure."""


def allreduce_s(chip: Chip, devices: int, size: int) -> float:
    """Returns the seconds of an all-reduce of `size` bytes around one ring over two of a chip's links, as compiled
    programs say (`StrategyRing`, one color). The links and the latency are assumed, not estimated by the compiler."""
    if devices == 1:
        return 0.0
    return 2 * (devices - 1) / devices * size / (2 * chip.ici / chip.links) + 2 * (devices // 2) * HOP_S
