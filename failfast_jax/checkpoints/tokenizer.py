"""Tokenizers: from a model's folder or GGUF file, and the check that two models share one.

`transformers` and `tokenizers` are imported when first needed; PyTorch never is. No code of a folder ever runs: the
classes are named here, and `auto_map` is ignored.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from failfast_jax.checkpoints.hub import OLDER_TOKENIZERS, TOKENIZER_FILES, resolve_source
from failfast_jax.errors import CheckpointError, PromptError, explaining, quoted
from failfast_jax.models.model_config import ENDS, ModelConfig
from failfast_jax.template_rendering import has_template, prepare
from failfast_jax.text_stream import special_tokens
from failfast_jax.util.files import LARGEST_TEXT, is_regular_file, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLASSES = ("Qwen2Tokenizer", "GPT2Tokenizer")
"""Classes of transformers that read `vocab.json` and `merges.txt`; `tokenizer.json` needs none."""
SENTENCEPIECE, WHOLE, SETTINGS = "tokenizer.model", "tokenizer.json", "tokenizer_config.json"
PATIENCE_S, CHARACTERS_A_SECOND = 30.0, 50_000
"""A text may take so many seconds to tokenize, and one more for so many characters: a hundred times what it takes."""
SHORT = 64
"""Characters that are tokenized at once, without looking at the time."""


def load_tokenizer(path_or_hub_id: str | os.PathLike[str], file: Any = None) -> PreTrainedTokenizerBase | None:
    """Loads a model's tokenizer with its chat template, or None where the folder has no tokenizer.

    Takes what `load_model` takes. `config.json` is not consulted: `transformers` does not know every
    `model_type` that is served here. That of a GGUF file is a `GGUFTokenizer`.

    Args:
      file: the GGUF file, if it is open already.

    Raises:
      CheckpointError: no such model, or tokenizer files that cannot be read; for GGUF, a tokenizer
        other than SentencePiece's BPE and byte-level BPE with a known pre-tokenizer.
    """
    path = resolve_source(path_or_hub_id)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: not a folder and not a .gguf file")
        from failfast_jax.checkpoints.gguf_file import GGUFFile
        from failfast_jax.checkpoints.gguf_tokenizer import GGUFTokenizer, fast_tokenizer_arguments

        arguments = fast_tokenizer_arguments(file or GGUFFile.open(path))
        return _loaded(lambda: GGUFTokenizer(_transformers, **arguments), path)
    name = class_of(path)
    if name is None:
        return None
    options = {"local_files_only": True, "trust_remote_code": False}
    if name == SENTENCEPIECE:
        name, options = "PreTrainedTokenizerFast", options | _sentencepiece_options(path)
    return _loaded(lambda: getattr(_transformers(), name).from_pretrained(str(path), **options), path)


def class_of(folder: Path) -> str | None:
    """The class of transformers that reads a folder's tokenizer, or SENTENCEPIECE; None: it has none."""
    there = {name for name in (*TOKENIZER_FILES, *OLDER_TOKENIZERS) if is_regular_file(folder / name)}
    for name in there:
        if (size := (folder / name).stat().st_size) > LARGEST_TEXT:
            raise CheckpointError(f"{folder / name}: {size} bytes; at most {LARGEST_TEXT} are read")
    if WHOLE in there:
        return "PreTrainedTokenizerFast"
    if not {"vocab.json", "merges.txt"} <= there:
        return SENTENCEPIECE if SENTENCEPIECE in there else None
    stated = read_json(folder / SETTINGS).get("tokenizer_class") if SETTINGS in there else None
    name = CLASSES[0] if stated is None else str(stated).removesuffix("Fast")
    if name not in CLASSES:
        raise CheckpointError(
            f"{folder / SETTINGS}: tokenizer_class {quoted(stated)} is not read from vocab.json and merges.txt (read "
            f"are {', '.join(CLASSES)}); put the model's {WHOLE} there"
        )
    return name


