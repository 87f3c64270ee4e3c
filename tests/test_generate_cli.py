"""The command line: its JSON, its files, and its answers to bad input."""

import io
import json
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest
from checkpoint_files import GOLDEN, hf_folder

from failfast_jax.generate import main

TARGET = str(GOLDEN / "qwen2_target_160")
DRAFTER = str(GOLDEN / "fast_dllm_v2_untied")
PROMPT = "7,12,100,5"
STATS = {
    "rounds",
    "drafted",
    "accepted",
    "drafter_passes",
    "target_passes",
    "load_s",
    "compile_s",
    "prefill_s",
    "decode_s",
    "tokens_per_s",
    "compiles",
    "cache_hits",
    "host_syncs",
}


def run_json(capsys, *args: str) -> dict:
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "args",
    [
        ["--drafter", DRAFTER],
        ["--drafter", DRAFTER, "--schedule", "aligned"],
        ["--drafter", DRAFTER, "--method", "fast-dllm"],
        ["--drafter", TARGET, "--method", "ar"],
        ["--drafter", TARGET, "--method", "ar", "--dynamic", "--tau", "0.3", "--max-spec-len", "7"],
        ["--drafter", DRAFTER, "--reuse", "--max-spec-len", "15"],
        ["--method", "suffix", "--max-spec-len", "7"],
        ["--method", "lookup"],
        ["--method", "vanilla", "--exact"],
    ],
    ids=["wide", "aligned", "fast-dllm", "ar", "dynamic", "reuse", "suffix", "lookup", "exact"],
)
def test_methods_agree(args, capsys):
    common = ["--target", TARGET, "--token-ids", PROMPT, "--max-new-tokens", "40"]
    expected = run_json(capsys, *common, "--method", "vanilla")
    result = run_json(capsys, *common, *args)
    assert result["output_ids"] == expected["output_ids"]
    assert set(result) == {
        "prompt_ids",
        "output_ids",
        "text",
        "finish_reason",
        "method",
        "stats",
        "rounds",
    }
    assert result["prompt_ids"] == [7, 12, 100, 5] and result["text"] is None
    assert result["finish_reason"] == "length" and set(result["stats"]) == STATS
    stats, rounds = result["stats"], result["rounds"]
    assert stats["rounds"] == len(rounds) == stats["target_passes"]
    assert stats["drafted"] == sum(len(r["drafted"]) for r in rounds)
    assert stats["accepted"] == sum(r["accepted"] for r in rounds)
    assert stats["drafter_passes"] == sum(r["passes"] for r in rounds)
    assert list(chain.from_iterable(r["emitted"] for r in rounds)) == result["output_ids"]
    assert stats["tokens_per_s"] == pytest.approx(40 / stats["decode_s"])


def test_standalone_diffusion_reproduces_the_golden_file(capsys):
    with np.load(GOLDEN / "fast_dllm_v2_untied" / "golden.npz") as data:
        expected = data["gen_5_0.9_nobc"].reshape(-1).tolist()
    ids = ",".join(map(str, expected[:5]))
    args = ["--method", "dllm", "--target", DRAFTER, "--token-ids", ids, "--max-new-tokens", "64", "--threshold", "0.9"]
    result = run_json(capsys, *args)
    assert result["output_ids"] == expected[5:] and result["stats"]["target_passes"] == 60


def test_stdout_is_json_alone_and_stderr_has_the_summary():
    command = [sys.executable, "-m", "failfast_jax.generate", "--target", TARGET, "--method", "lookup", "--json"]
    command += ["--token-ids", PROMPT, "--max-new-tokens", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["output_ids"]) == 8
    assert "lookup: 8 tokens" in done.stderr and "accepted per round" in done.stderr


