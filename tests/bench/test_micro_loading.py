"""The benchmark of loading, on a tiny folder; what it times is tested, not how long that takes."""

from __future__ import annotations

import json

from checkpoint_files import GOLDEN

from failfast_jax.bench import __main__ as bench
from failfast_jax.bench import loading

FOLDER = GOLDEN / "qwen2_untied"


def test_a_report(capsys):
    assert bench.main(["micro", "--parts", "loading", "--model", str(FOLDER)]) == 0
    found = json.loads(capsys.readouterr().out)["loading"]
    assert found["gigabytes"] == (FOLDER / "model.safetensors").stat().st_size / 1e9
    for state in ("cold", "warm"):
        assert found[state]["load_per_read"] == found[state]["load_s"] / found[state]["read_s"] > 0


def test_every_byte_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "PIECE", 1000)
    file, read = tmp_path / "model.gguf", []
    file.write_bytes(bytes(range(250)) * 41)
    opened = type(file).open

    class Noting:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def seek(self, place):
            self.file.seek(place)

        def read(self, size):
            read.append((self.file.tell(), len(self.file.read(size))))

    monkeypatch.setattr(type(file), "open", lambda path, *how, **more: Noting(opened(path, *how, **more)))
    loading.read_through([file])
    assert sorted(read) == [(start, min(1000, 10_250 - start)) for start in range(0, 10_250, 1000)]


def test_what_it_needs_is_said(capsys):
    for words in (["--parts", "loading"], ["--parts", "passes", "--model", str(FOLDER)]):
        assert bench.main(["micro", *words]) == 2
        assert "--parts loading: needs --model, and no other part takes it" in capsys.readouterr().err
    assert bench.main(["micro", "--parts", "loading", "--model", "/nowhere"]) == 2
    assert "/nowhere" in capsys.readouterr().err