def _loaded(load: Callable[[], PreTrainedTokenizerBase], path: Path) -> PreTrainedTokenizerBase:
    with explaining(f"{path}: its tokenizer cannot be read", CheckpointError):
        tokenizer = load()
    # How long a text may be is checked by who asks.
    vars(tokenizer).get("deprecation_warnings", {})["sequence-length-is-longer-than-the-specified-maximum"] = True
    kind = type(tokenizer)
    tokenizer.__class__ = type(kind.__name__, (_Guarded, kind), {"model_path": path})
    if has_template(tokenizer):
        prepare()
    return tokenizer


class _Guarded:
    """A tokenizer whose errors name its file, panics of its native code among them, and which does not take for ever.

    A file may hold regular expressions that take longer than anybody waits. Native code cannot be ended: it goes on in
    its thread until it is done or the process ends.
    """

    model_path: Path

    def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
        with explaining(f"{self.model_path}: its tokenizer cannot take this text", PromptError):
            work = functools.partial(super().__call__, text, *args, **options)
            return _in_time(work, text) if isinstance(text, str) and len(text) > SHORT else work()

    def decode(self, *args: Any, **options: Any) -> Any:
        with explaining(f"{self.model_path}: its tokenizer cannot decode these tokens", CheckpointError):
            return super().decode(*args, **options)


def _in_time(work: Callable[[], Any], text: str) -> Any:
    """Returns or raises what `work` does. It runs in a thread: native code hears neither a clock nor Ctrl-C."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    seconds = PATIENCE_S + len(text) / CHARACTERS_A_SECOND
    try:
        return outcome.result(timeout=seconds)
    except TimeoutError:
        raise TimeoutError(f"after {seconds:.0f} s it was not done with {len(text)} characters") from None


def _sentencepiece_options(folder: Path) -> dict[str, Any]:
    """Arguments for a folder with `tokenizer.model` alone, as Llama 2's: defaults of the class that it names."""
    if importlib.util.find_spec("sentencepiece") is None:  # with which transformers translates the file
        raise CheckpointError(f"{folder}: {SENTENCEPIECE} and no {WHOLE}: pip install sentencepiece protobuf")
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    if not str(settings.get("tokenizer_class") or "Llama").startswith(("Llama", "CodeLlama")):
        return {}
    usual = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    return {key: value for key, value in usual.items() if settings.get(key) is None}


def _transformers() -> ModuleType:
    # Without PyTorch, the import otherwise prints an advice to install it.
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    is_set = name in os.environ
    os.environ.setdefault(name, "1")
    try:
        import transformers
    finally:
        if not is_set:
            del os.environ[name]
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
    """Checks that both models mean the same by each token id; returns the number of leading ids that may be drafted.

    Ids that only one tokenizer defines are no conflict: a drafter may have its mask token, and the
    embeddings of one family differ in their padding rows.

    Raises:
      ValueError: an id that means two things; or, if a model has no tokenizer, different vocabulary
        sizes. The message names both models.
    """
    both = f"target {target_name} and drafter {drafter_name}"
    sizes = target_config.vocab_size, drafter_config.vocab_size
    if target_tokenizer is None or drafter_tokenizer is None:
        if sizes[0] != sizes[1]:
            without = "target" if target_tokenizer is None else "drafter"
            raise ValueError(
                f"{both} cannot be checked for equal tokens because the {without} has no tokenizer, and their "
                f"vocabularies have {sizes[0]} and {sizes[1]} ids"
            )
        return sizes[0]
    tokens, others = ({id: token for token, id in t.get_vocab().items()} for t in (target_tokenizer, drafter_tokenizer))
    common = [id for id in tokens.keys() & others.keys() if id < min(sizes)]
    if not common:
        raise ValueError(f"{both} have no token id in common")
    if different := [id for id in common if tokens[id] != others[id]]:
        first = min(different)
        raise ValueError(
            f"{both} have different vocabularies ({len(different)} of {len(common)} ids differ): id {first} is "
            f"{tokens[first]!r} in the target and {others[first]!r} in the drafter"
        )
    return min(sizes)