def test_traces(tmp_path, capsys):
    common = ["--target", TARGET, "--drafter", DRAFTER, "--token-ids", PROMPT, "--max-new-tokens", "20"]
    assert main([*common, "--trace", str(tmp_path / "rounds.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    printed = [int(token) for token in capsys.readouterr().out.split(",")]
    assert list(chain.from_iterable(row["emitted"] for row in rows)) == printed
    assert main([*common, "--trace", str(tmp_path / "rounds.html")]) == 0
    page = (tmp_path / "rounds.html").read_text()
    assert page.count("<pre>") == len(rows) and 'class="rejected"' in page


COMMON = ["--target", TARGET, "--method", "lookup", "--token-ids", PROMPT]
BAD = {
    "tau": ([*COMMON, "--method", "suffix", "--tau", "1.5"], "--tau 1.5: must be in [0, 1]"),
    "ignored": ([*COMMON, "--tau", "0.3"], "--tau 0.3: --method lookup has no such option, only failfast, ar, suffix"),
    "steps": ([*COMMON, "--steps", "2"], "--steps 2: --method lookup has no such option, only specdiff"),
    "tree": ([*COMMON, "--tree-budget", "9"], "--tree-budget 9: --method lookup has no such option, only failfast"),
    "rejection": ([*COMMON, "--acceptance", "rejection"], "--acceptance rejection: exact only for drafts sampled"),
    "spec": (
        [*COMMON, "--method", "failfast", "--spec-len", "20", "--max-spec-len", "10"],
        "--max-spec-len 10: must be at least --spec-len 20",
    ),
    "default spec": (
        ["--target", TARGET, "--drafter", DRAFTER, "--token-ids", PROMPT, "--max-spec-len", "5"],
        "--max-spec-len 5: must be at least --spec-len 10",
    ),
    "small block": (
        [*COMMON, "--drafter", DRAFTER, "--method", "fast-dllm", "--small-block-size", "5"],
        "--small-block-size 5: must divide the block size 32",
    ),
    "dynamic": ([*COMMON, "--dynamic"], "--dynamic: --method lookup has no such option, only ar"),
    "reuse": ([*COMMON, "--reuse"], "--reuse: --method lookup has no such option, only failfast"),
    "temperature": ([*COMMON, "--temperature", "-1"], "--temperature -1.0"),
    "top-p": ([*COMMON, "--top-p", "0"], "--top-p 0.0: must be in (0, 1]"),
    "new tokens": ([*COMMON, "--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1"),
    "seed": ([*COMMON, "--seed", "-1"], "--seed -1"),
    "method": (["--method", "magic", "--token-ids", "1"], "--method magic: must be one of failfast"),
    "empty prompt": (["--target", TARGET, "--method", "lookup", "--prompt", "  "], "--prompt: the prompt is empty"),
    "no ids": (["--target", TARGET, "--token-ids", ","], "--token-ids: the prompt is empty"),
    "words as ids": (["--target", TARGET, "--token-ids", "a,b"], "expected integers separated by commas"),
    "id range": (["--target", TARGET, "--method", "lookup", "--token-ids", "5,160"], "token id 160 is outside"),
    "negative id": (["--target", TARGET, "--method", "lookup", "--token-ids=-1"], "token id -1 is outside"),
    "long prompt": (
        ["--target", TARGET, "--method", "lookup", "--token-ids", ",".join(["3"] * 2048)],
        "the prompt of 2048 tokens does not fit",
    ),
    "longer than asked": ([*COMMON, "--max-seq-len", "4"], "the prompt of 4 tokens does not fit"),
    "context": ([*COMMON, "--max-seq-len", "4000"], "must be between 2 and the context of 2048"),
    "no tokenizer": (["--target", TARGET, "--method", "lookup", "--prompt", "hi"], "has no tokenizer"),
    "mismatch": (
        ["--target", TARGET, "--drafter", str(GOLDEN / "fast_dllm_v2_tied"), "--token-ids", PROMPT],
        "qwen2_target_160 and drafter",
    ),
    "no drafter": (
        ["--target", TARGET, "--method", "failfast", "--token-ids", PROMPT],
        "--method failfast: needs --drafter",
    ),
    "ar drafter": (["--target", TARGET, "--method", "ar", "--token-ids", PROMPT], "--method ar: needs --drafter"),
    "wrong drafter": (
        ["--target", TARGET, "--drafter", TARGET, "--token-ids", PROMPT],
        "method failfast needs a drafter of kind block-diffusion or conditioned",
    ),
    "wrong ar drafter": (
        ["--target", TARGET, "--drafter", DRAFTER, "--method", "ar", "--token-ids", PROMPT],
        "method ar needs a drafter of kind autoregressive",
    ),
    "diffusion target": (["--target", DRAFTER, "--method", "vanilla", "--token-ids", PROMPT], "cannot verify drafts"),
    "dllm target": (["--target", TARGET, "--method", "dllm", "--token-ids", PROMPT], "needs a block-diffusion model"),
    "dllm without target": (["--method", "dllm", "--token-ids", PROMPT], "--method dllm: needs --target"),
    "dllm length": (
        ["--target", DRAFTER, "--method", "dllm", "--token-ids", PROMPT, "--max-new-tokens", "31"],
        "--max-new-tokens 31: must be at least the block size 32",
    ),
    "no model": (
        ["--target", "/nowhere/model", "--method", "lookup", "--token-ids", "1"],
        "/nowhere/model: no such file",
    ),
    "no prompt file": (
        ["--target", TARGET, "--prompt-file", "/nowhere/prompt"],
        "--prompt-file /nowhere/prompt: No such",
    ),
    "trace folder": ([*COMMON, "--trace", "/nowhere/rounds.html"], "--trace /nowhere/rounds.html: no such folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, capsys):
    args, message = BAD[case]
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], captured.err


def test_wrong_model_type(tmp_path, capsys):
    folder = hf_folder(tmp_path / "model", "qwen2_target_160", model_type="gemma")
    assert main(["--target", str(folder), "--method", "lookup", "--token-ids", "1"]) == 2
    assert "model_type 'gemma' is not supported" in capsys.readouterr().err


def test_prompt_from_stdin(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["--target", TARGET, "--method", "lookup"]) == 2
    assert "stdin: the prompt is empty" in capsys.readouterr().err
