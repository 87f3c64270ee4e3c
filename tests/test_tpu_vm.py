"""The commands that `tpu_vm.sh` gives to gcloud, written down by a stand-in for it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

# Bash cannot be made to hear a Ctrl-C that it was started deaf to.
pytestmark = pytest.mark.usefixtures("interrupts")

SCRIPT = Path(__file__).parents[1] / "tpu_scripts" / "tpu_vm.sh"
STAND_IN = """#!/bin/sh
[ "$1" = config ] && echo "$CONFIGURED" && exit
echo "$@" >> "$LOG"
case "$*" in *" list "*) cat "$LOG.listed" ;; esac
case "$*" in *"$STOPS"*) kill -INT 0 ;; esac
case "$*" in *"$FAILS"*) exit 1 ;; esac
"""
NEVER = "nothing that is ever said"


class Cloud:
    """A machine with the stand-in, and what it was told."""

    def __init__(self, folder: Path, tpu_type: str):
        self.folder = folder
        gcloud = folder / "gcloud"
        gcloud.write_text(STAND_IN)
        gcloud.chmod(0o755)
        git = folder / "git"  # packing the checkout takes seconds
        git.write_text('#!/bin/sh\n[ "$3" != status ] || echo "$CHANGED"\n')
        git.chmod(0o755)
        (folder / "log.listed").write_text("")
        names = {"TPU_NAME": "tpu-a", "TPU_ZONE": "zone-b", "TPU_TYPE": tpu_type, "LOG": str(folder / "log")}
        names |= {"CONFIGURED": "project-a", "CHANGED": ""}
        self.env = os.environ | names | {"XDG_STATE_HOME": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}

    def run(self, *args: str, fails: str = NEVER, stops: str = NEVER, **changes: str) -> subprocess.CompletedProcess:
        """Runs the script; gcloud fails, or Ctrl-C comes, at calls with such a text."""
        env = self.env | {"FAILS": fails, "STOPS": stops} | changes
        command, where = ["bash", str(SCRIPT), *args], SCRIPT.parents[1]
        return subprocess.run(command, env=env, capture_output=True, text=True, cwd=where, start_new_session=True)

    def all_told(self) -> list[str]:
        """Everything that gcloud was ever told."""
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []

    def told(self, *args: str, **changes: str) -> list[str]:
        """What a command that succeeds tells gcloud."""
        log = self.folder / "log"
        log.write_text("")
        done = self.run(*args, **changes)
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines()


PLACE = "--zone zone-b --project project-a"
DELETE_VM, DELETE_DISK = f"compute tpus tpu-vm delete tpu-a {PLACE}", f"compute disks delete tpu-a-data {PLACE}"


@pytest.mark.parametrize(
    "tpu_type, disk_type, version",
    [
        ("v5litepod-8", "pd-balanced", "v2-alpha-tpuv5-lite"),
        ("v6e-8", "hyperdisk-balanced", "v2-alpha-tpuv6e"),
        ("v5p-8", "pd-balanced", "v2-alpha-tpuv5"),
    ],
)
def test_a_vm_and_its_disk(tmp_path, tpu_type, disk_type, version):
    """Models are read from the disk."""
    cloud = Cloud(tmp_path, tpu_type)
    assert cloud.told("create", "--spot") == [
        f"compute disks create tpu-a-data --size 200GB --type {disk_type} {PLACE}",
        f"compute tpus tpu-vm create tpu-a --accelerator-type {tpu_type} --data-disk "
        f"source=projects/project-a/zones/zone-b/disks/tpu-a-data,mode=read-write --version {version} --spot {PLACE}",
    ]
    assert cloud.told("run", "python", "x.py", "--dry-run") == [
        "compute tpus tpu-vm ssh tpu-a --worker all --command export HF_HOME=/mnt/data/huggingface && cd failfast-jax "
        f"&& source .venv/bin/activate && python x.py --dry-run {PLACE}"
    ]
    assert cloud.told("delete") == [DELETE_VM, DELETE_DISK]


@pytest.mark.parametrize("tpu_type", ["v5litepod-16", "v6e-16", "v5p-16"])
def test_the_hosts_of_a_pod_share_no_disk(tmp_path, tpu_type):
    cloud = Cloud(tmp_path, tpu_type)
    [vm] = cloud.told("create")
    assert "data-disk" not in vm and f"--accelerator-type {tpu_type}" in vm
    [command] = cloud.told("run", "python", "-V")
    assert "--worker all --command cd failfast-jax" in command
    copied, installed, answered = cloud.told("setup")
    assert copied.endswith(f"--worker all {PLACE}") and "--worker all" in installed and "--worker 0" in answered


def test_a_queued_slice(tmp_path):
    cloud = Cloud(tmp_path, "v6e-8")
    assert cloud.told("create", "--queue", "--spot")[1] == (
        "compute tpus queued-resources create tpu-a --node-id tpu-a --accelerator-type v6e-8 --runtime-version "
        f"v2-alpha-tpuv6e --spot {PLACE}"
    )
    attached = f"alpha compute tpus tpu-vm attach-disk tpu-a --disk tpu-a-data --mode read-write {PLACE}"
    assert cloud.told("setup")[0] == attached
    assert cloud.told("status") == [f"compute tpus queued-resources describe tpu-a {PLACE}"]
    assert cloud.told("delete") == [f"compute tpus queued-resources delete tpu-a --force {PLACE}", DELETE_DISK]


def test_what_remains_is_said_and_nothing_else_is_deleted(tmp_path):
    cloud = Cloud(tmp_path, "v6e-8")
    nothing = cloud.run("delete")
    assert nothing.returncode == 2 and "nothing named tpu-a in zone-b was created from here" in nothing.stderr
    made = cloud.run("create")
    assert made.stderr == "costs money until 'tpu_vm.sh delete': disk vm of tpu-a in zone-b\n"
    again = cloud.run("create")
    assert again.returncode == 2 and "was created before" in again.stderr
    (tmp_path / "log.listed").write_text("tpu-a-data\n")
    kept = cloud.run("delete", fails="disks delete")
    assert kept.returncode == 1 and kept.stderr == "costs money until 'tpu_vm.sh delete': disk of tpu-a in zone-b\n"
    assert cloud.told("delete") == [DELETE_DISK]
    assert cloud.run("delete").returncode == 2


@pytest.mark.parametrize("fault", ["fails", "stops"])
@pytest.mark.parametrize(
    "words, call, sure, unsure, deletion",
    [
        ((), "disks create", "", "disk", "disks delete"),
        ((), "tpu-vm create", "disk", "vm", "tpu-vm delete"),
        (("--queue",), "queued-resources create", "disk", "queue", "queued-resources delete"),
    ],
)
def test_what_may_exist_is_named_and_deleted(tmp_path, fault, words, call, sure, unsure, deletion):
    """gcloud may have made it although it failed, or was stopped."""
    cloud = Cloud(tmp_path, "v6e-8")
    done = cloud.run("create", *words, **{fault: call})
    assert done.returncode != 0
    lines = [f"costs money until 'tpu_vm.sh delete': {sure} of tpu-a in zone-b"] if sure else []
    lines += [
        f"may exist and cost money until 'tpu_vm.sh delete': {unsure} of tpu-a in zone-b (asked for, not confirmed)"
    ]
    assert done.stderr.splitlines() == lines
    assert "was created before" in cloud.run("create").stderr
    (tmp_path / "log.listed").write_text("other-tpu-a\nprojects/p/nodes/tpu-a\ntpu-a-data\n")
    kept = cloud.run("delete", fails=deletion)
    assert kept.returncode == 1 and f"delete': {unsure} of tpu-a" in kept.stderr
    silent = cloud.run("delete", fails=" ")
    assert silent.returncode == 2 and "gcloud does not say" in silent.stderr and "may exist" in silent.stderr
    (tmp_path / "log.listed").write_text("other-tpu-a\nother-tpu-a-data\n")
    gone = cloud.run("delete", fails=deletion)
    assert gone.returncode == 0 and gone.stderr.startswith(f"gcloud lists no such {unsure}: it is gone already")
    assert len(gone.stderr.splitlines()) == 1 and cloud.run("delete").returncode == 2


@pytest.mark.parametrize("words, first", [((), "tpu-vm delete"), (("--queue",), "queued-resources delete")])
def test_the_disk_of_a_slice_that_is_gone_is_deleted(tmp_path, words, first):
    """Preempted, or deleted in the console."""
    cloud = Cloud(tmp_path, "v6e-8")
    cloud.told("create", *words)
    (tmp_path / "log.listed").write_text("tpu-a-data\nnot-tpu-a\n")
    done = cloud.run("delete", fails=first)
    assert done.returncode == 0 and "it is gone already" in done.stderr and "costs money" not in done.stderr
    assert cloud.all_told()[-1] == DELETE_DISK
    assert cloud.run("delete").returncode == 2  # nothing is left


def test_a_slice_that_is_kept_keeps_its_disk(tmp_path):
    """Who answers no to gcloud's question is not asked about the disk, which is in use."""
    cloud = Cloud(tmp_path, "v6e-8")
    cloud.told("create")
    (tmp_path / "log.listed").write_text("tpu-a\ntpu-a-data\n")
    done = cloud.run("delete", fails="tpu-vm delete")
    assert done.returncode == 1 and not [line for line in cloud.all_told() if "disks delete" in line]
    assert done.stderr == "costs money until 'tpu_vm.sh delete': disk vm of tpu-a in zone-b\n"


