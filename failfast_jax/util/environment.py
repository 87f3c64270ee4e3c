"""What the environment asks of JAX: platforms that are not there and flags that XLA does not know, each in one line."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax

from failfast_jax.errors import OptionError
from failfast_jax.util import progress

GOOGLE = "0x1ae0"
"""Vendor of TPU chips on the PCI bus."""
EXTRAS = {"cuda": ("cuda", "an NVIDIA GPU"), "gpu": ("cuda", "an NVIDIA GPU"), "tpu": ("tpu", "a TPU")}
"""By platform, the extra of this package that installs JAX's plugin for it, and the device."""
CUDA = {"cuda": ("jax-cuda13-plugin", 580), "cuda12": ("jax-cuda12-plugin", 525)}
"""By extra of this package: JAX's plugin, and the oldest of NVIDIA's drivers that it runs with."""
DRIVER = Path("/proc/driver/nvidia/version")
"""Written by NVIDIA's driver, where it is loaded."""
PARSE = """
from jaxlib import xla_client
xla_client.CompileOptions()
"""
"""A program in which jaxlib reads XLA_FLAGS; what it cannot read ends the process."""
PARSE_TPU = """
import libtpu
xla_client.load_pjrt_plugin_dynamically("tpu", libtpu.get_library_path())
xla_client.initialize_pjrt_plugin("tpu")
"""
"""Likewise libtpu, which reads LIBTPU_INIT_ARGS when it is loaded and knows other flags than jaxlib."""
COMPILE_TPU = """
import jax
from jax.experimental import topologies
device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
place = jax.sharding.SingleDeviceSharding(device)
jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "int32", sharding=place)).compile()
"""
"""It reads XLA_FLAGS when it compiles first."""
PARSE_S = 60
"""Seconds after which that program is not waited for."""
REFUSAL = re.compile(
    r"^(?:[EF]\d{4} .*?\]|ERROR:) ((?:Unknown|Couldn't interpret|Could not open) .*?)(?: \(We assumed.*)?$",
    re.MULTILINE,
)


def nvidia_driver() -> tuple[int, ...] | None:
    """Version of the kernel module of NVIDIA's driver, such as `(535, 104, 5)`; None: there is none."""
    try:
        text = DRIVER.read_text()
    except OSError:
        text = _asked_of_nvidia_smi()
    version = re.search(r"\b(\d{3})\.(\d+)(?:\.(\d+))?\b", text)
    return None if version is None else tuple(int(part) for part in version.groups() if part)


def _asked_of_nvidia_smi() -> str:
    """The same where the driver's own file is not to be seen, as under Windows."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PARSE_S, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def cuda_advice() -> str:
    """What to do so that JAX uses an NVIDIA GPU, by the driver; empty: its plugin is there, and fits."""
    driver = nvidia_driver()
    fitting = [extra for extra, (_, oldest) in CUDA.items() if driver is None or driver[0] >= oldest]
    there = [extra for extra, (plugin, _) in CUDA.items() if is_installed(plugin)]
    known = "" if driver is None else f" (its driver is {'.'.join(map(str, driver))})"
    if not fitting:
        return f"update NVIDIA's driver to 580 or later for CUDA 13, 525 for CUDA 12{known}"
    if any(extra in fitting for extra in there):
        return ""
    known = known or ' (driver 580 or later; from 525 on "cuda12" instead of "cuda")'
    plugins = " ".join(CUDA[extra][0] for extra in there)
    remove = f"pip uninstall {plugins} {plugins.replace('plugin', 'pjrt')}, and " if there else ""
    return f"{remove}{_install(fitting[0])}{known}"


def _install(extra: str) -> str:
    return f'pip install "failfast-jax[{extra}]", or -e ".[{extra}]" in a checkout'


def is_installed(package: str) -> bool:
    """True if a package of this name is installed, whatever its version."""
    return any(True for _ in metadata.distributions(name=package))


def has_tpu(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """True if a TPU is on this machine's PCI bus."""
    return any(path.read_text().strip() == GOOGLE for path in devices.glob("*/vendor"))


