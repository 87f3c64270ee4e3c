"""Drafters on the Hugging Face Hub."""

from __future__ import annotations

import sys
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from failfast_jax.errors import OptionError


def check_name(name: str) -> None:
    """Raises OptionError: no repository of the Hub can have this name."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise OptionError(f"--push-to-hub {name}: {str(error).splitlines()[0]}") from None


def push(folder: Path, name: str) -> None:
    """Uploads a drafter's folder to the repository `name`, which is made if there is none.

    Raises:
      OSError: no access, or no network; the folder stays where it is, and may be pushed again.
    """
    try:
        HfApi().create_repo(name, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # network, authentication, validation: half a dozen unrelated classes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OSError(f"--push-to-hub {name}: {reason}; {folder} is finished, the same command tries again") from error
    print(f"https://huggingface.co/{name}", file=sys.stderr)
