"""Tokenizers of every source, against the libraries that trained them, and the check that two models share one."""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import sentencepiece
import tokenizers
import transformers
from checkpoint_files import GOLDEN, byte_level_alphabet, default_target, refuses, write_gguf
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_config
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter

from convert import __main__ as convert
from failfast_jax.checkpoints.gguf_tokenizer import SPECIAL, GGUFTokenizer
from failfast_jax.checkpoints.tokenizer import check_same_tokens, load_tokenizer, stop_tokens
from failfast_jax.errors import ConfigError

TEXTS = (
    "Žluťoučký kůň, naïve façade; ßtraße İstanbul ÆØÅ Đặng",
    "نصٌّ حكيمٌ له سرٌّ قاطعٌ وذو شأنٍ عظيم ١٢٣",
    "דָּג סַקְרָן שָׁט בַּיָּם",
    "ऋषियों को सताने वाले क्षत्रिय १२३।",
    "视野无限广,窗外有蓝天。你好,世界!",
    "키스의 고유조건은 입술끼리 만나야 한다 각",
    "def f(x: int) -> str:\n\treturn f'{x**2:>8}'  # it's \"ok\" <0x41> != [12345]\r\n\r\n    pass\n",
    "They'll say I'VE WON'T don't HelloWorld fooBar HTTPServer e.g. 3.14 1234567",
    " one  two   three\t\ttabs \n\n \n\r\n\r  end   ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇺🇳 ☺️",
    "e\u0301 é a\u0323\u0302 \u0301\u0301 ｶ\u3099",
    "a\u00a0b\u2003c\u3000d\u200be\ufefff\u2028g\u0085h",
    "\ue000 \U000f0000 \ufffd \uffff \u0000\u0001\x7f",
    "\u2581a \u2581\u2581 b\u2581",
    "\\ud83d \\udc4d \ud7ff \U0010ffff \u202eabc\u202c",
    "½ ²³ Ⅻ ٣ 四 12 345 6789 0",
    "",
)
CORPUS = [*TEXTS, "the cat and the hat and the bat that sat; the theory of then and there. " * 3] * 3
TEXT = st.text(max_size=30) | st.lists(
    st.sampled_from([*"ab the\n\t'.1é你한🙂\u0301\u200d\u2581", "  ", "the", "'s"])
).map("".join)


def check_texts(check: Callable[[str], None]) -> None:
    """Checks all of `TEXTS`, and texts that hypothesis makes up."""
    for text in TEXTS:
        check(text)
    given(text=TEXT)(lambda text: check(text))()


refused = functools.partial(refuses, load=load_tokenizer)

# Folders, and SmolLM2 in its GGUF file.


def test_smollm2():
    smollm2 = load_tokenizer(default_target())
    # The ids are those of llama.cpp's own tokenizer for this file.
    assert smollm2.encode("<|im_start|>user\nHello 12345  world\n\n  x=3;<|im_end|>") == [
        *(1, 4093, 198, 19556, 216, 33, 34, 35, 36, 37, 216, 905, 8866, 1792, 45, 35, 43, 2)
    ]
    for text in TEXTS:
        ids = smollm2.encode(text)
        assert smollm2.decode(ids) == text and all(0 <= id < 49_152 for id in ids)
    for id, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]):
        assert smollm2.encode(token) == [id] and smollm2.encode(f"a{token}b")[1] == id
        assert smollm2.decode([id], skip_special_tokens=True) == ""
    assert len(smollm2) == 49_152
    assert (smollm2.eos_token_id, smollm2.bos_token_id, smollm2.pad_token_id) == (2, 1, 2)
    assert smollm2.unk_token == "<|endoftext|>" and "whole" not in vars(smollm2)  # transformers is not imported yet
    same_as_transformers(smollm2)


def same_as_transformers(tokenizer: GGUFTokenizer) -> None:
    """Compares a tokenizer of a GGUF file with transformers' of the same parts."""
    whole = tokenizer.whole
    names = [*SPECIAL, *(f"{name}_id" for name in SPECIAL), "special_tokens_map", "chat_template"]
    for name in (*names, "added_tokens_decoder", "get_vocab", "__len__"):
        ours, theirs = getattr(tokenizer, name), getattr(whole, name)
        assert (ours() if callable(ours) else ours) == (theirs() if callable(theirs) else theirs), name
    for text in TEXTS:
        for special in (True, False):
            ids = tokenizer(text, add_special_tokens=special)["input_ids"]
            assert ids == whole(text, add_special_tokens=special)["input_ids"]
            assert tokenizer.decode(ids, skip_special_tokens=special) == whole.decode(ids, skip_special_tokens=special)
    assert tokenizer(list(TEXTS))["input_ids"] == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.convert_ids_to_tokens([5]) == whole.convert_ids_to_tokens([5])


