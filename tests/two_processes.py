"""One of two processes of two devices each that answer together; process 0 prints the answers as JSON.

Run as a script: `two_processes.py HOST:PORT,2,INDEX`, with `wait` to have process 0 wait for process 1.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any

import jax
import numpy as np
from checkpoint_files import GOLDEN
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_models import random_model, tiny_config
from width_sets import SHORTEST

from failfast_jax import FailFast
from failfast_jax.bench.comparison import logit_gap
from failfast_jax.checkpoints import parameter_map
from failfast_jax.decoding.width_plan import DEFAULT_WIDTHS
from failfast_jax.errors import OptionError
from failfast_jax.models import sharding
from failfast_jax.util import command_line, processes

TARGET, DRAFTER = GOLDEN / "field" / "qwen3_a", GOLDEN / "field" / "dspark_qwen3_a"
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 3, 4, 5], [9, 8, 7, 6, 5], [11, 12], [5] * 20]
COMMON = {"max_new_tokens": 12, "ignore_eos": True}


def main() -> None:
    # Three KV heads, that neither two nor four devices can share.
    odd = random_model(tiny_config(num_heads=3, num_kv_heads=3))
    report: dict[str, Any] = {"refused": [refusal(TARGET, 2), refusal(odd, 1), refusal(odd, 4)]}
    FailFast.load(TARGET, tensor_parallel=4)
    print("TARGET READ", file=sys.stderr, flush=True)
    index = jax.process_index()
    report["broadcast"] = processes.broadcast_from_primary({"process": index, "text": "ä" * (1 + index)})
    report["parts"] = parts()
    read: list[int] = []
    assemble = parameter_map.ReadPlan.assemble

    def counted(plan, *args, **options):
        value = assemble(plan, *args, **options)
        read.append(value.size)
        return value

    parameter_map.ReadPlan.assemble = counted
    spread = FailFast.load(TARGET, DRAFTER, tensor_parallel=4)
    report["numbers read"] = sum(read)
    report["gap"] = logit_gap(spread, PROMPTS[0])
    [by_cost] = spread.generate(PROMPTS[:1], method="auto", **COMMON)
    [exact] = spread.generate(PROMPTS[:1], method="lookup", exact=True, **COMMON)
    report |= {"auto": by_cost.output_ids, "costs": by_cost.stats.costs, "exact": exact.output_ids}
    groups = FailFast.load(TARGET, tensor_parallel=2, data_parallel=2)
    report["two groups"] = [answer.output_ids for answer in groups.generate(PROMPTS, method="vanilla", **COMMON)]
    print(json.dumps(report))


def refusal(target: Any, tensor_parallel: int) -> str | None:
    try:
        FailFast.load(target, tensor_parallel=tensor_parallel)
    except OptionError as error:
        return str(error)


def parts() -> dict[str, Any]:
    """An array of which each process has a part."""
    mesh = sharding.make_mesh(jax.device_count())
    spread, everywhere = NamedSharding(mesh, P(sharding.TENSOR)), NamedSharding(mesh, P())
    value = np.arange(2 * jax.device_count())
    array = sharding.put(value, spread)
    same = sharding.put(array, NamedSharding(mesh, P((sharding.TENSOR,))))
    try:
        error = str(sharding.put(array, everywhere, "head.weight"))
    except ValueError as refused:
        error = str(refused)
    back = sharding.put(sharding.put(value, everywhere), spread)
    here = [shard.data.tolist() for shard in array.addressable_shards]
    kept = [here == [shard.data.tolist() for shard in other.addressable_shards] for other in (same, back)]
    return {"whole": sharding.whole(array).tolist(), "kept": kept, "error": error}


def wait() -> None:
    """Process 0 waits for a value of process 1, which does not bring it; they have agreed on another one before."""
    processes.broadcast_from_primary("something")
    print("waiting", flush=True)
    if jax.process_index() == 1:
        time.sleep(300)
    processes.broadcast_from_primary("nothing")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with SIGINT ignored
    DEFAULT_WIDTHS["cpu"] = SHORTEST
    # Costs are measured as users have them: what processes measure differs, and must not lead them apart.
    sys.exit(command_line.run(wait if "wait" in sys.argv else main, where=sys.argv[1]))
