"""Blocks of GGUF's quantisation types as `kernels.blocks` has them: the same numbers, codes and scales apart."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType as Quant
from gguf.quants import Q4_K

from failfast_jax.kernels.blocks import StoredMatrix

_K_SCALES = [("outer_scale", "<f2"), ("outer_minimum", "<f2"), ("levels", "u1", (3, 4))]
LAYOUTS = {
    Quant.Q4_0: [("scale", "<f2"), ("codes", "u1", 16)],
    Quant.Q4_1: [("scale", "<f2"), ("minimum", "<f2"), ("codes", "u1", 16)],
    Quant.Q5_0: [("scale", "<f2"), ("fifth", "u1", 4), ("codes", "u1", 16)],
    Quant.Q5_1: [("scale", "<f2"), ("minimum", "<f2"), ("fifth", "u1", 4), ("codes", "u1", 16)],
    Quant.Q8_0: [("scale", "<f2"), ("codes", "i1", 32)],
    Quant.Q4_K: [*_K_SCALES, ("codes", "u1", (4, 32))],
    Quant.Q5_K: [*_K_SCALES, ("fifth", "u1", 32), ("codes", "u1", (4, 32))],
    Quant.Q6_K: [("codes", "u1", (2, 2, 32)), ("high", "u1", (2, 1, 32)), ("scale", "i1", 16), ("outer_scale", "<f2")],
}
"""The bytes of a block, as fields of a numpy dtype. Those that `StoredMatrix` does not have are parts of others."""
FOUR_BITS = (Quant.Q4_0, Quant.Q4_1, Quant.Q4_K)


def read_blocks(stored: np.ndarray, quant: Quant) -> StoredMatrix:
    """Rows of a tensor, uint8 `[rows, blocks, bytes of a block]`, as they are stored."""
    fields = stored.view(LAYOUTS[quant])[..., 0]
    parts = {name: fields[name] for name in fields.dtype.names}
    if "levels" in parts:  # 6 bits for each of eight scales and eight minima
        levels = Q4_K.get_scale_min(parts.pop("levels").reshape(-1, 12))
        scale, minimum = (level.view(np.int8).reshape(*stored.shape[:-1], 8) for level in levels)
        parts |= {"scale": scale, "minimum": minimum, "outer_minimum": -parts["outer_minimum"]}
    if quant in FOUR_BITS:
        parts["codes"] = _k_pairs(parts["codes"]) if quant == Quant.Q4_K else parts["codes"]
    elif quant == Quant.Q6_K:
        parts["codes"] = _six_bits(parts["codes"], parts.pop("high"))
    elif quant != Quant.Q8_0:
        parts["codes"] = _five_bits(parts["codes"], parts.pop("fifth"), centred=quant == Quant.Q5_0)
    rows = {name: np.ascontiguousarray(part).reshape(*stored.shape[:-2], -1) for name, part in parts.items()}
    return StoredMatrix(**rows, bits=4 if quant in FOUR_BITS else 8)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """`[..., 2, bytes]`: the lower halves of all bytes, then the upper ones."""
    return np.stack([codes & 15, codes >> 4], axis=-2)


def _k_pairs(codes: np.ndarray) -> np.ndarray:
    """Q4_K's codes, of which 32 bytes hold a group of 32 in their lower halves and the next one in the upper ones."""
    groups = _nibbles(codes)
    return groups[..., :16] | groups[..., 16:] << 4


def _five_bits(codes: np.ndarray, fifth: np.ndarray, centred: bool) -> np.ndarray:
    """Codes of Q5_0 and Q5_1, whose fifth bits are in the order of the codes, and of Q5_K."""
    low = _nibbles(codes)
    if codes.ndim == fifth.ndim:
        bits = np.unpackbits(fifth, axis=-1, bitorder="little")
    else:  # bit g of byte i belongs to code i of the group of 32 with number g
        bits = fifth[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (low | bits.reshape(low.shape) << 4).view(np.int8) - np.int8(16 if centred else 0)


def _six_bits(codes: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Q6_K's codes, of 128 at a time: lower 4 bits of two groups of 32, of the other two in the upper halves of bytes;
    upper 2 bits of the four groups in the same 32 bytes."""
    low = np.concatenate([codes & 15, codes >> 4], axis=-2)
    high = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return (low | high << 4).view(np.int8) - np.int8(32)
