"""The commands that `tpu_vm.sh` gives to gcloud, written down by a stand-in for it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tpu_scripts" / "tpu_vm.sh"
STAND_IN = """#!/bin/sh
[ "$1" = config ] && echo "$CONFIGURED" && exit
echo "$@" >> "$LOG"
case "$*" in *"$FAILS"*) exit 1 ;; esac
"""
PLACE = "--zone zone-b --project project-a"
DISK = "source=projects/project-a/zones/zone-b/disks/tpu-a-data,mode=read-write"
DELETE_VM, DELETE_DISK = f"compute tpus tpu-vm delete tpu-a {PLACE}", f"compute disks delete tpu-a-data {PLACE}"


@pytest.fixture
def run(tmp_path):
    """Runs the script; returns the process and gcloud's commands, which fail if they contain `FAILS`."""
    for name, text in (("gcloud", STAND_IN), ("git", "#!/bin/sh\n")):  # packing the checkout takes seconds
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"
    names = {"TPU_NAME": "tpu-a", "TPU_ZONE": "zone-b", "TPU_TYPE": "v6e-8", "LOG": str(log), "FAILS": "nothing"}
    names |= {"CONFIGURED": "project-a", "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}

    def run(*words: str, **changes: str) -> tuple[subprocess.CompletedProcess, list[str]]:
        log.write_text("")
        command = ["bash", str(SCRIPT), *words]
        done = subprocess.run(command, env=os.environ | names | changes, capture_output=True, text=True)
        assert not list(tmp_path.glob("*.tar.gz"))
        return done, log.read_text().splitlines()

    return run


@pytest.mark.parametrize(
    "tpu_type, disk_type, version",
    [
        ("v5litepod-8", "pd-balanced", "v2-alpha-tpuv5-lite"),
        ("v6e-1", "hyperdisk-balanced", "v2-alpha-tpuv6e"),
        ("v5p-8", "pd-balanced", "v2-alpha-tpuv5"),
    ],
)
def test_a_vm_and_its_disk(run, tpu_type, disk_type, version):
    """Models are read from the disk."""
    done, commands = run("create", "--spot", TPU_TYPE=tpu_type)
    assert done.returncode == 0 and "costs money until 'tpu_vm.sh delete'" in done.stderr
    assert commands == [
        f"compute disks create tpu-a-data --size 200GB --type {disk_type} {PLACE}",
        f"compute tpus tpu-vm create tpu-a --version {version} --accelerator-type {tpu_type} --spot "
        f"--data-disk {DISK} {PLACE}",
    ]
    assert run("run", "python", "x.py", "--dry-run", TPU_TYPE=tpu_type)[1] == [
        "compute tpus tpu-vm ssh tpu-a --worker all --command export HF_HOME=/mnt/data/huggingface && cd failfast-jax "
        f"&& source .venv/bin/activate && python x.py --dry-run {PLACE}"
    ]
    assert run("delete", TPU_TYPE=tpu_type)[1] == [DELETE_VM, DELETE_DISK]


@pytest.mark.parametrize("tpu_type", ["v5litepod-16", "v6e-16", "v5p-16"])
def test_the_hosts_of_a_pod_share_no_disk(run, tpu_type):
    [vm] = run("create", TPU_TYPE=tpu_type)[1]
    assert "data-disk" not in vm and f"--accelerator-type {tpu_type}" in vm
    [command] = run("run", "python", "-V", TPU_TYPE=tpu_type)[1]
    assert "--worker all --command cd failfast-jax" in command
    copied, installed, answered = run("setup", TPU_TYPE=tpu_type)[1]
    assert copied.endswith(f"--worker all {PLACE}") and "--worker all" in installed and "--worker 0" in answered
    assert run("delete", TPU_TYPE=tpu_type)[1] == [DELETE_VM]


def test_a_slice_from_the_queue(run):
    words = {"create": 1, "setup": 0, "status": 0, "delete": 0}
    assert [run(word, TPU_QUEUE="yes")[1][place] for word, place in words.items()] == [
        "compute tpus queued-resources create tpu-a --node-id tpu-a --runtime-version v2-alpha-tpuv6e "
        f"--accelerator-type v6e-8 {PLACE}",
        f"alpha compute tpus tpu-vm attach-disk tpu-a --disk tpu-a-data --mode read-write {PLACE}",
        f"compute tpus queued-resources describe tpu-a {PLACE}",
        f"compute tpus queued-resources delete tpu-a --force {PLACE}",
    ]


def test_a_failure_names_what_costs_money(run):
    done, _ = run("create", FAILS="tpu-vm create")
    assert done.returncode != 0 and "tpu-a in zone-b costs money until 'tpu_vm.sh delete'" in done.stderr
    done, commands = run("delete", FAILS="tpu-vm delete")  # it may have been taken away: its disk is left
    assert done.returncode != 0 and commands == [DELETE_VM, DELETE_DISK]


def test_the_commands_of_the_page_and_dry_runs_do_nothing(run):
    page = (SCRIPT.parent / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^tpu_scripts/tpu_vm\.sh (.*)$", page, re.MULTILINE)
    assert {"create", "setup", "run", "copy", "delete"} <= {line.split()[0] for line in lines}
    for line in (*lines, "status"):
        words = [word for word in shlex.split(line) if word != "--dry-run"]
        done, commands = run("--dry-run", *words, CONFIGURED="")  # gcloud is not even asked for its project
        assert done.returncode == 0 and done.stdout.startswith("gcloud ") and commands == [], line + done.stderr
        assert "--project PROJECT" in done.stdout
        assert "--project project-b" in run("--dry-run", *words, TPU_PROJECT="project-b")[0].stdout


REFUSED = [
    ("TPU_NAME", "status", {"TPU_NAME": ""}),
    ("TPU_PROJECT", "status", {"CONFIGURED": ""}),
    *(("must be v5litepod-N", "create", {"TPU_TYPE": name}) for name in ("tpu7x-8", "a100", "v5e-8", "v6e-", "v6e-0")),
    ("PATH and FOLDER", "copy a", {}),
    ("PATH and FOLDER", "copy report here there", {}),
    *(("--dry-run, in front", line, {}) for line in ("delete --dry-run", "delete all", "setup now", "create now", "")),
    *(("--dry-run, in front", line, {}) for line in ("run", "run --dry-run python", "copy --dry-run a", "remove")),
]


@pytest.mark.parametrize("message, line, changes", REFUSED)
def test_misunderstood_words_do_nothing(run, message, line, changes):
    done, commands = run(*line.split(), **changes)
    assert done.returncode == 2 and message in done.stderr and commands == []


def test_help_needs_no_slice():
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"})
    assert done.stdout.startswith("Creates, sets up, uses and deletes") and "set -euo" not in done.stdout