def check() -> None:
    """Checks what would end the process, or make it write pages, once JAX looks for devices.

    Raises:
      OptionError: flags that XLA or libtpu does not know, or a TPU is asked for and there is none.
    """
    platforms = jax.config.jax_platforms or ""
    tpu = "tpu" in platforms.split(",") or (not platforms and has_tpu())
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", *(["LIBTPU_INIT_ARGS"] if tpu else []))}
    if any(flags.values()):
        check_flags(tuple(flags.items()))
    if not platforms and not tpu and nvidia_driver() and (advice := cuda_advice()):
        progress.warn_once(f"JAX does not use this machine's NVIDIA GPU: {advice}; or set JAX_PLATFORMS=cpu")
    # Where no bus is to be seen, in some containers, libtpu itself finds out.
    if tpu and any(Path("/sys/bus/pci/devices").glob("*")) and not has_tpu():
        raise OptionError(f"JAX_PLATFORMS={platforms}: no TPU is on this machine's PCI bus; {_advice(platforms)}")


@functools.cache
def check_flags(flags: tuple[tuple[str, str], ...]) -> None:
    """Checks the flags of XLA, and those of libtpu if its variable is among them, in a process of their own.

    Args:
      flags: variables of the environment with their values.

    Raises:
      OptionError: a flag that is not known, or a value that is none for it.
    """
    variables = [name for name, value in flags if value]
    program = PARSE
    if len(flags) > 1 and importlib.util.find_spec("libtpu"):
        program += PARSE_TPU + COMPILE_TPU * ("XLA_FLAGS" in variables)
    # Neither asks for metadata of the machine, nor waits for a process that holds the TPU, nor looks for one.
    environment = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    environment |= {"TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost"}
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=PARSE_S, check=False, **options)
    except (OSError, subprocess.SubprocessError):
        return  # then the flags are not at fault
    if done.returncode and (refusal := REFUSAL.search(done.stderr)):
        raise OptionError(f"{' or '.join(variables)}: {refusal[1].rstrip('.')}; correct the variable, or unset it")


def no_device(error: Exception) -> str | None:
    """The line for an error that JAX raised because it has no devices; None for any other error."""
    if not isinstance(error, RuntimeError | AssertionError):
        return None
    if "Unable to initialize backend" not in str(error):  # JAX says it once only where another platform is there
        try:
            jax.devices()
            return None
        except (RuntimeError, AssertionError) as refusal:
            error = refusal
    reason = (str(error).strip() or "no such device is visible").splitlines()[0]
    reason = re.sub(r" \((?:set JAX_PLATFORMS|you may need)[^()]*\)$", "", reason).rstrip(".")
    variable, platforms = "JAX_PLATFORMS", jax.config.jax_platforms
    if "nknown backend" in reason:
        variable, platforms = "JAX_PLATFORM_NAME", os.environ.get("JAX_PLATFORM_NAME")
    if platforms:
        return f"{variable}={platforms}: JAX cannot use it ({reason}); {_advice(platforms, variable)}"
    return f"JAX cannot use this machine's devices ({reason}); set JAX_PLATFORMS=cpu to go on without them"


def _advice(platforms: str, variable: str = "JAX_PLATFORMS") -> str:
    unset = f"unset {variable} to run on the devices of this machine"
    if (plain := platforms.lower().replace(" ", "").strip(",")) != platforms and plain:
        return f"names are in lower case and without spaces: {variable}={plain}; or {unset}"
    for name, (extra, device) in EXTRAS.items():
        if name in platforms.lower().split(","):
            install = _install(extra) if extra == "tpu" else cuda_advice() or "see what JAX says above"
            return f"on a machine with {device} {install}; else {unset}"
    return f"install the plugin of that platform for JAX, or {unset}"
