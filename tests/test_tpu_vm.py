"""The commands that `tpu_vm.sh` gives to gcloud, written down by a stand-in for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tpu_scripts" / "tpu_vm.sh"
STAND_IN = """#!/bin/sh
[ "$1" = config ] && echo project-a && exit
echo "$@" >> "$LOG"
case "$*" in *"$FAILS"*) exit 1 ;; esac
"""


class Cloud:
    """A machine with the stand-in, and what it was told."""

    def __init__(self, folder: Path, tpu_type: str):
        self.folder = folder
        gcloud = folder / "gcloud"
        gcloud.write_text(STAND_IN)
        gcloud.chmod(0o755)
        git = folder / "git"  # packing the checkout takes seconds
        git.write_text("#!/bin/sh\ntrue\n")
        git.chmod(0o755)
        names = {"TPU_NAME": "tpu-a", "TPU_ZONE": "zone-b", "TPU_TYPE": tpu_type, "LOG": str(folder / "log")}
        self.env = os.environ | names | {"XDG_STATE_HOME": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}

    def run(self, *args: str, fails: str = "nothing that is ever said") -> subprocess.CompletedProcess:
        where = SCRIPT.parents[1]
        command = ["bash", str(SCRIPT), *args]
        return subprocess.run(command, env=self.env | {"FAILS": fails}, capture_output=True, text=True, cwd=where)

    def told(self, *args: str) -> list[str]:
        """What a command that succeeds tells gcloud."""
        log = self.folder / "log"
        log.write_text("")
        done = self.run(*args)
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines()


@pytest.mark.parametrize(
    "tpu_type, disk_type, version",
    [
        ("v5litepod-8", "pd-balanced", "v2-alpha-tpuv5-lite"),
        ("v6e-8", "hyperdisk-balanced", "v2-alpha-tpuv6e"),
        ("v5p-8", "pd-balanced", "v2-alpha-tpuv5"),
    ],
)
def test_a_vm_has_a_disk_that_holds_the_models(tmp_path, tpu_type, disk_type, version):
    disk, vm = Cloud(tmp_path, tpu_type).told("create", "--spot")
    assert disk == f"compute disks create tpu-a-data --zone zone-b --size 200GB --type {disk_type}"
    assert vm == (
        f"compute tpus tpu-vm create tpu-a --accelerator-type {tpu_type} --data-disk "
        f"source=projects/project-a/zones/zone-b/disks/tpu-a-data,mode=read-write "
        f"--version {version} --spot --zone zone-b"
    )


def test_commands_read_models_from_that_disk(tmp_path):
    cloud = Cloud(tmp_path, "v6e-8")
    cloud.told("create")
    [command] = cloud.told("run", "python", "-V")
    assert command == (
        "compute tpus tpu-vm ssh tpu-a --worker all --command export HF_HOME=/mnt/data/huggingface && cd failfast-jax "
        "&& source .venv/bin/activate && python -V --zone zone-b"
    )


@pytest.mark.parametrize("tpu_type", ["v5litepod-16", "v6e-16", "v5p-16"])
def test_the_hosts_of_a_pod_share_no_disk(tmp_path, tpu_type):
    cloud = Cloud(tmp_path, tpu_type)
    [vm] = cloud.told("create")
    assert "data-disk" not in vm and f"--accelerator-type {tpu_type}" in vm
    [command] = cloud.told("run", "python", "-V")
    assert "--worker all --command cd failfast-jax" in command
    copied, installed, answered = cloud.told("setup")
    assert copied.endswith("--worker all --zone zone-b") and "--worker all" in installed and "--worker 0" in answered


def test_a_queued_slice(tmp_path):
    cloud = Cloud(tmp_path, "v6e-8")
    _, queued = cloud.told("create", "--queue", "--spot")
    assert queued == (
        "compute tpus queued-resources create tpu-a --node-id tpu-a --accelerator-type v6e-8 --runtime-version "
        "v2-alpha-tpuv6e --spot --zone zone-b"
    )
    assert "alpha compute tpus tpu-vm attach-disk tpu-a" in cloud.told("setup")[0]
    assert cloud.told("status") == ["compute tpus queued-resources describe tpu-a --zone zone-b"]
    assert cloud.told("delete") == [
        "compute tpus queued-resources delete tpu-a --force --zone zone-b",
        "compute disks delete tpu-a-data --zone zone-b",
    ]


def test_what_remains_is_said_and_nothing_else_is_deleted(tmp_path):
    cloud = Cloud(tmp_path, "v6e-8")
    nothing = cloud.run("delete")
    assert nothing.returncode == 2 and "nothing named tpu-a in zone-b was created from here" in nothing.stderr
    failed = cloud.run("create", fails="tpu-vm create")
    assert failed.returncode == 1
    assert "costs money until 'tpu_vm.sh delete': disk of tpu-a in zone-b" in failed.stderr
    again = cloud.run("create")
    assert again.returncode == 2 and "was created before" in again.stderr
    assert cloud.told("delete") == ["compute disks delete tpu-a-data --zone zone-b"]
    cloud.told("create")
    kept = cloud.run("delete", fails="disks delete")
    assert "costs money until 'tpu_vm.sh delete': disk of tpu-a" in kept.stderr
    done = cloud.run("delete")
    assert done.returncode == 0 and done.stderr == ""


def test_a_dry_run_does_nothing(tmp_path):
    cloud = Cloud(tmp_path, "v6e-8")
    for command in (("create", "--queue"), ("setup",), ("run", "python -V"), ("copy", "report", "here"), ("status",)):
        done = cloud.run("--dry-run", *command)
        assert done.returncode == 0 and done.stdout.startswith("gcloud "), done.stderr
    assert not (tmp_path / "log").exists() and cloud.run("delete").returncode == 2


@pytest.mark.parametrize("tpu_type, said", [("tpu7x-8", "GKE alone"), ("a100", "must be v5litepod-N")])
def test_other_chips_are_refused(tmp_path, tpu_type, said):
    done = Cloud(tmp_path, tpu_type).run("create")
    assert done.returncode != 0 and said in done.stderr
