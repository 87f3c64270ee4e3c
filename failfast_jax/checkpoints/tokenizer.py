"""Tokenizers: from a model's folder or GGUF file, and the check that two models share one.

`transformers` and `tokenizers` are imported when first needed; PyTorch never is.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from failfast_jax.checkpoints.hub import resolve_source
from failfast_jax.errors import CheckpointError
from failfast_jax.files import read_json
from failfast_jax.models.config import ENDS, ModelConfig
from failfast_jax.text import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path_or_hub_id: str | os.PathLike[str]) -> PreTrainedTokenizerBase | None:
    """Loads a model's tokenizer with its chat template, or None where the folder has no tokenizer.

    Takes what `load_model` takes. `config.json` is not consulted: `transformers` does not know every
    `model_type` that is served here.

    Raises:
      CheckpointError: no such model, or tokenizer files that cannot be read; for GGUF, a tokenizer
        other than SentencePiece's BPE and byte-level BPE with a known pre-tokenizer.
    """
    path = resolve_source(path_or_hub_id)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: not a folder and not a .gguf file")
        from failfast_jax.checkpoints.gguf import GGUFFile
        from failfast_jax.checkpoints.gguf_tokenizer import fast_tokenizer_arguments

        return _silent(_transformers().PreTrainedTokenizerFast(**fast_tokenizer_arguments(GGUFFile.open(path))))
    try:
        if (path / "tokenizer.json").is_file():
            return _silent(_transformers().PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True))
        if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            return _silent(_from_vocabulary_files(path))
    except Exception as error:  # the Rust library raises bare Exceptions
        raise CheckpointError(f"{path}: its tokenizer cannot be read ({error})") from error
    return None


def _silent(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Says nothing of texts longer than the model's context: how long one may be is checked, and said, by who asks."""
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _from_vocabulary_files(folder: Path) -> PreTrainedTokenizerBase:
    """From `vocab.json` and `merges.txt`, with the class that `tokenizer_config.json` names."""
    settings = folder / "tokenizer_config.json"
    name = read_json(settings).get("tokenizer_class") if settings.is_file() else None
    # AutoTokenizer would read config.json, too.
    tokenizer_class = getattr(_transformers(), (name or "Qwen2Tokenizer").removesuffix("Fast"), None)
    if tokenizer_class is None:
        raise ValueError(f"{settings}: tokenizer_class {name!r} is unknown to transformers")
    return tokenizer_class.from_pretrained(str(folder), local_files_only=True)


def _transformers() -> ModuleType:
    # Otherwise importing it without PyTorch prints an advice to install PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers


def stop_tokens(config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Ids that end an answer: those of the model's configuration, the tokenizer's end token, and the ends of turns that
    its chat template writes (fine-tuned models often name neither in their configuration)."""
    template, end = (str(getattr(tokenizer, name, None) or "") for name in ("chat_template", "eos_token"))
    named = [id for id, name in special_tokens(tokenizer).items() if name == end or (name in ENDS and name in template)]
    return tuple(dict.fromkeys((*config.eos_token_ids, *named)))


def check_same_tokens(
    target_tokenizer: PreTrainedTokenizerBase | None,
    drafter_tokenizer: PreTrainedTokenizerBase | None,
    target_config: ModelConfig,
    drafter_config: ModelConfig,
    target_name: str = "target",
    drafter_name: str = "drafter",
) -> int:
    """Checks that both models mean the same by each token id.

    Ids that only one tokenizer defines are no conflict: a drafter may have its mask token, and the
    embeddings of one family differ in their padding rows.

    Returns:
      How many leading ids both models can embed: the ids that may be drafted.

    Raises:
      ValueError: an id that means two things; or, if a model has no tokenizer, different vocabulary
        sizes. The message names both models.
    """
    both = f"target {target_name} and drafter {drafter_name}"
    shared = min(target_config.vocab_size, drafter_config.vocab_size)
    if target_tokenizer is None or drafter_tokenizer is None:
        if target_config.vocab_size != drafter_config.vocab_size:
            raise ValueError(
                f"{both} cannot be checked for equal tokens because "
                f"{'the target' if target_tokenizer is None else 'the drafter'} has no tokenizer, and their "
                f"vocabularies have {target_config.vocab_size} and {drafter_config.vocab_size} ids"
            )
        return shared
    target_tokens = {id: token for token, id in target_tokenizer.get_vocab().items()}
    drafter_tokens = {id: token for token, id in drafter_tokenizer.get_vocab().items()}
    common = [id for id in target_tokens.keys() & drafter_tokens.keys() if id < shared]
    if not common:
        raise ValueError(f"{both} have no token id in common")
    different = [id for id in common if target_tokens[id] != drafter_tokens[id]]
    if different:
        first = min(different)
        raise ValueError(
            f"{both} have different vocabularies ({len(different)} of {len(common)} ids differ): id {first} is "
            f"{target_tokens[first]!r} in the target and {drafter_tokens[first]!r} in the drafter"
        )
    return shared
