"""Figures read from the text of a compiled program: memory traffic, estimated cycles, collectives, host transfers.

The estimates in the text leave out asynchronous copies, Pallas kernels and collectives: `timeline` puts them in, in the
order in which the program is scheduled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

ITEM_BYTES = {f"{kind}{bits}": bits / 8 for kind in ("u", "s", "f", "bf") for bits in (4, 8, 16, 32)} | {"pred": 1}
KERNELS = ("attend_and_write", "window_attention")
"""Pallas calls of this package, as they are named in the text: they read a part of their operands."""
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
_FREE = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "copy-done", "slice-done", "while", "iota"}
_FREE |= {f"{kind}-{part}" for kind in ("async", "gather") for part in ("start", "update", "done")}
_OFFLOADED = {"offloaded-start", "offloaded-update", "offloaded-done"}
"""A collective on another core of the chip: it is announced, gets its operand, and has its result. On eight TPU7x:
`%all-reduce.76.cloned.1.call-start`, `...-update`, `...-done`, all of them operations `async-...` in the text."""
_HOST = re.compile(
    r'= [^=]*\b(infeed|outfeed|send|recv|send-done|recv-done)\(|custom_call_target="[^"]*([Cc]allback|[Hh]ost)[^"]*"'
    r"|\{[\d,]*:[^}]*S\(5\)\}"
)


class _Instruction(NamedTuple):
    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    text: str


_LINE = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.+?) ([\w\-]+)\((.*)$")


def entry_instructions(hlo: str) -> list[_Instruction]:
    """Returns the instructions of the entry computation."""
    entry = re.split(r"^ENTRY ", hlo, flags=re.MULTILINE)[1]
    entry = re.split(r"^\}", entry, maxsplit=1, flags=re.MULTILINE)[0]
    instructions = []
    for line in entry.splitlines()[1:]:
        if match := _LINE.match(line):
            name, kind, op, rest = match.groups()
            # The compiler's dumps call these `async-start`, `async-update` and `async-done`.
            families = ("slice-", "slice"), (COLLECTIVES, "offloaded"), ("gather", "gather")
            family = next((family for start, family in families if name.startswith(start)), "async")
            operands = tuple(re.findall(r"%([\w.\-]+)", rest.split("), ")[0]))
            instructions.append(_Instruction(name, kind, op.replace("async", family), operands, line))
    return instructions


def unread(hlo: str) -> list[str]:
    """Returns the names of operations of the entry computation that the figures leave out.

    They run beside others and move an unknown number of bytes, or are collectives of an unknown number of devices.
    """
    return [
        instruction.name
        for instruction in entry_instructions(hlo)
        if instruction.op == "async-start" or (instruction.op in COLLECTIVES and not devices_of(instruction.text))
    ]


def hbm_bytes_of(kind: str) -> int:
    """Returns the bytes of the arrays of a type that lie in HBM: those without another memory space."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", kind)
    in_hbm = ((dtype, dims) for dtype, dims, layout in arrays if dtype in ITEM_BYTES and "S(" not in layout)
    return int(sum(ITEM_BYTES[dtype] * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in in_hbm))


class Timeline(NamedTuple):
    """Estimates of an entry computation.

    Attributes:
      seconds: instructions in order, asynchronous copies beside them.
      traffic: bytes read from and written to HBM, without this package's kernels. Copies into fast memory count when
        they are started, reads from there do not; a look-up in a table reads the rows that it returns.
    """

    seconds: float
    traffic: int


