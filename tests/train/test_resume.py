"""Folders that know the settings of their command."""

from __future__ import annotations

import pytest

from failfast_jax.errors import OptionError
from failfast_jax.train.resume import begin, is_begun


def test_a_folder_belongs_to_one_setting(tmp_path):
    file = tmp_path / "run" / "train.json"
    assert [begin(file, {"seed": 1, "rows": 7}, foreign="*") for _ in range(2)] == [False, True]
    assert is_begun(file, {"rows": 7})
    with pytest.raises(OptionError, match=r"--out .*run: .*\(rows: 7 there, 8 here\)"):
        begin(file, {"seed": 1, "rows": 8})
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "train.json.part").write_text("{")  # killed at its very start
    assert not begin(tmp_path / "cut" / "train.json", {"seed": 1}, foreign="*")
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="file: not a folder"):
        begin(tmp_path / "file" / "train.json", {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(OptionError, match="other: not empty"):
        begin(tmp_path / "other" / "train.json", {}, foreign="*")
    assert not is_begun(tmp_path / "other" / "train.json", {}, foreign="shard-*")