@pytest.mark.parametrize("words", [("setup",), ("run", "ls"), ("copy", "a", "b"), ("status",), ("delete",)])
def test_a_slice_stays_in_its_project(tmp_path, words):
    """Whatever gcloud's project is later."""
    cloud = Cloud(tmp_path, "v6e-8")
    assert all("--project project-b" in line for line in cloud.told("create", TPU_PROJECT="project-b"))
    calls = "\n".join(cloud.told(*words, CONFIGURED="project-c"))
    assert calls.count("--project project-b") == calls.count("--zone zone-b") > 0
    dry = cloud.run("--dry-run", "status", CONFIGURED="project-c").stdout
    assert ("--project PROJECT" if words == ("delete",) else "--project project-b") in dry


def test_projects_and_homes_that_are_in_doubt(tmp_path):
    cloud = Cloud(tmp_path, "v6e-8")
    none = cloud.run("create", CONFIGURED="")
    assert none.returncode == 2 and none.stderr.startswith("TPU_PROJECT: set it") and not cloud.all_told()
    cloud.told("create")
    other = cloud.run("delete", TPU_PROJECT="project-b")
    assert other.returncode == 2 and "was created in the project project-a" in other.stderr
    assert len(cloud.told("delete", TPU_PROJECT="project-a")) == 2
    nowhere = cloud.run("create", HOME="", XDG_STATE_HOME="")
    assert nowhere.returncode == 2 and nowhere.stderr.startswith("HOME: ")
    assert all("--project project-c" in line for line in cloud.told("create", CONFIGURED="project-c"))


