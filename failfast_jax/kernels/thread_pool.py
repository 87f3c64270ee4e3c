"""Work of a CPU kernel, shared out over XLA's threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from failfast_jax.kernels import llvm_emitter
from failfast_jax.kernels.llvm_emitter import API_SCHEDULE, BYTE, INT, LONG, POINTER, Call, Emitter, constant

JOB_NEXT, JOB_DONE, JOB_HOLDERS, JOB_COUNT, JOB_VALUES = 0, 8, 16, 24, 32
"""Byte offsets: the next piece of work, how many are done, how many threads look at the job, how many pieces, and what
their work needs."""
PIECES_A_THREAD = 4
"""A thread is asked for help for so many pieces of work, at least."""


def share_out(call: Call, count, values: Sequence, work: Callable[[Emitter, Any, list], None]) -> None:
    """Emits `for piece in range(count): work(emitter, piece, values)`, shared out over XLA's threads.

    Each thread takes the next piece until none is left. The one that XLA called never waits for a thread that has not
    begun: a helper that comes too late finds nothing to do. The last one to look at the job frees it.

    Args:
      values: pointers and 64-bit integers.
    """
    emitter, module = call.emitter, call.emitter.module
    job = emitter.c_function("malloc", POINTER, constant(JOB_VALUES + 8 * len(values)))
    spare = emitter.sub(call.threads(), constant(1))
    helpers = emitter.least(spare, emitter.sdiv(count, constant(PIECES_A_THREAD)))
    fields = [(JOB_NEXT, constant(0)), (JOB_DONE, constant(0)), (JOB_COUNT, count)]
    fields.append((JOB_HOLDERS, emitter.add(helpers, constant(1))))
    for offset, value in (*fields, *((JOB_VALUES + 8 * index, value) for index, value in enumerate(values))):
        emitter.store(value, emitter.element(job, constant(offset), BYTE))
    pieces, (helper, leave) = _pieces(module, values, work), _helper(module)
    request = call.structure(call.context, emitter.ptrtoint(helper, LONG), job)

    def ask_for_help(_index, _carried):
        with emitter.if_then(call.ask(API_SCHEDULE, request), likely=False):
            emitter.call(leave, [job])

    emitter.loop(helpers, 1, ask_for_help)
    emitter.call(pieces, [job])
    done = emitter.element(job, constant(JOB_DONE), BYTE)
    look, waiting, after = (emitter.append_basic_block() for _ in range(3))
    emitter.branch(look)
    emitter.position_at_end(look)
    finished = emitter.load_atomic(done, "acquire", 8, typ=LONG)
    emitter.cbranch(emitter.icmp_signed("<", finished, count), waiting, after)
    emitter.position_at_end(waiting)  # for a piece under way, whose thread may have lost its core
    emitter.c_function("sched_yield", INT)
    emitter.branch(look)
    emitter.position_at_end(after)
    emitter.call(leave, [job])


def _pieces(module: ir.Module, values: Sequence, work: Callable) -> ir.Function:
    """`pieces(job)`: takes the next piece of work until none is left."""
    function, emitter = llvm_emitter.internal_function(module, "pieces", [POINTER], inline=True)
    (job,) = function.args
    values = [emitter.field(job, JOB_VALUES + 8 * index, value.type) for index, value in enumerate(values)]
    count = emitter.field(job, JOB_COUNT, LONG)
    take, inside, after = (emitter.append_basic_block() for _ in range(3))
    emitter.branch(take)
    emitter.position_at_end(take)
    piece = emitter.atomic_rmw("add", emitter.element(job, constant(JOB_NEXT), BYTE), constant(1), "monotonic")
    emitter.cbranch(emitter.icmp_signed("<", piece, count), inside, after)
    emitter.position_at_end(inside)
    work(emitter, piece, values)
    emitter.atomic_rmw("add", emitter.element(job, constant(JOB_DONE), BYTE), constant(1), "release")
    emitter.branch(take)
    emitter.position_at_end(after)
    emitter.ret_void()
    return function


def _helper(module: ir.Module) -> tuple[ir.Function, ir.Function]:
    """`helper(job)`, which another thread runs, and `leave(job)`."""
    leave, emitter = llvm_emitter.internal_function(module, "leave", [POINTER], inline=True)
    (job,) = leave.args
    holders = emitter.element(job, constant(JOB_HOLDERS), BYTE)
    last = emitter.icmp_signed("==", emitter.atomic_rmw("sub", holders, constant(1), "acq_rel"), constant(1))
    with emitter.if_then(last):
        emitter.c_function("free", ir.VoidType(), job)
    emitter.ret_void()
    helper, emitter = llvm_emitter.internal_function(module, "helper", [POINTER], inline=True)
    emitter.call(module.globals["pieces"], [helper.args[0]])
    emitter.call(leave, [helper.args[0]])
    emitter.ret_void()
    return helper, leave
