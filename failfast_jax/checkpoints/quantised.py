"""Checkpoints with quantised weights, which are not read: their method, from the settings or the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

SETTINGS = ("quantization_config", "quantization", "compression_config", "quantize_config", "quant_config")
"""Keys of `config.json`: of transformers, MLX, older versions of compressed-tensors, AutoGPTQ and AutoAWQ."""
NAMES = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 (fbgemm)",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "mlx": "MLX",
    "mxfp4": "MXFP4",
    "modelopt": "ModelOpt",
}
_ENDINGS = (
    # The first whose endings are all there names the method; "" is any tensor.
    ("GPTQ", (".qweight", ".g_idx")),
    ("AWQ", (".qweight", ".qzeros")),
    ("GPTQ or AWQ", (".qweight",)),
    ("compressed-tensors", (".weight_packed",)),
    ("MXFP4", ("_blocks", "_scales")),
    ("bitsandbytes (4 bits)", (".weight.absmax",)),
    ("bitsandbytes (8 bits)", (".SCB",)),
    ("bitsandbytes (8 bits)", (".weight_format",)),
    ("MLX", (".scales", ".biases")),
    ("MLX or another method with scales", (".scales",)),
    ("FP8", (".weight_scale_inv",)),
    ("ModelOpt (NVFP4)", (".weight_scale_2",)),
    ("HQQ", (".W_q",)),
)
"""Endings of tensors' names by method."""


def refusal(method: str) -> str:
    """The message about a checkpoint of that method, without the file's name."""
    return (
        f"quantised by {method}: not read; take the unquantised checkpoint, which --quantize int8 rounds while it is "
        "read, or a GGUF file"
    )


def of_config(raw: Mapping[str, Any]) -> str | None:
    """The method that a `config.json` names; None: none."""
    for key in SETTINGS:
        if not (settings := raw.get(key)):
            continue
        if not isinstance(settings, Mapping):
            return str(settings)[:60]
        method = settings.get("quant_method") or settings.get("quant_algo")
        if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
            method = "bitsandbytes"
        if method is None:
            method = "mlx" if {"group_size", "bits"} <= {*settings} and "zero_point" not in settings else key
        name = NAMES.get(str(method).lower(), str(method)[:60])
        bits = settings.get("bits") or settings.get("w_bit") or ("4" if settings.get("load_in_4bit") else None)
        return f"{name} ({bits} bits)" if type(bits) in (int, str) and bits else name
    return None


def of_tensors(tensors: Iterable[tuple[str, str]]) -> str | None:
    """The method by names and dtypes of tensors, as safetensors writes them; None: none."""
    names, dtypes = zip(*tensors, strict=True) if (tensors := list(tensors)) else ((), ())
    for method, endings in _ENDINGS:
        if all(any(name.endswith(ending) for name in names) for ending in endings):
            return method
    if any(dtype.startswith("F8_E") for dtype in dtypes):
        return "FP8"
    if any(name.endswith(".weight_scale") for name in names):
        return "compressed-tensors"
    if any(dtype.startswith(("F4", "F6")) for dtype in dtypes):
        return "a format of 4 to 6 bits"
    return None
