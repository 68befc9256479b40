# SPDX-License-Identifier: Apache-2.0
"""s_waitcnt: which registers still wait for memory.

gfx9 counts outstanding operations in two counters (CDNA ISA, "Manually inserted wait states / data dependency
resolution"):

* `vmcnt` (6 bits): vector memory loads, stores, atomics and direct-to-LDS loads.  Loads return in order, so a
  wait for N covers all but the N newest.
* `lgkmcnt` (4 bits): LDS operations (in order among themselves), scalar loads and messages (out of order:
  only a wait for 0 covers a scalar load).  FLAT operations count in both.

Registers are bits of one Python int: VGPR i is bit i, AGPR i bit 512+i, SGPR encoding i bit 1024+i.  Touching
a register that is pending is a `MissingWaitError`.  Source registers of a store, and address registers of any
access, need no protection: the hardware reads them at issue.  A later load into the same register of the same
in-order kind is legal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.operands import Operand

PendingKind = Literal["vmem", "store", "lds", "smem", "flat", "message"]
VM_LIMIT, LGKM_LIMIT, EXP_LIMIT = 63, 15, 7
AGPR_BIT, SGPR_BIT = 512, 1024
MAX_HISTORIES = 8


@dataclass(frozen=True, eq=False)
class Outstanding:
    """One operation that has been issued and not yet waited for.

    `mask`: the registers it will write; `lds_dwords`: the LDS dwords that a direct-to-LDS load will write.
    """

    mask: int
    instruction: Instruction
    kind: PendingKind
    lds_dwords: np.ndarray[Any, Any] | None = None


Queue = tuple[Outstanding, ...]


def register_bits(operand: Operand) -> int:
    """Bit mask of the registers an operand names."""
    if operand.kind == "vgpr":
        return ((1 << operand.count) - 1) << operand.index
    if operand.kind == "agpr":
        return ((1 << operand.count) - 1) << (AGPR_BIT + operand.index)
    if operand.kind == "sgpr" and operand.index < 128:
        return ((1 << operand.count) - 1) << (SGPR_BIT + operand.index)
    return 0


def register_name(mask: int) -> str:
    """Name of the lowest register in a mask."""
    bit = (mask & -mask).bit_length() - 1
    if bit < AGPR_BIT:
        return f"v{bit}"
    if bit < SGPR_BIT:
        return f"a{bit - AGPR_BIT}"
    return {106: "vcc_lo", 107: "vcc_hi", 124: "m0"}.get(bit - SGPR_BIT, f"s{bit - SGPR_BIT}")


class WaitState:
    """Outstanding operations of a group of waves.

    Waves that met again after a divergence may have different histories: `histories` holds each distinct
    (vmcnt queue, lgkmcnt queue) once.  There is one nearly always.
    """

    __slots__ = ("histories",)

    def __init__(self, histories: list[tuple[list[Outstanding], list[Outstanding]]] | None = None) -> None:
        self.histories = histories if histories is not None else [([], [])]

    def copy(self) -> WaitState:
        """An independent copy (a split gives one to each part)."""
        return WaitState([(list(vm), list(lgkm)) for vm, lgkm in self.histories])

    def issue(self, operation: Outstanding) -> None:
        """Put an operation into its counter's queue (both for FLAT)."""
        for vm, lgkm in self.histories:
            if operation.kind in ("vmem", "store", "flat"):
                vm.append(operation)
            if operation.kind in ("lds", "smem", "message", "flat"):
                lgkm.append(operation)

    def wait(self, vmcnt: int | None, lgkmcnt: int | None, landed: list[Any] | None = None) -> int:
        """Apply `s_waitcnt`; None means that counter is not waited for.  Returns the new pending mask.

        `landed` collects the LDS dwords whose direct loads are now covered.
        """
        for history in self.histories:
            vm, lgkm = history
            if vmcnt is not None and len(vm) > vmcnt:
                # a FLAT operation may return out of order with respect to the others: only 0 covers it
                keep = [op for op in vm[: len(vm) - vmcnt] if op.kind == "flat" and vmcnt]
                if landed is not None:
                    landed += [op.lds_dwords for op in vm[: len(vm) - vmcnt] if op.lds_dwords is not None]
                del vm[: len(vm) - vmcnt]
                vm[:0] = keep
            if lgkmcnt is not None and len(lgkm) > lgkmcnt:
                ordered = all(op.kind == "lds" for op in lgkm)
                if lgkmcnt == 0 or ordered:
                    del lgkm[: len(lgkm) - lgkmcnt]
        if len(self.histories) > 1:
            self.histories = unique(self.histories)
        return self.pending()

    def pending(self) -> int:
        """Registers that some history still waits for."""
        mask = 0
        for vm, lgkm in self.histories:
            for operation in vm:
                mask |= operation.mask
            for operation in lgkm:
                mask |= operation.mask
        return mask

    def find(self, mask: int) -> Outstanding | None:
        """The newest outstanding operation that writes a register of `mask`."""
        for vm, lgkm in self.histories:
            for operation in reversed([*vm, *lgkm]):
                if operation.mask & mask:
                    return operation
        return None

    def conflicts(self, mask: int, kind: PendingKind) -> Outstanding | None:
        """Like `find`, for the result registers of a new load: in-order operations of its own kind are no
        conflict.
        """
        in_order = kind in ("vmem", "lds")
        for vm, lgkm in self.histories:
            for operation in reversed([*vm, *lgkm]):
                if operation.mask & mask and not (in_order and operation.kind == kind):
                    return operation
        return None

    @staticmethod
    def merged(a: WaitState, b: WaitState) -> WaitState:
        """Histories of two groups that meet."""
        return WaitState(unique([*a.histories, *b.histories]))


