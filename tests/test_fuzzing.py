"""Thousands of damaged files and odd command lines: served or refused, never a traceback, never for long."""

from __future__ import annotations

import json
import struct

import fuzzing
import pytest
from checkpoint_files import hf_folder, run_python

from failfast_jax.checkpoints.checkpoint import open_checkpoint
from failfast_jax.errors import CheckpointError


@pytest.mark.parametrize("count", [40, pytest.param(20_000, marks=pytest.mark.long(rare=True))])
def test_odd_input_is_served_or_refused(count):
    """In a process that may take four gigabytes more than its libraries, programs and models."""
    done = run_python(fuzzing.__file__, "--seed", 1, "--count", count, "--seconds", 800, "--gigabytes", 4)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["faults"] == [] and done.returncode == 0
    # Kinds of input times what came of them; few inputs do not reach them all.
    assert report["inputs"] == count and len(report["outcomes"]) >= min(22, count // 3), report["outcomes"]


@pytest.mark.parametrize("count", [120, pytest.param(10_000, marks=pytest.mark.long(rare=True))])
def test_odd_command_lines_are_served_or_refused(count):
    """Every command, up to where it would read models."""
    done = run_python(fuzzing.__file__, "--seed", 1, "--count", count, "--case", fuzzing.COMMAND_LINE)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["faults"] == [] and done.returncode == 0
    assert report["inputs"] == count and min(report["outcomes"].values()) > count // 8, report["outcomes"]


def header_of(folder):
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def test_headers_that_lie(tmp_path):
    """A name twice, and a header of a gigabyte."""
    folder = hf_folder(tmp_path, "qwen2_untied")
    header, data = header_of(folder)
    first, second, *_ = (name for name in header if name != "__metadata__")
    text = json.dumps(header).encode()[:-1] + b", " + json.dumps({first: header[second]}).encode()[1:]
    twice = len(text).to_bytes(8, "little") + text + data
    for content, size in ((twice, len(twice)), (struct.pack("<Q", 10**9), 2 * 10**9)):
        with (folder / "model.safetensors").open("wb") as file:
            file.write(content)
            file.truncate(size)  # takes no room on a disk
        with pytest.raises(CheckpointError, match="model.safetensors: .*download it again"):
            open_checkpoint(folder)


def test_the_fuzzer_finds_faults(tmp_path):
    def case(rng):
        raise ZeroDivisionError("as num_attention_heads 2^70 gave")

    report = fuzzing.run({"a fault": case, "fine": lambda rng: None}, seed=0, count=4)
    assert [fault["number"] for fault in report["faults"]] == [0, 2] and report["outcomes"]["fine: served"] == 2
