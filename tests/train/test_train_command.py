"""`python -m failfast_jax.train` from end to end, and what it refuses before any work."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import GOLDEN
from safetensors.numpy import load_file, save_file
from tiny_models import random_extended
from training_runs import write_data

from failfast_jax import FailFast, load_model
from failfast_jax.checkpoints.block_drafter_folder import save_dspark
from failfast_jax.checkpoints.model_folder import ModelFolder
from failfast_jax.errors import OptionError
from failfast_jax.policy.expected_tokens import MODEL_CHANCES
from failfast_jax.train import train_command
from failfast_jax.train.__main__ import main
from failfast_jax.train.documents import load_documents
from failfast_jax.util import command_line
from failfast_jax.util.records import begin

TARGET, PUBLISHED = str(GOLDEN / "llama_tied"), str(GOLDEN / "field" / "dspark_qwen3_a")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "a.npz", documents=16, vocab=150, longest=50)


def arguments(data, out, *more: str) -> list[str]:
    anchors = [] if {"standalone", "diffusion"} & {*more} else ["--anchors", "4"]
    small = ["--batch", "2", *anchors, "--held-out", "4", "--eval-prompts", "2", "--eval-tokens", "6"]
    return ["--target", TARGET, "--data", str(data), "--out", str(out), "--seq-len", "64", *small, *more]


WHOLE = ["--family", "diffusion", "--block-size", "16"]
BLOCK = "--family dspark --rows 3 --markov-rank 8 --confidence-for greedy --row-features 0,1 --draft-vocab 50 --borrow"


@pytest.mark.long
def test_a_run_in_two_pieces_makes_a_drafter(data, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    whole = arguments(data, out, *BLOCK.split(), "--save-every", "2", "--storage", "float32")
    whole += ["--feature-cache", str(tmp_path / "features")]
    assert main([*whole, "--steps", "2", "--minutes", "0.0001"]) == 3  # ended among the features
    assert not capsys.readouterr().out
    assert main([*whole, "--steps", "2", "--minutes", "0.0001"]) == 3
    shown = capsys.readouterr()
    first = json.loads(shown.out)
    assert first["steps"] == 1 and f"the drafter is in {first['drafter']}" in shown.err
    log = (out / "log.jsonl").read_text()
    # A run is lengthened, and never shrinks.
    assert main([*whole, "--steps", "4"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert "steps 2 before, 4 now: it goes on" in shown.err and (out / "log.jsonl").read_text().startswith(log)
    assert report["steps"] == 4 and report["rounds"] > 0 and report["drafted_per_round"] > 0
    whole += ["--steps", "4"]
    config = json.loads((out / "drafter" / "config.json").read_text())
    assert config["training"]["family"] == "dspark" and config["training"]["steps_done"] == 4
    assert config["training"]["held_out_figures"]["accepted_per_round"] == report["accepted_per_round"]
    assert 0 <= config["training"]["calibration"]["calibration_error"]["before"] <= 1
    chances = FailFast(TARGET, out / "drafter").chances
    assert list(chances) == config["chances"] != list(MODEL_CHANCES)  # measured with the figures
    # It is told from its folder; decoding defaults that were written meanwhile stay.
    (out / "drafter" / "config.json").write_text(json.dumps(config | {"decoding": {"cpu": {"spec_len": 2}}}))
    monkeypatch.setattr(train_command, "load_model", None)
    assert main([*whole, "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert ModelFolder(out / "drafter").decoding("cpu") == {"spec_len": 2}
    assert len(load_documents([out / "held_out.npz"], vocab_size=150, shortest=1, longest=64)) == 4
    # Another setting in the same folder is another run.
    for flags, difference in ((["--seed", "1"], "seed: 0 there, 1 here"), (["--steps", "3"], "steps: 4 there, 3 here")):
        assert main([*whole, *flags]) == 2
        assert difference in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("block, method", [(16, "failfast"), (1, "ar")])
def test_a_standalone_drafter_borrows_from_its_target(block, method, data, tmp_path, capsys):
    flags = f"--family standalone --layers 1 --block-size {block} --steps 2".split()
    assert main(arguments(data, tmp_path / "run", *flags)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == 2 and report["drafted_per_round"] > 0
    assert json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())["borrow"] is True
    engine = FailFast(TARGET, tmp_path / "run" / "drafter")
    assert engine.drafter.config.num_layers == 1 and engine.drafter.config.block_size == block
    assert engine.drafter.method == method
    (answer,) = engine.generate([[3, 14, 15]], method=method, max_new_tokens=4)
    assert answer.stats.drafted > 0
    # Trained on, as a block-diffusion drafter: steps of almost nothing keep its weights.
    more = f"--family standalone --start {tmp_path / 'run' / 'drafter'} --block-size 8 --steps 1 --learning-rate 1e-12"
    assert main(arguments(data, tmp_path / "longer", *more.split())) == 0
    config = json.loads((tmp_path / "longer" / "drafter" / "config.json").read_text())
    assert config["bd_size"] == 8 and config["num_hidden_layers"] == 1
    before, after = (load_file(tmp_path / run / "drafter" / "model.safetensors") for run in ("run", "longer"))
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)


@pytest.mark.parametrize("name, more, calls", [("make_default_drafter", [], 4), ("make_diffusion_drafter", ["2.6"], 8)])
def test_the_commands_of_a_script_parse(name, more, calls, tmp_path, monkeypatch):
    """Each command, with real parsers: a misspelt option would only show after hours."""
    note = '#!/bin/sh\n(printf "%s\\t" "$@"; echo) >> "$(dirname "$0")/calls"\n'
    (tmp_path / "python").write_text(note)
    (tmp_path / "python").chmod(0o755)
    script = GOLDEN.parents[2] / "examples" / f"{name}.sh"
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", script, tmp_path, *more], env=os.environ | {"PATH": path}, check=True)
    monkeypatch.setattr(command_line, "run", lambda *_, **__: 0)  # reached once all words are parsed
    made = [line.split("\t")[:-1] for line in (tmp_path / "calls").read_text().splitlines()]
    assert made[0][1:3] == ["failfast_jax.train", "selfgen"] and len(made) == calls
    for words in made:
        if "--openings" in words:
            assert Path(words[words.index("--openings") + 1]).is_file()
        package = importlib.import_module(words[1])
        module = importlib.import_module(f"{words[1]}.__main__") if hasattr(package, "__path__") else package
        assert module.main(words[2:]) == 0


def test_the_example_that_exchanges_layers(tmp_path):
    def exchange(layers):
        drafter, copy = tmp_path / f"drafter{layers}", tmp_path / f"copy{layers}"
        drafter.mkdir()
        tensors = {f"model.layers.{n}.mlp.weight": np.full(2, n, np.float32) for n in range(layers)}
        save_file(tensors, drafter / "model.safetensors")
        script = GOLDEN.parents[2] / "examples" / "exchange_layers.py"
        return subprocess.run([sys.executable, script, drafter, copy], capture_output=True, text=True), copy

    done, copy = exchange(26)
    assert done.returncode == 0, done.stderr
    order = [load_file(copy / "model.safetensors")[f"model.layers.{n}.mlp.weight"][0] for n in range(26)]
    assert order == [0, 1, 5, 3, 4, 2, *range(6, 26)]
    done, copy = exchange(4)
    assert done.returncode == 1 and "has no layer 5 to exchange" in done.stderr and not copy.exists()


def test_a_missing_chat_template_comes_before_a_missing_mask_token(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    for family in ([], WHOLE):
        assert main(["--target", TARGET, "--data", str(tmp_path), "--out", str(tmp_path / "run"), *family]) == 2
        shown = capsys.readouterr().err
        assert "conversations need a target with a chat template" in shown and "--mask-token" not in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--row-features", "--held-out", "16"], "--held-out 16: there are only 16 documents"),
        (["--start", "nowhere/", "--layers", "1"], "--layers 1: not with --start"),
        (["--layers", "0", "--row-features"], "--layers 0: layer 0 has no layer before it"),
        (["--row-features", "x"], "--row-features 'x': expected layer numbers"),
        (["--family", "standalone", "--block-size", "7"], "--seq-len 64: must be a multiple of --block-size 7"),
        ([*WHOLE, "--layers", "1"], "--layers 1: --family diffusion trains a whole model"),
        ([*WHOLE, "--mask-token", "999"], "mask token 999 is outside the vocabulary of"),
        ([*WHOLE, "--fsdp", "3"], "--fsdp 3: must divide the 1 devices"),
        (["--preset", "fast-dllm-v2", "--family", "dflash"], "--family dflash: --preset fast-dllm-v2 is of --family"),
        (["--family", "dspark", "--features", "5"], "--features 5: the target's layers are 0 to"),
        (["--family", "dspark"], "--mask-token: the target has no tokenizer: name an id that no text has"),
        (["--family", "dflash", "--markov-rank", "3"], "--markov-rank 3: --family dflash has no such option, only"),
        (["--row-features", "--features", "0"], "--features 0: not with --row-features"),
        (["--fsdp", "2"], "--fsdp 2: only --family diffusion shares its parameters"),
        (["--start", PUBLISHED, "--rows", "5"], f"--rows 5: the drafter of --start {PUBLISHED} decides it"),
        (["--start", PUBLISHED, "--family", "dflash"], "has a Markov or a confidence head: --family dspark"),
        (["--start", PUBLISHED], "drafts for a target with hidden size 64; "),
        (["--start", TARGET], f"--start {TARGET}: not a dspark or dflash drafter"),
        (["--family", "standalone", "--start", PUBLISHED], f"--start {PUBLISHED}: not a standalone drafter"),
        (["--freeze", "backbone"], "--freeze backbone: needs --start"),
        (["--storage", "int8"], "--storage int8: only --family "),
        (["--family", "standalone", "--storage", "int8"], "inputs: must be multiples of 32"),
        (["--data", "nothing.npz"], "nothing.npz: no such file or folder"),
        (["--target", str(GOLDEN / "fast_dllm_v2_tied")], "a block-diffusion model; drafters are made from"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(data, tmp_path, flags, message, capsys):
    assert main(arguments(data, tmp_path / "run", *flags)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_drafter_is_trained_on(data, tmp_path, capsys):
    """With heads that it lacked."""
    target = load_model(TARGET)
    last = target.config.num_layers - 1
    start = random_extended(target, rows=3, draft_ids=np.arange(60), context_layers=(0,), row_features=(0, last))
    save_dspark(tmp_path / "start", start, target.config, storage="float32", borrow=True)
    more = ["--start", str(tmp_path / "start"), "--markov-rank", "4", "--steps", "2", "--borrow"]
    assert main(arguments(data, tmp_path / "run", *more, "--confidence-weight", "0")) == 0
    assert json.loads(capsys.readouterr().out)["drafted_per_round"] > 2
    config = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())
    assert config["row_feature_layer_ids"] == [0, last] and config["training"]["prefix_fraction"] == 0.25
    drafter = FailFast(TARGET, tmp_path / "run" / "drafter").drafter
    assert drafter.config == dataclasses.replace(start.config, markov="vanilla", markov_rank=4)
    before = load_file(tmp_path / "start" / "model.safetensors")
    assert main(arguments(data, tmp_path / "heads", *more, "--freeze", "backbone", "--storage", "float32")) == 0
    after = load_file(tmp_path / "heads" / "drafter" / "model.safetensors")
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert {key.split(".")[0] for key in after.keys() - before.keys()} == {"markov_head", "confidence_head"}
    assert all(np.any(after[key]) for key in after.keys() - before.keys())


def test_a_folder_belongs_to_one_run(tmp_path):
    (tmp_path / "train.json.part").write_text("{")  # killed at its very start
    assert [begin(tmp_path / "train.json", {"seed": 1}, foreign="*") for _ in range(2)] == [False, True]
    assert begin(tmp_path / "train.json", {"rows": 7}, create=False)
    with pytest.raises(OptionError, match="train.json: not a folder"):
        begin(tmp_path / "train.json" / "train.json", {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(OptionError, match="other: not empty"):
        begin(tmp_path / "other" / "train.json", {}, foreign="*")
