"""Tokenizers that the metadata of a GGUF file describes: SentencePiece's BPE and byte-level BPE.

Both are put together from parts of the `tokenizers` library. Where llama.cpp and the models' own `tokenizer.json`
differ (llama.cpp never normalises Unicode, say), the latter counts.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from failfast_jax.checkpoints.gguf_file import GGUFFile
from failfast_jax.errors import CheckpointError, InputError, is_failure, quoted
from failfast_jax.util import values

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Values of `gguf.TokenType`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_LONGEST_TOKEN = 1024
"""Characters: all ways to cut a token in two are tried."""
_SPACE = "\u2581"
"""SentencePiece writes a space so."""

# How text is cut into words, which are merged each on their own.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|DIGITS| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_SEED_CODER = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}"
_LOWER, _UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+SUFFIX|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*SUFFIX|DIGITS"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _TAIL
)


@dataclasses.dataclass(frozen=True)
class _PreTokenizer:
    """A pre-tokenizer of llama.cpp: regular expressions, each of which cuts what the one before it left."""

    splits: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is taken without merging
    add_bos: bool = False  # where the metadata do not say
    nfc: bool = False  # text is brought to Unicode's normal form C


_DEFAULT = _PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_WORDS = _PreTokenizer((_GPT2,))
_DIGITS_AND_WORDS = _PreTokenizer((_DIGIT, _GPT2))
_QWEN2 = _PreTokenizer((_CL100K.replace("DIGITS", r"\p{N}"),), nfc=True)
_LLAMA3 = _PreTokenizer((_CL100K.replace("DIGITS", r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_PRE_TOKENIZERS = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "a.x-4.0", "gigachat", "mellum", "trillion"), _WORDS),
    **dict.fromkeys(("smollm", "minerva-7b", "refact", "starcoder"), _DIGITS_AND_WORDS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "megrez": dataclasses.replace(_QWEN2, nfc=False),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "pixtral"), _LLAMA3),
    "tekken": _PreTokenizer(
        (_O200K.replace("SUFFIX", "").replace("DIGITS", r"\p{N}"),), whole_words=True, add_bos=True
    ),
    "gpt-4o": _PreTokenizer((_O200K.replace("SUFFIX", f"{_CONTRACTIONS}?").replace("DIGITS", r"\p{N}{1,3}"),)),
    "seed-coder": _PreTokenizer((_SEED_CODER,)),
    "deepseek-coder": _PreTokenizer(
        ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", _DIGIT)
    ),
    "deepseek-v3": _PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)),
}


def fast_tokenizer_arguments(file: GGUFFile) -> dict[str, Any]:
    """Builds the tokenizer of a GGUF file, as the arguments of `PreTrainedTokenizerFast`.

    Raises:
      CheckpointError: a kind of tokenizer other than `llama` (SentencePiece's BPE) and `gpt2` (byte-level BPE), an
        unknown pre-tokenizer, or metadata that are missing or inconsistent.
    """
    kind = file.text("tokenizer.ggml.model")
    if kind not in ("llama", "gpt2"):
        raise CheckpointError(
            f"{file.path}: tokenizer model {quoted(kind)} is not supported (supported: 'llama', SentencePiece's BPE; "
            "'gpt2', byte-level BPE); use the model's Hugging Face folder"
        )
    vocabulary = _read_vocabulary(file, {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {})
    try:
        backend = _sentencepiece(vocabulary) if kind == "llama" else _byte_level(vocabulary)
        _add_tokens(backend, vocabulary)
    except BaseException as error:  # the Rust library raises bare Exceptions and panics
        if isinstance(error, InputError) or not is_failure(error):
            raise
        raise CheckpointError(f"{file.path}: its tokenizer cannot be built ({error})") from error
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    architecture = file.text("general.architecture", None)
    return {
        "tokenizer_object": backend,
        **{argument: vocabulary.special(name) for argument, name in names.items()},
        "chat_template": file.text("tokenizer.chat_template", None),
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.number(f"{architecture}.context_length", default=None),
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
        return values.flag(self.file.metadata, f"tokenizer.ggml.{key}", self.file.path, default)

    def special(self, name: str) -> str | None:
        """A special token, or None where the model has none of that name."""
        id = self.file.token_id(name, self.defaults.get(name))
        token = self.tokens[id] if id is not None and id < len(self.tokens) else None
        return token if token in self.ids else None

    def merges(self) -> list[tuple[str, ...]]:
        """The merges that the metadata list; CheckpointError: one of anything but two tokens that make a third."""
        merges = [tuple(merge.split(" ", 1)) for merge in self.file.entries("tokenizer.ggml.merges", str)]
        for merge in merges:
            if len(merge) != 2 or not {*merge, "".join(merge)} <= self.ids.keys():
                raise self.error(f"the merge {quoted(' '.join(merge))}, which is not two tokens that make a third")
        return merges

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: its tokenizer has {problem}")


def _read_vocabulary(file: GGUFFile, defaults: dict[str, int]) -> _Vocabulary:
    tokens = file.entries("tokenizer.ggml.tokens", str)
    types = file.entries("tokenizer.ggml.token_type", int, [_NORMAL] * len(tokens))
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


def _add_tokens(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Adds the tokens that stand in the text as they are."""
    from tokenizers import AddedToken

    backend.add_tokens(
        [
            AddedToken(token, special=vocabulary.types[id] != _USER_DEFINED, normalized=False)
            for token, id in vocabulary.ids.items()
            if vocabulary.types[id] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )


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
    frame = _frame(vocabulary, add_bos=True)
    if frame is not None:
        backend.post_processor = frame
    return backend


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, ...]]:
    """All pairs of pieces that make a piece, the better its score the earlier.

    SentencePiece merges the pair whose whole has the best score. Where all scores are equal, the converter had none:
    the file may have merges instead, or else ids are in the order of training.
    """
    scores = vocabulary.file.entries("tokenizer.ggml.scores", float)
    if len(scores) < len(vocabulary.tokens):
        raise vocabulary.error(f"{len(vocabulary.tokens)} tokens and {len(scores)} scores")
    # Only these are looked up; bytes and control tokens are never the result of a merge.
    pieces = {token: id for token, id in vocabulary.ids.items() if vocabulary.types[id] == _NORMAL}
    if vocabulary.file.entries("tokenizer.ggml.merges", str, []) and len({scores[id] for id in pieces.values()}) == 1:
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

    name = vocabulary.file.text("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{vocabulary.file.path}: pre-tokenizer {quoted(name)} is not supported (supported: "
            f"{', '.join(_PRE_TOKENIZERS)}); use the model's Hugging Face folder"
        )
    rule = _PRE_TOKENIZERS[name]
    model = models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges(), ignore_merges=rule.whole_words)
    backend = Tokenizer(model)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [
        pre_tokenizers.Digits(individual_digits=True)
        if split == _DIGIT
        else pre_tokenizers.Split(Regex(split), behavior="isolated")
        for split in rule.splits
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = _frame(vocabulary, rule.add_bos) or processors.ByteLevel(trim_offsets=False)
    return backend