def timeline(hlo: str, *, clock: float, rate: float, others: Callable[..., tuple[float, float]]) -> Timeline:
    """Adds up the entry computation.

    Copies move one after the other, with the bandwidth that the running instruction leaves; their consumer waits until
    they have arrived. A collective of another core runs from the time when it gets its operand.

    A fusion of 1 s that reads 256 bytes, at 512 bytes/s: 256 bytes of a copy of 1,024 arrive beside it, and the copy's
    consumer waits (1,024 - 256) / 512 = 1.5 s.

    Args:
      clock: cycles per second.
      rate: achieved bytes per second of HBM.
      others: seconds, and bytes to and from HBM, of a collective or a kernel by its name, its line, and the bytes of
        its operands and its result there: the text itself has no estimate.
    """
    instructions = entry_instructions(hlo)
    by_name = {instruction.name: instruction for instruction in instructions}
    now, traffic, flying, ends, copies = 0.0, 0, {}, {}, _copies(instructions)

    def moved(size: float) -> None:
        for name in [*flying]:
            taken = min(size, flying[name])
            flying[name], size = flying[name] - taken, size - taken

    for instruction in instructions:
        if instruction.name in copies:
            flying[instruction.name] = copies[instruction.name]
            traffic += copies[instruction.name]
        elif instruction.op in ("copy-done", "slice-done", "gather-done"):
            waited = 0.0
            for name in [*flying]:
                waited += flying.pop(name)
                if name == instruction.operands[0]:
                    break
            now += waited / rate
        elif instruction.op in _OFFLOADED:
            done = re.sub("-(start|update)$", "-done", instruction.name)
            if instruction.name == done:
                moved(max(ends[done] - now, 0) * rate)
                now = max(now, ends[done])
            else:
                ends[done] = now + others(done, by_name[done].text, 0)[0]
        elif instruction.op not in _FREE:
            size = _operand_bytes(instruction, by_name)
            if instruction.op not in COLLECTIVES and not instruction.name.startswith(KERNELS):
                traffic += size
            if cycles := re.search(r'"estimated_cycles":"(\d+)"', instruction.text):
                seconds = int(cycles.group(1)) % (2**63 - 1) / clock  # the largest number stands for no estimate
            else:
                seconds, size = others(instruction.name, instruction.text, size)
            now += seconds
            moved(max(seconds * rate - size, 0))
    return Timeline(now, traffic)


def _operand_bytes(instruction: _Instruction, by_name: dict[str, _Instruction]) -> int:
    """Bytes in HBM that an instruction reads and writes; a look-up in a table reads the rows that it returns."""
    if "gather" in instruction.name and "all-gather" not in instruction.op:
        return hbm_bytes_of(re.sub(r"S\(\d+\)", "", instruction.type))
    read = [by_name[name].type for name in instruction.operands if name in by_name]
    return sum(map(hbm_bytes_of, (*read, instruction.type)))


def _copies(instructions: list[_Instruction]) -> dict[str, int]:
    """Bytes in HBM of each asynchronous copy, by the instruction that starts it.

    A copy is `(to, from, ...)`, a slice `((whole), part, ...)`; a look-up in a table ends with its rows.
    """
    sizes, fetched = {}, set()
    for instruction in instructions:
        if instruction.op == "gather-done":
            sizes[instruction.operands[0]] = hbm_bytes_of(instruction.type)
        elif instruction.op in ("copy-start", "slice-start"):
            is_copy, source = instruction.op == "copy-start", instruction.operands[0]
            arrays = re.findall(r"\w+\[[\d,]*\]", instruction.type)
            # A second copy of one source is the first of the next run.
            again = is_copy and source in fetched
            sizes[instruction.name] = 0 if again else hbm_bytes_of(arrays[0 if is_copy else 1])
            fetched.add(source)
    return sizes


def devices_of(collective: str) -> int:
    """Returns the number of devices in each group of a collective operation, by its line of the text; 0: not known.

    Three forms are known: `[groups,devices]<=...`, `{{0,1},{2,3}}`, `mesh['a'=4,'b'=2] {'b'}`.
    """
    if groups := re.search(r"replica_groups=\[\d+,(\d+)\]<=", collective):
        return int(groups[1])
    if groups := re.search(r"replica_groups=\{\{([\d,]+)\}", collective):
        return groups[1].count(",") + 1
    if groups := re.search(r"replica_groups=mesh\[([^\]]*)\] \{((?:'\w+',? ?)+)\}", collective):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", groups[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", groups[2]))
    return 0


def collectives(hlo: str) -> dict[str, int]:
    """Returns the number of collective operations by kind."""
    return {kind: len(re.findall(rf" {kind}(?:-start)?\(", hlo)) for kind in COLLECTIVES}


def host_transfers(hlo: str) -> list[str]:
    """Returns the instructions that wait for, call or read the host."""
    return [match.group(0) for match in _HOST.finditer(hlo)]


def copies_of(hlo: str, shape: str) -> list[str]:
    """Returns copies of arrays such as `bf16[1,8,1024,128]` outside the entry computation, which may run every round:
    caches that move."""
    before, entry = re.split(r"^ENTRY ", hlo, flags=re.MULTILINE)
    after = re.split(r"^\}", entry, maxsplit=1, flags=re.MULTILINE)[1]
    lines = map(str.strip, (before + after).splitlines())
    return [line for line in lines if re.search(r"= [^=]* copy(-start)?\(", line) and shape in line.split(" copy")[0]]
