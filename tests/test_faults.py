"""Full disks, folders that cannot be written, two processes in one place: an error in a line, nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import zlib

import numpy as np
import pytest
from checkpoint_files import GOLDEN

from failfast_jax import generate
from failfast_jax.bench.answer_log import AnswerLog
from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.policy import cost_book
from failfast_jax.train import feature_cache
from failfast_jax.util import compile_cache, files
from failfast_jax.util.files import sole_writer, write_atomically
from failfast_jax.util.records import append_lines, read_lines


@pytest.fixture
def full_disk(monkeypatch):
    """After so many more bytes the disk is full; a write that does not fit takes what does."""

    def fill(room: int) -> None:
        write = os.write
        left = [room]

        def limited(descriptor, data):
            if not left[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = write(descriptor, data[: left[0]])
            left[0] -= taken
            return taken

        monkeypatch.setattr(os, "write", limited)

    return fill


def test_a_full_disk_keeps_what_was_there(tmp_path, full_disk):
    path = tmp_path / "settings.json"
    write_atomically(path, "old")
    full_disk(10)
    with pytest.raises(OSError) as caught:
        write_atomically(path, "x" * 1000)
    message = files.describe_os_error(caught.value)
    assert message == f"{path}: No space left on device; make room there, or name another folder"
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["settings.json"]
    with pytest.raises(FileNotFoundError) as caught:  # named itself, not the part file
        write_atomically(tmp_path / "nowhere" / "a.json", "x")
    assert caught.value.filename == str(tmp_path / "nowhere" / "a.json")


@pytest.mark.parametrize("room", [0, 60])
def test_a_log_on_a_full_disk(tmp_path, full_disk, room):
    """A line that does not fit is not there at all, and the same command goes on."""
    path = tmp_path / "out" / "records.jsonl"
    score = {"kind": "score", "dataset": "d", "question": "q", "text": "t"}
    AnswerLog(path, {"a": 1}).append(score)
    before = path.read_bytes()
    log = AnswerLog(path, {"a": 1})
    full_disk(room)
    with pytest.raises(OSError, match="No space left.*records.jsonl"):
        log.append(score | {"text": "y" * 100})
    assert path.read_bytes() == before and list(log.scores.values()) == [score]


def test_a_line_is_added_whole_though_the_system_takes_it_in_parts(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    append_lines(tmp_path / "log.jsonl", [{"text": "a long line"}, {"n": 2}])
    assert read_lines(tmp_path / "log.jsonl") == ([{"text": "a long line"}, {"n": 2}], False)


def test_one_process_writes_to_a_folder(tmp_path):
    with sole_writer(tmp_path / "a"):
        with pytest.raises(OptionError, match="--out .*a: another process is writing there; wait for it, or name"):
            with sole_writer(tmp_path / "a"):
                pass
        (tmp_path / "a" / "file").touch()
    with sole_writer(tmp_path / "a"):
        pass
    with pytest.raises(OptionError, match="not a folder"), sole_writer(tmp_path / "a" / "file"):
        pass


def test_a_trace_that_cannot_be_written(tmp_path, full_disk, capsys):
    """The answer is there all the same."""
    full_disk(100)
    path = tmp_path / "rounds.html"
    flags = ["--token-ids", "5,6,7", "--max-new-tokens", "4", "--method", "vanilla", "--trace", str(path)]
    assert generate.main(["--target", str(GOLDEN / "llama_tied"), *flags]) == 2
    output = capsys.readouterr()
    assert len(output.out.split(",")) == 4
    assert f"error: {path}: No space left on device; make room there" in output.err and not os.listdir(tmp_path)


def test_features_need_their_room_before_they_are_computed(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device: '.*features.bin'"):
        feature_cache.mapped(tmp_path / "features.bin", (10, 2, 4))
    monkeypatch.undo()
    values = feature_cache.mapped(tmp_path / "features.bin", (10, 2, 4))
    assert values.shape == (10, 2, 4) and not np.asarray(values, np.float32).any()
    assert (tmp_path / "features.bin").stat().st_blocks * 512 >= 160


def test_programs_that_were_cut_off_are_removed(tmp_path):
    whole = zlib.compress(b"a program" * 1000)
    for name, content in {"a": whole, "b": whole[:-3], "c": b"", "d": whole[: len(whole) // 2]}.items():
        (tmp_path / f"{name}-cache").write_bytes(content)
    (tmp_path / "b-atime").write_bytes(b"")
    compile_cache.drop_cut_off(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a-cache", "b-atime", compile_cache.CHECKED]
    # What was found whole is not read again; what came later is.
    (tmp_path / "a-cache").write_bytes(whole[:5])
    os.utime(tmp_path / "a-cache", (0, 0))
    (tmp_path / "e-cache").write_bytes(whole[:5])
    compile_cache.drop_cut_off(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*-cache")) == ["a-cache"]


def test_programs_packed_by_zstandard():
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.ZstdCompressor().compress(b"a program" * 1000)
    assert compile_cache.is_whole(packed) and not compile_cache.is_whole(packed[:-1])


def test_costs_that_cannot_be_kept_are_no_error(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cost_book.CostBook, "path", staticmethod(lambda: tmp_path / "absent" / cost_book.FILE))
    book = cost_book.CostBook()
    book.save("key", {"verify": {"1": 1.0}})
    assert "No such file or directory" in caplog.text and "measured again next time" in caplog.text
    monkeypatch.setattr(cost_book.CostBook, "path", staticmethod(lambda: tmp_path / cost_book.FILE))
    for odd in ('{"machine": []}', '{"costs": 3}', "[]", "{"):
        (tmp_path / cost_book.FILE).write_text(odd)
        assert book.load() == {}


def test_files_beyond_all_measure(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"a": "b" * 20}))
    with pytest.raises(ConfigError, match="config.json: more than 10 characters"):
        files.read_text(file, 10)
    for content in ("[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\ud83d"):
        file.write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(ConfigError, match=r"config\.json: not "):
            files.read_json(file)
