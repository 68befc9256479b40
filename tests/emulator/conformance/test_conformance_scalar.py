# SPDX-License-Identifier: Apache-2.0
"""Scalar ALU: every result and the SCC rule of every instruction, exec-saving operations, compares,
constants.

Source: AMD "CDNA4 Instruction Set Architecture Reference Guide", chapter 5 (table of SALU instructions with
their "sets SCC" column) and chapter 12 (pseudocode).  Instructions that do not set SCC must leave it, which
is checked with both values before.  Easy to get wrong: SCC of s_add_i32 and s_sub_i32 is signed overflow, of
s_add_u32 the carry; s_min/s_max set SCC when the FIRST operand was chosen; s_mul_i32 sets nothing;
s_andn2_saveexec takes S0 & ~EXEC, s_andn1 takes ~S0 & EXEC; s_lshl2_add sets SCC on overflow; s_bfe_u32's
width is 7 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from conformance_harness import Case, Report, case_id, implemented, rng_for, run, sname, test_values
from conformance_reference import M32, M64, sx

Result = tuple[int | None, int | None]  # (destination or None, SCC or None for "unchanged")


@dataclass(frozen=True)
class ScalarCase(Case):
    """`reference(*sources, scc)` gives (result, new SCC or None when the instruction leaves it)."""

    sources: tuple[int, ...] = (32, 32)  # bits of each source
    result: int = 32  # bits of the destination, 0 for none
    reference: Callable[..., Result] = field(default=lambda: (0, None))
    reads_old: bool = False  # the destination's old value is the last source
    text: str = "{m} {d}, {s}"


def salu(
    name: str, bits: int | tuple[int, ...], result: int, reference: Callable[..., Result], **options: Any
) -> ScalarCase:
    """A row; `bits` of the sources: one number means one source."""
    sources = (bits,) if isinstance(bits, int) else bits
    return ScalarCase(
        name,
        ("sgpr", "inline", "literal"),
        options.pop("checks", "result and SCC"),
        sources=sources,
        result=result,
        reference=reference,
        **options,
    )


def nonzero(f: Callable[..., int], bits: int) -> Callable[..., Result]:
    """Result masked; SCC = result is not zero."""

    def apply(*v: int) -> Result:
        value = f(*v[:-1]) & ((1 << bits) - 1)
        return value, int(value != 0)

    return apply


def keeps(f: Callable[..., int], bits: int = 32) -> Callable[..., Result]:
    """Result masked; SCC unchanged."""
    return lambda *v: (f(*v[:-1]) & ((1 << bits) - 1), None)


def s(value: int) -> int:
    """Signed 32-bit."""
    return sx(value, 32)


def find(value: int, bits: int, wanted: int, from_top: bool = False) -> int:
    """Position of the first bit equal to `wanted`, or -1."""
    order = range(bits - 1, -1, -1) if from_top else range(bits)
    return next((p for p, bit in enumerate(order) if value >> bit & 1 == wanted), -1)


def sign_run(value: int, bits: int) -> int:
    """Leading bits equal to the sign, or -1 when all are."""
    return find(value, bits, 1 - (value >> (bits - 1) & 1), True)


def overflow(total: int) -> int:
    """Whether a signed 32-bit sum does not fit."""
    return int(not -(1 << 31) <= total < 1 << 31)


def bfe(value: int, control: int, bits: int, signed: bool) -> int:
    """Bit field: offset in the low bits, width in [22:16]."""
    offset, width = control & (bits - 1), control >> 16 & 127
    if width == 0:
        return 0
    moved = (sx(value, bits) if signed else value) >> offset
    part = moved & ((1 << min(width, bits)) - 1)
    return sx(part, min(width, bits)) if signed else part


def quads(value: int, bits: int, whole: bool) -> int:
    """s_wqm (whole) or s_quadmask."""
    out = 0
    for i in range(0, bits, 4):
        if value >> i & 15:
            out |= 15 << i if whole else 1 << (i // 4)
    return out


LOGIC: list[ScalarCase] = [
    salu(f"s_{name}_b{bits}", (bits, bits), bits, nonzero(f, bits))
    for bits in (32, 64)
    for name, f in (
        ("and", lambda a, b: a & b),
        ("or", lambda a, b: a | b),
        ("xor", lambda a, b: a ^ b),
        ("andn2", lambda a, b: a & ~b),
        ("orn2", lambda a, b: a | ~b),
        ("nand", lambda a, b: ~(a & b)),
        ("nor", lambda a, b: ~(a | b)),
        ("xnor", lambda a, b: ~(a ^ b)),
    )
] + [
    salu("s_lshl_b32", (32, 32), 32, nonzero(lambda a, b: a << (b & 31), 32)),
    salu("s_lshr_b32", (32, 32), 32, nonzero(lambda a, b: a >> (b & 31), 32)),
    salu("s_ashr_i32", (32, 32), 32, nonzero(lambda a, b: s(a) >> (b & 31), 32)),
    salu("s_lshl_b64", (64, 32), 64, nonzero(lambda a, b: a << (b & 63), 64)),
    salu("s_lshr_b64", (64, 32), 64, nonzero(lambda a, b: a >> (b & 63), 64)),
    salu("s_ashr_i64", (64, 32), 64, nonzero(lambda a, b: sx(a, 64) >> (b & 63), 64)),
    salu("s_bfm_b32", (32, 32), 32, keeps(lambda a, b: ((1 << (a & 31)) - 1) << (b & 31))),
    salu("s_bfm_b64", (32, 32), 64, keeps(lambda a, b: ((1 << (a & 63)) - 1) << (b & 63), 64)),
    salu("s_bfe_u32", (32, 32), 32, nonzero(lambda a, b: bfe(a, b, 32, False), 32)),
    salu("s_bfe_i32", (32, 32), 32, nonzero(lambda a, b: bfe(a, b, 32, True), 32)),
    salu("s_bfe_u64", (64, 32), 64, nonzero(lambda a, b: bfe(a, b, 64, False), 64)),
    salu("s_bfe_i64", (64, 32), 64, nonzero(lambda a, b: bfe(a, b, 64, True), 64)),
]
ARITHMETIC: list[ScalarCase] = [
    salu("s_add_u32", (32, 32), 32, lambda a, b, c: (a + b & M32, int(a + b > M32))),
    salu("s_sub_u32", (32, 32), 32, lambda a, b, c: (a - b & M32, int(b > a))),
    salu("s_add_i32", (32, 32), 32, lambda a, b, c: (a + b & M32, overflow(s(a) + s(b)))),
    salu("s_sub_i32", (32, 32), 32, lambda a, b, c: (a - b & M32, overflow(s(a) - s(b)))),
    salu("s_addc_u32", (32, 32), 32, lambda a, b, c: (a + b + c & M32, int(a + b + c > M32))),
    salu("s_subb_u32", (32, 32), 32, lambda a, b, c: (a - b - c & M32, int(b + c > a))),
    salu("s_min_i32", (32, 32), 32, lambda a, b, c: (min(s(a), s(b)) & M32, int(s(a) < s(b)))),
    salu("s_min_u32", (32, 32), 32, lambda a, b, c: (min(a, b), int(a < b))),
    salu("s_max_i32", (32, 32), 32, lambda a, b, c: (max(s(a), s(b)) & M32, int(s(a) >= s(b)))),
    salu("s_max_u32", (32, 32), 32, lambda a, b, c: (max(a, b), int(a >= b))),
    salu("s_mul_i32", (32, 32), 32, keeps(lambda a, b: a * b)),
    salu("s_mul_hi_u32", (32, 32), 32, keeps(lambda a, b: a * b >> 32)),
    salu("s_mul_hi_i32", (32, 32), 32, keeps(lambda a, b: s(a) * s(b) >> 32)),
    salu("s_absdiff_i32", (32, 32), 32, nonzero(lambda a, b: abs(s(a - b & M32)), 32)),
    *(
        salu(
            f"s_lshl{n}_add_u32",
            (32, 32),
            32,
            lambda a, b, c, n=n: ((a << n) + b & M32, int((a << n) + b > M32)),
        )
        for n in (1, 2, 3, 4)
    ),
    salu("s_pack_ll_b32_b16", (32, 32), 32, keeps(lambda a, b: a & 0xFFFF | b << 16)),
    salu("s_pack_lh_b32_b16", (32, 32), 32, keeps(lambda a, b: a & 0xFFFF | b >> 16 << 16)),
    salu("s_pack_hh_b32_b16", (32, 32), 32, keeps(lambda a, b: a >> 16 | b >> 16 << 16)),
    salu("s_cselect_b32", (32, 32), 32, lambda a, b, c: (a if c else b, None)),
    salu("s_cselect_b64", (64, 64), 64, lambda a, b, c: (a if c else b, None)),
]
UNARY: list[ScalarCase] = [
    salu("s_mov_b32", 32, 32, keeps(lambda a: a)),
    salu("s_mov_b64", 64, 64, keeps(lambda a: a, 64)),
    salu("s_not_b32", 32, 32, nonzero(lambda a: ~a, 32)),
    salu("s_not_b64", 64, 64, nonzero(lambda a: ~a, 64)),
    salu("s_brev_b32", 32, 32, keeps(lambda a: int(f"{a:032b}"[::-1], 2))),
    salu("s_brev_b64", 64, 64, keeps(lambda a: int(f"{a:064b}"[::-1], 2), 64)),
    salu("s_bcnt0_i32_b32", 32, 32, nonzero(lambda a: 32 - a.bit_count(), 32)),
    salu("s_bcnt0_i32_b64", 64, 32, nonzero(lambda a: 64 - a.bit_count(), 32)),
    salu("s_bcnt1_i32_b32", 32, 32, nonzero(lambda a: a.bit_count(), 32)),
    salu("s_bcnt1_i32_b64", 64, 32, nonzero(lambda a: a.bit_count(), 32)),
    salu("s_ff0_i32_b32", 32, 32, keeps(lambda a: find(a, 32, 0))),
    salu("s_ff0_i32_b64", 64, 32, keeps(lambda a: find(a, 64, 0))),
    salu("s_ff1_i32_b32", 32, 32, keeps(lambda a: find(a, 32, 1))),
    salu("s_ff1_i32_b64", 64, 32, keeps(lambda a: find(a, 64, 1))),
    salu("s_flbit_i32_b32", 32, 32, keeps(lambda a: find(a, 32, 1, True))),
    salu("s_flbit_i32_b64", 64, 32, keeps(lambda a: find(a, 64, 1, True))),
    salu("s_flbit_i32", 32, 32, keeps(lambda a: sign_run(a, 32))),
    salu("s_flbit_i32_i64", 64, 32, keeps(lambda a: sign_run(a, 64))),
    salu("s_sext_i32_i8", 32, 32, keeps(lambda a: sx(a, 8))),
    salu("s_sext_i32_i16", 32, 32, keeps(lambda a: sx(a, 16))),
    salu("s_abs_i32", 32, 32, nonzero(lambda a: abs(s(a)), 32)),
    salu("s_wqm_b32", 32, 32, nonzero(lambda a: quads(a, 32, True), 32)),
    salu("s_wqm_b64", 64, 64, nonzero(lambda a: quads(a, 64, True), 64)),
    salu("s_quadmask_b32", 32, 32, nonzero(lambda a: quads(a, 32, False), 32)),
    salu("s_quadmask_b64", 64, 64, nonzero(lambda a: quads(a, 64, False), 64)),
    salu(
        "s_bitreplicate_b64_b32",
        32,
        64,
        keeps(lambda a: sum((a >> i & 1) * 3 << (2 * i) for i in range(32)), 64),
    ),
    salu("s_cmov_b32", (32, 32), 32, lambda a, old, c: (a if c else old, None), reads_old=True),
    salu("s_cmov_b64", (64, 64), 64, lambda a, old, c: (a if c else old, None), reads_old=True),
    salu("s_bitset0_b32", (32, 32), 32, keeps(lambda a, old: old & ~(1 << (a & 31))), reads_old=True),
    salu("s_bitset1_b32", (32, 32), 32, keeps(lambda a, old: old | 1 << (a & 31)), reads_old=True),
    salu("s_bitset0_b64", (32, 64), 64, keeps(lambda a, old: old & ~(1 << (a & 63)), 64), reads_old=True),
    salu("s_bitset1_b64", (32, 64), 64, keeps(lambda a, old: old | 1 << (a & 63), 64), reads_old=True),
]
COMPARES: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
}  # fmt: skip
COMPARE: list[ScalarCase] = [
    salu(
        f"s_cmp_{n}_{k}32",
        (32, 32),
        0,
        (lambda a, b, c, f=f: (None, int(f(s(a), s(b)))))
        if k == "i"
        else (lambda a, b, c, f=f: (None, int(f(a, b)))),
        text="{m} {s}",
        checks="SCC",
    )
    for n, f in COMPARES.items()
    for k in "iu"
] + [
    salu("s_cmp_eq_u64", (64, 64), 0, lambda a, b, c: (None, int(a == b)), text="{m} {s}", checks="SCC"),
    salu("s_cmp_lg_u64", (64, 64), 0, lambda a, b, c: (None, int(a != b)), text="{m} {s}", checks="SCC"),
    salu(
        "s_bitcmp0_b32",
        (32, 32),
        0,
        lambda a, b, c: (None, 1 - (a >> (b & 31) & 1)),
        text="{m} {s}",
        checks="SCC",
    ),
    salu(
        "s_bitcmp1_b32", (32, 32), 0, lambda a, b, c: (None, a >> (b & 31) & 1), text="{m} {s}", checks="SCC"
    ),
    salu(
        "s_bitcmp0_b64",
        (64, 32),
        0,
        lambda a, b, c: (None, 1 - (a >> (b & 63) & 1)),
        text="{m} {s}",
        checks="SCC",
    ),
    salu(
        "s_bitcmp1_b64", (64, 32), 0, lambda a, b, c: (None, a >> (b & 63) & 1), text="{m} {s}", checks="SCC"
    ),
]


def constants(kind: int) -> list[tuple[str, int]]:
    """Inline constants and a literal as a scalar source sees them."""
    mask = (1 << kind) - 1
    floats = [("0.5", 0x3F000000), ("-4.0", 0xC0800000)] if kind == 32 else []
    literal = [("0x89abcdef", 0x89ABCDEF)] if kind == 32 else []
    return [("0", 0), ("64", 64), ("-16", -16 & mask), ("1", 1), *floats, *literal]


WAVES = 16  # each wave has its own operand values; even waves start with SCC 1, odd ones with 0
PLAIN_LINES = 8
FIRST_SCC, LAST = 96, 94


@dataclass
class ScalarLine:
    """One instruction of a snippet: its text, operand values by wave, destination and the register of SCC."""

    text: str
    values: list[tuple[int, ...]]
    destination: int
    flag: int


def patterns_of(case: ScalarCase) -> list[list[tuple[str, int] | None]]:
    """Operand choices: None for a register, else (text, value) of a constant in one position."""
    texts = case.sources[:-1] if case.reads_old else case.sources
    patterns: list[list[tuple[str, int] | None]] = [[None] * len(case.sources) for _ in range(PLAIN_LINES)]
    for position, bits in enumerate(texts):
        for constant in constants(bits):
            pattern: list[tuple[str, int] | None] = [None] * len(case.sources)
            pattern[position] = constant
            patterns.append(pattern)
    return patterns


def scalar_line(
    case: ScalarCase, pattern: list[tuple[str, int] | None], first: int, sgprs: dict[int, Any]
) -> tuple[ScalarLine, int]:
    """The line of a pattern over registers from `first` on, and the next free register."""
    rng = rng_for(case.mnemonic, first, repr(pattern))
    columns = test_values([f"b{b}" for b in case.sources], rng, WAVES)
    names = []
    for i, (constant, bits) in enumerate(zip(pattern, case.sources, strict=True)):
        if constant is not None:
            names.append(constant[0])
            columns[i] = [constant[1]] * WAVES
            continue
        names.append(sname(first, bits // 32))
        sgprs |= {first + h: np.array([v >> (32 * h) & M32 for v in columns[i]]) for h in (0, 1)}
        first += 2
    if case.reads_old:
        destination = first - 2
        names.pop()
    else:
        destination, first = first, first + 2
        sgprs |= {destination: 0x5EED0001, destination + 1: 0x5EED0002}
    result = sname(destination, max(1, case.result // 32))
    text = case.text.format(m=case.mnemonic, d=result, s=", ".join(names))
    return ScalarLine(text, [*zip(*columns, strict=True)], destination, first), first + 2


def check_scalar(case: ScalarCase) -> None:
    """Every pattern over many values, with SCC 0 and 1 before; SCC is set and read by instructions."""
    report, patterns = Report(case.mnemonic), patterns_of(case)
    while patterns:
        lines: list[ScalarLine] = []
        sgprs: dict[int, Any] = {FIRST_SCC: np.arange(WAVES) % 2}
        first = 0
        while patterns and first + 2 * len(case.sources) + 4 <= LAST:
            line, first = scalar_line(case, patterns.pop(), first, sgprs)
            lines.append(line)
        text = "\n".join(
            f"s_cmp_eq_u32 0, s{FIRST_SCC}\n{line.text}\ns_cselect_b32 s{line.flag}, 1, 0" for line in lines
        )
        result = run(text, sgprs=sgprs, num_waves=WAVES)
        for line in lines:
            check_scalar_line(case, line, result, report)
    report.finish()


def check_scalar_line(case: ScalarCase, line: ScalarLine, result: Any, report: Report) -> None:
    """Compare destination and SCC of every wave."""
    low, high, flags = (result.sgpr(i).tolist() for i in (line.destination, line.destination + 1, line.flag))
    for wave, values in enumerate(line.values):
        scc = 1 - wave % 2
        value, new_scc = case.reference(*values, scc)
        inputs = [hex(v) for v in values]
        got = low[wave] | (high[wave] << 32 if case.result == 64 else 0)
        report.check(
            not case.result or got == value,
            lambda i=inputs, g=got, w=value: f"`{line.text}` {i} gave {g:#x}, want {w:#x}",
        )
        want_scc = scc if new_scc is None else new_scc
        report.check(
            flags[wave] == want_scc,
            lambda i=inputs, g=flags[wave], w=want_scc, c=scc: f"`{line.text}` {i} SCC {c} -> {g}, want {w}",
        )


@pytest.mark.parametrize("case", implemented([*LOGIC, *ARITHMETIC, *UNARY, *COMPARE]), ids=case_id)
def test_scalar(case: ScalarCase) -> None:
    check_scalar(case)


SOPK: list[ScalarCase] = [
    ScalarCase(
        "s_movk_i32", ("simm16",), "sign extension, SCC kept", reference=lambda d, k, c: (k & M32, None)
    ),
    ScalarCase(
        "s_cmovk_i32", ("simm16",), "under SCC", reference=lambda d, k, c: (k & M32 if c else d, None)
    ),
    ScalarCase(
        "s_addk_i32",
        ("simm16",),
        "signed overflow",
        reference=lambda d, k, c: (d + k & M32, overflow(s(d) + k)),
    ),
    ScalarCase("s_mulk_i32", ("simm16",), "SCC kept", reference=lambda d, k, c: (d * k & M32, None)),
    *(
        ScalarCase(
            f"s_cmpk_{n}_{k}32",
            ("imm16",),
            "SCC; signed or zero-extended immediate",
            result=0,
            reference=(lambda d, k, c, f=f: (None, int(f(s(d), k))))
            if k == "i"
            else (lambda d, k, c, f=f: (None, int(f(d, k & 0xFFFF)))),
        )
        for n, f in COMPARES.items()
        for k in "iu"
    ),
]


@pytest.mark.parametrize("case", implemented(SOPK), ids=case_id)
def test_scalar_immediate(case: ScalarCase) -> None:
    report = Report(case.mnemonic)
    registers = (0, 1, 0x7FFFFFFF, 0x80000000, M32, 0xFFFF8000, 0x8000, 0x7FFF, 0xFFFF, 12345)
    for immediate in (0, 1, -1, 32767, -32768, 100):
        unsigned = "_u32" in case.mnemonic
        text = hex(immediate & 0xFFFF)
        for scc in (0, 1):
            lines, sgprs = [], {}
            for i, value in enumerate(registers):
                sgprs[2 * i] = value
                lines += [
                    f"s_cmp_eq_u32 0, {1 - scc}",
                    f"{case.mnemonic} s{2 * i}, {text}",
                    f"s_cselect_b32 s{2 * i + 1}, 1, 0",
                ]
            result = run("\n".join(lines), sgprs=sgprs)
            for i, value in enumerate(registers):
                want, new_scc = case.reference(value, immediate & 0xFFFF if unsigned else immediate, scc)
                want = value if want is None else want
                got, got_scc = int(result.sgpr(2 * i)), int(result.sgpr(2 * i + 1))
                want_scc = scc if new_scc is None else new_scc
                report.check(
                    (got, got_scc) == (want, want_scc),
                    lambda v=value, k=immediate, g=(got, got_scc), w=(want, want_scc): (
                        f"{case.mnemonic} {v:#x}, {k}: got {g}, want {w}"
                    ),
                )
    report.finish()


SAVEEXEC: dict[str, Callable[[int, int], int]] = {
    "s_and_saveexec_b64": lambda a, e: a & e, "s_or_saveexec_b64": lambda a, e: a | e,
    "s_xor_saveexec_b64": lambda a, e: a ^ e, "s_andn2_saveexec_b64": lambda a, e: a & ~e,
    "s_orn2_saveexec_b64": lambda a, e: a | ~e, "s_nand_saveexec_b64": lambda a, e: ~(a & e),
    "s_nor_saveexec_b64": lambda a, e: ~(a | e), "s_xnor_saveexec_b64": lambda a, e: ~(a ^ e),
    "s_andn1_saveexec_b64": lambda a, e: ~a & e, "s_orn1_saveexec_b64": lambda a, e: ~a | e,
    "s_andn1_wrexec_b64": lambda a, e: ~a & e, "s_andn2_wrexec_b64": lambda a, e: a & ~e,
}  # fmt: skip
EXEC_CASES: list[Case] = [
    Case(name, ("sgpr", "vcc"), "old or new exec saved, new exec, SCC") for name in SAVEEXEC
]


@pytest.mark.parametrize("case", implemented(EXEC_CASES), ids=case_id)
def test_saveexec(case: Case) -> None:
    for a in (0, 0xF0F0F0F0_12345678, M64, 0x0123456789ABCDEF):
        for e in (M64, 0xFEDCBA9876543210, 1):
            text = (
                f"{case.mnemonic} s[4:5], s[2:3]\ns_cselect_b32 s6, 1, 0\n"
                "s_mov_b64 s[8:9], exec\ns_mov_b64 exec, -1"
            )
            result = run(text, sgprs={2: a & M32, 3: a >> 32}, exec_mask=e)
            new = SAVEEXEC[case.mnemonic](a, e) & M64
            saved = new if "wrexec" in case.mnemonic else e
            got = [int(result.sgpr(i)) | int(result.sgpr(i + 1)) << 32 for i in (4, 8)]
            assert got == [saved, new], (hex(a), hex(e), [hex(g) for g in got], hex(new))
            assert int(result.sgpr(6)) == int(new != 0)


CASES: list[Case] = [*LOGIC, *ARITHMETIC, *UNARY, *COMPARE, *SOPK, *EXEC_CASES]
