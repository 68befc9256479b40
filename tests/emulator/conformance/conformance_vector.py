# SPDX-License-Identifier: Apache-2.0
"""Builds and checks vector ALU cases: every encoding and operand form of a mnemonic in one snippet.

A signature is `"f32 f32 -> f32"`: source types, `->`, result types, in assembly order.  Extra source types:
`mask` (a lane mask in the text), `vcc` (read but not in the text), `old:f32` (the destination's previous
value, not in the text).  A result of type `mask` goes to vcc or an SGPR pair.  16-bit operands carry
different test values in both halves of their register, so that picking the wrong half is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import conformance_reference as ref
import numpy as np
from conformance_harness import (
    EXEC_WITH_HOLES,
    FULL_EXEC,
    LANES,
    TYPES,
    Case,
    Expected,
    OneOf,
    Report,
    compare,
    from_registers,
    rng_for,
    run,
    show,
    sname,
    test_values,
    to_registers,
    vname,
)

from kernellib.emulator.state import FloatMode

SOURCE_BASE = (8, 16, 24, 32)  # first VGPR of each source, room for 4 registers and more
RESULT_BASE = 64
SCALAR_SOURCE = 8  # s[8:9] holds the scalar operand, s[10:11] the mask operand, s[12:13] vcc
MASK_SOURCE = 10
MASK_RESULT = 20
Reference = Callable[..., Any]


@dataclass(frozen=True)
class VectorCase(Case):
    """A vector ALU row: `reference(*bits)` gives the result bits (a tuple when there are several results)."""

    signature: str = ""
    reference: Reference = field(default=lambda: 0)
    encodings: tuple[str, ...] = ("vop3",)
    high: str = "zero"  # upper half of the register after a 16-bit result: "zero", "keep" or "any"
    count: int = 512
    modifiers: bool = True  # whether neg/abs/clamp apply (float sources in VOP3)
    clamp: bool = True  # whether a float result takes the clamp bit
    op_sel: bool = True  # whether VOP3 on 16-bit operands has op_sel (the legacy instructions lack it)
    sdwa_dst: bool = True  # whether SDWA has dst_sel
    sdwa_sext: bool = True  # whether integer sources under SDWA take sext()
    scalar: bool = True  # whether SGPR and inline forms apply
    suffix: str = ""  # modifiers that each line carries
    mask_holes: bool = True  # whether bits of inactive lanes of a mask result are known (zero)
    keep: Callable[..., bool] | None = None  # filter of the random inputs
    literal_at: int | None = None  # this source is always a literal (v_fmamk, v_fmaak)

    @property
    def sources(self) -> list[str]:
        """Source types."""
        return self.signature.split("->")[0].split()

    @property
    def results(self) -> list[str]:
        """Result types."""
        return self.signature.split("->")[1].split()


def row(
    mnemonic: str,
    signature: str,
    reference: Reference,
    encodings: str = "vop3",
    checks: str = "",
    **options: Any,
) -> VectorCase:
    """A short constructor; `encodings` is "e32 e64 sdwa dpp" or "vop3" (no suffix in the text)."""
    return VectorCase(
        mnemonic,
        forms=tuple(encodings.split()),
        checks=checks,
        signature=signature,
        reference=reference,
        encodings=tuple(encodings.split()),
        **options,
    )


@dataclass
class Line:
    """One instruction of the snippet with the values its sources have and where its results go."""

    text: str
    label: str
    columns: list[list[int]]
    registers: list[int]  # register of each result (VGPR index, or SGPR index of a mask)
    place: Callable[[int, int], int] | None = None  # (result, old register) -> register, 16-bit results
    finish: Callable[[Expected], Expected] | None = None  # what clamp makes of the first result
    checked: int = 0  # how many lanes are compared (the values are shuffled, so any prefix is a sample)


SAMPLE = 2 * LANES  # lanes compared in the many operand forms; the plain forms compare all


class Builder:
    """Collects the lines of one case over shared source registers."""

    def __init__(self, case: VectorCase, full_exec: bool = False, mode: FloatMode | None = None) -> None:
        self.case = case
        self.rng = rng_for(case.mnemonic, case.signature, case.suffix)
        self.mode = mode
        self.exec_mask = FULL_EXEC if full_exec else EXEC_WITH_HOLES
        self.waves = max(1, case.count // LANES)
        self.num = self.waves * LANES
        self.lines: list[Line] = []
        self.known: dict[tuple[int, ...], Any] = {}
        self.next_vgpr, self.next_sgpr = RESULT_BASE, MASK_RESULT
        self.kinds = [k.split(":")[-1] for k in case.sources if k not in ("mask", "vcc")]
        self.columns = self._values()
        has_halves = any(TYPES[kind].bits == 16 for kind in self.kinds)
        self.high = self._values() if has_halves else self.columns  # what the upper halves of operands hold
        self.mask = self.rng.getrandbits(64)
        self.vcc = self.rng.getrandbits(64)
        self.old_column: list[int] | None = None
        for index, kind in enumerate(case.sources):
            if kind.startswith("old:"):
                self.old_column = self.columns[self._value_index(index)]

    def _values(self) -> list[list[int]]:
        columns = test_values(self.kinds, self.rng, self.num)
        while self.case.keep is not None:
            bad = [i for i, values in enumerate(zip(*columns, strict=True)) if not self.case.keep(*values)]
            if not bad:
                break
            fresh = test_values(self.kinds, self.rng, self.num)
            for column, new in zip(columns, fresh, strict=True):
                for i in bad:
                    column[i] = new[i]
        return columns

    def _value_index(self, source: int) -> int:
        return sum(k not in ("mask", "vcc") for k in self.case.sources[:source])

    def source_columns(self) -> list[list[int]]:
        """Values per source, masks included."""
        out = []
        for index, kind in enumerate(self.case.sources):
            bits = self.mask if kind == "mask" else self.vcc
            if kind in ("mask", "vcc"):
                out.append([bits >> (i % LANES) & 1 for i in range(self.num)])
            else:
                out.append(self.columns[self._value_index(index)])
        return out

    def high_column(self, source: int) -> list[int]:
        """Values in the upper halves of a 16-bit source."""
        return self.high[self._value_index(source)]

    def register_of(self, source: int) -> str:
        """Name of the VGPR (pair) of a source."""
        kind = self.case.sources[source]
        return vname(SOURCE_BASE[self._value_index(source)], TYPES[kind].registers)

    def emit(
        self,
        encoding: str,
        label: str,
        names: dict[int, str] | None = None,
        columns: dict[int, list[int]] | None = None,
        suffix: str = "",
        place: Callable[[int, int], int] | None = None,
        finish: Callable[[Expected], Expected] | None = None,
        mask_in_vcc: bool = True,
    ) -> None:
        """Add a line; `names` and `columns` replace operands (by source index)."""
        case = self.case
        names, columns = names or {}, columns or {}
        base = case.mnemonic + ("" if encoding == "vop3" else f"_{encoding}")
        uses_vcc = encoding in ("e32", "sdwa", "dpp") and mask_in_vcc
        operands, registers, after = [], [], ""
        for kind in case.results:
            if kind == "mask":
                registers.append(self.next_sgpr)
                pair = sname(self.next_sgpr, 2)
                operands.append("vcc" if uses_vcc else pair)
                after += f"s_nop 4\ns_mov_b64 {pair}, vcc\n" if uses_vcc else ""
                self.next_sgpr += 2
            else:
                width = TYPES[kind].registers
                self.next_vgpr += self.next_vgpr % 2 if width > 1 else 0
                registers.append(self.next_vgpr)
                operands.append(vname(self.next_vgpr, width))
                self.next_vgpr += width
        before = ""
        for index, kind in enumerate(case.sources):
            if kind == "mask":
                before = f"s_mov_b64 vcc, {sname(MASK_SOURCE, 2)}\ns_nop 4\n" if uses_vcc else before
                operands.append("vcc" if uses_vcc else sname(MASK_SOURCE, 2))
            elif kind == "vcc":
                before = f"s_mov_b64 vcc, {sname(12, 2)}\ns_nop 4\n"
            elif not kind.startswith("old:"):
                operands.append(names.get(index, self.register_of(index)))
        tail = " ".join(s for s in (case.suffix, suffix) if s)
        text = f"{before}{base} {', '.join(operands)}{' ' + tail if tail else ''}\n{after}s_nop 4"
        values = [columns.get(i, c) for i, c in enumerate(self.source_columns())]
        checked = self.num if label in ("vgprs", "both") else min(SAMPLE, self.num)
        self.lines.append(Line(text, f"{base} {label}".strip(), values, registers, place, finish, checked))

    # -- execution ------------------------------------------------------------
    def _state(self) -> dict[str, Any]:
        vgprs: dict[int, Any] = {}
        for index, kind in enumerate(self.kinds):
            column = self.columns[index]
            if TYPES[kind].bits == 16:
                column = [lo | hi << 16 for lo, hi in zip(column, self.high[index], strict=True)]
            for i, array in enumerate(to_registers(column, TYPES[kind].registers, self.waves)):
                vgprs[SOURCE_BASE[index] + i] = array
        poison = np.arange(self.num, dtype=np.uint32).reshape(self.waves, LANES)
        for index in range(RESULT_BASE, self.next_vgpr):
            vgprs[index] = poison * np.uint32(0x01010101) + np.uint32(0xA5C3_0000 + index)
        if self.old_column is not None:
            width = TYPES[self.case.results[0]].registers
            arrays = to_registers(self.old_column, width, self.waves)
            for line in self.lines:
                for i, array in enumerate(arrays):
                    vgprs[line.registers[0] + i] = array.copy()
        self.initial = {k: np.array(v, dtype=np.uint32) for k, v in vgprs.items()}
        scalar = self.columns[0][self.num // 3] if self.columns else 0
        sgprs = {SCALAR_SOURCE: scalar & ref.M32, SCALAR_SOURCE + 1: scalar >> 32 & ref.M32}
        sgprs |= {MASK_SOURCE: self.mask & ref.M32, MASK_SOURCE + 1: self.mask >> 32}
        sgprs |= {12: self.vcc & ref.M32, 13: self.vcc >> 32}
        return {
            "vgprs": vgprs, "sgprs": sgprs, "exec_mask": self.exec_mask, "num_waves": self.waves,
            "mode": self.mode,
        }  # fmt: skip

    def scalar_value(self, source: int) -> list[int]:
        """What every lane sees when a source is the SGPR (pair) at SCALAR_SOURCE."""
        bits = TYPES[self.case.sources[source]].bits
        return [self.columns[0][self.num // 3] & ((1 << bits) - 1)] * self.num

    def execute(self) -> None:
        """Run all lines and compare every lane."""
        state = self._state()
        result = run("\n".join(line.text for line in self.lines), **state)
        report = Report(self.case.mnemonic)
        active = [self.exec_mask >> (i % LANES) & 1 for i in range(self.num)]
        for line in self.lines:
            rows = [*zip(*line.columns, strict=True)][: line.checked]
            wanted = [
                self._reference(values) if on else None for values, on in zip(rows, active, strict=False)
            ]
            for position, kind in enumerate(self.case.results):
                want = [w[position] if isinstance(w, tuple) else w for w in wanted]
                if line.finish is not None and not position:
                    want = [None if w is None else line.finish(w) for w in want]
                if kind == "mask":
                    self._check_mask(result, line, line.registers[position], want, report)
                else:
                    self._check_lanes(result, line, line.registers[position], kind, want, report)
        report.finish()

    def _reference(self, values: tuple[int, ...]) -> Any:
        """The case's reference, which many lines ask about the same values."""
        found = self.known.get(values)
        if found is None:
            found = self.known[values] = self.case.reference(*values)
        return found

    def _check_mask(self, result: Any, line: Line, index: int, want: list[Any], report: Report) -> None:
        halves = [
            np.broadcast_to(np.asarray(result.sgpr(index + i)).reshape(-1), (self.waves,)) for i in (0, 1)
        ]
        for i, expected in enumerate(want):
            wave, lane = divmod(i, LANES)
            got = int(halves[lane // 32][wave]) >> (lane % 32) & 1
            if expected is None and not self.case.mask_holes:
                continue
            report.check(
                got == (expected or 0),
                lambda i=i, got=got, e=expected: (
                    f"{line.label}: lane {i} {self._inputs(line, i)} gave {got}, want {e}"
                ),
            )

    def _check_lanes(
        self, result: Any, line: Line, index: int, kind: str, want: list[Any], report: Report
    ) -> None:
        t = TYPES[kind]
        got = from_registers([result.vgpr(index + i) for i in range(t.registers)], len(want))
        before = from_registers([self.initial[index + i] for i in range(t.registers)], len(want))
        for i, expected in enumerate(want):
            good = (
                got[i] == before[i]
                if expected is None
                else self._matches(t, line, got[i], expected, before[i])
            )
            report.check(
                good,
                lambda i=i, e=expected: (
                    f"{line.label}: lane {i} {self._inputs(line, i)} gave {got[i]:#x}, want "
                    f"{show(before[i]) + ' (inactive lane)' if e is None else show(0, e)}"
                ),
            )

    def _matches(self, t: Any, line: Line, got: int, expected: Expected, before: int) -> bool:
        if line.place is not None:
            if isinstance(expected, OneOf) and any(got == line.place(v, before) for v in expected.values):
                return True
            if isinstance(expected, int) and not (t.fmt and ref.is_nan(t.fmt, expected)):
                return got == line.place(expected, before)
            return any(  # a NaN or an inexact result: find which half it went to by trying
                got == line.place(half, before) and compare(t.fmt, half, expected)
                for half in (got & 0xFFFF, got >> 16)
            )
        if t.bits == 16:
            upper = {"zero": 0, "keep": before >> 16, "any": got >> 16}[self.case.high]
            return got >> 16 == upper and compare(t.fmt, got & 0xFFFF, expected)
        return compare(t.fmt, got, expected)

    def _inputs(self, line: Line, i: int) -> str:
        return "(" + ", ".join(f"{c[i]:#x}" for c in line.columns) + ")"


__all__ = ["Builder", "VectorCase", "row"]
