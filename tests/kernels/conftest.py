"""Widths of vectors that the CPU's kernels are compiled for."""

from __future__ import annotations

import pytest

from failfast_jax.kernels import cpu_kernels


@pytest.fixture(params=(16, 8, 4), ids=("AVX-512", "AVX2", "NEON"))
def lanes(request, monkeypatch):
    """Kernels as another processor has them. LLVM splits vectors that this one does not have."""
    if cpu_kernels.vector_lanes() is None:
        pytest.skip(cpu_kernels.NO_UNIT)
    monkeypatch.setattr(cpu_kernels, "vector_lanes", lambda: request.param)
    return request.param
