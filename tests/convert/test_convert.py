"""Converters: the result loads bit-identically, appears atomically, and errors are one line."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections import namedtuple
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_files import (
    GOLDEN,
    GOLDEN_NAMES,
    cast,
    gguf_tokenizer,
    hf_folder,
    logits,
    refuses,
    run_python,
    shard,
    tensors_of,
    write_gguf,
)
from gguf import GGMLQuantizationType as Quant

from convert import conversion, fast_dllm, gguf, qwen2, qwen3, sdar
from failfast_jax.checkpoints import orbax_folder
from failfast_jax.checkpoints.checkpoint import load_model
from failfast_jax.checkpoints.tokenizer import load_tokenizer


def converter_of(name: str):
    others = {"field/qwen3_a": qwen3, "field/sdar_a": sdar}
    return fast_dllm if name.startswith("fast_dllm") else others.get(name, qwen2)


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "converted" / "out"


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("name", [*GOLDEN_NAMES, "field/qwen3_a", "field/sdar_a"])
def test_golden_round_trip(name, out):
    assert converter_of(name).main([str(GOLDEN / name), str(out)]) == 0
    model, source = load_model(out), load_model(GOLDEN / name)
    assert model.config == source.config
    assert jax.tree.all(jax.tree.map(np.array_equal, model, source))
    assert files_in(out.parent) == ["out"]


@pytest.mark.parametrize(
    "name", ["lr[1e-4]", "[!a]b[", "a*b?", "{x} 100% %41", "~", "-dash", "ünï 日本", "a\nb", ".hidden~"]
)
def test_names_of_folders_are_no_patterns(name, tmp_path):
    """Neither of the folder itself nor of the one above it."""
    out = tmp_path / name / name
    assert qwen2.main(["--", str(GOLDEN / "llama_tied"), str(out)]) == 0
    assert jax.tree.all(jax.tree.map(np.array_equal, load_model(out), load_model(GOLDEN / "llama_tied")))


def test_a_folder_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert qwen2.main([str(GOLDEN / "llama_tied"), "~/at home"]) == 0 and (tmp_path / "at home/config.json").is_file()


@pytest.mark.parametrize("name", [b"back\\slash", b"caf\xe9", b"gs:/model", b"gs:"])
def test_names_that_storage_cannot_have_are_refused(name, tmp_path, capsys):
    assert qwen2.main([str(GOLDEN / "llama_tied"), str(tmp_path / os.fsdecode(name))]) == 2
    assert "name another one" in capsys.readouterr().err and files_in(tmp_path) == []


def test_what_was_written_is_looked_at(out, capsys, monkeypatch):
    """A conversion that cannot be read again is no success, and leaves nothing."""
    save = ocp.Checkpointer.save

    def forgetful(self, path, args):
        save(self, path, args)
        shutil.rmtree(path)
        path.mkdir()

    monkeypatch.setattr(ocp.Checkpointer, "save", forgetful)
    assert qwen2.main([str(GOLDEN / "llama_tied"), str(out)]) == 2
    assert "cannot be read" in capsys.readouterr().err and files_in(out.parent) == []


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
def test_stored_dtype_is_kept_and_loads_at_any(tmp_path, out, stored):
    source = hf_folder(tmp_path / "source", "qwen2_untied", cast(tensors_of("qwen2_untied"), stored))
    assert qwen2.main([str(source), str(out)]) == 0
    assert {str(param.dtype) for param in orbax_folder.stored_params(out).values()} == {stored}
    for dtype in ("float32", "bfloat16", "float16"):
        assert np.array_equal(logits(out, dtype=dtype), logits(source, dtype=dtype))


def test_mixed_dtypes_of_shards_are_widened(tmp_path, out):
    tensors = cast(tensors_of("qwen2_untied"), "bfloat16")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32) * 1.0001
    source = hf_folder(tmp_path / "source", "qwen2_untied", tensors)
    shard(source, tensors, parts=2)
    assert qwen2.main([str(source), str(out)]) == 0
    assert np.array_equal(logits(out), logits(source))


def test_dtype_option(out, tmp_path):
    assert qwen2.main([str(GOLDEN / "llama_tied"), str(out), "--dtype", "bfloat16"]) == 0
    assert np.array_equal(logits(out, dtype="bfloat16"), logits(GOLDEN / "llama_tied", dtype="bfloat16"))
    # A converted folder is a source, too.
    assert qwen2.main([str(out), str(tmp_path / "again"), "--dtype", "float32"]) == 0
    assert np.array_equal(logits(tmp_path / "again"), logits(out))


def test_configuration_of_the_result(out):
    source = hf_folder(out.parent / "source", "fast_dllm_v2_tied", mask_token_id=None, eos_token_id=[210, 4])
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    (source / "added_tokens.json").write_text('{"|<MASK>|": 203}')
    assert fast_dllm.main([str(source), str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["failfast_format"] == 1
    assert (config["eos_token_id"], config["mask_token_id"], config["dtype"]) == ([210, 4, 7], 203, "float32")
    assert config["model_type"] == "Fast_dLLM_Qwen" and config["bd_size"] == 32
    assert files_in(out) == ["added_tokens.json", "config.json", "generation_config.json", "params"]


@pytest.mark.parametrize("name", ["llama_tied", "qwen2_untied", "field/qwen3_a"])
def test_gguf(tmp_path, out, name):
    path = write_gguf(tmp_path / "model.gguf", name, extra=gguf_tokenizer)
    assert gguf.main([str(path), str(out)]) == 0
    assert np.array_equal(logits(out), logits(path))
    assert load_model(out).config == load_model(path).config
    tokenizer, again = load_tokenizer(path), load_tokenizer(out)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == "{{ messages[0].content }}"
    ids = again.encode("abé 12\n<|end|>x")
    assert ids == tokenizer.encode("abé 12\n<|end|>x") and again.eos_token_id in ids
    assert again.decode(ids) == tokenizer.decode(ids) == "abé 12\n<|end|>x"


def rounded_where_it_fits(key: str, value: np.ndarray) -> Quant:
    return Quant.Q8_0 if value.ndim == 2 and value.shape[1] % 32 == 0 else Quant.F32


def test_rope_divisors_and_quantised_weights_survive(tmp_path, out):
    divisors = np.asarray([1, 1.7, 8, 8], np.float32)
    path = write_gguf(
        tmp_path / "model.gguf",
        "llama_tied",
        quantise=rounded_where_it_fits,
        extra=gguf_tokenizer,
        extra_tensors={"rope_freqs.weight": divisors},
    )
    assert gguf.main([str(path), str(out), "--dtype", "bfloat16"]) == 0
    assert load_model(out).config.rope.divisors == pytest.approx(divisors)
    assert np.array_equal(logits(out, dtype="bfloat16"), logits(path, dtype="bfloat16"))


# Refusals: exit status 2, one line on stderr, nothing left behind.


def refused(capsys, module, *argv: object) -> str:
    capsys.readouterr()
    assert module.main([str(argument) for argument in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_wrong_model_types_name_the_right_command(capsys, tmp_path, out):
    path = write_gguf(tmp_path / "model.gguf", "llama_tied")
    for module, source, hint in (
        (qwen2, GOLDEN / "fast_dllm_v2_tied", "convert.fast_dllm"),
        (qwen2, path, "convert.gguf"),
        (fast_dllm, GOLDEN / "qwen2_untied", "convert.qwen2"),
        (fast_dllm, GOLDEN / "llama_tied", "convert.qwen2"),
        (fast_dllm, path, "convert.gguf"),
        (gguf, GOLDEN / "qwen2_untied", "convert.qwen2"),
        (qwen2, GOLDEN / "field" / "qwen3_a", "convert.qwen3"),
        (qwen3, GOLDEN / "field" / "sdar_a", "convert.sdar"),
    ):
        assert f"use python -m {hint}" in refused(capsys, module, source, out)
    source = hf_folder(tmp_path / "gemma", "qwen2_untied", model_type="gemma2")
    assert "model_type 'gemma2' is not supported" in refused(capsys, qwen2, source, out)
    assert files_in(out.parent) == []


def test_damaged_sources(capsys, tmp_path, out):
    source = hf_folder(tmp_path / "source", "qwen2_untied")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{weights}: truncated" in refused(capsys, qwen2, source, out)
    weights.rename(source / "pytorch_model.bin")
    assert "only pickled weights" in refused(capsys, qwen2, source, out)
    assert "no such file or folder" in refused(capsys, qwen2, tmp_path / "absent", out)
    assert files_in(out.parent) == []


def test_existing_output_is_refused_before_any_work(capsys, monkeypatch, out):
    out.mkdir(parents=True)  # an empty folder holds nothing that could be lost
    assert qwen2.main([str(GOLDEN / "llama_tied"), str(out)]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(conversion.checkpoint, "open_checkpoint", lambda *_: pytest.fail("work was done"))
        assert "exists already; pass --overwrite" in refused(capsys, qwen2, GOLDEN / "qwen2_untied", out)
    assert qwen2.main([str(GOLDEN / "qwen2_untied"), str(out), "--overwrite"]) == 0
    assert load_model(out).config.model_type == "qwen2"
    assert files_in(out.parent) == ["out"]


def test_overwrite_replaces_only_conversions(capsys, tmp_path, out):
    source = hf_folder(tmp_path / "source", "qwen2_untied")
    for victim in (source, tmp_path, source / "config.json"):
        assert "not a converted model" in refused(capsys, qwen2, GOLDEN / "llama_tied", victim, "--overwrite")
    assert qwen2.main([str(source), str(out)]) == 0
    assert "is the source itself" in refused(capsys, qwen2, out, out, "--overwrite")


def test_a_failed_overwrite_keeps_the_old_result(capsys, monkeypatch, out):
    assert qwen2.main([str(GOLDEN / "llama_tied"), str(out)]) == 0
    before = logits(out)

    def fail(folder, params):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(orbax_folder, "save_params", fail)
    assert "Input/output error" in refused(capsys, qwen2, GOLDEN / "qwen2_untied", out, "--overwrite")
    assert np.array_equal(logits(out), before)
    assert files_in(out.parent) == ["out"]


def test_too_little_disk_space(capsys, monkeypatch, out):
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 5000, 5000)
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: usage)
    message = refused(capsys, qwen2, GOLDEN / "llama_tied", out)
    parameters = sum(value.size for value in tensors_of("llama_tied").values())
    needed = parameters * 4 + (GOLDEN / "llama_tied" / "generation_config.json").stat().st_size
    assert f"{needed + conversion.SPARE_BYTES:,} bytes needed, 5,000 bytes available" in message
    assert not out.parent.exists()


def test_places_where_nothing_can_be_made(capsys, monkeypatch, tmp_path, out):
    (tmp_path / "page.md").touch()
    message = refused(capsys, qwen2, GOLDEN / "llama_tied", tmp_path / "page.md" / "out")
    assert f"{tmp_path / 'page.md'}: is not a folder" in message
    flags = namedtuple("flags", "f_flag")(os.ST_RDONLY)
    monkeypatch.setattr(conversion.os, "statvfs", lambda path: flags)
    message = refused(capsys, qwen2, GOLDEN / "llama_tied", out)
    assert "its file system is read-only; name a folder that may be written" in message and not out.parent.exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("RESOURCE_EXHAUSTED: Error writing 'x': No space left on device [os_error_code='28']"),
    ],
)
def test_disk_that_fills_up(capsys, monkeypatch, out, error):
    def fail(folder, params):
        (folder / "params").mkdir()
        raise error

    monkeypatch.setattr(orbax_folder, "save_params", fail)
    assert "the disk filled up during the conversion" in refused(capsys, qwen2, GOLDEN / "llama_tied", out)
    assert files_in(out.parent) == []


_KILLED = """
import os, signal, sys
from convert import qwen2
from failfast_jax.checkpoints import orbax_folder
save = orbax_folder.save_params
def save_and_die(folder, params):
    save(folder, params)
    os.kill(os.getpid(), signal.SIGKILL)
