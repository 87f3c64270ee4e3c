"""Tokenizers inside GGUF files against the libraries that trained them: SentencePiece and `tokenizers`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers
from checkpoint_files import byte_level_alphabet, refuses, sentencepiece_model, write_gguf
from gguf import TokenType
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter

from convert import __main__ as convert
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.errors import CheckpointError, ConfigError

TEXTS = {
    "latin": "Žluťoučký kůň, naïve façade; ßtraße İstanbul ÆØÅ Đặng",
    "arabic": "نصٌّ حكيمٌ له سرٌّ قاطعٌ وذو شأنٍ عظيم ١٢٣",
    "hebrew": "דָּג סַקְרָן שָׁט בַּיָּם",
    "devanagari": "ऋषियों को सताने वाले क्षत्रिय १२३।",
    "chinese": "视野无限广,窗外有蓝天。你好,世界!",
    "korean": "키스의 고유조건은 입술끼리 만나야 한다 각",
    "code": "def f(x: int) -> str:\n\treturn f'{x**2:>8}'  # it's \"ok\" <0x41> != [12345]\r\n\r\n    pass\n",
    "words": "They'll say I'VE WON'T don't HelloWorld fooBar HTTPServer e.g. 3.14 1234567",
    "spaces": " one  two   three\t\ttabs \n\n \n\r\n\r  end   ",
    "newlines": "\n\n\n",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇺🇳 ☺️",
    "marks": "e\u0301 é a\u0323\u0302 \u0301\u0301 ｶ\u3099",
    "odd spaces": "a\u00a0b\u2003c\u3000d\u200be\ufefff\u2028g\u0085h",
    "private": "\ue000 \U000f0000 \ufffd \uffff \u0000\u0001\x7f",
    "lower one eighth block": "\u2581a \u2581\u2581 b\u2581",
    "looks unpaired": "\\ud83d \\udc4d \ud7ff \U0010ffff \u202eabc\u202c",
    "numbers": "½ ²³ Ⅻ ٣ 四 12 345 6789 0",
    "empty": "",
}
CORPUS = [*TEXTS.values(), "the cat and the hat and the bat that sat; the theory of then and there. " * 3] * 3
TEXT = st.text(max_size=30) | st.lists(
    st.sampled_from([*"ab the\n\t'.1é你한🙂\u0301\u200d\u2581", "  ", "the", "'s"])
).map("".join)


def cases(function: Callable) -> Callable:
    """Runs a test, a function of a text at last, on each of `TEXTS` and on texts that hypothesis makes up."""
    for text in TEXTS.values():
        function = example(text=text)(function)
    return given(text=TEXT)(function)


# SentencePiece.


@functools.cache
def trained(add_dummy_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    """A model as small as it gets, with the options of Llama 2."""
    options = {"vocab_size": 600, "character_coverage": 0.98, "allow_whitespace_only_pieces": True}
    options |= {"split_digits": True, "control_symbols": ["[INST]"], "add_dummy_prefix": add_dummy_prefix}
    return sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(CORPUS, model_type="bpe", **options))


def piece_type(model: sentencepiece.SentencePieceProcessor, id: int) -> TokenType:
    """As `_create_vocab_sentencepiece` of llama.cpp's convert_hf_to_gguf.py."""
    if model.is_unknown(id):
        return TokenType.UNKNOWN
    if model.is_control(id):
        return TokenType.CONTROL
    return TokenType.BYTE if model.is_byte(id) else TokenType.NORMAL


def write_sentencepiece(
    path: Path,
    add_dummy_prefix: bool = True,
    added: tuple[str, ...] = (),
    scores: tuple[float, ...] | None = None,
    merges: tuple[str, ...] = (),
    **flags: bool | None,
) -> Path:
    """A GGUF file with the trained model, added tokens and padding, and `flags` in its metadata."""
    model = trained(add_dummy_prefix)
    ids = range(model.vocab_size())
    types = [piece_type(model, id) for id in ids] + [TokenType.USER_DEFINED] * len(added) + [TokenType.UNUSED] * 2

    def metadata(writer):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([*map(model.id_to_piece, ids), *added, "[PAD0]", "[PAD1]"])
        writer.add_token_types(types)
        writer.add_token_scores(scores or [*map(model.get_score, ids), *[-1000.0] * (len(added) + 2)])
        if merges:
            writer.add_token_merges(merges)
        for key, value in ({"add_space_prefix": add_dummy_prefix} | flags).items():
            if value is not None:
                writer.add_bool(f"tokenizer.ggml.{key}", value)

    return write_gguf(path, "llama_tied", extra=metadata)


