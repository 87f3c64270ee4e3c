"""What every command does around its work: logging, exit status, errors in one line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

USAGE_ERROR, INTERRUPTED = 2, 130


def run(work: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Runs a command's work and returns its exit status.

    Input that cannot be served (`ValueError`, `OSError`) becomes one line on stderr and status 2; Ctrl-C becomes 130.

    Args:
      work: returns a status; None is 0.
      interrupted: what to say at Ctrl-C.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        return work() or 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED
