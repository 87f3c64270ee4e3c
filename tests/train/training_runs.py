"""Documents, targets and figures of the training tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from checkpoint_files import hf_folder
from safetensors.numpy import load_file
from tiny_models import VOCAB
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from failfast_jax.checkpoints.parameter_map import AbstractModule
from failfast_jax.train.documents import load_documents
from failfast_jax.train.train_config import PRESETS

LENGTH = 32
OBJECTIVE = ("family", "corruption", "block_start", "mask_logit", "position_decay")
RELEASED_OPTIONS = {name: PRESETS["fast-dllm-v2"][name] for name in OBJECTIVE}


def write_data(
    path: Path, documents: int = 12, seed: int = 0, vocab: int = VOCAB, longest: int = 24, **changes
) -> Path:
    """Writes documents of 3 to 6 and 12 to 23 (half to all of `longest`) random tokens; `changes` replaces arrays."""
    rng = np.random.default_rng(seed)
    lengths = {"prompt": rng.integers(3, 7, documents), "answer": rng.integers(longest // 2, longest, documents)}
    arrays = {name: rng.integers(2, vocab, count.sum()).astype(np.uint16) for name, count in lengths.items()}
    arrays |= {f"{name}_len": count.astype(np.int32) for name, count in lengths.items()}
    np.savez(path, **(arrays | changes))
    return path


def differing_keys(folder: Path, other: Path) -> set[str]:
    """Keys of `config.json` in which two drafters' folders differ; their tensors do not."""
    theirs, ours = (load_file(place / "model.safetensors") for place in (folder, other))
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[key], ours[key]) for key in theirs)
    theirs, ours = (json.loads((place / "config.json").read_text()) for place in (folder, other))
    return {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}


def load(path: Path, **options):
    return load_documents([path], **({"vocab_size": VOCAB, "shortest": 8, "longest": LENGTH} | options))


def losses_of(folder: Path) -> dict[int, float]:
    """Losses by step, of a run's log."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def parameters(net) -> dict:
    return {name: leaf[...] for name, leaf in AbstractModule.of(net).leaves.items()}


END, START = "<|im_end|>", "<|im_start|>"
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nbe brief<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_of(tokens: list[str], merges: tuple = (), template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of a few tokens."""
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in (END, START)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, chat_template=template)


def letters_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per letter; id 1 ends a turn, as in `tiny_config`."""
    tokens = ["?", END, START, "Ċ", "Ġ", *"abcdefghijklmnopqrstuvwxyz", *"012345678"]
    assert len(tokens) == VOCAB
    return tokenizer_of(tokens, template=template)


def letters_folder(folder: Path, name: str) -> Path:
    """A golden model with a chat template, of whose tokens a tokenizer of letters uses forty."""
    folder = hf_folder(folder, name, eos_token_id=1)
    (folder / "generation_config.json").unlink(missing_ok=True)
    letters_tokenizer().save_pretrained(folder)
    return folder
