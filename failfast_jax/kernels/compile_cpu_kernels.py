"""Compiles `cpu_kernels.c` to the LLVM text that the package ships; for developers, after a change of that file.

    pip install ziglang==0.17.1
    python -m failfast_jax.kernels.compile_cpu_kernels

zig's C compiler reads the file and optimises nothing: `cpu_kernels` does that on the user's machine, for its processor.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

HERE = Path(__file__).parent
LANES = (4, 8, 16)
"""Float32 numbers in a vector register: NEON, AVX2, AVX-512."""
FLAGS = ("-O2", "-Xclang", "-disable-llvm-passes", "-ffp-contract=off", "-fno-strict-aliasing", "-g0")
FLAGS += ("-fno-stack-protector", "-fno-sanitize=all", "-target", "x86_64-linux-gnu", "-mcpu=x86_64_v4", "-mavx512vnni")
KEPT_ATTRIBUTES = ("alwaysinline", "noinline")


def portable(text: str) -> str:
    """LLVM text without what names the compiler's machine, or is new in its release."""
    text = re.sub(
        r"^(; ModuleID|source_filename|target |!llvm\.ident|; Function Attrs|; preds).*\n", "", text, flags=re.M
    )
    text = re.sub(r"^.*@llvm\.lifetime\..*\n", "", text, flags=re.M)
    text = re.sub(r" +; preds = .*", "", text)

    def attributes(match: re.Match) -> str:
        kept = [name for name in KEPT_ATTRIBUTES if re.search(rf"\b{name}\b", match[2])]
        return f"attributes {match[1]} = {{ {' '.join([*kept, 'nounwind'])} }}"

    return re.sub(r"^attributes (#\d+) = \{(.*)\}", attributes, text, flags=re.M)


def compiled(lanes: int) -> str:
    """The LLVM text of `cpu_kernels.c` for vectors of `lanes` numbers.

    Raises:
      subprocess.CalledProcessError: the compiler refuses it; its messages are on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "kernels.ll"
        compiler = [sys.executable, "-m", "ziglang", "cc", *FLAGS, f"-DLANES={lanes}", f"-I{jax.ffi.include_dir()}"]
        command = [*compiler, "-S", "-emit-llvm", "cpu_kernels.c", "-o", str(output)]
        subprocess.run(command, cwd=HERE, check=True)
        return portable(output.read_text())


if __name__ == "__main__":
    if importlib.util.find_spec("ziglang") is None:
        sys.exit("error: needs ziglang: pip install ziglang==0.17.1")
    for lanes in LANES:
        (HERE / f"cpu_kernels_{lanes}.ll").write_text(compiled(lanes))
