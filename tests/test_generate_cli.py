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

from failfast_jax.generate import main

TARGET = str(GOLDEN / "qwen2_target_160")
DRAFTER = str(GOLDEN / "fast_dllm_v2_untied")
PROMPT = "7,12,100,5"
STATS = {
    *("rounds", "drafted", "accepted", "drafter_passes", "target_passes", "compiles", "cache_hits", "host_syncs"),
    *("load_s", "compile_s", "prefill_s", "decode_s", "tokens_per_s"),
}


def run_json(*args: str) -> dict:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*args, "--json"]) == 0
    return json.loads(out.getvalue())


SHORT = ["--spec-len", "5", "--max-spec-len", "15"]
COMMON = ["--target", TARGET, "--token-ids", PROMPT, "--max-new-tokens", "40"]


@pytest.fixture(scope="module")
def vanilla() -> dict:
    return run_json(*COMMON, "--method", "vanilla")


def test_an_error_is_one_line_and_auto_says_what_it_lacks(capsys):
    words = ["--target", "./nowhere", "--prompt", "x"]
    assert main(words) == 2
    error = "error: --target ./nowhere: no such file or folder"
    assert capsys.readouterr().err.splitlines() == [error]
    assert main([*words, "--method", "lookup", "--policy", "fixed"]) == 2  # a former option, without effect
    assert capsys.readouterr().err.splitlines() == [error]
    assert main([*COMMON, "--max-new-tokens", "1"]) == 0
    assert "no --drafter: --method auto drafts from the text alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["--drafter", DRAFTER, "--method", "failfast", *SHORT],
        ["--drafter", TARGET, "--method", "ar", "--dynamic", "--tau", "0.3", "--max-spec-len", "7"],
        ["--drafter", TARGET],
        ["--method", "suffix", "--max-spec-len", "7"],
        ["--method", "vanilla", "--exact"],
    ],
    ids=["wide", "dynamic", "auto", "suffix", "exact"],
)
def test_methods_agree(args, vanilla):
    result = run_json(*COMMON, *args)
    assert result["output_ids"] == vanilla["output_ids"]
    assert set(result) == {"prompt_ids", "output_ids", "text", "finish_reason", "method", "stats", "rounds"}
    assert result["prompt_ids"] == [7, 12, 100, 5] and result["text"] is None
    assert result["finish_reason"] == "length" and {*result["stats"]} - {"costs"} == STATS
    stats, rounds = result["stats"], result["rounds"]
    assert stats["rounds"] == len(rounds) == stats["target_passes"]
    assert stats["drafted"] == sum(len(r["drafted"]) for r in rounds)
    assert stats["accepted"] == sum(r["accepted"] for r in rounds)
    assert stats["drafter_passes"] == sum(r["passes"] for r in rounds)
    assert list(chain.from_iterable(r["emitted"] for r in rounds)) == result["output_ids"]
    assert stats["tokens_per_s"] == pytest.approx(40 / stats["decode_s"])


def test_standalone_diffusion_reproduces_the_golden_file():
    with np.load(GOLDEN / "fast_dllm_v2_untied" / "golden.npz") as data:
        expected = data["gen_5_0.9_nobc"].reshape(-1).tolist()
    ids = ",".join(map(str, expected[:5]))
    options = ["--method", "dllm", "--released-length", "--max-new-tokens", "64"]
    result = run_json(*options, "--target", DRAFTER, "--token-ids", ids)
    assert result["output_ids"] == expected[5:] and result["stats"]["target_passes"] == 60


def test_stdout_is_json_alone_and_stderr_has_the_summary(tmp_path):
    """In a process of its own; with a profile, which another version's plugin of an accelerator would crash."""
    command = ["--target", TARGET, "--method", "lookup", "--json", "--token-ids", PROMPT, "--max-new-tokens", "8"]
    done = run_python("-m", "failfast_jax.generate", *command, "--profile", tmp_path / "profile")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["output_ids"]) == 8
    assert "lookup: 8 tokens" in done.stderr and " drafted tokens accepted (" in done.stderr
    assert any(path.is_file() for path in (tmp_path / "profile").rglob("*"))


def test_traces(tmp_path, capsys):
    common = [*COMMON, "--drafter", DRAFTER, *SHORT]
    assert main([*common, "--trace", str(tmp_path / "rounds.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    printed = [int(token) for token in capsys.readouterr().out.split(",")]
    assert list(chain.from_iterable(row["emitted"] for row in rows)) == printed
    assert main([*common, "--trace", str(tmp_path / "rounds.html")]) == 0
    page = (tmp_path / "rounds.html").read_text()
    rounds = [f"round {number}: " in page for number in range(1, len(rows) + 1)]
    assert all(rounds) and 'class="rejected"' in page


T, D, IDS = f"--target {TARGET}", f"--drafter {DRAFTER}", f"--token-ids {PROMPT}"
LOOKUP = f"{T} --method lookup"
BAD = {
    f"{LOOKUP} {IDS} --tau 0.3": "--tau 0.3: --method lookup has no such option, only --method failfast, ar, suffix",
    f"{T} {IDS} --method failfast --spec-len 20 --max-spec-len 10": "--max-spec-len 10: must be at least --spec-len 20",
    f"{T} {D} {IDS} --method fast-dllm --small-block-size 5": "--small-block-size 5: must divide the block size 32",
    f"{LOOKUP} {IDS} --max-new-tokens 0": "--max-new-tokens 0: must be",
    "--method magic --token-ids 1": "--method magic: must be one of auto",
    f"{LOOKUP} --prompt ''": "--prompt: the prompt is empty",
    f"{LOOKUP} --prompt ' '": "has no tokenizer",  # is text
    f"{T} --token-ids a,b": "expected integers separated by commas",
    f"{LOOKUP} --token-ids 5,160": "token id 160 is outside the vocabulary of 160",
    f"{LOOKUP} --token-ids {','.join(['3'] * 2048)}": "the prompt of 2048 tokens does not fit",
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
    f"--target {DRAFTER} {IDS} --method dllm --spiffy 3 --spiffy-graph /nowhere/graph": "draft graph in /nowhere/graph",
    f"--target {DRAFTER} {IDS} --method dllm --spiffy-graph g.json": "--spiffy-graph g.json: needs --spiffy",
    "--target /nowhere/model --method lookup --token-ids 1": "/nowhere/model: no such file",
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


def test_prompt_from_stdin(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["--target", TARGET, "--method", "lookup"]) == 2
    assert "stdin: the prompt is empty" in capsys.readouterr().err


def test_without_a_length_an_answer_ends_where_the_context_does(capsys):
    options = "--method vanilla --ignore-eos --max-seq-len 8 --json"
    argv = ["--target", TARGET, "--token-ids", "1,2,3", *options.split()]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["output_ids"]) == 5 and "exceed" not in captured.err
    assert main([*argv, "--max-new-tokens", "6"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: --max-new-tokens 6: the prompt's 3 tokens leave room for 5 of 8" in captured.err
