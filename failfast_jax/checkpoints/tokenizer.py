"""Tokenizers: from a model's folder, from GGUF metadata, and the check that two models share one.

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
from failfast_jax.models.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from failfast_jax.checkpoints.gguf import GGUFFile

# llama.cpp's names of pre-tokenizers -> the rules of `_pre_tokenizer`.
_PRE_TOKENIZERS = {
    "default": "gpt-2",
    "gpt-2": "gpt-2",
    "smollm": "smollm",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
}
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"qwen2": _SPLIT.replace("DIGITS", r"\p{N}"), "llama-bpe": _SPLIT.replace("DIGITS", r"\p{N}{1,3}")}
# Values of `gguf.TokenType`.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5


def load_tokenizer(path_or_hub_id: str | os.PathLike[str]) -> PreTrainedTokenizerBase | None:
    """Loads a model's tokenizer with its chat template, or None where the folder has no tokenizer.

    Takes what `load_model` takes. `config.json` is not consulted: `transformers` does not know every
    `model_type` that is served here.

    Raises:
      CheckpointError: no such model, or tokenizer files that cannot be read; for GGUF, a tokenizer
        other than byte-level BPE with a known pre-tokenizer.
    """
    path = resolve_source(path_or_hub_id)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: not a folder and not a .gguf file")
        from failfast_jax.checkpoints.gguf import GGUFFile

        return gguf_tokenizer(GGUFFile.open(path))
    try:
        if (path / "tokenizer.json").is_file():
            return _transformers().PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            return _from_vocabulary_files(path)
    except Exception as error:  # the Rust library raises bare Exceptions
        raise CheckpointError(f"{path}: its tokenizer cannot be read ({error})") from error
    return None


def gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """Builds the byte-level BPE tokenizer that a GGUF file's metadata describes.

    Raises:
      CheckpointError: another kind of tokenizer, an unknown pre-tokenizer, or missing metadata.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    prefix = "tokenizer.ggml."
    kind = file.need(prefix + "model")
    if kind != "gpt2":
        raise CheckpointError(
            f"{file.path}: tokenizer model {kind!r} is not supported (supported: 'gpt2', byte-level BPE); "
            "use the model's Hugging Face folder"
        )
    name = file.metadata.get(prefix + "pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {name!r} is not supported (supported: {', '.join(_PRE_TOKENIZERS)}); "
            "use the model's Hugging Face folder"
        )
    rule = _PRE_TOKENIZERS[name]
    tokens: list[str] = file.need(prefix + "tokens")
    types: list[int] = file.metadata.get(prefix + "token_type", [1] * len(tokens))
    # Unused entries pad the vocabulary to the embedding's size; they are no tokens.
    vocab = {token: id for id, (token, type) in enumerate(zip(tokens, types)) if type != _UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in file.need(prefix + "merges")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule == "llama-bpe"))
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(rule)
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=type != _USER_DEFINED, normalized=False)
        for token, type in zip(tokens, types)
        if type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)

    def token(name: str) -> str | None:
        id = file.metadata.get(f"{prefix}{name}_token_id")
        return tokens[id] if id is not None and id < len(tokens) else None

    bos = token("bos")
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    if bos is not None and file.metadata.get(prefix + "add_bos_token", rule == "llama-bpe"):
        text = {"single": f"{bos} $A", "pair": f"{bos} $A {bos} $B"}
        backend.post_processor = processors.TemplateProcessing(**text, special_tokens=[(bos, vocab[bos])])
    architecture = file.metadata.get("general.architecture")
    return _transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=token("eos"),
        unk_token=token("unknown"),
        pad_token=token("padding"),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=file.metadata.get(f"{architecture}.context_length"),
    )


def _pre_tokenizer(rule: str):
    """How text is cut into words before merging, as the models' own `tokenizer.json` says."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if rule == "gpt-2":
        return ByteLevel(add_prefix_space=False)
    if rule == "smollm":
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    return Sequence(
        [Split(Regex(_SPLITS[rule]), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )


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
