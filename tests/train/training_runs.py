"""Documents, targets and objectives of the training tests."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file
from tiny_models import VOCAB, diffusion_config, random_dspark, random_extended, random_model, tiny_config
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from failfast_jax import FailFast
from failfast_jax.checkpoints import parameter_map
from failfast_jax.checkpoints.parameter_map import AbstractModule
from failfast_jax.train.block_loss import BlockObjective
from failfast_jax.train.block_start import initial
from failfast_jax.train.diffusion_run import DiffusionObjective
from failfast_jax.train.documents import batches, load_documents, packed_batches
from failfast_jax.train.train_config import MASKED, PRESETS, TrainConfig

LENGTH = 32
OBJECTIVE = ("corruption", "block_start", "mask_logit", "position_decay")
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


def hf_tensors(params: dict, config) -> dict[str, np.ndarray]:
    """A decoder's parameters, or gradients, by path as a checkpoint's tensors in float64."""
    tensors = parameter_map.stored_tensors(parameter_map.HF_TABLE, jax.device_get(params), config)
    return {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}


def make_batches(family: str, documents, batch: int):
    """Batches as in the family's runs."""
    if family in MASKED:
        options = {"seq_len": 2 * LENGTH, "block_size": 8, "batch": batch, "packing": "stream"}
        return packed_batches(documents, TrainConfig(family=family, **options))[0]
    return batches(documents, length=LENGTH, batch=batch, seed=0)


def make_objective(family: str, target, documents, **changes):
    """A small objective; `extended` is this project's own block drafter."""
    if family == "standalone":
        options = TrainConfig(family=family, block_size=8, position_decay=2.0, **changes)
        return DiffusionObjective.of_layers(target, (0, 2), options)
    if family == "diffusion":
        start = random_model(diffusion_config(num_layers=2), seed=3)
        options = TrainConfig(family=family, **RELEASED_OPTIONS, **changes)
        return DiffusionObjective(start.config, parameters(start), options)
    if family == "dspark":
        model = random_dspark(target, feature_layers=(0, 1), seed=5)
        return BlockObjective(model.network, target, None, TrainConfig(anchors=3, position_decay=4.0, **changes))
    ids = documents.frequent_tokens(VOCAB, 20, (1,))
    shape = random_extended(target, rows=4, draft_ids=ids, context_layers=(1,), row_features=(0, 2)).config
    options = TrainConfig(anchors=3, position_decay=4.0, ce_weight=1.0, borrow=True, **changes)
    return BlockObjective(initial(target, shape, (2,), 0), target, ids, options)


END, START = "<|im_end|>", "<|im_start|>"
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nbe brief<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def letters_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per letter; id 1 ends a turn, as in `tiny_config`."""
    tokens = ["?", END, START, "Ċ", "Ġ", *"abcdefghijklmnopqrstuvwxyz", *"012345678"]
    assert len(tokens) == VOCAB
    backend = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in (END, START)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, chat_template=template)


def letters_engine(*_, method: str = "vanilla", dtype: str | None = None, **mesh) -> FailFast:
    """A target of one layer that writes letters; arguments as of `defaults.load_pair`."""
    return FailFast(random_model(tiny_config(num_layers=1)), tokenizer=letters_tokenizer(), **mesh)
