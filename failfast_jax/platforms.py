"""The machine that a process runs on, and the numbers that depend on the kind of device."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import jax


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
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
        "date": time.strftime("%Y-%m-%d"),
    }
