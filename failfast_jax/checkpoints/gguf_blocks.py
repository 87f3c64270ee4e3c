"""Blocks of GGUF's quantisation types as `kernels.blocks` has them: the same numbers, codes and scales apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType as Quant

from failfast_jax.kernels.blocks import BlockMatrix

Stored = np.ndarray
"""uint8 `[..., blocks, bytes of a block]`."""


def _halves(stored: Stored) -> np.ndarray:
    """float16 `[..., blocks]`, of the two bytes of each."""
    return np.ascontiguousarray(stored).view(np.float16)[..., 0]


def _joined(codes: np.ndarray) -> np.ndarray:
    """`[..., blocks, codes of a block]` as `[..., codes]`."""
    return np.ascontiguousarray(codes).reshape(*codes.shape[:-2], -1)


def _nibbles(stored: Stored) -> np.ndarray:
    """The lower halves of all bytes, then the upper ones."""
    return np.concatenate([stored & 15, stored >> 4], axis=-1)


def _bits(stored: Stored) -> np.ndarray:
    """The bits of all bytes, lowest first."""
    return np.unpackbits(stored, axis=-1, bitorder="little")


def _q4_0(stored: Stored) -> dict[str, np.ndarray]:
    return {"codes": _joined(stored[..., 2:]), "scale": _halves(stored[..., :2])}


def _q4_1(stored: Stored) -> dict[str, np.ndarray]:
    scale, minimum = _halves(stored[..., :2]), _halves(stored[..., 2:4])
    return {"codes": _joined(stored[..., 4:]), "scale": scale, "minimum": minimum}


def _q5_0(stored: Stored) -> dict[str, np.ndarray]:
    codes = _nibbles(stored[..., 6:]) | _bits(stored[..., 2:6]) << 4
    return {"codes": _joined(codes.view(np.int8) - 16), "scale": _halves(stored[..., :2])}


def _q5_1(stored: Stored) -> dict[str, np.ndarray]:
    codes = _nibbles(stored[..., 8:]) | _bits(stored[..., 4:8]) << 4
    scale, minimum = _halves(stored[..., :2]), _halves(stored[..., 2:4])
    return {"codes": _joined(codes.view(np.int8)), "scale": scale, "minimum": minimum}


def _q8_0(stored: Stored) -> dict[str, np.ndarray]:
    return {"codes": _joined(stored[..., 2:]).view(np.int8), "scale": _halves(stored[..., :2])}


def _k_scales(stored: Stored) -> dict[str, np.ndarray]:
    """Both levels of Q4_K and Q5_K, whose 12 bytes hold eight scales and eight minima of 6 bits.

    The first four of each are the lower 6 bits of bytes 0 to 3 and 4 to 7; of the others bytes 8 to 11 hold 4 bits
    (scales below, minima above), and the upper 2 bits of the first eight bytes the rest.
    """
    a, b, c = (stored[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scale = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], axis=-1)
    minimum = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], axis=-1)
    return {
        "scale": _joined(scale.view(np.int8)),
        "minimum": _joined(minimum.view(np.int8)),
        "outer_scale": _halves(stored[..., :2]),
        "outer_minimum": -_halves(stored[..., 2:4]),
    }


def _k_nibbles(stored: Stored) -> np.ndarray:
    """256 codes of 4 bits: of each 32 bytes, the lower halves come before the upper ones."""
    groups = stored.reshape(*stored.shape[:-1], 4, 32)
    return _nibbles(groups).reshape(*stored.shape[:-1], 256)


def _q4_k(stored: Stored) -> dict[str, np.ndarray]:
    groups = _k_nibbles(stored[..., 16:]).reshape(*stored.shape[:-1], 8, 32)
    codes = groups[..., :16] | groups[..., 16:] << 4
    return {"codes": _joined(codes.reshape(*stored.shape[:-1], 128)), **_k_scales(stored)}


def _q5_k(stored: Stored) -> dict[str, np.ndarray]:
    # Bit g of byte i belongs to code i of the group of 32 with number g.
    fifth = _bits(stored[..., 16:48, None]).swapaxes(-1, -2).reshape(*stored.shape[:-1], 256)
    codes = _k_nibbles(stored[..., 48:]) | fifth << 4
    return {"codes": _joined(codes.view(np.int8)), **_k_scales(stored)}


def _q6_k(stored: Stored) -> dict[str, np.ndarray]:
    low = stored[..., :128].reshape(*stored.shape[:-1], 2, 2, 32)
    low = np.concatenate([low & 15, low >> 4], axis=-2)  # of 128 codes: two lower halves, two upper ones
    high = stored[..., 128:192].reshape(*stored.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = (low | (high & 3) << 4).reshape(*stored.shape[:-1], 256)
    return {
        "codes": _joined(codes.view(np.int8) - 32),
        "scale": _joined(stored[..., 192:208]).view(np.int8),
        "outer_scale": _halves(stored[..., 208:210]),
    }


READERS: dict[Quant, Callable[[Stored], dict[str, np.ndarray]]] = {
    Quant.Q4_0: _q4_0,
    Quant.Q4_1: _q4_1,
    Quant.Q5_0: _q5_0,
    Quant.Q5_1: _q5_1,
    Quant.Q8_0: _q8_0,
    Quant.Q4_K: _q4_k,
    Quant.Q5_K: _q5_k,
    Quant.Q6_K: _q6_k,
}
FOUR_BITS = (Quant.Q4_0, Quant.Q4_1, Quant.Q4_K)


def read_blocks(stored: Stored, quant: Quant) -> BlockMatrix:
    """Rows of a tensor, uint8 `[rows, blocks, bytes of a block]`, as they are stored."""
    return BlockMatrix(**READERS[quant](stored), bits=4 if quant in FOUR_BITS else 8)
