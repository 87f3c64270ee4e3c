"""Several processes that decode or train as one, on the hosts of a TPU pod or elsewhere: each runs the same command.

Process 0, the primary, prints and writes files. Values that depend on a clock or on a host's files are broadcast from
it: processes whose programs differ would wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
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
from failfast_jax.util import hardware

AUTOMATIC, ALONE = "auto", "alone"
TIMEOUT_S = 20
"""Seconds without a heartbeat after which a process is lost, and the others end with an error."""
_LENGTH, _FIRST_PIECE, _PIECE = 8, 4096, 2**18
"""Bytes of a broadcast: the value's length in front, the first message, each following message."""
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"

Value = TypeVar("Value")

_as_single = False


def add_flag(parser: Any) -> None:
    """Adds `--distributed` to a command that several processes can run together."""
    parser.add_argument(
        "--distributed",
        metavar="HOST:PORT,N,I",
        nargs="?",
        const=AUTOMATIC,
        help="this is process I of N, of which process 0 listens at HOST:PORT; without a value: as Slurm, Open MPI, "
        "Kubernetes or Cloud TPU say (the default on TPU pods)",
    )


def join(where: str | None = None) -> None:
    """Joins the other processes, before JAX looks for devices; returns at once if there are none.

    Args:
      where: the value of `--distributed`; ALONE for commands without that flag.

    Raises:
      OptionError: the value is malformed, no cluster is found, some processes did not come within five minutes, or a
        command for one process was started on a host of a pod.
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
    cluster = {} if where in (None, AUTOMATIC) else _cluster(where)
    index = "process {process_id} of {num_processes}".format(**cluster) if cluster else "this process"
    print(f"{index}: waiting for the others, up to five minutes", file=sys.stderr, flush=True)
    # JAX's preemption service would catch SIGTERM, and the process would live on.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**cluster, heartbeat_timeout_seconds=TIMEOUT_S, shutdown_timeout_seconds=TIMEOUT_S)
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        flag = f"--distributed{f' {where}' if cluster else ''}"
        raise OptionError(f"{flag}: {reason}; say HOST:PORT,N,I") from error
    if is_single_process():
        return
    print(f"{jax.process_count()} processes, {len(jax.devices())} devices", file=sys.stderr, flush=True)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # A wait for another process is native code, where Python cannot raise KeyboardInterrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Native libraries such as Gloo print to descriptor 1, which is for answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    buffering = 1 if sys.stdout.isatty() else -1
    encoding = sys.stdout.encoding
    sys.stdout = os.fdopen(answers, "w", buffering=buffering, encoding=encoding, errors="backslashreplace")


def _cluster(where: str) -> dict[str, Any]:
    """Arguments of `jax.distributed.initialize` for a value HOST:PORT,N,I."""
    match = re.fullmatch(r"(\S+:\d+),(\d+),(\d+)", where)
    if not match or not int(match[3]) < int(match[2]):
        raise OptionError(f"--distributed {where}: expected HOST:PORT,N,I with I from 0 to N - 1")
    return {"coordinator_address": match[1], "num_processes": int(match[2]), "process_id": int(match[3])}


def tpu_hosts(devices: Path = hardware.PCI) -> int:
    """Counts the hosts of this machine's TPU slice; 0 without a TPU, or if JAX_PLATFORMS leaves it out."""
    platforms = jax.config.jax_platforms
    if platforms and "tpu" not in platforms.split(","):
        return 0
    if names := os.environ.get("TPU_WORKER_HOSTNAMES"):
        return len(names.split(","))
    if not hardware.is_present("tpu", devices):
        return 0
    try:
        request = urllib.request.Request(METADATA, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=2) as reply:
            return len(reply.read().decode().split(","))
    except (urllib.error.URLError, OSError):
        return 1


def is_single_process() -> bool:
    """True if this is the only process. Asking does not make JAX look for devices."""
    return _as_single or not jax.distributed.is_initialized() or jax.process_count() == 1


@contextlib.contextmanager
def as_single_process() -> Iterator[None]:
    """Inside, this process works by itself and on its own devices, as if there were no others."""
    global _as_single
    before, _as_single = _as_single, True
    try:
        yield
    finally:
        _as_single = before


def is_primary() -> bool:
    """True if this process prints and writes files: the only one, or process 0."""
    return is_single_process() or jax.process_index() == 0


def output_folder(path: str | os.PathLike) -> Path:
    """Returns `path` in the primary process and a temporary folder in the others."""
    return Path(path) if is_primary() else Path(tempfile.mkdtemp(prefix="failfast-"))


@contextlib.contextmanager
def only_primary_prints() -> Iterator[None]:
    """Inside, the other processes print nothing. An error that ends one of them is printed after this context."""
    if is_primary():
        yield
        return
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        yield


def with_process_index(message: str) -> str:
    """Returns an error's text, preceded by the index of its process if there are several."""
    return message if is_single_process() else f"process {jax.process_index()}: {message}"


def broadcast_from_primary(value: Value) -> Value:
    """Returns the primary process's value in all processes.

    Args:
      value: JSON-ready.
    """
    if is_single_process():
        return value
    from jax.experimental.multihost_utils import broadcast_one_to_all

    # In messages of two sizes, each of which compiles once, as servers broadcast many times per second. A value of
    # 5,000 bytes: 4,096 bytes that begin with the length, then the remaining 912 in a message of 2**18.
    text = json.dumps(value).encode()
    message = len(text).to_bytes(_LENGTH, "big") + text
    received, length, size = b"", _LENGTH, _FIRST_PIECE
    while len(received) < length:
        part = message[len(received) :][:size].ljust(size)
        received += np.asarray(broadcast_one_to_all(np.frombuffer(part, np.uint8)), np.uint8).tobytes()
        length, size = _LENGTH + int.from_bytes(received[:_LENGTH], "big"), _PIECE
    return json.loads(received[_LENGTH:length])


def run_on_primary(work: Callable[[], Value]) -> Value:
    """Runs `work` in the primary process and returns its JSON-ready result in all processes.

    Raises:
      ValueError, OSError: `work` raised it; in the other processes an OptionError with the same text.
    """
    result, error = None, None
    if is_primary():
        try:
            result = work()
        except (ValueError, OSError) as raised:
            error = raised
    result, message = broadcast_from_primary([result, None if error is None else str(error)])
    if error is not None:
        raise error
    if message is not None:
        raise OptionError(message)
    return result


def where_false(condition: bool) -> list[int]:
    """Returns, in all processes, the indices of the processes in which the condition is false."""
    if is_single_process():
        return [] if condition else [0]
    from jax.experimental.multihost_utils import process_allgather

    return np.flatnonzero(~process_allgather(np.asarray(condition))).tolist()


def exit_process(status: int) -> None:
    """Ends one of several processes at once if its status is not 0: a usual exit waits for the others, which wait for
    it."""
    if status and not is_single_process():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
