"""Settings of JAX for the tests: on a CPU, XLA compiles in a quarter of the time; elsewhere products are precise."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import jax

from failfast_jax.util import hardware

QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",  # the older code generator, which later versions do not have
    "--xla_cpu_parallel_codegen_split_count=1",  # a program in one piece: there are as many workers as cores
)

PARSE = "from jaxlib import xla_client\nxla_client.CompileOptions()\n"
"""A program in which jaxlib reads XLA_FLAGS; an unknown flag ends the process."""


def known(flags: tuple[str, ...] = QUICK) -> tuple[str, ...]:
    """Flags that the installed jaxlib knows, tried in a process of their own, which an unknown one ends."""
    variables = os.environ | {"XLA_FLAGS": " ".join(flags)}
    done = subprocess.run([sys.executable, "-c", PARSE], env=variables, capture_output=True, text=True)
    if done.returncode == 0:
        return flags
    refused = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", done.stderr)
    unknown = re.findall(r"--[\w=]+", refused[1]) if refused else flags
    assert unknown, done.stderr
    return known(tuple(flag for flag in flags if flag not in unknown))


def suit_the_platform(quick: bool) -> None:
    """Sets them for this process and those that it starts with `os.environ`.

    On a TPU or a GPU JAX rounds the factors of float32 products to bfloat16 or TF32 by default: results are 1e-3 off,
    and the tests allow 1e-5. On a CPU jaxlib reads XLA_FLAGS at once; then they go from this process's own variables,
    as a libtpu or a GPU plugin that is loaded later ends the process at flags that it does not know.

    Args:
      quick: True for programs that compile quickly; else they are those of users.
    """
    platforms = jax.config.jax_platforms or ""
    if platforms != "cpu" and (platforms or hardware.is_present("tpu") or hardware.is_present("gpu")):
        os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
        jax.config.update("jax_default_matmul_precision", os.environ["JAX_DEFAULT_MATMUL_PRECISION"])
    elif quick:
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *known()]).strip()
        exec(PARSE)
        os.unsetenv("XLA_FLAGS")
