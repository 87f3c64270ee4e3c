"""Tokenizers that the metadata of a GGUF file describes: SentencePiece's BPE and byte-level BPE.

Both are put together from parts of the `tokenizers` library. Where llama.cpp and the models' own `tokenizer.json`
differ (llama.cpp never normalises Unicode, say), the latter counts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from failfast_jax.checkpoints.gguf_file import GGUFFile
from failfast_jax.errors import CheckpointError, explaining, quoted
from failfast_jax.util import values

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Values of `gguf.TokenType`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_LONGEST_TOKEN = 1024
"""Characters: all ways to cut a token in two are tried."""
_SPACE = "\u2581"
"""SentencePiece writes a space so."""

_PRE_TOKENIZERS = {name: rule for rule in values.asset("pre_tokenizers.toml")["rules"] for name in rule["names"]}


class GGUFTokenizer:
    """A tokenizer with the ids, texts and names that transformers' has for the same arguments.

    Importing transformers takes a second. Whatever is not defined here is that of `whole`.

    Args:
      transformers: imports the library.
      arguments: those of `PreTrainedTokenizerFast`.
    """

    def __init__(self, transformers: Callable[[], ModuleType], **arguments: Any):
        self._transformers, self._arguments = transformers, arguments
        self.chat_template, self.clean_up_tokenization_spaces = arguments["chat_template"], False
        self.backend = backend = arguments["tokenizer_object"]
        self.get_vocab = backend.get_vocab
        names = self.special_tokens_map = {name: arguments[name] for name in SPECIAL if arguments[name] is not None}
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        backend.add_special_tokens([token for token in dict.fromkeys(names.values()) if token not in known])
        self.added_tokens_decoder = backend.get_added_tokens_decoder()
        for name in SPECIAL:
            setattr(self, name, arguments[name])
            setattr(self, f"{name}_id", backend.token_to_id(names[name]) if name in names else None)

    @functools.cached_property
    def whole(self) -> Any:
        """The `PreTrainedTokenizerFast`."""
        whole = self._transformers().PreTrainedTokenizerFast(**self._arguments)
        whole.chat_template = self.chat_template
        return whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return self.backend.get_vocab_size()

    def __call__(self, text: Any, add_special_tokens: bool = True, **options: Any) -> Any:
        if options or not isinstance(text, str):
            return self.whole(text, add_special_tokens=add_special_tokens, **options)
        return {"input_ids": self.encode(text, add_special_tokens)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns a text's ids."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Returns the text of ids as the tokens spell it."""
        return self.backend.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens=skip_special_tokens)


def fast_tokenizer_arguments(file: GGUFFile) -> dict[str, Any]:
    """Builds the tokenizer of a GGUF file, as the arguments of `PreTrainedTokenizerFast`.

    Raises:
      CheckpointError: a kind of tokenizer other than `llama` (SentencePiece's BPE) and `gpt2` (byte-level BPE), an
        unknown pre-tokenizer, or metadata that are missing or inconsistent.
    """
    kind = file.get(values.text, "tokenizer.ggml.model")
    if kind not in ("llama", "gpt2"):
        raise CheckpointError(
            f"{file.path}: tokenizer model {quoted(kind)} is not supported (supported: 'llama', SentencePiece's BPE; "
            "'gpt2', byte-level BPE); use the model's Hugging Face folder"
        )
    from tokenizers import AddedToken

    vocabulary = _read_vocabulary(file, {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {})
    with explaining(f"{file.path}: its tokenizer cannot be built", CheckpointError):
        backend = _sentencepiece(vocabulary) if kind == "llama" else _byte_level(vocabulary)
        # The tokens that stand in the text as they are.
        kinds = {token: vocabulary.types[id] for token, id in vocabulary.ids.items()}
        literal = {token: kind for token, kind in kinds.items() if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)}
        backend.add_tokens(
            [AddedToken(token, special=kind != _USER_DEFINED, normalized=False) for token, kind in literal.items()]
        )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    architecture = file.get(values.text, "general.architecture", None)
    return {
        "tokenizer_object": backend,
        **{argument: vocabulary.special(name) for argument, name in names.items()},
        "chat_template": file.get(values.text, "tokenizer.chat_template", None),
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get(values.number, f"{architecture}.context_length", default=None),
    }


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """Tokens, their types and ids, from the metadata of `file`; `defaults`: special tokens that it does not name."""

    file: GGUFFile
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    defaults: dict[str, int]

    def flag(self, key: str, default: bool) -> bool:
        return self.file.get(values.flag, f"tokenizer.ggml.{key}", default)

    def special(self, name: str) -> str | None:
        """A special token, or None where the model has none of that name."""
        id = self.file.token_id(name, self.defaults.get(name))
        token = self.tokens[id] if id is not None and id < len(self.tokens) else None
        return token if token in self.ids else None

    def merges(self) -> list[tuple[str, ...]]:
        """The merges that the metadata list; CheckpointError: one of anything but two tokens that make a third."""
        merges = [tuple(merge.split(" ", 1)) for merge in self.file.get(values.entries, "tokenizer.ggml.merges", str)]
        for merge in merges:
            if len(merge) != 2 or not {*merge, "".join(merge)} <= self.ids.keys():
                raise self.error(f"the merge {quoted(' '.join(merge))}, which is not two tokens that make a third")
        return merges

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: its tokenizer has {problem}")


