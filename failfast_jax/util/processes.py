"""Several processes that decode or train as one, on the hosts of a TPU pod or elsewhere: each runs the same command.

Process 0 speaks and writes; what depends on a clock or on a host's own files is agreed on, as programs that differ
between processes would wait for each other for ever.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from failfast_jax.errors import OptionError
from failfast_jax.util import environment

AUTOMATIC, ALONE = "auto", "alone"
TIMEOUT_S = 20
"""Seconds after which a process that is not heard of is lost, and the others end with an error."""
_LENGTH, _FIRST_PIECE, _PIECE = 8, 4096, 2**18
"""Bytes of a value that processes agree on: what says its length, the first message, each of the others."""
_HOSTS = "TPU_WORKER_HOSTNAMES"
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"

Value = TypeVar("Value")

_apart = False


def add_flag(parser: Any) -> None:
    """`--distributed`, of commands that several processes can run together."""
    parser.add_argument(
        "--distributed",
        metavar="HOST:PORT,N,I",
        nargs="?",
        const=AUTOMATIC,
        help="this is process I of N, the first of which listens there; without a value what Slurm, Open MPI, "
        "Kubernetes or Cloud TPU say (by itself on TPU pods)",
    )


class _Refused(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f"--distributed: this command runs in one process; {self.const}")


def refuse_flag(parser: Any, instead: str) -> None:
    """`--distributed`, of commands that one process runs: refused, with what to do `instead`."""
    hidden = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument("--distributed", nargs="?", const=instead, action=_Refused, **hidden)


def join(where: str | None = None) -> None:
    """Joins the other processes, before JAX looks for devices; alone if there are none.

    Args:
      where: the value of `--distributed`; ALONE, of commands that have no such flag.

    Raises:
      OptionError: not such a value, no cluster to be found, not all processes have come within five minutes, or a
        command that works alone was started on a host of a pod.
    """
    if where in (None, ALONE):
        hosts = tpu_hosts()
        if hosts > 1 and where == ALONE:
            raise OptionError(
                f"this TPU slice has {hosts} hosts, and this command runs in one process: take a slice of one host, or "
                "set JAX_PLATFORMS=cpu if no TPU is needed; docs/scaling.md has what several hosts can run"
            )
        if hosts < 2:
            return
    given: dict[str, Any] = {}
    if where not in (None, AUTOMATIC):
        found = re.fullmatch(r"(\S+:\d+),(\d+),(\d+)", where)
        if not found or not int(found[3]) < int(found[2]):
            raise OptionError(f"--distributed {where}: expected HOST:PORT,N,I with I from 0 to N - 1")
        given = {"coordinator_address": found[1], "num_processes": int(found[2]), "process_id": int(found[3])}
    index = f"process {given['process_id']} of {given['num_processes']}" if given else "this process"
    print(f"{index}: waiting for the others, up to five minutes", file=sys.stderr, flush=True)
    # The service keeps SIGTERM for itself, to save at: nothing here asks it, and the process would live on.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**given, heartbeat_timeout_seconds=TIMEOUT_S, shutdown_timeout_seconds=TIMEOUT_S)
    except (ValueError, RuntimeError) as error:
        said = str(error).strip().splitlines()[0]
        raise OptionError(
            f"--distributed{f' {where}' if given else ''}: {said.rstrip('.')}; say HOST:PORT,N,I"
        ) from error
    if not alone():
        print(f"{jax.process_count()} processes, {len(jax.devices())} devices", file=sys.stderr, flush=True)
        # Libraries below Python (Gloo, for one) print to stdout, which is for answers.
        answers = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = os.fdopen(
            answers,
            "w",
            buffering=1 if sys.stdout.isatty() else -1,
            encoding=sys.stdout.encoding,
            errors="backslashreplace",
        )


def tpu_hosts(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """Hosts of the TPU slice that this machine belongs to; 0: no TPU, or JAX is to leave it alone."""
    platforms = jax.config.jax_platforms
    if platforms and "tpu" not in platforms.split(","):
        return 0
    if names := os.environ.get(_HOSTS):
        return len(names.split(","))
    if not environment.has_tpu(devices):
        return 0
    try:
        request = urllib.request.Request(METADATA, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=2) as answer:
            return len(answer.read().decode().split(","))
    except (urllib.error.URLError, OSError):
        return 1


def alone() -> bool:
    """Whether this is the only process. Asking does not make JAX look for devices."""
    return _apart or not jax.distributed.is_initialized() or jax.process_count() == 1


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside, this process works for itself and on its own devices, as if there were no others."""
    global _apart
    before, _apart = _apart, True
    try:
        yield
    finally:
        _apart = before


def speaks() -> bool:
    """Whether this process prints and writes files: the only one, or the first."""
    return alone() or jax.process_index() == 0


def output_folder(path: str | os.PathLike) -> Path:
    """Where this process writes what a command makes: `path` if it speaks, else a folder of no account."""
    return Path(path) if speaks() else Path(tempfile.mkdtemp(prefix="failfast-"))


@contextlib.contextmanager
def one_voice() -> Iterator[None]:
    """Inside, only process 0 prints. Errors are told by whoever meets them."""
    if speaks():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def named(message: str) -> str:
    """An error's text, with the process that it comes from if there are several."""
    return message if alone() else f"process {jax.process_index()}: {message}"


def agreed(value: Value) -> Value:
    """Process 0's value, everywhere.

    Args:
      value: JSON-ready.
    """
    if alone():
        return value
    from jax.experimental.multihost_utils import broadcast_one_to_all

    def broadcast(part: bytes, size: int) -> bytes:
        filled = np.frombuffer(part.ljust(size), np.uint8)
        return np.asarray(broadcast_one_to_all(filled), np.uint8).tobytes()

    # In pieces of two sizes, each of which compiles once: servers agree many times a second.
    text = json.dumps(value).encode()
    words = len(text).to_bytes(_LENGTH, "big") + text
    said = broadcast(words[:_FIRST_PIECE], _FIRST_PIECE)
    length = _LENGTH + int.from_bytes(said[:_LENGTH], "big")
    while len(said) < length:
        said += broadcast(words[len(said) :][:_PIECE], _PIECE)
    return json.loads(said[_LENGTH:length])


def first(work: Callable[[], Value]) -> Value:
    """What `work` returns in process 0, which alone does it; everywhere, JSON-ready.

    Raises:
      ValueError, OSError: `work` raised it; in the other processes an OptionError that says the same.
    """
    result, error = None, None
    if speaks():
        try:
            result = work()
        except (ValueError, OSError) as raised:
            error = raised
    result, said = agreed([result, None if error is None else str(error)])
    if error is not None:
        raise error
    if said is not None:
        raise OptionError(said)
    return result


def where_not(holds: bool) -> list[int]:
    """Numbers of the processes in which it does not hold, everywhere."""
    if alone():
        return [] if holds else [0]
    from jax.experimental.multihost_utils import process_allgather

    return np.flatnonzero(~process_allgather(np.asarray(holds))).tolist()


def leave(status: int) -> None:
    """Ends a process that failed at once: at the usual exit it would wait for the others, who wait for it."""
    if status and not alone():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