def unique(
    histories: list[tuple[list[Outstanding], list[Outstanding]]],
) -> list[tuple[list[Outstanding], list[Outstanding]]]:
    """Distinct histories, in order; more than MAX_HISTORIES are collapsed into one.

    (Each pass of a loop whose body only some waves enter would otherwise double their number.)
    """
    result: list[tuple[list[Outstanding], list[Outstanding]]] = []
    for history in histories:
        if history not in result:
            result.append(history)
            if len(result) > MAX_HISTORIES:
                return [(_collapsed([h[0] for h in histories]), _collapsed([h[1] for h in histories]))]
    return result


def _collapsed(queues: list[list[Outstanding]]) -> list[Outstanding]:
    """One queue that stands for all: position by position from the newest, an operation with every register
    that some queue's operation writes there.

    A wait for N keeps the N newest of each queue, so this keeps exactly the registers that some queue keeps
    while operations return in order; where they do not, it may keep more.
    """
    merged: list[Outstanding] = []
    for position in range(1, max((len(queue) for queue in queues), default=0) + 1):
        found = list(dict.fromkeys(queue[-position] for queue in queues if len(queue) >= position))
        first = next((operation for operation in found if operation.mask), found[0])
        mask = 0
        for operation in found:
            mask |= operation.mask
        unordered = [operation.kind for operation in found if operation.kind not in ("vmem", "store", "lds")]
        dwords = [operation.lds_dwords for operation in found if operation.lds_dwords is not None]
        kind = unordered[0] if unordered else first.kind
        landed = np.concatenate(dwords) if dwords else None
        merged.append(first if len(found) == 1 else Outstanding(mask, first.instruction, kind, landed))
    return merged[::-1]


def parse_waitcnt(text: str) -> tuple[int | None, int | None]:
    """(vmcnt, lgkmcnt) of `s_waitcnt`'s argument; None where a counter is not waited for.

    Accepts `vmcnt(3) lgkmcnt(0)`, with `&`, `|` or `,` between, `expcnt(n)`, and a plain number
    (gfx9 encoding: vmcnt in bits 3:0 and 15:14, expcnt 6:4, lgkmcnt 11:8).  Raises ValueError otherwise.
    """
    text = text.strip()
    if text[:1].isdigit():
        bits = int(text, 0)
        vmcnt, lgkmcnt = bits & 15 | bits >> 14 << 4, bits >> 8 & 15
        return (vmcnt if vmcnt < VM_LIMIT else None), (lgkmcnt if lgkmcnt < LGKM_LIMIT else None)
    found: dict[str, int] = {}
    for part in text.replace("&", " ").replace("|", " ").replace(",", " ").split():
        name, bracket, rest = part.partition("(")
        limit = {"vmcnt": VM_LIMIT, "lgkmcnt": LGKM_LIMIT, "expcnt": EXP_LIMIT}.get(name)
        if limit is None or not bracket or not rest.endswith(")") or name in found:
            raise ValueError(f"{part!r} is not a counter of this target")
        value = int(rest[:-1], 0)
        if not 0 <= value <= limit:
            raise ValueError(f"{name} takes 0..{limit}, got {value}")
        found[name] = value
    if not found:
        raise ValueError("s_waitcnt without a counter")
    return found.get("vmcnt"), found.get("lgkmcnt")
