"""Runs the README's first command as on a fresh machine: a clone, a new environment, no compiled programs.

    python tests/first_answer.py

Prints the seconds until the answer was there, and the answer. Packages come from where pip finds them, and its cache is
used.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def quickstart() -> list[str]:
    """The README's commands for a fresh machine."""
    block = re.search(r"<!-- quickstart -->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert block is not None
    return block[1].splitlines()


def main() -> int:
    """Exit status: the command's."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        environment = os.environ | {"FAILFAST_COMPILE_CACHE": str(Path(folder) / "programs")}
        start = time.perf_counter()
        done = subprocess.run(
            ["bash", "-c", quickstart()[0]], cwd=clone, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        seconds = time.perf_counter() - start
    answer = done.stdout.splitlines()[-1:]
    print(json.dumps({"seconds": round(seconds, 1), "status": done.returncode, "answer": answer}))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
