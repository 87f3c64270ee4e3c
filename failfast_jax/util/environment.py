"""Platforms and flags that the environment asks of JAX: missing and unknown ones are refused in one line."""

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
"""By extra of this package: JAX's plugin, and the oldest NVIDIA driver that it runs with."""
DRIVER = Path("/proc/driver/nvidia/version")
"""File of NVIDIA's driver, if it is loaded."""
PARSE = """
from jaxlib import xla_client
xla_client.CompileOptions()
"""
"""A program in which jaxlib reads XLA_FLAGS; an unknown flag ends the process."""
PARSE_TPU = """
import libtpu
xla_client.load_pjrt_plugin_dynamically("tpu", libtpu.get_library_path())
xla_client.initialize_pjrt_plugin("tpu")
"""
"""A program in which libtpu is loaded and reads LIBTPU_INIT_ARGS; its flags are not those of jaxlib."""
COMPILE_TPU = """
import jax
from jax.experimental import topologies
device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
place = jax.sharding.SingleDeviceSharding(device)
jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "int32", sharding=place)).compile()
"""
"""A program in which libtpu compiles and so reads XLA_FLAGS."""
PARSE_S = 60
"""Seconds to wait for such a program."""
REFUSAL = re.compile(
    r"^(?:[EF]\d{4} .*?\]|ERROR:) ((?:Unknown|Couldn't interpret|Could not open) .*?)(?: \(We assumed.*)?$",
    re.MULTILINE,
)


def nvidia_driver() -> tuple[int, ...] | None:
    """Returns the version of NVIDIA's driver, such as `(535, 104, 5)`; None without a driver."""
    try:
        text = DRIVER.read_text()
    except OSError:
        text = _ask_nvidia_smi()
    version = re.search(r"\b(\d{3})\.(\d+)(?:\.(\d+))?\b", text)
    return None if version is None else tuple(int(part) for part in version.groups() if part)


def _ask_nvidia_smi() -> str:
    """Asks for the version where the driver's file is not visible, as under Windows."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PARSE_S, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def cuda_advice() -> str:
    """Returns the command after which JAX uses an NVIDIA GPU with this driver; empty if its plugin fits already."""
    driver = nvidia_driver()
    fitting = [extra for extra, (_, oldest) in CUDA.items() if driver is None or driver[0] >= oldest]
    installed = [extra for extra, (plugin, _) in CUDA.items() if is_installed(plugin)]
    known = "" if driver is None else f" (its driver is {'.'.join(map(str, driver))})"
    if not fitting:
        return f"update NVIDIA's driver to 580 or later for CUDA 13, 525 for CUDA 12{known}"
    if any(extra in fitting for extra in installed):
        return ""
    known = known or ' (driver 580 or later; from 525 on "cuda12" instead of "cuda")'
    plugins = " ".join(CUDA[extra][0] for extra in installed)
    remove = f"pip uninstall {plugins} {plugins.replace('plugin', 'pjrt')}, and " if installed else ""
    return f"{remove}{_install(fitting[0])}{known}"


def _install(extra: str) -> str:
    return f'pip install "failfast-jax[{extra}]", or -e ".[{extra}]" in a checkout'


def is_installed(package: str) -> bool:
    """True if a package of this name is installed in any version."""
    return any(True for _ in metadata.distributions(name=package))


def has_tpu(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """True if a TPU is on this machine's PCI bus."""
    return any(path.read_text().strip() == GOOGLE for path in devices.glob("*/vendor"))


def check() -> None:
    """Checks the environment for settings that would end the process, or print pages, once JAX looks for devices.

    Raises:
      OptionError: XLA or libtpu does not know a flag, or JAX_PLATFORMS names a TPU and there is none.
    """
    platforms = jax.config.jax_platforms or ""
    tpu = "tpu" in platforms.split(",") or (not platforms and has_tpu())
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", *(["LIBTPU_INIT_ARGS"] if tpu else []))}
    if any(flags.values()):
        check_flags(tuple(flags.items()))
    if not platforms and not tpu and nvidia_driver() and (advice := cuda_advice()):
        progress.warn_once(f"JAX does not use this machine's NVIDIA GPU: {advice}; or set JAX_PLATFORMS=cpu")
    # In containers without a visible bus libtpu itself looks for the chips.
    if tpu and any(Path("/sys/bus/pci/devices").glob("*")) and not has_tpu():
        raise OptionError(f"JAX_PLATFORMS={platforms}: no TPU is on this machine's PCI bus; {_advice(platforms)}")


@functools.cache
def check_flags(flags: tuple[tuple[str, str], ...]) -> None:
    """Checks the flags of XLA, and of libtpu if its variable is among them, in a separate process.

    Args:
      flags: variables of the environment with their values.

    Raises:
      OptionError: a flag is unknown, or has an invalid value.
    """
    variables = [name for name, value in flags if value]
    program = PARSE
    if len(flags) > 1 and importlib.util.find_spec("libtpu"):
        program += PARSE_TPU + COMPILE_TPU * ("XLA_FLAGS" in variables)
    # The process asks for no metadata of the machine, and neither looks for a TPU nor waits for one.
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
