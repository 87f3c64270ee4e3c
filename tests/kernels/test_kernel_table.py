"""The table of attention kernels: which one serves a device, a type and heads, and why others do not."""

from __future__ import annotations

import dataclasses
import itertools
import re
from types import SimpleNamespace

import jax
import pytest
from checkpoint_files import GOLDEN

from failfast_jax import FailFast
from failfast_jax.checkpoints.checkpoint import Checkpoint
from failfast_jax.checkpoints.model_folder import read_pair
from failfast_jax.errors import OptionError
from failfast_jax.kernels import cpu_kernels
from failfast_jax.kernels.attention_window import AttentionCase
from failfast_jax.kernels.kernel_table import ATTENTION, SIMULATED_TPU, kernel_of, refusal, serving, unserved
from failfast_jax.load_options import LoadOptions
from failfast_jax.util import progress

DEVICES = {
    "v2": ("tpu", "TPU v2"), "v3": ("tpu", "TPU v3"), "v4": ("tpu", "TPU v4"), "v5e": ("tpu", "TPU v5 lite"),
    "7x": ("tpu", "TPU7x"), "T4": ("gpu", "7.5"), "A100": ("gpu", "8.0"), "L4": ("gpu", "8.9"), "H100": ("gpu", "9.0"),
    "B200": ("gpu", "10.0"), "MI300X": ("gpu", "gfx942"), "none": ("gpu", None), "other": ("metal", None),
}  # fmt: skip


def a(name: str) -> SimpleNamespace:
    """A device, as far as a kernel is chosen by it."""
    platform, kind = DEVICES[name]
    return SimpleNamespace(platform=platform, device_kind=kind if platform == "tpu" else name, compute_capability=kind)


BF16, F16, F32 = "bfloat16", "float16", "float32"


@pytest.mark.parametrize(
    "devices, dtypes, head_dims, kernel",
    [
        ("v4 v5e 7x", (BF16, F32), (64, 128, 256), "tpu"),
        ("v4 v5e 7x", (F16,), (64, 128, 256), "reference"),
        ("v2 v3", (BF16, F16, F32), (64, 128, 256, 100), "reference"),
        ("v4 v5e 7x", (BF16, F16, F32), (16, 80, 96, 100, 160, 512), "reference"),
        ("H100", (BF16, F16), (64, 128), "gpu"),
        ("H100", (BF16, F16), (80, 96, 160, 256), "cudnn"),
        ("B200", (BF16, F16), (64, 80, 128, 160, 256), "cudnn"),
        ("A100 L4", (BF16, F16), (64, 80, 128), "cudnn"),
        ("A100 L4", (BF16, F16), (100, 160, 256), "xla"),
        ("H100 B200", (BF16, F16), (100, 512), "xla"),
        ("A100 L4 H100 B200", (F32,), (64, 128), "xla"),
        ("T4 MI300X none", (BF16, F16, F32), (64, 100, 128), "xla"),
        ("other", (BF16, F32), (64, 100), "reference"),
    ],
)
def test_the_device_the_type_and_the_heads_choose_the_kernel(devices, dtypes, head_dims, kernel):
    for name, dtype, head_dim in itertools.product(devices.split(), dtypes, head_dims):
        model = {"dtype": dtype, "head_dim": head_dim}
        case, reason = (name, dtype, head_dim), unserved(a(name), **model)
        assert kernel_of(a(name), dtype, head_dim) == kernel, case
        assert refusal(kernel, a(name), **model) is None, case
        # XLA is not chosen without a reason, which is a line.
        assert (reason is None) == (kernel not in ("xla", "reference") or name == "other"), case
        assert reason is None or "\n" not in reason, case


@pytest.mark.parametrize(
    "kernel, device, model, message",
    [
        ("tpu", "v3", {}, "need a TPU v4 or later, this is a TPU v3"),
        ("tpu", "v5e", {"dtype": F16}, "a cache of float16"),
        ("tpu", "v5e", {"head_dim": 100}, "head_dim 100: 64, 128, 256"),
        ("tpu", "v5e", {"heads": 5, "kv_heads": 2}, "5 query heads for 2 KV heads"),
        ("tpu", "A100", {}, "JAX sees no TPU here, it runs on gpu"),
        ("gpu", "v5e", {}, "JAX sees no GPU here, it runs on tpu"),
        ("gpu", "A100", {}, "9.x (Hopper), not 8.0"),
        ("gpu", "H100", {"head_dim": 160}, "head_dim 160: 64, 128"),
        ("cudnn", "MI300X", {}, "8.0 (Ampere) or later, not gfx942"),
        ("cudnn", "A100", {"head_dim": 160}, "head_dim 160: multiples of 8 up to 128"),
        ("cpu", "H100", {}, "no CPU"),
        (SIMULATED_TPU, "A100", {}, "set JAX_PLATFORMS=cpu"),
    ],
)
def test_a_kernel_says_why_it_does_not_serve(kernel, device, model, message):
    assert message in refusal(kernel, a(device), **({"dtype": BF16, "head_dim": 128} | model))


