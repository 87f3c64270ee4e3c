"""The commands that `tpu_vm.sh` gives to gcloud, written down by a stand-in for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tpu_scripts" / "tpu_vm.sh"


def commands(folder: Path, tpu_type: str, *args: str) -> list[str]:
    gcloud = folder / "gcloud"
    gcloud.write_text('#!/bin/sh\n[ "$1" = config ] && echo project-a || echo "$@" >> "$LOG"\n')
    gcloud.chmod(0o755)
    names = {"TPU_NAME": "tpu-a", "TPU_ZONE": "zone-b", "TPU_TYPE": tpu_type, "LOG": str(folder / "log")}
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", SCRIPT, *args], env=os.environ | names | path, check=True, cwd=SCRIPT.parent)
    return (folder / "log").read_text().splitlines()


@pytest.mark.parametrize(
    "tpu_type, disk_type, version",
    [
        ("v5litepod-8", "pd-balanced", "v2-alpha-tpuv5-lite"),
        ("v6e-8", "hyperdisk-balanced", "v2-alpha-tpuv6e"),
        ("tpu7x-8", "hyperdisk-balanced", "v2-alpha-tpu7-ubuntu2404"),
    ],
)
def test_a_vm_has_a_disk_that_holds_the_models(tmp_path, tpu_type, disk_type, version):
    disk, vm = commands(tmp_path, tpu_type, "create")
    assert disk == f"compute disks create tpu-a-data --zone zone-b --size 200GB --type {disk_type}"
    assert vm.startswith("compute tpus tpu-vm create tpu-a --zone zone-b") and f"--version {version} " in vm
    assert vm.endswith("--data-disk source=projects/project-a/zones/zone-b/disks/tpu-a-data,mode=read-write")


def test_commands_read_models_from_that_disk(tmp_path):
    [command] = commands(tmp_path, "v6e-8", "run", "python", "-V")
    assert "export HF_HOME=/mnt/data/huggingface && cd failfast-jax" in command
