"""Training over two processes of two devices each: what one process of four learns, and what ends them."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import GOLDEN
from safetensors.numpy import load_file
from tiers import tiers
from training_runs import letters_folder, losses_of, write_data

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
COMMON = "--seq-len 64 --batch 4 --held-out 4 --eval-prompts 2 --eval-tokens 6 --storage float32 --save-every 2"
FAMILIES = {
    "diffusion": "--family diffusion --block-size 16 --mask-token 1 --fsdp 4 --accumulate 2",
    "dspark": "--family dspark --rows 3 --markov-rank 8 --mask-token 1 --features 0,1 --anchors 4"
    " --confidence-for greedy",
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "a.npz", documents=20, vocab=140, longest=50)


def words(family: str, documents: Path, out: Path | str, *more: str) -> list[str]:
    where = ["--target", str(GOLDEN / "llama_tied"), "--data", str(documents), "--out", str(out)]
    return [*where, *COMMON.split(), *FAMILIES[family].split(), "--steps", "12", *more]


def start(flags: list[str], processes: int, folders: Sequence[Path] = (ROOT, ROOT)) -> list[subprocess.Popen]:
    """The command in so many processes, of four devices together, each in its folder."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    xla_flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={4 // processes}"
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "preexec_fn": functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        "env": os.environ | {"XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    }
    joined = [["--distributed", f"localhost:{port},{processes},{index}"] for index in range(processes)]
    command = [sys.executable, "-m", "failfast_jax.train", *flags]
    commands = [[*command, *more] for more in joined] if processes > 1 else [command]
    return [subprocess.Popen(command, cwd=folder, **options) for command, folder in zip(commands, folders)]


def ended(started: list[subprocess.Popen]) -> tuple[list[int], list[str], list[str]]:
    """Returns exit statuses, and the texts of stdout and stderr."""
    output = [process.communicate(timeout=300) for process in started]
    return [process.returncode for process in started], *map(list, zip(*output))


def run(flags: list[str], processes: int, status: int = 0) -> dict:
    """The report of process 0; the others say nothing."""
    statuses, (report, *others), errors = ended(start(flags, processes))
    assert statuses == [status] * processes, errors
    assert not any(others)
    return json.loads(report)


@pytest.fixture(scope="module")
def alone(documents, tmp_path_factory):
    """By family: a run of one process, and its report."""

    @functools.cache
    def trained(family: str) -> tuple[Path, dict]:
        out = tmp_path_factory.mktemp("alone") / family
        return out, run(words(family, documents, out), 1)

    return trained


def assert_same(one: Path, two: Path) -> None:
    before, after = losses_of(one), losses_of(two)
    assert before.keys() <= after.keys() and len(before) > 1
    for step, loss in before.items():
        assert after[step] == pytest.approx(loss, rel=1e-4)
    [first], [second] = (map(load_file, (out / "drafter").glob("*.safetensors")) for out in (one, two))
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("family", tiers(FAMILIES, quick=[]))
def test_two_processes_learn_what_one_does(documents, tmp_path, alone, family):
    """A whole model, of which each of four devices has a part, or from features that each process computes of its own
    rows; in two pieces."""
    (whole, report), out = alone(family), tmp_path / "run"
    flags = words(family, documents, out)
    assert run([*flags, "--minutes", "0.0001"], 2, status=3)["steps"] == 1
    assert run(flags, 2) == report | {"drafter": str(out / "drafter")}
    assert_same(whole, out)
    # Finished: process 0 reads for the other.
    assert run(flags, 2) == report | {"drafter": str(out / "drafter")}


@pytest.mark.long(rare=True)
def test_two_processes_write_as_one(tmp_path):
    """A batch shared between them; the second process has no folder of its own."""
    folders = [tmp_path / name for name in ("alone", "first", "second")]
    for folder in folders:
        folder.mkdir()
    target = letters_folder(tmp_path / "target", "qwen2_target_160")
    flags = ["selfgen", "--target", str(target), "--out", "data", "--documents", "4", "--shard-size", "4"]
    flags += ["--batch-size", "4", "--max-prompt-tokens", "12", "--max-answer-tokens", "20"]
    started = [*start(flags, 1, folders[:1]), *start([*flags, "--data-parallel", "4"], 2, folders[1:])]
    statuses, _, errors = ended(started)
    assert not any(statuses), errors
    assert not list(folders[2].iterdir())
    shards = [np.load(folder / "data" / "shard-00000.npz") for folder in folders[:2]]
    assert all(np.array_equal(shards[0][name], shards[1][name]) for name in shards[0])


@pytest.mark.long(rare=True)
def test_a_lost_process_ends_the_other_and_one_goes_on(documents, tmp_path, alone):
    whole, _ = alone("diffusion")
    flags = words("diffusion", documents, tmp_path / "run")
    first, second = start(flags, 2)
    until = time.monotonic() + 120
    while not (tmp_path / "run" / "checkpoints" / "2").exists():
        assert time.monotonic() < until and first.poll() is None, first.communicate()
        time.sleep(0.01)
    second.kill()
    lost = time.monotonic()
    assert ended([first])[0] != [0] and time.monotonic() - lost < 60
    second.communicate()
    assert not (tmp_path / "run" / "drafter").exists()
    run(flags, 1)
    assert_same(whole, tmp_path / "run")


@pytest.mark.parametrize(
    "out, differ, message",
    [("run", 0, "--out run: process 1 does not see it"), ("../run", 1, "process 1 has other options or documents")],
    ids=("folder", "documents"),
)
def test_processes_that_do_not_share_are_refused(documents, tmp_path, out, differ, message):
    folders = tmp_path / "a", tmp_path / "b"
    for number, folder in enumerate(folders):
        folder.mkdir()
        with np.load(documents) as arrays:
            np.savez(folder / "data.npz", **{**arrays, "answer": arrays["answer"] + np.uint16(differ * number)})
    (status, _), _, (output, _) = ended(start(words("dspark", Path("data.npz"), out), 2, folders))
    assert status == 2 and message in output, output
    assert not (tmp_path / "run").exists() and not any((folder / "run").exists() for folder in folders)
