"""Converters: the result loads bit-identically, appears atomically, and errors are one line."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
from collections import namedtuple
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_files import (
    GOLDEN,
    cast,
    gguf_tokenizer,
    hf_folder,
    refuses,
    run_python,
    same_parameters,
    shard,
    tensors_of,
    write_gguf,
)
from gguf import GGMLQuantizationType as Quant

from convert import conversion
from failfast_jax.checkpoints import orbax_folder
from failfast_jax.checkpoints.checkpoint import load_model
from failfast_jax.checkpoints.tokenizer import load_tokenizer

LLAMA = GOLDEN / "llama_tied"
DIVISORS = np.asarray([1, 1.7, 8, 8], np.float32)


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "converted" / "out"


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def converted(source: Path, out: Path, *flags: str) -> Path:
    assert conversion.main([str(source), str(out), *flags]) == 0
    return out


@pytest.mark.parametrize(
    "family, name",
    [("qwen2", "llama_tied"), ("qwen3", "field/qwen3_a"), ("sdar", "field/sdar_a"), ("fast_dllm", "fast_dllm_v2_tied")],
)
def test_golden_round_trip(family, name, out):
    assert importlib.import_module(f"convert.{family}").main([str(GOLDEN / name), str(out)]) == 0
    model, source = load_model(out), load_model(GOLDEN / name)
    assert model.config == source.config and same_parameters(model, source)
    assert files_in(out.parent) == ["out"]


def test_names_of_folders_are_no_patterns(tmp_path, monkeypatch):
    """Neither of the folder itself nor of the one above it; `~` is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    name = "lr[1e-4] a*b? {x} 100% %41 ünï 日本\nb"
    assert same_parameters(converted(LLAMA, tmp_path / name / name), LLAMA)
    assert same_parameters(converted(LLAMA, Path("~/out")).expanduser(), LLAMA)


def test_a_stored_dtype_is_kept_and_loads_at_any(tmp_path, out):
    source = hf_folder(tmp_path / "source", "qwen2_untied", cast(tensors_of("qwen2_untied"), "bfloat16"))
    converted(source, out)
    assert {str(param.dtype) for param in orbax_folder.stored_params(out).values()} == {"bfloat16"}
    for dtype in ("float32", "bfloat16", "float16"):
        model, expected = load_model(out, dtype), load_model(source, dtype)
        assert same_parameters(model, expected) and model.embed[...].dtype == expected.embed[...].dtype
    assert same_parameters(converted(out, tmp_path / "again", "--dtype", "float32"), out)


def test_mixed_dtypes_of_shards_are_widened(tmp_path, out):
    tensors = cast(tensors_of("qwen2_untied"), "bfloat16")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32) * 1.0001
    source = hf_folder(tmp_path / "source", "qwen2_untied", tensors)
    shard(source, tensors, parts=2)
    assert same_parameters(converted(source, out), source)


def test_configuration_of_the_result(out):
    source = hf_folder(out.parent / "source", "fast_dllm_v2_tied", mask_token_id=None, eos_token_id=[210, 4])
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    (source / "added_tokens.json").write_text('{"|<MASK>|": 203}')
    config = json.loads((converted(source, out) / "config.json").read_text())
    assert config["failfast_format"] == 1
    assert (config["eos_token_id"], config["mask_token_id"], config["dtype"]) == ([210, 4, 7], 203, "float32")
    assert config["model_type"] == "Fast_dLLM_Qwen" and config["bd_size"] == 32
    assert files_in(out) == ["added_tokens.json", "config.json", "generation_config.json", "params"]


def test_gguf(tmp_path, out):
    """Quantised weights, the divisors of rotary frequencies, and the tokenizer survive."""

    def rounded_where_it_fits(key: str, value: np.ndarray) -> Quant:
        return Quant.Q8_0 if value.ndim == 2 and value.shape[1] % 32 == 0 else Quant.F32

    options = {"quantise": rounded_where_it_fits, "extra": gguf_tokenizer}
    path = write_gguf(tmp_path / "model.gguf", "llama_tied", extra_tensors={"rope_freqs.weight": DIVISORS}, **options)
    assert importlib.import_module("convert.gguf").main([str(path), str(out)]) == 0
    model, source = load_model(out), load_model(path, widen=True)
    assert model.config == source.config and same_parameters(model, source)
    assert model.config.rope.divisors == pytest.approx(DIVISORS)
    tokenizer, again, text = load_tokenizer(path), load_tokenizer(out), "abé 12\n<|end|>x"
    assert again.get_vocab() == tokenizer.get_vocab() and again.chat_template == "{{ messages[0].content }}"
    ids = again.encode(text)
    assert ids == tokenizer.encode(text) and again.eos_token_id in ids and again.decode(ids) == text


def test_a_half_precision_folder_widens_while_it_is_read(tmp_path):
    """Its largest parameter is far larger in float32 than what Orbax stored."""
    tensors = cast(tensors_of("llama_tied"), "bfloat16")
    embed = np.random.default_rng(0).normal(size=(40_000, 48)).astype(tensors["model.embed_tokens.weight"].dtype)
    tensors |= {"model.embed_tokens.weight": embed}
    out = converted(hf_folder(tmp_path / "source", "llama_tied", tensors, vocab_size=40_000), tmp_path / "out")
    assert np.array_equal(np.asarray(load_model(out, dtype="float32").embed[...]), embed.astype(np.float32))