def test_what_is_not_committed_is_said(tmp_path):
    cloud = Cloud(tmp_path, "v6e-8")
    cloud.told("create")
    done = cloud.run("setup", CHANGED=" M failfast_jax/engine.py\n?? new.py")
    first, *rest = done.stderr.splitlines()
    assert done.returncode == 0 and first.startswith("setup installs the last commit; these changes are not in it")
    assert rest[:2] == [" M failfast_jax/engine.py", "?? new.py"]
    assert "last commit" not in cloud.run("setup").stderr


def test_a_dry_run_does_nothing(tmp_path):
    cloud, temporary = Cloud(tmp_path, "v6e-8"), tmp_path / "temporary"
    temporary.mkdir()
    for line in ("create --queue", "setup", "run 'python -V'", "copy report here", "status", "delete"):
        done, again = (cloud.run("--dry-run", *shlex.split(line), TMPDIR=str(temporary)) for _ in range(2))
        assert done.returncode == 0 and done.stdout.startswith("gcloud ") and again.stdout == done.stdout, done.stderr
    printed = [f"gcloud {call} " for call in (DELETE_VM, DELETE_DISK)]
    unknown = [line.replace("project-a", "PROJECT") for line in printed]  # gcloud is not even asked for it
    assert done.stdout.splitlines() == unknown
    assert cloud.run("--dry-run", "delete", TPU_TYPE="v6e-16").stdout.splitlines() == unknown[:1]
    assert not cloud.all_told() and not list(temporary.iterdir()) and cloud.run("delete").returncode == 2
    cloud.told("create")
    assert cloud.run("--dry-run", "delete").stdout.splitlines() == printed
    assert len(cloud.told("delete")) == 2


