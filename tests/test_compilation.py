"""Compile counts, the bounded store of programs, and the persistent cache's folder."""

import jax
import numpy as np
import pytest

from failfast_jax.compilation import Executables, Program, compile_counts, enable_compile_cache


def program(key: int) -> Program:
    return Program(key, lambda x: x * key, (np.float32(0),))


def test_programs_are_compiled_once_and_the_oldest_dropped():
    programs = Executables(limit=2)
    [double] = programs.start(program(2))
    assert float(programs.wait(double)(np.float32(3))) == 6
    before = compile_counts()
    assert programs.start(program(2)) == [double]
    assert compile_counts().since(before).requests == 0
    others = programs.start(program(3), program(4))
    [again] = programs.start(program(2))
    for future in (*others, again):
        programs.wait(future)
    assert again is not double and compile_counts().since(before).requests == 3


def test_a_cache_hit_is_no_compilation(tmp_path):
    old = jax.config.jax_compilation_cache_dir
    try:
        assert enable_compile_cache(tmp_path / "cache") == tmp_path / "cache"
        jax.clear_caches()
        from jax.experimental.compilation_cache import compilation_cache

        compilation_cache.reset_cache()
        counts = []
        for _ in range(2):
            before = compile_counts()
            programs = Executables()
            [future] = programs.start(Program("k", lambda x: x @ x + 41, (np.ones((8, 8), np.float32),)))
            programs.wait(future)
            counts.append(compile_counts().since(before))
            jax.clear_caches()
        assert (counts[0].compiles, counts[0].cache_hits) == (1, 0)
        assert (counts[1].compiles, counts[1].cache_hits) == (0, 1)
    finally:
        enable_compile_cache(old)
        compilation_cache.reset_cache()


def test_cache_folder(tmp_path, monkeypatch):
    old = jax.config.jax_compilation_cache_dir
    try:
        monkeypatch.setenv("FAILFAST_COMPILE_CACHE", str(tmp_path / "named"))
        assert enable_compile_cache() == tmp_path / "named"
        assert enable_compile_cache("off") is None and jax.config.jax_compilation_cache_dir is None
        monkeypatch.delenv("FAILFAST_COMPILE_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert enable_compile_cache() == tmp_path / "xdg" / "failfast_jax"
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match="compile cache .*file.*--compile-cache"):
            enable_compile_cache(tmp_path / "file" / "sub")
    finally:
        enable_compile_cache(old)