@pytest.mark.parametrize(
    "stops, end, template, expected",
    [
        ((7,), "<|endoftext|>", "{{ messages }}<|im_end|>", (7, 3, 4)),  # a base model's configuration beside a chat's
        ((3,), "<|im_end|>", None, (3, 4)),
        ((), None, "<|im_start|>{{ messages }}</s>", ()),  # no special token of that name
        ((4, 9), "<|im_end|>", "<|im_end|>", (4, 9)),
    ],
)
def test_stop_tokens_of_a_folder(stops, end, template, expected):
    names = ["a", "b", "</s>", "<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: id for id, name in enumerate(names)}, "a"))
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in names[3:]])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, chat_template=template)
    config = tiny_config(eos_token_ids=stops)
    assert stop_tokens(config, tokenizer) == expected and stop_tokens(config, None) == stops


def test_vocabulary_files(tmp_path):
    vocab = {token: id for id, token in enumerate([*sorted(byte_level_alphabet()), "ab", "abc"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nab c\n")
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {"258": {"content": "<|endoftext|>", "special": True}},
        "chat_template": "{{ messages[0].content }}!",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    # transformers does not know its model_type.
    shutil.copyfile(GOLDEN / "fast_dllm_v2_tied" / "config.json", tmp_path / "config.json")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("abc<|endoftext|>ab") == [257, 258, 256]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x!"
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)  # of `tokenizer.json`
    assert again.get_vocab() == tokenizer.get_vocab() and again.chat_template == tokenizer.chat_template
    assert again.encode("abc<|endoftext|>ab") == [257, 258, 256]


def test_sources_without_a_tokenizer(tmp_path):
    assert load_tokenizer(GOLDEN / "llama_tied") is None
    (tmp_path / "tokenizer.json").write_text("{")
    refused("its tokenizer cannot be read", tmp_path)
    refused("not a folder and not a .gguf file", tmp_path / "tokenizer.json")
    refused("no such file or folder", tmp_path / "absent")


# SentencePiece.


@functools.cache
def trained(add_dummy_prefix: bool, kind: str = "bpe") -> sentencepiece.SentencePieceProcessor:
    """A model as small as it gets, with the options of Llama 2; it spells in bytes what is no piece."""
    options = {"vocab_size": 600, "character_coverage": 0.98, "allow_whitespace_only_pieces": True, "minloglevel": 2}
    options |= {"split_digits": True, "control_symbols": ["[INST]"], "add_dummy_prefix": add_dummy_prefix}
    options |= {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    options |= {"hard_vocab_limit": kind == "bpe"}
    model, corpus = io.BytesIO(), iter(CORPUS)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=corpus, model_writer=model, model_type=kind, **options)
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


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


@pytest.fixture
def load_sentencepiece(tmp_path):
    """Loads what `write_sentencepiece` writes."""
    return lambda *args, **options: load_tokenizer(write_sentencepiece(tmp_path / "model.gguf", *args, **options))


def same_as_sentencepiece(tokenizer, model: sentencepiece.SentencePieceProcessor, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == [model.bos_id(), *model.encode(text)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == model.decode(ids[1:]) == text.replace("\u2581", " ")


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
def test_sentencepiece(load_sentencepiece, add_dummy_prefix):
    tokenizer, model = load_sentencepiece(add_dummy_prefix), trained(add_dummy_prefix)
    check_texts(lambda text: same_as_sentencepiece(tokenizer, model, text))
    assert sum(model.is_byte(id) for id in model.encode("".join(TEXTS))) > 50
    pieces = [model.id_to_piece(id) for id in range(model.vocab_size())]
    assert tokenizer.convert_tokens_to_ids(pieces) == [*range(len(tokenizer))]
    special = tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token
    assert special == ("<s>", "</s>", "<unk>", None)


def test_sentencepiece_without_its_scores(load_sentencepiece):
    """Files made from a `tokenizer.json` alone have one placeholder for all scores; merges count then, if any."""
    model = trained(True)
    scores = (-1000.0,) * (model.vocab_size() + 2)
    without_merges = load_sentencepiece(scores=scores)
    for text in CORPUS:
        same_as_sentencepiece(without_merges, model, text)
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
    same_as_transformers(tokenizer)
    assert again.get_vocab() == tokenizer.get_vocab()
    for text in [*CORPUS, "[INST]a<tool> b</s>"]:
        ids = tokenizer.encode(text)
        assert again.encode(text) == ids
        assert again.decode(ids) == tokenizer.decode(ids)


def test_sentencepiece_that_cannot_be_built(tmp_path):
    refused("has 602 tokens and 1 scores", write_sentencepiece(tmp_path / "a.gguf", scores=(0.0,)))
    refused("has the token '<s>' twice", write_sentencepiece(tmp_path / "b.gguf", added=("<s>",)))


@pytest.mark.parametrize("kind, add_dummy_prefix", [("bpe", True), ("bpe", False), ("unigram", True)])
def test_tokenizer_model_without_tokenizer_json(tmp_path, kind, add_dummy_prefix):
    model = trained(add_dummy_prefix, kind)
    (tmp_path / "tokenizer.model").write_bytes(model.serialized_model_proto())
    settings = {"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXTS:
        if kind == "bpe" or "<0x41>" not in text:  # a Unigram of `tokenizers` takes the name of a byte for the byte
            same_as_sentencepiece(tokenizer, model, text)
    assert tokenizer.chat_template == settings["chat_template"] and tokenizer.eos_token_id == 2
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))
    assert load_tokenizer(tmp_path).encode("the world") == model.encode("the world")


def test_tokenizer_model_without_the_library(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    refused("its tokenizer cannot be read", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused("pip install sentencepiece protobuf", tmp_path)


# Byte-level BPE.

QWEN2 = transformers.Qwen2Tokenizer().backend_tokenizer
GPT2 = transformers.GPT2Tokenizer().backend_tokenizer.pre_tokenizer
DIGITS = pre_tokenizers.Digits(individual_digits=True)
LLAMA3 = pre_tokenizers.Split(Regex(TikTokenConverter().pattern), behavior="isolated")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
# Pre-tokenizer, normaliser, and whether whole words are looked up first, as in the models' own `tokenizer.json`.
REFERENCES = {
    "gpt-2": (GPT2, None, False),
    "smollm": (pre_tokenizers.Sequence([DIGITS, GPT2]), None, False),
    "qwen2": (QWEN2.pre_tokenizer, QWEN2.normalizer, False),
    "megrez": (QWEN2.pre_tokenizer, None, False),
    "llama-bpe": (pre_tokenizers.Sequence([LLAMA3, BYTES]), None, True),
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
    same_as_transformers(tokenizer)
    begin = [0] if name == "llama-bpe" else []
    normal = normalizers.NFC().normalize_str if reference.normalizer is not None else str

    def same(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == begin + reference.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(ids) == normal(text)

    check_texts(same)
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
    path = write_gguf(tmp_path / "a.gguf", "llama_tied", extra=lambda writer: writer.add_tokenizer_model("t5"))
    refused("tokenizer model 't5' .*supported: 'llama', .*; 'gpt2', ", path)
    path = write_gguf(tmp_path / "b.gguf", "llama_tied")
    refused("'tokenizer.ggml.model' .*missing", path, error=ConfigError)
    path = write_byte_level(tmp_path / "c.gguf", "superbpe", trained_byte_level("gpt-2"))
    refused("pre-tokenizer 'superbpe' is not supported .supported: default, gpt-2,.*tekken", path)


# Shared vocabularies.


def vocabulary(*tokens: str, **others: int) -> SimpleNamespace:
    """A tokenizer with the one method that the check needs."""
    ids = {token: id for id, token in enumerate(tokens)} | others
    return SimpleNamespace(get_vocab=lambda: ids)


ABC, WITH_MASK = vocabulary("a", "b", "c"), vocabulary("a", "b", "c", mask=3)
ABD = vocabulary("a", "b", "d", mask=3)


@pytest.mark.parametrize(
    "target, drafter, sizes, shared",
    [
        (ABC, ABC, (152, 140), 140),  # padding alone
        (ABC, WITH_MASK, (8, 8), 8),  # what one side adds is no conflict
        (ABC, vocabulary("a", "b", "y"), (2, 8), 2),  # beyond the smaller embedding nothing can be drafted
        (None, None, (160, 160), 160),  # without both tokenizers sizes must be equal
        (ABC, None, (160, 160), 160),
        (vocabulary("a"), vocabulary(b=5), (8, 8), "no token id in common"),
        (ABC, None, (160, 211), "target T and drafter D .* the drafter has no tokenizer.*160 and 211"),
        (None, ABC, (160, 211), "the target has no tokenizer"),
        (vocabulary("a", "b", "c", "tool"), ABD, (8, 8), "T.* D.*2 of 4 ids differ.*id 2 is 'c' in the target and 'd'"),
    ],
)
def test_vocabularies_are_shared_or_not(target, drafter, sizes, shared):
    models = target, drafter, *(tiny_config(vocab_size=size) for size in sizes), "T", "D"
    if isinstance(shared, int):
        assert check_same_tokens(*models) == shared
    else:
        with pytest.raises(ValueError, match=shared):
            check_same_tokens(*models)