orbax_folder.save_params = save_and_die
qwen2.main(sys.argv[1:])
"""


def test_a_killed_conversion_leaves_nothing_that_loads(out):
    run = run_python("-c", _KILLED, GOLDEN / "llama_tied", out)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert not out.exists()
    (leftover,) = out.parent.iterdir()
    refuses("an unfinished conversion", leftover)
    renamed = Path(shutil.copytree(leftover, out.parent / "renamed"))
    refuses("an unfinished conversion .no config.json.", renamed)
    shutil.rmtree(renamed)
    assert qwen2.main([str(GOLDEN / "llama_tied"), str(out)]) == 0
    assert files_in(out.parent) == ["out"]


def test_two_conversions_to_one_place(capsys, out):
    with conversion.partial_folder(out):
        assert "another conversion to the same place" in refused(capsys, qwen2, GOLDEN / "llama_tied", out)
        assert files_in(out.parent) == [".out.partial"]
    assert files_in(out.parent) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's failing read
def test_damaged_results_are_refused(out):
    assert qwen2.main([str(GOLDEN / "llama_tied"), str(out)]) == 0
    config = out / "config.json"
    text = config.read_text()
    config.write_text(json.dumps(json.loads(text) | {"num_hidden_layers": 3}))
    refuses("parameters do not fit config.json: layers.2.*is missing", out)
    config.write_text(json.dumps(json.loads(text) | {"intermediate_size": 100}))
    refuses(r"mlp.down.weight is \[48, 96\], not \[48, 100\]", out)
    config.write_text(json.dumps(json.loads(text) | {"failfast_format": 2}))
    refuses("converted to format 2, and this version reads 1", out)
    config.write_text(text)
    for data in (out / "params").glob("**/d/*"):
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    refuses("params: cannot be read .*convert the model again", out)
    shutil.rmtree(out / "params")
    refuses("incomplete: params/ is missing", out)


def test_command_line(out):
    """On the machine's own devices: nothing but the result is said."""
    run = run_python("-m", "convert.fast_dllm", GOLDEN / "fast_dllm_v2_tied", out, without=("JAX_PLATFORMS",))
    assert (run.returncode, run.stderr) == (0, "") and run.stdout.startswith(f"{out}: ")


def test_a_half_precision_folder_widens_while_it_is_read(tmp_path):
    """Its largest parameter is far larger in float32 than what Orbax stored."""
    tensors = cast(tensors_of("llama_tied"), "bfloat16")
    rng = np.random.default_rng(0)
    embed = rng.normal(size=(40_000, 48)).astype(tensors["model.embed_tokens.weight"].dtype)
    source = hf_folder(
        tmp_path / "source", "llama_tied", tensors | {"model.embed_tokens.weight": embed}, vocab_size=40_000
    )
    assert qwen2.main([str(source), str(tmp_path / "out")]) == 0
    model = load_model(tmp_path / "out", dtype="float32")
    assert np.array_equal(np.asarray(model.embed[...]), embed.astype(np.float32))
