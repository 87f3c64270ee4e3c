"""Two processes with two devices each: answers, what they read, what they agree on, and the loss of one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from safetensors.numpy import load_file
from two_processes import COMMON, DRAFTER, PROMPTS, TARGET

from failfast_jax import FailFast
from failfast_jax.bench.comparison import logit_gap
from failfast_jax.checkpoints.safetensors_file import WEIGHTS
from failfast_jax.errors import OptionError
from failfast_jax.util import processes

SCRIPT = Path(__file__).parent / "two_processes.py"


def started(*words: str) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = f"localhost:{free.getsockname()[1]}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    commands = [[sys.executable, str(SCRIPT), f"{where},2,{index}", *words] for index in range(2)]
    return [subprocess.Popen(command, **options) for command in commands]


@pytest.mark.long
def test_two_processes_answer_as_one():
    first, second = started()
    output, errors = first.communicate(timeout=500)
    assert first.returncode == 0, errors
    assert second.wait(60) == 0 and second.stdout.read() == ""  # process 0 speaks for both
    report = json.loads(output)
    engine = FailFast.load(TARGET)
    alone = [answer.output_ids for answer in engine.generate(PROMPTS, method="vanilla", **COMMON)]
    assert report["auto"] == report["exact"] == alone[0] and report["two groups"] == alone
    assert report["costs"]["source"].startswith("measured")
    assert report["gap"] == pytest.approx(logit_gap(engine, PROMPTS[0]), rel=1e-3)
    # A process reads its parts of what is spread; norms are whole on every device, and so are the drafter's layers and
    # too few KV heads.
    everything = sum(value.size for folder in (TARGET, DRAFTER) for value in load_file(folder / WEIGHTS).values())
    assert report["numbers read"] < 0.9 * everything
    # KV heads of the target are copied, and yet no process connects to the other while it is read: many small exchanges
    # lock each other out.
    before, after = errors.split("TARGET READ")
    assert "[Gloo]" not in before and "[Gloo]" in after
    assert report["broadcast"] == {"process": 0, "text": "ä"}
    assert report["parts"] == {
        "whole": list(range(8)),
        "kept": [True, True],
        "error": "head.weight [8]: parts on other processes are not sent",
    }
    # A mesh must have all processes; errors name the numbers of devices that divide the model's 3 KV heads.
    left_out, odd, uneven = report["refused"]
    together = "2 processes have 4 devices together"
    assert left_out.startswith(f"--tensor-parallel 2 (x 1 data-parallel): {together}")
    assert odd.startswith(f"--tensor-parallel 1 (x 1 data-parallel): {together}") and odd.endswith("1, 3")
    assert uneven.startswith("--tensor-parallel 4: 3 key and value heads") and uneven.endswith("1, 3")


@pytest.mark.long
@pytest.mark.parametrize(
    "index, number",
    [
        (0, signal.SIGINT),
        (0, signal.SIGTERM),
        (1, signal.SIGKILL),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.long(rare=True)),
    ],
)
def test_a_process_that_waits_ends_at_signals_and_with_the_other(index, number):
    """Also if the other is there, and silent."""
    both = started("wait")
    first, _ = both
    try:
        assert first.stdout.readline() == "waiting\n", first.communicate()[1]
        time.sleep(1)
        both[index].send_signal(number)
        status = first.wait(60)
        assert status == -number if index == 0 else status != 0 and first.stderr.read()
    finally:
        for process in both:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("where", ["here", "localhost,2,0", "localhost:1234,2", "localhost:1234,2,2", "a:1,x,0"])
def test_values_that_name_no_process(where):
    with pytest.raises(OptionError, match=f"--distributed {where}: expected HOST:PORT,N,I"):
        processes.join(where)


def test_no_cluster_to_be_found(monkeypatch):
    for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OptionError, match="--distributed: .*; say HOST:PORT,N,I"):
        processes.join(processes.AUTOMATIC)


@pytest.mark.parametrize(
    "vendor, names, hosts", [(None, "", 0), ("0x8086", "", 0), ("0x1ae0", "", 1), (None, "a,b", 2), (None, "a", 1)]
)
def test_hosts_of_a_slice(monkeypatch, tmp_path, vendor, names, hosts):
    if vendor is not None:
        (tmp_path / "0").mkdir()
        (tmp_path / "0" / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(processes, "METADATA", "http://127.0.0.1:9/nothing")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", names)
    platforms = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    try:
        assert processes.tpu_hosts(tmp_path) == hosts
    finally:
        jax.config.update("jax_platforms", platforms)