def test_the_commands_of_the_page(tmp_path):
    page = (SCRIPT.parent / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^tpu_scripts/tpu_vm\.sh (.*)$", page, re.MULTILINE)
    assert {"create", "setup", "run", "copy", "delete"} <= {line.split()[0] for line in lines}
    cloud = Cloud(tmp_path, "v6e-8")
    for line in lines:
        done = cloud.run("--dry-run", *(word for word in shlex.split(line) if word != "--dry-run"))
        assert done.returncode == 0 and done.stdout.startswith("gcloud "), line + done.stderr


MISUNDERSTOOD = [
    "delete --dry-run", "delete all", "setup --dry-run", "setup now", "create --dry-run", "create now",
    "run --dry-run python", "run", "copy --dry-run report", "copy a", "copy report here there", "status --dry-run",
    "remove", "",
]  # fmt: skip


@pytest.mark.parametrize("line", MISUNDERSTOOD)
def test_misunderstood_words(tmp_path, line):
    """Nothing is done, and the list of what was made is kept."""
    cloud = Cloud(tmp_path, "v6e-8")
    cloud.told("create")
    before = cloud.all_told()
    done = cloud.run(*line.split())
    assert done.returncode == 2 and len(done.stderr.splitlines()) in (2, 12)  # one line, or the usage; and the costs
    assert cloud.all_told() == before
    assert len(cloud.told("delete")) == 2


def test_help_needs_no_slice(tmp_path):
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"})
    assert done.stdout.startswith("Creates, sets up, uses and deletes") and "set -euo" not in done.stdout
    done = subprocess.run(
        [SCRIPT, "status"], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )
    assert (done.returncode, done.stderr) == (2, "TPU_NAME: set it to the name of the slice\n")


REFUSED = {
    "TPU_TYPE: set it": [""],
    "GKE alone": ["tpu7x-8"],
    "must be v5litepod-N": ["a100", "v6e-", "v6e-abc", "v6e-0"],
    "gcloud calls it v5litepod-8": ["v5e-8"],
    "there are v6e-1, 4, 8": ["v6e-3", "v6e-2", "v6e-512"],
    "there are v5p-8": ["v5p-12", "v5p-4", "v5p-129", "v5p-12416", "v5p-1"],
    "there are v5litepod-1": ["v5litepod-12", "v5litepod-99999"],
}


@pytest.mark.parametrize("tpu_type, reason", [(name, reason) for reason, names in REFUSED.items() for name in names])
def test_types_are_checked_before_anything_is_done(tmp_path, tpu_type, reason):
    cloud = Cloud(tmp_path, tpu_type)
    for command in (("create",), ("setup",), ("run", "python")):
        done = cloud.run(*command)
        assert done.returncode == 2 and reason in done.stderr and len(done.stderr.splitlines()) == 1
    assert not cloud.all_told()


@pytest.mark.parametrize("tpu_type", ["v5litepod-1", "v5litepod-256", "v6e-1", "v6e-4", "v6e-64", "v5p-64", "v5p-384"])
def test_types_that_there_are(tmp_path, tpu_type):
    done = Cloud(tmp_path, tpu_type).run("--dry-run", "create")
    assert done.returncode == 0 and f"--accelerator-type {tpu_type}" in done.stdout
