"""`python -m failfast_jax.train --preset fast-dllm-v2`, from files of text to a model that drafts."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from checkpoint_files import GOLDEN
from training_runs import differing_keys, letters_folder, losses_of

from failfast_jax import FailFast, load_model
from failfast_jax.checkpoints.checkpoint import open_checkpoint
from failfast_jax.checkpoints.fast_dllm_folder import RELEASE, save_fast_dllm
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.train.__main__ import main


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
def test_a_run_makes_a_model_of_its_own(corpus, tmp_path):
    """In two pieces; then it is trained on, with other blocks. The result needs neither folder."""
    target = letters_folder(tmp_path / "target", "qwen2_target_160")
    whole = arguments(target, corpus, tmp_path / "run")
    assert main([*whole, "--minutes", "0.0001"]) == 3
    assert main(whole) == 0
    losses = losses_of(tmp_path / "run")
    assert sorted(losses) == [1, 10, 20, 30] and losses[30] < losses[10] < losses[1] / 2
    settings = json.loads((tmp_path / "run" / "train.json").read_text())
    wanted = {"family": "diffusion", "block_start": "noised", "mask_logit": "scored", "packing": "stream"}
    assert wanted.items() <= settings.items() and settings["weight_decay"] == 0 and settings["steps"] == 30
    drafter = tmp_path / "run" / "drafter"
    tokenizer, model = load_tokenizer(drafter), load_model(drafter)
    assert tokenizer.convert_tokens_to_ids("|<MASK>|") == model.config.mask_token_id == len(load_tokenizer(target))
    assert model.config.block_size == 16 and model.config.vocab_size == 160
    options = {"max_new_tokens": 12, "ignore_eos": True}
    one, two = (
        FailFast(target, drafter).generate("count", method=name, **options)[0] for name in ("failfast", "vanilla")
    )
    assert one.output_ids == two.output_ids and one.stats.drafted > 0
    text = FailFast(drafter).generate("count", method="dllm", max_new_tokens=32)[0].text
    assert text.replace(" ", "").startswith("onetwothree")  # it knows its documents by heart, a letter per token
    more = ["--start", str(drafter), "--block-size", "32", "--steps", "2"]
    assert main(arguments(target, corpus, tmp_path / "longer", *more)) == 0
    shutil.rmtree(drafter)
    shutil.rmtree(target)
    longer = load_model(tmp_path / "longer" / "drafter")
    assert longer.config == dataclasses.replace(model.config, block_size=32)
    assert losses_of(tmp_path / "longer")[2] < losses[1] / 5


@pytest.mark.parametrize("name", ["fast_dllm_v2_tied", "fast_dllm_v2_untied"])
def test_a_released_model_is_written_as_it_was_read(name, tmp_path):
    source = open_checkpoint(GOLDEN / name)
    save_fast_dllm(tmp_path / name, source.config, source.read(np.dtype("float32")), storage="float32")
    ours = {"auto_map", "head_dim", "torch_dtype"}
    assert differing_keys(GOLDEN / name, tmp_path / name) == ours | {"transformers_version", "max_window_layers"}
    config = json.loads((tmp_path / name / "config.json").read_text())
    assert config["auto_map"]["AutoConfig"] == f"{RELEASE}--configuration.Fast_dLLM_QwenConfig"