@pytest.fixture(scope="module")
def load_sentencepiece(tmp_path_factory):
    """Loads what `write_sentencepiece` writes, each once."""
    return functools.cache(
        lambda *args, **options: load_tokenizer(
            write_sentencepiece(tmp_path_factory.mktemp("gguf") / "model.gguf", *args, **options)
        )
    )


def same_as_sentencepiece(tokenizer, model: sentencepiece.SentencePieceProcessor, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == [model.bos_id(), *model.encode(text)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == model.decode(ids[1:]) == text.replace("\u2581", " ")


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
def test_sentencepiece(load_sentencepiece, add_dummy_prefix):
    tokenizer, model = load_sentencepiece(add_dummy_prefix), trained(add_dummy_prefix)
    check = cases(lambda text: same_as_sentencepiece(tokenizer, model, text))
    check()
    assert sum(model.is_byte(id) for id in model.encode("".join(TEXTS.values()))) > 50
    assert [tokenizer.convert_tokens_to_ids(model.id_to_piece(id)) for id in range(len(tokenizer))] == [
        *range(model.vocab_size())
    ]
    special = tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token
    assert special == ("<s>", "</s>", "<unk>", None)


def test_sentencepiece_without_its_scores(load_sentencepiece):
    """Files made from a `tokenizer.json` alone have one placeholder for all scores; merges count then, if any."""
    model = trained(True)
    scores = (-1000.0,) * (model.vocab_size() + 2)
    for text in CORPUS:
        same_as_sentencepiece(load_sentencepiece(scores=scores), model, text)
    tokens = load_sentencepiece(scores=scores, merges=("▁ t",)).tokenize("the then")
    assert tokens == ["▁t", "h", "e", "▁t", "h", "e", "n"]
    assert load_sentencepiece(merges=("▁ t",)).encode("the then")[1:] == model.encode("the then")


def test_sentencepiece_special_tokens(load_sentencepiece):
    added = load_sentencepiece(added=("<tool>", "   "))
    for tokenizer, text, expected in (
        # As in llama.cpp, what follows a special token begins like a text.
        (added, "[INST]a</s>  <tool>b", ["<s>", "[INST]", "▁a", "</s>", "▁▁", "▁", "<tool>", "▁b"]),
        (added, "a   b", ["<s>", "▁a", "   ", "▁b"]),
        (load_sentencepiece(add_bos_token=False), "[INST]", ["[INST]"]),
        (load_sentencepiece(add_eos_token=True), "[INST]", ["<s>", "[INST]", "</s>"]),
        (load_sentencepiece(add_bos_token=False, add_eos_token=True), "[INST]", ["[INST]", "</s>"]),
        (load_sentencepiece(add_space_prefix=None), "a", ["<s>", "▁a"]),
        (load_sentencepiece(False), "[INST]a", ["<s>", "[INST]", "a"]),
    ):
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == expected
    ids = added.encode("[INST]a<tool>")
    assert added.decode(ids) == "<s>[INST] a<tool>"
    assert added.decode(ids, skip_special_tokens=True) == "a<tool>"
    # A byte is one only in a model's output.
    plain = load_sentencepiece()
    assert len(plain.encode("<0x41>")) > 5
    assert plain.decode(plain.convert_tokens_to_ids(["<0x41>", "<0xE2>"])) == "\ufffd\ufffd"


def test_sentencepiece_survives_conversion(tmp_path):
    path = write_sentencepiece(tmp_path / "model.gguf", added=("<tool>",))
    assert convert.main([str(path), str(tmp_path / "out")]) == 0
    tokenizer, again = load_tokenizer(path), load_tokenizer(tmp_path / "out")
    assert again.get_vocab() == tokenizer.get_vocab()
    for text in [*CORPUS, "[INST]a<tool> b</s>"]:
        ids = tokenizer.encode(text)
        assert again.encode(text) == ids
        assert again.decode(ids) == tokenizer.decode(ids)
        assert again.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "options, message",
    [({"scores": (0.0,)}, "has 602 tokens and 1 scores"), ({"added": ("<s>",)}, "has the token '<s>' twice")],
)
def test_sentencepiece_that_cannot_be_built(load_sentencepiece, options, message):
    with pytest.raises(CheckpointError, match=message):
        load_sentencepiece(**options)


# Byte-level BPE.

LLAMA3 = TikTokenConverter().pattern
QWEN2 = transformers.Qwen2Tokenizer().backend_tokenizer


def words_of(*splits: Any) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# Pre-tokenizer, normaliser, and whether whole words are looked up first, as in the models' own `tokenizer.json`.
REFERENCES = {
    "gpt-2": (transformers.GPT2Tokenizer().backend_tokenizer.pre_tokenizer, None, False),
    "smollm": (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        None,
        False,
    ),
    "qwen2": (QWEN2.pre_tokenizer, QWEN2.normalizer, False),
    "megrez": (QWEN2.pre_tokenizer, None, False),
    "llama-bpe": (words_of(pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated")), None, True),
}


@functools.cache
def trained_byte_level(name: str) -> tokenizers.Tokenizer:
    pre_tokenizer, normalizer, whole_words = REFERENCES[name]
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=whole_words))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=byte_level_alphabet(),
        special_tokens=["<|begin|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_byte_level(path: Path, pre: str, reference: tokenizers.Tokenizer) -> Path:
    """A GGUF file with the trained model, a word that no merges lead to, and the name of a pre-tokenizer."""
    tokens = [*(reference.id_to_token(id) for id in range(reference.get_vocab_size())), "ĠNoMergesLeadHere"]

    def metadata(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(tokens) - 2))
        writer.add_token_merges([" ".join(merge) for merge in json.loads(reference.to_str())["model"]["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)

    return write_gguf(path, "qwen2_untied", extra=metadata)


@pytest.mark.parametrize("name", REFERENCES)
def test_byte_level(name, tmp_path):
    reference = trained_byte_level(name)
    tokenizer = load_tokenizer(write_byte_level(tmp_path / "model.gguf", name, reference))
    begin = [0] if name == "llama-bpe" else []
    normal = normalizers.NFC().normalize_str if reference.normalizer is not None else str

    def same(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == begin + reference.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(ids) == normal(text)

    cases(same)()
    ids = tokenizer.encode("a<|end|>b  <|begin|>")
    assert ids == begin + reference.encode("a<|end|>b  <|begin|>").ids and 1 in ids
    assert tokenizer.eos_token == "<|end|>"


@pytest.mark.parametrize(
    "pre, text, words",
    [
        ("default", "ab1234=x  y", "ab|123|4|=|x| | y"),
        ("gpt-2", "ab1234=x  y", "ab|1234|=|x| | y"),
        ("mellum", "it's I'M ½3", "it|'s| I|'|M| ½3"),
        ("starcoder", "x12 3", "x|1|2| |3"),
        ("deepseek-r1-qwen", "it's I'M a1234\n\n b!?\n", "it|'s| I|'M| a|1|2|3|4|\n\n| b|!?\n"),
        ("falcon3", "it's I'M a1234\n\n b!?\n", "it|'s| I|'M| a|123|4|\n\n| b|!?\n"),
        ("tekken", "HelloWorld ÉTÉs don't 12 a//\n", "Hello|World| ÉTÉs| don|'t| |1|2| a|//\n"),
        ("gpt-4o", "HelloWorld ÉTÉs don't 1234 a//\n", "Hello|World| ÉTÉs| don't| |123|4| a|//\n"),
        ("seed-coder", "HelloWorld don't 12 a//\n", "HelloWorld| don|'t| |1|2| a|//|\n"),
        ("deepseek-coder", "f(x):\n\n 你好hi 12", "f|(|x|):|\n|\n| |你好|hi| |1|2"),
        ("deepseek-v3", "f(x):\n\n 你好hi 1234", "f|(x|):\n\n| |你好|hi| |123|4"),
    ],
)
def test_pre_tokenizers(pre, text, words, tmp_path):
    tokenizer = load_tokenizer(write_byte_level(tmp_path / "model.gguf", pre, trained_byte_level("gpt-2")))
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == words.split("|")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    takes_whole_words = "ĠNoMergesLeadHere" in tokenizer.tokenize(" NoMergesLeadHere")
    assert takes_whole_words is (pre == "falcon3")
    assert (tokenizer.encode("") == [0]) is (pre in ("falcon3", "tekken"))


def test_tokenizers_that_are_not_known(tmp_path):
    for name, message in (
        ("t5", "tokenizer model 't5' .*supported: 'llama', .*; 'gpt2', "),
        ("llama", "'tokenizer.ggml.tokens' .*missing"),
        (None, "'tokenizer.ggml.model' .*missing"),
    ):
        path = write_gguf(
            tmp_path / f"{name}.gguf", "llama_tied", extra=lambda w, n=name: n and w.add_tokenizer_model(n)
        )
        refuses(message, path, load=load_tokenizer, error=(CheckpointError, ConfigError))
    path = write_byte_level(tmp_path / "model.gguf", "superbpe", trained_byte_level("gpt-2"))
    refuses("pre-tokenizer 'superbpe' is not supported .supported: default, gpt-2,.*tekken", path, load=load_tokenizer)
