"""Platforms that the environment asks of JAX: missing ones are refused in one line."""

from __future__ import annotations

import os
import re
import subprocess
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


def nvidia_driver() -> tuple[int, ...] | None:
    """Returns the version of NVIDIA's driver, such as `(535, 104, 5)`; None without a driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:  # the file is not visible under Windows
        text = DRIVER.read_text() if DRIVER.exists() else subprocess.check_output(command, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"\b(\d{3})\.(\d+)(?:\.(\d+))?\b", text)
    return None if version is None else tuple(int(part) for part in version.groups() if part)


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
    """Checks the environment before JAX looks for devices, and warns of a GPU that JAX does not use.

    Raises:
      OptionError: JAX_PLATFORMS names a TPU and there is none.
    """
    platforms = jax.config.jax_platforms or ""
    is_tpu = "tpu" in platforms.split(",") or (not platforms and has_tpu())
    if not platforms and not is_tpu and nvidia_driver() and (advice := cuda_advice()):
        progress.warn_once(f"JAX does not use this machine's NVIDIA GPU: {advice}; or set JAX_PLATFORMS=cpu")
    # In containers without a visible bus libtpu itself looks for the chips.
    if is_tpu and any(Path("/sys/bus/pci/devices").glob("*")) and not has_tpu():
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
