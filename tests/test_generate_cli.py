"""The command line: its JSON, its files, and its messages for bad input."""

import contextlib
import io
import json
import shlex
import sys
from itertools import chain

import numpy as np
import pytest
from checkpoint_files import GOLDEN, run_python

from failfast_jax import chat, serve
from failfast_jax.checkpoints.checkpoint import Checkpoint, load_model
from failfast_jax.generate import main
from failfast_jax.models import quantization

TARGET = str(GOLDEN / "qwen2_target_160")
DRAFTER = str(GOLDEN / "fast_dllm_v2_untied")
MODELS = {"target": TARGET, "drafter": DRAFTER}
PROMPT = "7,12,100,5"
STATS = {
    *("rounds", "drafted", "accepted", "drafter_passes", "target_passes", "compiles", "cache_hits", "host_syncs"),
    *("parameter_bytes", "load_s", "compile_s", "prefill_s", "decode_s", "tokens_per_s"),
}


def run_json(*args: str) -> dict:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*args, "--json"]) == 0
    return json.loads(out.getvalue())


COMMON = ["--target", TARGET, "--token-ids", PROMPT, "--max-new-tokens", "40"]


@pytest.fixture(scope="module")
def vanilla() -> dict:
    return run_json(*COMMON, "--method", "vanilla")


def test_the_json_and_the_trace_of_an_answer(vanilla, tmp_path):
    trace = tmp_path / "rounds.jsonl"
    drafts = ["--drafter", DRAFTER, "--method", "failfast", "--spec-len", "5", "--max-spec-len", "15"]
    result = run_json(*COMMON, *drafts, "--trace", str(trace))
    assert result["output_ids"] == vanilla["output_ids"]
    keys = {"prompt_ids", "output_ids", "text", "finish_reason", "method", "stats", "rounds", "arithmetic"}
    assert set(result) == keys and result["arithmetic"] == "float32 weights, float32 activations"
    assert result["prompt_ids"] == [7, 12, 100, 5] and result["text"] is None
    assert result["finish_reason"] == "length" and set(result["stats"]) == STATS
    stats, rounds = result["stats"], result["rounds"]
    sizes = {name: quantization.parameter_bytes(load_model(path)) for name, path in MODELS.items()}
    assert stats["parameter_bytes"] == sizes and sizes["drafter"] > 100_000
    assert stats["rounds"] == len(rounds) == stats["target_passes"]
    assert stats["drafted"] == sum(len(r["drafted"]) for r in rounds)
    assert stats["accepted"] == sum(r["accepted"] for r in rounds)
    assert stats["drafter_passes"] == sum(r["passes"] for r in rounds)
    assert list(chain.from_iterable(r["emitted"] for r in rounds)) == result["output_ids"]
    assert stats["tokens_per_s"] == pytest.approx(40 / stats["decode_s"])
    traced = [json.loads(line) for line in trace.read_text().splitlines()]
    assert traced == [{"round": number, **entry} for number, entry in enumerate(rounds, 1)]
    assert all(entry["took"] > 0 for entry in rounds)
    page = tmp_path / "rounds.html"
    run_json(*COMMON, *drafts, "--tau", "0", "--trace", str(page))
    heading = "failfast --spec-len 5 --tau 0.0 --max-spec-len 15 --rule confidence --schedule wide"
    assert f"<h2>{heading}</h2>" in page.read_text()


def test_stdout_is_json_alone_and_stderr_has_the_summary(vanilla, tmp_path):
    """In a process of its own; with a profile, which another version's plugin of an accelerator would crash."""
    done = run_python("-m", "failfast_jax.generate", *COMMON, "--json", "--profile", tmp_path / "profile")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output_ids"] == vanilla["output_ids"]
    assert "no --drafter: --method auto drafts from the text alone" in done.stderr
    assert "auto: 40 tokens" in done.stderr and " drafted tokens accepted (" in done.stderr
    assert any(path.is_file() for path in (tmp_path / "profile").rglob("*"))


def test_standalone_diffusion_reproduces_the_golden_file():
    with np.load(GOLDEN / "fast_dllm_v2_untied" / "golden.npz") as data:
        expected = data["gen_5_0.9_nobc"].reshape(-1).tolist()
    ids = ",".join(map(str, expected[:5]))
    options = ["--method", "dllm", "--released-length", "--max-new-tokens", "64"]
    result = run_json(*options, "--target", DRAFTER, "--token-ids", ids)
    assert result["output_ids"] == expected[5:] and result["stats"]["target_passes"] == 60


