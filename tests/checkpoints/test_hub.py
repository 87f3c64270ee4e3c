"""The Hub's cache: what is used offline, what is downloaded, and a Hub that does not answer."""

from __future__ import annotations

import json
import shutil
import socket
import time

import pytest
from checkpoint_files import GOLDEN, config_of, refuses, same_parameters, shard
from huggingface_hub import constants, errors
from safetensors.numpy import load_file

from failfast_jax.checkpoints import hub
from failfast_jax.checkpoints.checkpoint import load_model
from failfast_jax.errors import CheckpointError, ConfigError

COMMIT = "0123456789012345678901234567890123456789"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A Hub cache of `someone/tiny` as the Hub's client keeps it, offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.snapshot.cache_clear()
    repository = tmp_path / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    folder = shutil.copytree(GOLDEN / "llama_tied", repository / "snapshots" / COMMIT)
    (folder / "tokenizer.json").write_text("{}")
    yield folder
    hub.snapshot.cache_clear()


def test_hub_ids_come_from_the_cache_when_offline(cache):
    assert same_parameters(load_model("someone/tiny"), GOLDEN / "llama_tied")
    for name in ("someone/absent", "not a name"):
        refuses(f"{name}: no such file or folder here", name)


def test_a_hub_that_does_not_answer_is_one_error_in_seconds(cache, monkeypatch, caplog, capsys):
    """A server that takes connections and says nothing, as a firewall does: no retries, no minutes."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        begin = time.monotonic()
        refuses("someone/absent: no such file or folder here.*Timeout", "someone/absent")
        assert hub.resolve_source("someone/tiny") == cache
        assert time.monotonic() - begin < 5 and not caplog.records and not capsys.readouterr().err


@pytest.mark.parametrize(
    "missing, is_needed",
    [
        ("trainer_state.json", False),
        ("consolidated.safetensors", False),
        ("special_tokens_map.json", False),
        ("tokenizer_config.json", True),
        ("chat_template.jinja", True),
        ("model-00002-of-00003.safetensors", True),
    ],
)
@pytest.mark.skipif(not hasattr(errors, "IncompleteSnapshotError"), reason="this huggingface_hub keeps no listings")
def test_a_cache_without_a_file(cache, missing, is_needed):
    shard(cache, load_file(cache / "model.safetensors"))
    (cache / missing).unlink(missing_ok=True)
    names = [*(path.name for path in cache.iterdir()), missing]
    listing = {"format_version": 1, "files": {name: {"size": 1, "blob_id": "0" * 40} for name in names}}
    (cache.parents[1] / "trees").mkdir()
    (cache.parents[1] / "trees" / f"{COMMIT}.json").write_text(json.dumps(listing))
    if is_needed:
        refuses(f"someone/tiny: .*neither cached nor downloadable.*{missing}", "someone/tiny")
    else:
        assert hub.resolve_source("someone/tiny") == cache


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "key 'quantization_config'"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({}, None),
        ({"model_type": "anything", "architectures": ["DFlashDraftModel"]}, None),
    ],
)
def test_weights_are_downloaded_after_the_configuration_is_checked(cache, monkeypatch, changes, message):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    (cache / "config.json").write_text(json.dumps(config_of("llama_tied") | changes))
    repository = ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "merges.txt"]
    unread = ["pytorch_model.bin", "original/model.safetensors", "onnx/config.json", "consolidated.safetensors"]
    asked = []

    def snapshot_download(hub_id, revision=None, local_files_only=False, **patterns):
        asked.append(sorted(filter_repo_objects(repository + unread, **patterns)))
        assert revision == (None, COMMIT)[len(asked) - 1]
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    small = sorted({*repository} - {"model.safetensors"})
    if message is None:
        assert hub.resolve_source("someone/tiny") == cache and asked == [small, ["model.safetensors"]]
    else:
        refuses(message, "someone/tiny", error=(CheckpointError, ConfigError))
        assert asked == [small]
