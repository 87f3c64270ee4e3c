"""Compiles for a Hopper GPU that is not there: XLA, Mosaic GPU and ptxas, down to machine code.

Run as a script, in a process of its own, with `attention` and cases as JSON, or `loop` and a method. The output has
ptxas' report on every Mosaic GPU kernel, and a line of JSON for each program.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

# What XLA must know about the device (an H100 SXM), as it would find it out from the driver.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def attention(device, cases: list[dict]) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from failfast_jax.kernels import gpu_attention
    from failfast_jax.kernels.attention_window import Window

    def attend(q, k, v, start, until, live):
        return gpu_attention.attend(q, (k, v), Window(None, None, start, live, until=until, block_size=32))

    for case in cases:
        (batch, width, heads, kv_heads, capacity, head_dim), dtype = case["shape"], case["dtype"]
        cache = (batch, kv_heads, capacity, head_dim), dtype
        shapes = ((batch, width, heads, head_dim), dtype), cache, cache, *[((batch,), "int32")] * 2, ((), "int32")
        place = SingleDeviceSharding(device)
        arguments = [jax.ShapeDtypeStruct(shape, jnp.dtype(kind), sharding=place) for shape, kind in shapes]
        text = jax.jit(attend).lower(*arguments).compile().as_text()
        entry = text[text.index("\nENTRY ") :]
        kernels = re.findall(r'custom_call_target="([^"]*)"', entry)
        copied = [line for line in entry.splitlines() if " copy(" in line and str(capacity) in line]
        print(json.dumps({"device": device.device_kind, "kernels": kernels, "cache_copies": len(copied)}), flush=True)


def launches(dump: Path) -> dict:
    """What the host launches of the compiled loop, from XLA's list of thunks, in which what is deeper is further right.

    Returns:
      `round`: the kinds of what a round consists of, in order (`kCommandBuffer`: a CUDA graph; loops and branches are
      decided by the host). `kernels`, `in_graphs`: how many calls of Mosaic GPU kernels there are, and how many of them
      are part of a graph.
    """
    [path] = dump.glob("*jit_generate.thunk_sequence_after_thunk_passes.txt")
    above: list[tuple[int, str]] = []
    actual, round_ = [], []
    for line in path.read_text().splitlines():
        if not (thunk := re.match(r"( *)\d+: (k\w+)", line)):
            continue
        depth, kind = len(thunk[1]), thunk[2]
        above = [one for one in above if one[0] < depth]
        parents = [name for _, name in above]
        actual.append((kind, "kCommandBuffer" in parents))
        # The first loop's body has its conditions beside it, of which no graph is made.
        if parents == ["kWhile"] and kind != "kCustomKernel":
            round_.append(kind)
        above.append((depth, kind))
    kernels = [in_graph for kind, in_graph in actual if kind == "kCustomCall"]
    return {"round": round_, "kernels": len(kernels), "in_graphs": sum(kernels)}


def main(what: str, argument: str) -> None:
    from jax.experimental import topologies
    from tpu_compile import check

    topology = topologies.get_topology_desc("h100", platform="cuda", topology="1x1x1", target_config=H100)
    if what == "attention":
        attention(topology.devices[0], json.loads(argument))
    else:
        check(topology.devices[0], argument)
        print(json.dumps(launches(Path(DUMP.name))))


if __name__ == "__main__":
    DUMP = tempfile.TemporaryDirectory()
    flags = f"--xla_dump_to={DUMP.name} --xla_dump_hlo_module_re=jit_generate"
    os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1", "XLA_FLAGS": flags}
    main(*sys.argv[1:])
