"""Two processes with several devices each: answers, what they read, what they agree on, and the loss of one."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from safetensors.numpy import load_file
from tiers import tiers
from two_processes import COMMON, DRAFTER, PROMPTS, TARGET

from failfast_jax import FailFast
from failfast_jax.bench.comparison import logit_gap
from failfast_jax.checkpoints.safetensors_file import WEIGHTS
from failfast_jax.errors import OptionError
from failfast_jax.util import processes

SCRIPT = Path(__file__).parent / "two_processes.py"


def started(devices: int, *words: str) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, str(SCRIPT)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen([*command, f"{where},2,{index}", str(devices), *words], **pipes) for index in range(2)]


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long(rare=True))]
)
def devices(request):
    return request.param


@pytest.fixture(scope="module")
def report(devices):
    first, second = started(devices)
    said, errors = first.communicate(timeout=500)
    assert first.returncode == 0, errors
    assert second.wait(60) == 0 and second.stdout.read() == ""  # process 0 speaks for both
    return json.loads(said) | {"stderr": errors}


def test_answers_are_those_of_one_process(report, devices):
    engine = FailFast(TARGET)
    alone = engine.generate(PROMPTS, method="vanilla", **COMMON)
    assert report["one group"] == alone[0].output_ids
    if devices > 2:
        assert report["two groups"] == [result.output_ids for result in alone]
        assert report["exact"] == report["by cost"] == alone[0].output_ids
    assert report["gap"] == pytest.approx(logit_gap(engine, PROMPTS[0]), rel=1e-3)


def test_a_process_reads_only_its_parts(report):
    """Of what is spread; norms are whole on every device, and so are the drafter's layers and too few KV heads."""
    everything = sum(value.size for folder in (TARGET, DRAFTER) for value in load_file(folder / WEIGHTS).values())
    assert report["numbers read"] < 0.9 * everything


def test_a_target_is_read_without_an_exchange(report):
    """Its KV heads are copied, and yet no process connects to the other: many small exchanges lock each other out."""
    before, after = report["stderr"].split("TARGET READ")
    assert "[Gloo]" not in before and "[Gloo]" in after


def test_processes_agree(report, devices):
    assert report["broadcast"] == {"process": 0, "text": "ä"}
    assert devices == 2 or report["costs"]["source"].startswith("measured")


def test_parts_of_an_array_are_never_sent_unsaid(report, devices):
    count = 4 * devices
    assert report["parts"] == {
        "whole": list(range(count)),
        "kept": [True, True],
        "error": f"head.weight [{count}]: parts on other processes are not sent",
    }


def test_a_mesh_must_have_all_processes(report, devices):
    """The error names the numbers of devices that divide the model's 3 KV heads."""
    count = 2 * devices
    left_out, odd, uneven = report["refused"]
    numbers = {4: "1, 3", 8: "1, 3, 6"}[count]
    together = f"2 processes have {count} devices together"
    assert left_out.startswith(f"--tensor-parallel {devices} (x 1 data-parallel): {together}")
    assert odd.startswith(f"--tensor-parallel 1 (x 1 data-parallel): {together}") and odd.endswith(numbers)
    assert uneven.startswith(f"--tensor-parallel {count}: 3 key and value heads") and uneven.endswith(numbers)


@pytest.mark.parametrize("count", tiers([1, 4], quick=[], long=[1]))
def test_a_lost_process_ends_the_other(count):
    first, second = started(count, "lose")
    assert first.stdout.readline() == "answering\n", first.communicate()[1]
    assert second.wait(60) == 9
    _, errors = first.communicate(timeout=60)
    assert first.returncode != 0 and errors


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT])
def test_a_process_that_waits_ends_at_signals(number):
    first, second = started(1, "wait")
    try:
        assert first.stdout.readline() == "waiting\n", first.communicate()[1]
        time.sleep(2)
        first.send_signal(number)
        assert first.wait(30) == -number
    finally:
        for process in (first, second):
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
    ("vendors", "names", "hosts"), [([], "", 0), (["0x8086"], "", 0), (["0x1ae0"], "", 1), ([], "a,b", 2), ([], "a", 1)]
)
def test_hosts_of_a_slice(monkeypatch, tmp_path, vendors, names, hosts):
    for number, vendor in enumerate(vendors):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(processes, "METADATA", "http://127.0.0.1:9/nothing")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", names)
    platforms = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    try:
        assert processes.tpu_hosts(tmp_path) == hosts
    finally:
        jax.config.update("jax_platforms", platforms)
