"""Vector units that the CPU's kernels are emitted for."""

from __future__ import annotations

import pytest

from failfast_jax.kernels import cpu_product, llvm_emitter

UNITS = [llvm_emitter.VectorUnit(16, 32), llvm_emitter.VectorUnit(8, 16), llvm_emitter.VectorUnit(4, 32)]
"""AVX-512, AVX2 and NEON. LLVM splits vectors that a processor does not have."""


@pytest.fixture(params=UNITS, ids=lambda unit: f"{unit.lanes}-lanes")
def unit(request, monkeypatch):
    """Kernels as they are emitted for another processor, under names of their own."""
    if llvm_emitter.vector_unit() is None:
        pytest.skip(cpu_product.NO_UNIT)
    monkeypatch.setattr(llvm_emitter, "vector_unit", lambda: request.param)
    monkeypatch.setattr(llvm_emitter, "TARGETS", f"test_{request.param.lanes}")
    return request.param