@pytest.mark.parametrize("file", ["tpu_attention", "tpu_prompt", "gpu_attention", "cpu_attention"])
def test_limits_of_windows_and_caches(file):
    [kernel] = [kernel for kernel in ATTENTION if kernel.file == file]
    fine = AttentionCase(BF16, 128, heads=8, kv_heads=2, capacity=256, width=8)
    rows = kernel.module.LIMITS.rows or 10**6
    assert kernel.refusal(dataclasses.replace(fine, width=rows)) is None
    changes = {"a tree": {"pattern": "tree"}, "200 positions": {"capacity": 200}, "int8": {"dtype": "int8"}}
    if rows < 10**6:
        changes |= {f"{rows + 1} rows": {"width": rows + 1}, "a window of 0 rows": {"width": 0}}
    for message, change in changes.items():
        assert message in kernel.refusal(dataclasses.replace(fine, **change))
    copies = dataclasses.replace(fine, pattern="copies", copies=2)
    if kernel.fused:
        assert kernel.refusal(dataclasses.replace(copies, width=16)) is None
        assert "a window of 136 rows" in kernel.refusal(dataclasses.replace(copies, width=272))


def test_a_cpu_runs_its_own_kernel_where_it_has_a_vector_unit():
    cpu = SimpleNamespace(platform="cpu", device_kind="cpu")
    assert kernel_of(cpu, BF16, 128) == ("cpu" if cpu_kernels.vector_lanes() else "reference")
    assert kernel_of(cpu, "float64", 64) == "reference" and unserved(cpu, dtype="float64", head_dim=64)
    for kernel in ("reference", "xla", SIMULATED_TPU):
        assert refusal(kernel, cpu, dtype=F16, head_dim=100) is None


@pytest.mark.parametrize(
    "name, width, pattern, file",
    [
        ("tpu", 8, "text", "tpu_attention"),
        ("tpu", 8, "copies", "tpu_attention"),
        ("tpu", 129, "text", "tpu_prompt"),
        ("tpu", 8, "tree", "plain_attention"),
        (SIMULATED_TPU, 8, "sliding window", "plain_attention"),
        ("gpu", 8, "text", "gpu_attention"),
        ("gpu", 129, "text", "cudnn_attention"),
        ("gpu", 8, "sliding window", "cudnn_attention"),
        ("gpu", 8, "tree", "xla_attention"),
        ("cudnn", 8, "text", "cudnn_attention"),
        ("xla", 8, "text", "xla_attention"),
        ("cpu", 8, "tree", "plain_attention"),
        ("reference", 8, "text", "plain_attention"),
    ],
)
def test_the_width_and_the_mask_choose_a_kernel_of_that_name(name, width, pattern, file):
    assert serving(name, AttentionCase(BF16, 128, width=width, pattern=pattern)).file == file


@pytest.mark.parametrize("drafter", [None, GOLDEN / "fast_dllm_v2_untied"])
def test_kernels_are_refused_before_weights_are_read(drafter, monkeypatch):
    """Of the target, and of its drafter; heads of 16 are for no TPU."""
    monkeypatch.setattr(jax, "devices", lambda: [a("v5e")])
    monkeypatch.setattr(Checkpoint, "load", lambda *args, **options: pytest.fail("weights are read"))
    name = str(drafter or GOLDEN / "qwen2_target_160")
    with pytest.raises(OptionError, match=f"^--attention tpu: {re.escape(name)}: .* head_dim [0-9]+: 64, 128, 256$"):
        read_pair(GOLDEN / "qwen2_target_160", drafter, LoadOptions(attention="tpu"))


def test_xla_says_once_that_it_attends_instead(caplog):
    progress.warn_once.cache_clear()
    for _ in range(2):
        engine = FailFast(GOLDEN / "qwen2_target_160", attention=SIMULATED_TPU)
    [line] = [record.message for record in caplog.records if "attention runs in XLA" in record.message]
    assert "qwen2_target_160: attention runs in XLA: the TPU's kernels do not take head_dim" in line
    assert engine.target.execution.resolved(engine.target.dtype, engine.target.config.head_dim) == "reference"