T, D, IDS = f"--target {TARGET}", f"--drafter {DRAFTER}", f"--token-ids {PROMPT}"
LOOKUP = f"{T} --method lookup"
BAD = {
    f"{LOOKUP} {IDS} --tau 0.3": "--tau 0.3: --method lookup has no such option, only --method failfast, ar, suffix",
    f"{T} {IDS} --method failfast --spec-len 20 --max-spec-len 10": "--max-spec-len 10: must be at least --spec-len 20",
    f"{T} {D} {IDS} --method fast-dllm --small-block-size 5": "--small-block-size 5: must divide the block size 32",
    "--method magic --token-ids 1": "--method magic: must be one of auto",
    f"{LOOKUP} --prompt ''": "--prompt: the prompt is empty",
    f"{LOOKUP} --prompt ' '": "has no tokenizer; put the model's tokenizer.json there",  # is text
    f"{T} --token-ids a,b": "expected integers separated by commas",
    f"{LOOKUP} --token-ids 5,160": "token id 160 is outside the vocabulary of 160",
    f"{T} {IDS} --drafter {GOLDEN / 'fast_dllm_v2_tied'}": "qwen2_target_160 and drafter",
    f"{T} {IDS} --method failfast": "--method failfast: needs --drafter",
    f"{T} {IDS} --drafter {TARGET} --method failfast": (
        "needs a drafter of kind block-diffusion or feature-block or eagle, this one is autoregressive"
    ),
    f"--target {DRAFTER} {IDS} --method vanilla": "a block-diffusion model cannot verify drafts",
    f"{IDS} --method dllm": "--method dllm: needs --target",
    f"--target {DRAFTER} {IDS} --method dllm --released-length --max-new-tokens 31": (
        "--max-new-tokens 31: must be at least the block size 32"
    ),
    f"--target {DRAFTER} {IDS} --method dllm --spiffy 3": (
        "fast_dllm_v2_untied/spiffy.json; make one with python -m failfast_jax.train spiffy --target"
    ),
    f"--target {DRAFTER} {IDS} --method dllm --spiffy-graph g.json": "--spiffy-graph g.json: needs --spiffy",
    "--target ./nowhere --prompt x": "--target ./nowhere: no such file or folder",
    # A former option, without effect.
    "--target ./nowhere --prompt x --method lookup --policy fixed": "--target ./nowhere: no such file or folder",
    f"{T} --prompt-file /nowhere/prompt": "--prompt-file /nowhere/prompt: No such",
    f"{LOOKUP} {IDS} --trace /nowhere/rounds.html": "--trace /nowhere/rounds.html: no such folder",
}


@pytest.mark.parametrize("words, message", BAD.items(), ids=BAD.values())
def test_bad_input(words, message, capsys):
    assert main(shlex.split(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], captured.err


@pytest.mark.parametrize("command", [main, chat.main, serve.main])
def test_a_folder_without_a_tokenizer_is_refused_before_its_weights_are_read(command, monkeypatch, capsys):
    monkeypatch.setattr(Checkpoint, "load", lambda *args, **options: pytest.fail("weights are read"))
    more = {main: ["--prompt", "x"], serve.main: ["--port", "0"]}.get(command, [])
    assert command(["--target", TARGET, "--method", "lookup", *more]) == 2
    assert f"error: --target {TARGET}: has no tokenizer; put " in capsys.readouterr().err


def test_a_second_prompt_is_an_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--prompt", "a", "--prompt", "b"])
    assert "error: --prompt: given twice, and an answer has one prompt" in capsys.readouterr().err


def test_prompt_from_stdin(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["--target", TARGET, "--method", "lookup"]) == 2
    assert "stdin: the prompt is empty; give --prompt or --prompt-file\n" in capsys.readouterr().err


def test_without_a_length_an_answer_ends_where_the_context_does(capsys):
    argv = ["--target", TARGET, "--token-ids", "1,2,3", *"--method vanilla --ignore-eos --max-seq-len 8".split()]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert len(captured.out.split(",")) == 5 and "exceed" not in captured.err
    assert main([*argv, "--max-new-tokens", "6"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: --max-new-tokens 6: the prompt's 3 tokens leave room for 5 of 8" in captured.err
