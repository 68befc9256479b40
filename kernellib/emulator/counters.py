# SPDX-License-Identifier: Apache-2.0
"""What a launch did, by class of instruction, and how it used memory.

Two kinds.  Free ones follow from how often each block ran: instructions by class, matrix operations by type,
waits.  Costly ones look at every lane's address and are collected under `emulated(counters="all")`: lines of
64 and 128 bytes touched (128 bytes is the line of the L2, and both are sizes of its requests to memory: ROCm
Compute Profiler documentation, "L2 cache"), and LDS bank conflicts (banks.py).

All numbers are counts; none is a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.banks import Direction, bank_passes
from kernellib.emulator.instructions import lookup
from kernellib.emulator.instructions.registry import AluDef, ControlDef, MemoryDef
from kernellib.emulator.waits import parse_waitcnt

if TYPE_CHECKING:
    from kernellib.emulator.assembly import Instruction
    from kernellib.emulator.state import WaveGroup

Array = np.ndarray[Any, Any]
LINE_BYTES = (64, 128)
CLASSES = (
    "vector", "transcendental", "matrix", "scalar", "vector memory", "lds", "scalar memory", "wait",
    "barrier", "branch", "other",
)  # fmt: skip
F8F6F4_NAMES = ("fp8", "bf8", "fp6", "bf6", "fp4")
_SPACES = {"scalar": "scalar memory", "scalar_buffer": "scalar memory", "lds": "lds"}
_HANDLERS = {
    "branch": "branch", "cbranch": "branch", "barrier": "barrier", "waitcnt": "wait", "sleep": "wait",
}  # fmt: skip


def instruction_class(mnemonic: str) -> str:
    """One of CLASSES, by what executes the instruction.

    >>> [instruction_class(m) for m in ("v_pk_fma_f32", "v_exp_f32_e32", "s_waitcnt", "buffer_load_dword")]
    ['vector', 'transcendental', 'wait', 'vector memory']
    """
    definition = lookup(mnemonic)
    if isinstance(definition, MemoryDef):
        return _SPACES.get(definition.space, "vector memory")
    if isinstance(definition, AluDef):
        return _alu_class(definition)
    return _HANDLERS.get(definition.handler, "other") if isinstance(definition, ControlDef) else "other"


def _alu_class(definition: AluDef) -> str:
    if definition.mnemonic.startswith("ds_"):
        return "lds"
    if definition.kind == "mfma":
        return "matrix"
    if definition.transcendental:
        return "transcendental"
    return "scalar" if definition.is_scalar else "vector"


def by_class(counts: Mapping[str, int]) -> dict[str, int]:
    """Issues per class, every class present, of issues per mnemonic."""
    totals = dict.fromkeys(CLASSES, 0)
    for mnemonic, number in counts.items():
        totals[instruction_class(mnemonic)] += number
    return totals


# ------------------------------------------------------------------------------------------ matrix operations
def matrix_type(inst: Instruction) -> str | None:
    """Operand types of a matrix instruction ("bf16", "fp8 x fp4", "scaled fp8 x fp4"), None for any other."""
    definition = lookup(inst.mnemonic)
    if not isinstance(definition, AluDef) or definition.kind != "mfma":
        return None
    name = definition.mnemonic
    if "f8f6f4" in name:
        left, right = (F8F6F4_NAMES[int(str(inst.modifiers.get(key, 0)))] for key in ("cbsz", "blgp"))
        return f"{'scaled ' if 'scale' in name else ''}{left} x {right}"
    parts = name.split("_")
    types = [part for part in parts[4:] if not part.endswith("b")] or parts[2:3]
    return " x ".join(types) + (" sparse" if "smfmac" in name else "")


def matrix_flops(counts: Mapping[str, int]) -> dict[str, int]:
    """Multiplications and additions by mnemonic, of issues per mnemonic."""
    found = {}
    for mnemonic, number in counts.items():
        definition = lookup(mnemonic)
        if isinstance(definition, AluDef) and definition.flops:
            found[mnemonic] = definition.flops * number
    return found


def matrix_flops_by_type(instructions: Sequence[Instruction], issues: Iterable[int]) -> dict[str, int]:
    """Multiplications and additions by operand types (see `matrix_type`)."""
    totals: Counter[str] = Counter()
    for inst, number in zip(instructions, issues, strict=True):
        kind = matrix_type(inst) if number else None
        if kind is not None:
            definition = lookup(inst.mnemonic)
            assert isinstance(definition, AluDef)
            totals[kind] += definition.flops * int(number)
    return dict(totals)


def count_waits(instructions: Sequence[Instruction], issues: Iterable[int]) -> dict[str, int]:
    """Waits issued: `vmcnt(n)` and `lgkmcnt(n)` by n, barriers and sleeps."""
    totals: Counter[str] = Counter()
    for inst, number in zip(instructions, issues, strict=True):
        if not number or inst.mnemonic not in ("s_waitcnt", "s_barrier", "s_sleep"):
            continue
        if inst.mnemonic != "s_waitcnt":
            totals[inst.mnemonic.removeprefix("s_")] += int(number)
            continue
        operands = inst.text.split(None, 1)
        for name, left in zip(("vmcnt", "lgkmcnt"), parse_waitcnt(operands[1]), strict=True):
            if left is not None:
                totals[f"{name}({left})"] += int(number)
    return dict(sorted(totals.items()))


# -------------------------------------------------------------------------------------------- memory accesses
@dataclass(frozen=True)
class AccessTotals:
    """Accesses of one kind.

    Attributes:
        accesses: wave-level instructions with a lane that asks for something.
        lanes: lane requests; bytes: what they ask for.
        lines_64, lines_128: distinct lines of that many bytes, counted anew for each wave's access (global,
            scratch and scalar; a scratch line holds the same dword of consecutive lanes).
        passes, conflicts: passes through the LDS banks, and those beyond one per phase (LDS only).
    """

    accesses: int = 0
    lanes: int = 0
    bytes: int = 0
    lines_64: int = 0
    lines_128: int = 0
    passes: int = 0
    conflicts: int = 0

    def __add__(self, other: AccessTotals) -> AccessTotals:
        return AccessTotals(*(a + b for a, b in zip(self.as_tuple(), other.as_tuple(), strict=True)))

    def as_tuple(self) -> tuple[int, ...]:
        """The fields in order."""
        return tuple(getattr(self, name) for name in FIELDS)

    @property
    def efficiency(self) -> float:
        """Bytes asked for over bytes of the 64-byte lines touched (more than 1: lanes share bytes)."""
        return self.bytes / (64 * self.lines_64) if self.lines_64 else 0.0

    @property
    def conflict_rate(self) -> float:
        """Share of the LDS passes that are bank conflicts."""
        return self.conflicts / self.passes if self.passes else 0.0


FIELDS = ("accesses", "lanes", "bytes", "lines_64", "lines_128", "passes", "conflicts")


class AccessCounters:
    """Collects `AccessTotals` for every instruction of a listing."""

    def __init__(self, num_instructions: int) -> None:
        self.table = np.zeros((num_instructions, len(FIELDS)), np.int64)
        self.kind: dict[int, tuple[str, str]] = {}

    def add(
        self,
        g: WaveGroup,
        space: str,
        action: str,
        size: int,
        addresses: Array,
        lanes: tuple[Array, Array] | None = None,
    ) -> None:
        """Enter one step of a group (see `Cohort.count` for the arguments)."""
        pc = g.pc
        self.kind[pc] = (space, action)
        row = self.table[pc]
        if space == "scalar":
            addresses = addresses[:, None]
            active = np.ones_like(addresses, np.bool_)
        else:
            addresses, active = _spread(g, addresses, lanes)
        row[0] += int(active.any(axis=1).sum())
        row[1] += int(active.sum())
        row[2] += int(active.sum()) * size
        if space == "lds":
            definition = lookup(g.cohort.launch.bound.program.instructions[pc].mnemonic)
            halves = 2 if isinstance(definition, MemoryDef) and definition.pairs else 1
            passes, conflicts = bank_passes(addresses, active, size // halves, _direction(action))
            row[5] += halves * int(passes.sum())
            row[6] += halves * int(conflicts.sum())
            return
        if space == "scratch":  # dword d of lane l lies at 256 d + 4 l: lanes of a dword side by side
            addresses = (addresses >> 2 << 8) + 4 * np.arange(64)
            size = min(size, 4) if size < 4 else 4 * (size // 4)
            row[3] += sum(
                int(distinct_lines(addresses + 256 * d, active, 4, 64)) for d in range(-(-size // 4))
            )
            row[4] += sum(
                int(distinct_lines(addresses + 256 * d, active, 4, 128)) for d in range(-(-size // 4))
            )
            return
        row[3] += distinct_lines(addresses, active, size, 64)
        row[4] += distinct_lines(addresses, active, size, 128)

    def totals(self, pc: int) -> AccessTotals:
        """What one instruction did."""
        return AccessTotals(*(int(v) for v in self.table[pc]))

    def by_kind(self) -> dict[tuple[str, str], AccessTotals]:
        """Totals by (space, action)."""
        found: dict[tuple[str, str], AccessTotals] = {}
        for pc, kind in sorted(self.kind.items()):
            found[kind] = found.get(kind, AccessTotals()) + self.totals(pc)
        return found


def _direction(action: str) -> Direction:
    return {"load": "read", "store": "write"}.get(action, "atomic")  # type: ignore[return-value]


def _spread(g: WaveGroup, addresses: Array, lanes: tuple[Array, Array] | None) -> tuple[Array, Array]:
    """(addresses, active), both [n, 64], of addresses of some lanes."""
    if addresses.ndim == 2 and lanes is None:
        return addresses, np.ones(addresses.shape, np.bool_)
    where = lanes if lanes is not None else np.nonzero(g.lane_mask)
    active = np.zeros((g.n, 64), np.bool_)
    active[where] = True
    spread = np.zeros((g.n, 64), np.int64)
    spread[where] = addresses.reshape(-1)
    return spread, active


def distinct_lines(addresses: Array, active: Array, num_bytes: int, line_bytes: int) -> int:
    """Distinct lines that each wave's lanes touch, summed over the waves.

    Args:
        addresses: int64 [n, lanes]; active: bool of that shape; num_bytes: bytes a lane, at most a line.

    >>> distinct_lines(np.arange(64)[None] * 16, np.ones((1, 64), bool), 16, 128)
    8
    """
    lines = np.concatenate([addresses // line_bytes, (addresses + (num_bytes - 1)) // line_bytes], axis=1)
    lines = np.sort(np.where(np.tile(active, 2), lines, -1), axis=1)
    counts = lines >= 0
    counts[:, 1:] &= lines[:, 1:] != lines[:, :-1]
    return int(counts.sum())
