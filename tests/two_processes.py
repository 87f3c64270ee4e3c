"""One of two processes that answer together; process 0 prints the answers as JSON.

Run as a script: `two_processes.py HOST:PORT,2,INDEX DEVICES` for that many devices in each, with `lose` behind it to
lose process 1 while they answer, with `wait` to have process 0 wait for it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with SIGINT ignored
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={sys.argv[2]}"
    os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}

import jax
import numpy as np
from checkpoint_files import GOLDEN
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_models import random_model, tiny_config

from failfast_jax import FailFast
from failfast_jax.bench.comparison import logit_gap
from failfast_jax.checkpoints import parameter_map
from failfast_jax.errors import OptionError
from failfast_jax.models import sharding
from failfast_jax.util import command_line, processes

TARGET, DRAFTER = GOLDEN / "field" / "qwen3_a", GOLDEN / "field" / "dspark_qwen3_a"
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 3, 4, 5], [9, 8, 7, 6, 5], [11, 12], [5] * 20]
COMMON = {"max_new_tokens": 12, "ignore_eos": True}

_assemble = parameter_map.ReadPlan.assemble


def main() -> None:
    read: list[int] = []

    def counted(plan, *args, **options):
        value = _assemble(plan, *args, **options)
        read.append(value.size)
        return value

    parameter_map.ReadPlan.assemble = counted
    report: dict[str, object] = {}
    devices = int(sys.argv[2])
    report["refused"] = [refusal(TARGET, tensor_parallel=devices)]
    # Three KV heads, that neither two nor four devices can share.
    odd = random_model(tiny_config(num_heads=3, num_kv_heads=3))
    report["refused"] += [refusal(odd, tensor_parallel=count) for count in (1, 2 * devices)]
    if "wait" in sys.argv:
        wait()
    if "lose" in sys.argv:
        lose(FailFast(TARGET, tensor_parallel=2 * devices))
    FailFast(TARGET, tensor_parallel=2 * devices)
    print("TARGET READ", file=sys.stderr, flush=True)
    report["parts"] = parts()
    read.clear()
    spread = FailFast(TARGET, DRAFTER, tensor_parallel=2 * devices)
    report["numbers read"] = sum(read)
    [answer] = spread.generate(PROMPTS[:1], method="dspark", **COMMON)
    report["one group"], report["gap"] = answer.output_ids, logit_gap(spread, PROMPTS[0])
    if devices > 2:  # each answer compiles for minutes on few cores
        [answer] = spread.generate(PROMPTS[:1], method="lookup", exact=True, **COMMON)
        engine = FailFast(TARGET, tensor_parallel=devices, data_parallel=2)
        results = engine.generate(PROMPTS, method="vanilla", **COMMON)
        report |= {"exact": answer.output_ids, "two groups": [result.output_ids for result in results]}
        [answer] = spread.generate(PROMPTS[:1], method="auto", **COMMON)
        report |= {"by cost": answer.output_ids, "costs": answer.stats.costs}
    index = jax.process_index()
    report["broadcast"] = processes.broadcast_from_primary({"process": index, "text": "ä" * (1 + index)})
    print(json.dumps(report))


def refusal(*models: Any, **options: Any) -> str | None:
    try:
        FailFast(*models, **options)
    except OptionError as error:
        return str(error)


def parts() -> dict[str, Any]:
    """What becomes of an array of which each process has a part."""
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
    """Process 0 waits for a value of process 1, which does not bring it."""
    print("waiting", flush=True)
    if jax.process_index() == 1:
        time.sleep(300)
    processes.broadcast_from_primary("nothing")


def lose(engine: FailFast) -> None:
    """Answers for ever; process 1 only once."""
    for turn in range(10**6):
        engine.generate(PROMPTS[:1], method="vanilla", **COMMON)
        if turn == 0:
            print("answering", flush=True)
            if jax.process_index() == 1:
                os._exit(9)


if __name__ == "__main__":
    # Costs are measured as users have them: what processes measure differs, and must not lead them apart.
    sys.exit(command_line.run(main, where=sys.argv[1]))
