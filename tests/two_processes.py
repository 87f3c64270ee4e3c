"""One of two processes that answer together; process 0 prints the answers as JSON.

Run as a script: `two_processes.py HOST:PORT,2,INDEX DEVICES` for that many devices in each, with `lose` behind it to
lose process 1 while they answer, with `wait` to have process 0 wait for it.
"""

from __future__ import annotations

import json
import os
import sys
import time

if __name__ == "__main__":
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={sys.argv[2]}"
    os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}

import jax
from checkpoint_files import GOLDEN

from failfast_jax import FailFast, command, distributed
from failfast_jax.checkpoints import mapping
from failfast_jax.errors import OptionError

TARGET, DRAFTER = GOLDEN / "field" / "qwen3_a", GOLDEN / "field" / "dspark_qwen3_a"
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 3, 4, 5], [9, 8, 7, 6, 5], [11, 12], [5] * 20]
COMMON = {"max_new_tokens": 12, "ignore_eos": True}

_assemble = mapping.Plan.assemble


def main() -> None:
    read: list[int] = []

    def counted(plan, *args, **options):
        value = _assemble(plan, *args, **options)
        read.append(value.size)
        return value

    mapping.Plan.assemble = counted
    report: dict[str, object] = {}
    devices = int(sys.argv[2])
    try:
        FailFast(TARGET, tensor_parallel=devices)
    except OptionError as error:
        report["a process left out"] = str(error)
    if "wait" in sys.argv:
        wait()
    if "lose" in sys.argv:
        lose(FailFast(TARGET, tensor_parallel=2 * devices))
    FailFast(TARGET, tensor_parallel=2 * devices)
    print("TARGET READ", file=sys.stderr, flush=True)
    read.clear()
    spread = FailFast(TARGET, DRAFTER, tensor_parallel=2 * devices)
    report["numbers read"] = sum(read)
    [answer] = spread.generate(PROMPTS[:1], method="failfast", **COMMON)
    report["one group"], report["costs"] = answer.output_ids, answer.stats.costs
    engine = FailFast(TARGET, tensor_parallel=devices, data_parallel=2)
    report["two groups"] = [result.output_ids for result in engine.generate(PROMPTS, method="vanilla", **COMMON)]
    report["agreed"] = distributed.agreed({"process": jax.process_index(), "text": "ä" * (1 + jax.process_index())})
    print(json.dumps(report))


def wait() -> None:
    """Process 0 waits for a value of process 1, which does not bring it."""
    print("waiting", flush=True)
    if jax.process_index() == 1:
        time.sleep(300)
    distributed.agreed("nothing")


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
    sys.exit(command.run(main, where=sys.argv[1]))