def _read_vocabulary(file: GGUFFile, defaults: dict[str, int]) -> _Vocabulary:
    tokens = file.get(values.entries, "tokenizer.ggml.tokens", str)
    types = file.get(values.entries, "tokenizer.ggml.token_type", int, [_NORMAL] * len(tokens))
    # Unused entries pad the vocabulary to the embedding's size; they are no tokens.
    used = [(token, id) for id, (token, type) in enumerate(zip(tokens, types)) if token and type != _UNUSED]
    vocabulary = _Vocabulary(file, tokens, types, dict(used), defaults)
    if len(types) < len(tokens):
        raise vocabulary.error(f"{len(tokens)} tokens and {len(types)} token types")
    if longest := next((token for token in tokens if len(token) > _LONGEST_TOKEN), None):
        raise vocabulary.error(f"the token {quoted(longest)} of {len(longest)} characters")
    if twice := [token for token, id in used if vocabulary.ids[token] != id]:
        raise vocabulary.error(f"the token {quoted(twice[0])} twice")
    return vocabulary


def _frame(vocabulary: _Vocabulary, add_bos: bool):
    """The post-processor that adds first and last tokens; None where there are none to add."""
    from tokenizers.processors import TemplateProcessing

    bos = vocabulary.special("bos") if vocabulary.flag("add_bos_token", add_bos) else None
    eos = vocabulary.special("eos") if vocabulary.flag("add_eos_token", False) else None
    ends = {token: vocabulary.ids[token] for token in (bos, eos) if token is not None}
    if not ends:
        return None

    def framed(name: str) -> list[str]:
        return [token for token in (bos, name, eos) if token is not None]

    return TemplateProcessing(single=framed("$A"), pair=framed("$A") + framed("$B"), special_tokens=list(ends.items()))


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece's BPE, as in Llama 2 and Mistral; what is no piece is spelt in bytes.

    As in llama.cpp, a space goes in front of the text and of what follows each special token.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    options = {"unk_token": vocabulary.special("unknown"), "fuse_unk": True, "byte_fallback": True}
    backend = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=_merges_by_score(vocabulary), **options))
    steps = [normalizers.Replace(" ", _SPACE)]
    undo = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    backend.normalizer, backend.decoder = normalizers.Sequence(steps), decoders.Sequence(undo)
    if (frame := _frame(vocabulary, add_bos=True)) is not None:
        backend.post_processor = frame
    return backend


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, ...]]:
    """All pairs of pieces that make a piece, the better its score the earlier.

    SentencePiece merges the pair whose whole has the best score. Where all scores are equal, the converter had none:
    the file may have merges instead, or else ids are in the order of training.
    """
    scores = vocabulary.file.get(values.entries, "tokenizer.ggml.scores", float)
    if len(scores) < len(vocabulary.tokens):
        raise vocabulary.error(f"{len(vocabulary.tokens)} tokens and {len(scores)} scores")
    # Only these are looked up; bytes and control tokens are never the result of a merge.
    pieces = {token: id for token, id in vocabulary.ids.items() if vocabulary.types[id] == _NORMAL}
    stored = vocabulary.file.get(values.entries, "tokenizer.ggml.merges", str, [])
    if stored and len({scores[id] for id in pieces.values()}) == 1:
        return vocabulary.merges()
    merges = [
        (-scores[id], id, len(piece) - cut, piece[:cut], piece[cut:])
        for piece, id in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    """Byte-level BPE, as in Llama 3 and Qwen2."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    name = vocabulary.file.get(values.text, "tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{vocabulary.file.path}: pre-tokenizer {quoted(name)} is not supported (supported: "
            f"{', '.join(_PRE_TOKENIZERS)}); use the model's Hugging Face folder"
        )
    rule = _PRE_TOKENIZERS[name]
    merges, whole_words = vocabulary.merges(), rule.get("whole_words", False)
    backend = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=whole_words))
    if rule.get("nfc"):
        backend.normalizer = normalizers.NFC()
    splits = [
        pre_tokenizers.Digits(individual_digits=True)  # the same, faster
        if split == r"\p{N}"
        else pre_tokenizers.Split(Regex(split), behavior="isolated")
        for split in rule["splits"]
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    backend.decoder = decoders.ByteLevel()
    frame = _frame(vocabulary, rule.get("add_bos", False))
    backend.post_processor = frame or processors.ByteLevel(trim_offsets=False)
    return backend