# Refusals: exit status 2, one line on stderr, nothing left behind.


@pytest.fixture
def refused(capsys):
    """Runs a command, which must be refused; returns its line."""

    def run(*argv: object) -> str:
        capsys.readouterr()
        assert conversion.main([str(argument) for argument in argv]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
        return captured.err

    return run


def test_existing_output_is_kept_or_replaced(refused, tmp_path, monkeypatch, out):
    out.mkdir(parents=True)  # an empty folder holds nothing that could be lost
    converted(LLAMA, out)
    with monkeypatch.context() as patch:
        patch.setattr(conversion.checkpoint, "open_checkpoint", lambda *_: pytest.fail("work was done"))
        assert "exists already; pass --overwrite" in refused(GOLDEN / "qwen2_untied", out)
    with monkeypatch.context() as patch:
        patch.setattr(ocp.Checkpointer, "save", fill_the_disk)
        problem = refused(GOLDEN / "qwen2_untied", out, "--overwrite")
    assert "params: cannot be written (RESOURCE_EXHAUSTED" in problem
    assert same_parameters(out, LLAMA) and files_in(out.parent) == ["out"]
    converted(GOLDEN / "qwen2_untied", out, "--overwrite")
    assert load_model(out).config.model_type == "qwen2" and files_in(out.parent) == ["out"]
    assert "is the source itself" in refused(out, out, "--overwrite")
    source = hf_folder(tmp_path / "source", "qwen2_untied")
    for victim in (source, tmp_path, source / "config.json"):
        assert "not a converted model" in refused(LLAMA, victim, "--overwrite")


def fill_the_disk(checkpointer, path, args):
    path.mkdir()
    raise ValueError("RESOURCE_EXHAUSTED: Error writing 'x': No space left on device [os_error_code='28']")


def test_places_where_nothing_can_be_made(refused, monkeypatch, tmp_path, out):
    for name in (b"back\\slash", b"caf\xe9", b"gs:/model", b"gs:"):
        assert "name another one" in refused(LLAMA, tmp_path / os.fsdecode(name))
    assert files_in(tmp_path) == []
    (tmp_path / "page.md").touch()
    assert f"{tmp_path / 'page.md'}: is not a folder" in refused(LLAMA, tmp_path / "page.md" / "out")
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 5000, 5000)
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: usage)
    needed = sum(value.size for value in tensors_of("llama_tied").values()) * 4
    needed += (LLAMA / "generation_config.json").stat().st_size + conversion.SPARE_BYTES
    assert f"{needed:,} bytes needed, 5,000 bytes available" in refused(LLAMA, out)
    assert not out.parent.exists()


_KILLED = """
import os, signal, sys
from convert import conversion
from failfast_jax.checkpoints import orbax_folder
save = orbax_folder.save_params
def save_and_die(folder, params):
    save(folder, params)
    os.kill(os.getpid(), signal.SIGKILL)
orbax_folder.save_params = save_and_die
conversion.main(sys.argv[1:])
"""


def test_a_killed_conversion_leaves_nothing_that_loads(out):
    run = run_python("-c", _KILLED, LLAMA, out)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert not out.exists()
    (leftover,) = out.parent.iterdir()
    refuses("an unfinished conversion", leftover)
    renamed = Path(shutil.copytree(leftover, out.parent / "renamed"))
    refuses("no config.json; an unfinished conversion", renamed)
    shutil.rmtree(renamed)
    converted(LLAMA, out)
    assert files_in(out.parent) == ["out"]


def test_two_conversions_to_one_place(refused, out):
    with conversion.new_folder(out):
        assert "another conversion to the same place" in refused(LLAMA, out)
        assert files_in(out.parent) == [".out.partial"]
    assert files_in(out.parent) == ["out"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's failing read
def test_damaged_results_are_refused(out):
    config = converted(LLAMA, out) / "config.json"
    raw = json.loads(config.read_text())
    for changes, message in (
        ({"num_hidden_layers": 3}, "missing tensors: layers.2"),
        ({"intermediate_size": 100}, r"mlp.down.weight is \[48, 96\] in .*params, not \[48, 100\]"),
        ({"failfast_format": 2}, "converted to format 2, and this version reads 1"),
    ):
        config.write_text(json.dumps(raw | changes))
        refuses(message, out)
    config.write_text(json.dumps(raw))
    for data in (out / "params").glob("**/d/*"):
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    refuses("params: cannot be read .*convert the model again", out)
    shutil.rmtree(out / "params")
    refuses("incomplete: params/ is missing", out)


_COMMAND = """
import atexit, runpy, sys
atexit.register(lambda: print(sorted({"torch", "llama_cpp"} & {*sys.modules})))
runpy.run_module("convert", run_name="__main__", alter_sys=True)
"""


def test_command_line(tmp_path, out):
    """On the machine's own devices: nothing but the result is printed, and PyTorch stays out."""
    path = write_gguf(tmp_path / "model.gguf", "llama_tied", extra=gguf_tokenizer)
    run = run_python("-c", _COMMAND, path, out, without=("JAX_PLATFORMS",))
    assert (run.returncode, run.stderr) == (0, "") and re.fullmatch(rf"{out}: 0\.\d MB\n\[\]\n", run.stdout)
