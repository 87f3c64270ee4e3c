"""Tokens of a block chosen from left to right on CPU, each corrected for the one before it by a Markov head.

A row's score of token v is `logits[v] + w2[v] . w1[before]`. Few of these sums are formed: one can exceed the mean's by
`|w1[before]| * radius[v]` at most (Cauchy and Schwarz), where `radius[v]` is how far `w2[v]` lies from the mean of all,
so that most tokens cannot be the best one. What is chosen is the best one nevertheless. One call chooses a whole block:
the rows wait for each other, and anything between two of them would cost more than they do.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from llvmlite import ir

from failfast_jax.kernels import cpu_product, llvm_emitter, thread_pool
from failfast_jax.kernels.llvm_emitter import ELEMENTS, FLOAT, INT, Call, Emitter, constant

BIT = ir.IntType(1)


def supports(*, rank: int, outputs: int, dtypes: Sequence[DTypeLike]) -> str | None:
    """Why a head is not served; None if it is.

    Args:
      rank: of both matrices.
      outputs: tokens that can be drafted.
      dtypes: of both matrices.
    """
    unit = llvm_emitter.vector_unit()
    if unit is None:
        return cpu_product.NO_UNIT
    if rank < 1 or rank % unit.lanes:
        return f"rank {rank}: a multiple of {unit.lanes}"
    if outputs < unit.lanes:
        return f"{outputs} tokens: {unit.lanes} or more"
    others = [name for name in map(_name, dtypes) if name not in ("float32", "bfloat16", "float16")]
    return f"{others[0]}: float32, bfloat16 or float16" if others else None


def _name(dtype: DTypeLike) -> str:
    return jnp.dtype(dtype).name


def choose(
    logits: Float[Array, "B N v"],
    last: Int[Array, " B"],
    w1: Float[Array, "V r"],
    w2: Float[Array, "v r"],
    center: Float[Array, " r"],
    radius: Float[Array, " v"],
    ids: Int[Array, " v"] | None,
) -> Int[Array, "B N"]:
    """The token with the highest score in each row, the lowest id on ties.

    Args:
      logits: before correction, float32. Where they are NaN a token is never chosen, or the choice is any token.
      last: the token before the first row.
      w1: of the whole vocabulary.
      w2: of the tokens that can be drafted.
      center: float32; the mean of the rows of `w2`.
      radius: float32; how far each of them lies from it, or more.
      ids: ids of these tokens, ascending; None: 0 .. v - 1.

    Raises:
      ValueError: the kernel would read or write beside its arrays.
    """
    batch, rows, size = logits.shape
    ids = jnp.arange(size, dtype=jnp.int32) if ids is None else ids
    rank = w1.shape[-1]
    wanted = [(logits, jnp.float32, (batch, rows, size)), (last, jnp.int32, (batch,)), (w1, w1.dtype, (len(w1), rank))]
    wanted += [(w2, w2.dtype, (size, rank)), (center, jnp.float32, (rank,)), (radius, jnp.float32, (size,))]
    wanted.append((ids, jnp.int32, (size,)))
    why = supports(rank=rank, outputs=size, dtypes=(w1.dtype, w2.dtype))
    if why or any(x.dtype != dtype or x.shape != shape for x, dtype, shape in wanted):
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x, _, _ in wanted)
        raise ValueError(f"a Markov head of {shapes}: {why or 'shapes and types that do not fit'}")
    name = llvm_emitter.registered(_module, _name(w1.dtype), _name(w2.dtype))
    return llvm_emitter.call(name, jax.ShapeDtypeStruct((batch, rows), jnp.int32))(*(x for x, _, _ in wanted))[0]


def _module(*dtypes: str) -> ir.Module:
    module = ir.Module(f"{llvm_emitter.TARGETS}_markov_{'_'.join(dtypes)}")
    llvm_emitter.handler(module, functools.partial(_choose, dtypes=dtypes))
    return module


def _choose(call: Call, *, dtypes: tuple[str, ...]) -> None:
    arrays = [call.input(index) for index in range(7)]
    logits, w1 = arrays[0], arrays[2]
    values = [*(array.data for array in arrays), call.output().data]
    values += [logits.size(1), logits.size(2), w1.size(0), w1.size(1)]
    thread_pool.share_out(call, logits.size(0), values, functools.partial(_choose_block, dtypes=dtypes))


def _choose_block(emitter: Emitter, block, values: list, *, dtypes: tuple[str, ...]) -> None:
    logits, last, w1, w2, center, radius, ids, chosen, rows, size, vocab, rank = values
    of_codes, of_tokens = dtypes
    lanes, first_row = llvm_emitter.vector_unit().lanes, emitter.mul(block, rows)
    zero, least = llvm_emitter.vector([0.0] * lanes), llvm_emitter.vector([float("-inf")] * lanes)
    places, end = llvm_emitter.vector(range(lanes), INT), emitter.sub(size, constant(lanes))

    def row(index, carried):
        here = emitter.add(first_row, index)
        x = emitter.element(logits, emitter.mul(here, size))
        # A token beyond the vocabulary would be read beside the matrix.
        before = emitter.most(constant(0), emitter.least(carried[0], emitter.sub(vocab, constant(1))))
        code = _line(emitter, w1, before, rank, of_codes)

        def with_code(line, dtype: str):
            """The lanes of the sum of products of a line with the code."""

            def body(at, sums):
                ours, theirs = (
                    emitter.floats(emitter.element(p, at, ELEMENTS[d]), lanes, d)
                    for p, d in ((code, of_codes), (line, dtype))
                )
                return [emitter.multiply_add(ours, theirs, sums[0])]

            return emitter.loop(rank, lanes, body, [zero])[0]

        def total(vector):
            return emitter.lane(emitter.sums([vector])[0], 0)

        def score(token):
            correction = total(with_code(_line(emitter, w2, token, rank, of_tokens), of_tokens))
            return emitter.fadd(emitter.load(emitter.element(x, token), typ=FLOAT), correction)

        def better(token, best, where):
            """The better of two tokens, and its score."""
            new = score(token)
            same = emitter.and_(emitter.fcmp_ordered("==", new, best), emitter.icmp_signed("<", token, where))
            wins = emitter.or_(emitter.fcmp_ordered(">", new, best), same)
            return [emitter.select(wins, new, best), emitter.select(wins, token, where)]

        length = emitter.intrinsic("sqrt", FLOAT, total(with_code(code, of_codes)))
        mean = total(with_code(center, "float32"))

        def highest(at, carried):
            at = emitter.least(at, end)
            numbers = emitter.floats(emitter.element(x, at), lanes)
            above = emitter.fcmp_ordered(">", numbers, carried[0])
            here = emitter.add(emitter.repeated(emitter.trunc(at, INT), lanes), places)
            return [emitter.select(above, numbers, carried[0]), emitter.select(above, here, carried[1])]

        # The highest logits of every lane are a good guess: with the best of them few others are left.
        _, guesses = emitter.loop(size, lanes, highest, [least, places])
        best, where = ir.Constant(FLOAT, float("-inf")), constant(0)
        for lane in range(lanes):
            best, where = better(emitter.zext(emitter.lane(guesses, lane), llvm_emitter.LONG), best, where)
        reach, offset = emitter.repeated(length, lanes), emitter.repeated(mean, lanes)

        def look(at, carried):
            best, where = carried
            at = emitter.least(at, end)
            numbers, radii = (emitter.floats(emitter.element(p, at), lanes) for p in (x, radius))
            # Added last, as in a score: whatever that rounds, it keeps the order.
            most = emitter.fadd(numbers, emitter.multiply_add(reach, radii, offset))
            bits = ir.IntType(lanes)
            left = emitter.bitcast(emitter.fcmp_ordered(">=", most, emitter.repeated(best, lanes)), bits)

            def one(_, carried):
                left, *found = carried
                lane = _bits(emitter, "cttz", left, ir.Constant(BIT, 1))
                token = emitter.add(at, emitter.zext(lane, llvm_emitter.LONG))
                rest = emitter.and_(left, emitter.sub(left, ir.Constant(bits, 1)))
                return [rest, *better(token, *found)]

            count = emitter.zext(_bits(emitter, "ctpop", left), llvm_emitter.LONG)
            return emitter.loop(count, 1, one, [left, best, where])[1:]

        best, where = emitter.loop(size, lanes, look, [best, where])
        token = emitter.load(emitter.element(ids, where, INT), typ=INT)
        emitter.store(token, emitter.element(chosen, here, INT))
        return [emitter.sext(token, llvm_emitter.LONG)]

    emitter.loop(
        rows, 1, row, [emitter.sext(emitter.load(emitter.element(last, block, INT), typ=INT), llvm_emitter.LONG)]
    )


def _line(emitter: Emitter, matrix, row, rank, dtype: str):
    """Address of a row."""
    return emitter.element(matrix, emitter.mul(row, rank), ELEMENTS[dtype])


def _bits(emitter: Emitter, name: str, bits, *flags):
    """LLVM's own function of that name, which counts bits."""
    full = f"llvm.{name}.i{bits.type.width}"
    kind = ir.FunctionType(bits.type, [bits.type, *(flag.type for flag in flags)])
    function = emitter.module.globals.get(full) or ir.Function(emitter.module, kind, full)
    return emitter.call(function, [bits, *flags])
