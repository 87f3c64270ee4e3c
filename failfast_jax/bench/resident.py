"""Resident memory of this process: what it has now, not the most that it ever had."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import numpy as np

EVERY_S = 0.25
WARM = 0.1
"""Share of the time after which memory may not grow any more; the next as long is compared with the last."""


def resident_mb() -> float | None:
    """In MB; None where neither /proc nor psutil tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        pass
    try:
        import psutil
    except ImportError:
        return None
    return psutil.Process().memory_info().rss / 1e6


class Resident:
    """Samples over a time."""

    def __init__(self) -> None:
        self._samples: list[float] = []

    def sample(self) -> None:
        """Takes one."""
        if (found := resident_mb()) is not None:
            self._samples.append(found)

    def watch(self, process: subprocess.Popen) -> None:
        """Takes samples, in a thread of its own, until another process has ended."""

        def work() -> None:
            while process.poll() is None:
                self.sample()
                time.sleep(EVERY_S)

        threading.Thread(target=work, name="resident", daemon=True).start()

    @property
    def last(self) -> float | None:
        """The newest."""
        return self._samples[-1] if self._samples else None

    @property
    def grown_percent(self) -> float | None:
        """From behind the first tenth of the time to its last tenth, medians."""
        if not self._samples:
            return None
        count = max(int(WARM * len(self._samples)), 1)
        early, late = self._samples[count : 2 * count] or self._samples[:1], self._samples[-count:]
        return 100 * float(np.median(late) / np.median(early) - 1)
