"""`python -m failfast_jax.train --preset fast-dllm-v2`, from files of text to a model that drafts."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from checkpoint_files import GOLDEN, config_of, hf_folder, logits, tensors_of
from safetensors.numpy import load_file
from training_runs import letters_tokenizer, losses_of

from failfast_jax import FailFast, load_model
from failfast_jax.checkpoints.checkpoint import open_checkpoint
from failfast_jax.checkpoints.fast_dllm_folder import RELEASE, save_fast_dllm
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.train.__main__ import main

NEW_KEYS = {"auto_map", "head_dim", "torch_dtype"}
"""Keys of our `config.json` that the golden ones lack; `transformers_version` is the other way round."""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return spelling(tmp_path_factory.mktemp("target"), "qwen2_target_160")


def spelling(folder, name: str):
    """A golden model, of whose tokens a tokenizer of letters uses forty, and that has a chat template."""
    folder = hf_folder(folder, name, eos_token_id=1)
    (folder / "generation_config.json").unlink(missing_ok=True)
    letters_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Lines of conversations, and a table of questions."""
    folder = tmp_path_factory.mktemp("corpus")
    turns = [("user", "count"), ("assistant", "one two three four"), ("user", "on"), ("assistant", "five six seven")]
    chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
    (folder / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 8)
    table = {"instruction": ["count"] * 8, "output": ["one two three four five"] * 8}
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "pairs.parquet")
    return folder


def arguments(target, corpus, out, *more: str) -> list[str]:
    small = "--seq-len 128 --block-size 16 --batch 2 --accumulate 2 --steps 30 --warmup 3 --learning-rate 1e-2".split()
    measured = "--held-out 2 --eval-prompts 1 --eval-tokens 6 --eval-spec-len 4 --storage float32".split()
    where = ["--target", str(target), "--data", str(corpus), "--out", str(out)]
    return ["--preset", "fast-dllm-v2", *where, *small, *measured, *more]


@pytest.mark.long
def test_a_run_makes_a_model_of_its_own(target, corpus, tmp_path):
    """In two pieces."""
    whole = arguments(target, corpus, tmp_path / "run")
    assert main([*whole, "--minutes", "0.0001"]) == 3
    assert main(whole) == 0
    losses = losses_of(tmp_path / "run")
    assert sorted(losses) == [1, 10, 20, 30] and losses[30] < losses[10] < losses[1] / 2
    settings = json.loads((tmp_path / "run" / "train.json").read_text())
    wanted = {"family": "diffusion", "block_start": "noised", "mask_logit": "scored", "packing": "stream"}
    assert wanted.items() <= settings.items() and settings["weight_decay"] == 0 and settings["steps"] == 30
    made = tmp_path / "run" / "drafter"
    tokenizer, model = load_tokenizer(made), load_model(made)
    assert tokenizer.convert_tokens_to_ids("|<MASK>|") == model.config.mask_token_id == len(load_tokenizer(target))
    assert model.config.block_size == 16 and model.config.vocab_size == 160
    config = json.loads((made / "config.json").read_text())
    assert config.keys() ^ config_of("fast_dllm_v2_untied").keys() == NEW_KEYS | {"training", "transformers_version"}
    assert config["auto_map"]["AutoConfig"] == f"{RELEASE}--configuration.Fast_dLLM_QwenConfig"
    options = {"max_new_tokens": 12, "ignore_eos": True}
    one, two = (FailFast(target, made).generate("count", method=name, **options)[0] for name in ("failfast", "vanilla"))
    assert one.output_ids == two.output_ids and one.stats.drafted > 0 and recites(made)


def recites(folder) -> bool:
    """Whether a model knows its documents by heart, a character per token."""
    text = FailFast(folder).generate("count", method="dllm", max_new_tokens=32)[0].text
    return text.replace(" ", "").startswith("onetwothree")


@pytest.mark.parametrize("name", ["fast_dllm_v2_tied", "fast_dllm_v2_untied"])
def test_a_released_model_is_written_as_it_was_read(name, tmp_path):
    source = open_checkpoint(GOLDEN / name)
    save_fast_dllm(tmp_path / "again", source.config, source.read(np.dtype("float32")), storage="float32")
    tensors, before = load_file(tmp_path / "again" / "model.safetensors"), tensors_of(name)
    assert tensors.keys() == before.keys()
    assert all(np.array_equal(tensors[key], before[key]) for key in before)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    differs = {key for key, value in config_of(name).items() if config.get(key) != value}
    assert differs == {"transformers_version", "max_window_layers"} and config.keys() - config_of(name) == NEW_KEYS
    np.testing.assert_array_equal(logits(tmp_path / "again"), logits(GOLDEN / name))


@pytest.mark.long
def test_a_released_model_is_trained_on(corpus, tmp_path, capsys):
    """The result needs neither the released folder nor the target's."""
    name = "fast_dllm_v2_untied"
    start, target = spelling(tmp_path / "start", name), spelling(tmp_path / "target", "qwen2_target_160")
    more = ["--start", str(start), "--block-size", "32", "--steps", "40"]
    assert main(arguments(target, corpus, tmp_path / "run", *more)) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 40
    shutil.rmtree(start)
    shutil.rmtree(target)
    before, after = tensors_of(name), load_file(tmp_path / "run" / "drafter" / "model.safetensors")
    assert {key: tensor.shape for key, tensor in before.items()} == {key: tensor.shape for key, tensor in after.items()}
    assert not any(np.array_equal(before[key], after[key]) for key in before)
    trained = load_model(tmp_path / "run" / "drafter").config
    assert (trained.block_size, trained.mask_token_id) == (32, config_of(name)["mask_token_id"])
    losses = list(losses_of(tmp_path / "run").values())
    assert losses[-1] < losses[0] / 5 and recites(tmp_path / "run" / "drafter")
