# SPDX-License-Identifier: Apache-2.0
"""Division: V_DIV_SCALE by its definition, and the sequences that compilers emit, correctly rounded.

Sources: AMD "CDNA4 Instruction Set Architecture Reference Guide", chapter 12 (V_DIV_SCALE, V_DIV_FMAS,
V_DIV_FIXUP); LLVM, AMDGPULegalizerInfo (the f32 and f64 division sequences); IEEE 754 (the quotient).

The printed definition of V_DIV_SCALE scales a huge denominator up where both 1/S1 and S2/S1 are subnormal,
which overflows; operands of that kind are left out of the table test and covered by the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import conformance_reference as ref
import numpy as np
import pytest
from conformance_harness import (
    EXEC_WITH_HOLES,
    LANES,
    TYPES,
    Case,
    Report,
    case_id,
    compare,
    from_registers,
    implemented,
    rng_for,
    run,
    test_values,
    to_registers,
)
from conformance_reference import F32, F64, Format, decode, encode

WAVES = 16
NUM = WAVES * LANES


@dataclass(frozen=True)
class ScaleCase(Case):
    """V_DIV_SCALE of a format; `power` is log2 of the scale, `near` the exponent distance of overflow."""

    fmt: Format = F32
    power: int = 64
    near: int = 96
    tiny: int = 23


CHECKS = "every branch of the definition; the sequence correctly rounded"
CASES: list[Case] = [
    ScaleCase("v_div_scale_f32", ("vcc", "sgpr"), CHECKS),
    ScaleCase("v_div_scale_f64", ("vcc", "sgpr"), CHECKS, fmt=F64, power=128, near=768, tiny=53),
]


def exponent(fmt: Format, bits: int) -> int:
    """The exponent field."""
    return bits >> fmt.mbits & (1 << fmt.ebits) - 1


def is_subnormal_quotient(fmt: Format, numerator: int, denominator: int) -> bool:
    """Whether a quotient of finite numbers lies below the normal range (and is not zero)."""
    n, d = decode(fmt, numerator), decode(fmt, denominator)
    smallest = ref.Fraction(2) ** (1 - fmt.bias)
    return n.kind == "num" and d.kind == "num" and not n.is_zero and abs(n.fraction / d.fraction) < smallest


def div_scale(  # noqa: PLR0911 (one return per branch of the definition)
    case: ScaleCase, chosen: int, denominator: int, numerator: int
) -> tuple[int, int] | None:
    """(result, scales back), or None where the printed text cannot be meant."""
    fmt = case.fmt
    d, n = decode(fmt, denominator), decode(fmt, numerator)
    if d.kind != "num" or n.kind != "num":
        return None
    if d.is_zero or n.is_zero:
        return fmt.nan_bits, 0
    one = fmt.bias << fmt.mbits
    scaled = {p: encode(fmt, ref.scale_by(decode(fmt, chosen), p)) for p in (case.power, -case.power)}
    up, down = scaled[case.power], scaled[-case.power]
    inverse, quotient = (is_subnormal_quotient(fmt, x, denominator) for x in (one, numerator))
    if exponent(fmt, numerator) - exponent(fmt, denominator) >= case.near:
        return (up if chosen == denominator else chosen), 1
    if exponent(fmt, denominator) == 0:
        return up, 0
    if inverse and quotient:
        return None
    if inverse:
        return down, 0
    if quotient:
        return (up if chosen == numerator else chosen), 1
    if exponent(fmt, numerator) <= case.tiny:
        return up, 0
    return chosen, 0


def operands(fmt: Format, rng: Any) -> tuple[list[int], list[int]]:
    """Denominators and numerators: special values, ordinary ones, and exponents all over."""
    denominators, numerators = test_values([fmt.name, fmt.name], rng, NUM)
    for i in range(0, NUM, 2):
        for column in (denominators, numerators):
            field = rng.randrange(1 << fmt.ebits) if i % 4 else fmt.bias + rng.randint(-3, 3)
            sign = rng.getrandbits(1) << fmt.bits - 1
            column[i] = sign | min(field, (1 << fmt.ebits) - 2) << fmt.mbits | rng.getrandbits(fmt.mbits)
    return denominators, numerators


def registers_of(fmt: Format, denominators: list[int], numerators: list[int]) -> dict[int, Any]:
    """The numerator at v0, the denominator at v2."""
    width = TYPES[fmt.name].registers
    found: dict[int, Any] = {}
    for base, column in ((0, numerators), (2, denominators)):
        for i, array in enumerate(to_registers(column, width, WAVES)):
            found[base + i] = array
    return found


@pytest.mark.parametrize("case", implemented(CASES), ids=case_id)
def test_div_scale(case: ScaleCase) -> None:
    fmt, report, checked = case.fmt, Report(case.mnemonic), 0
    denominators, numerators = operands(fmt, rng_for(case.mnemonic))
    vgprs = registers_of(fmt, denominators, numerators)
    width = TYPES[fmt.name].registers
    name = (lambda b: f"v{b}") if width == 1 else (lambda b: f"v[{b}:{b + 1}]")
    for chosen, mask in ((2, "vcc"), (0, "s[20:21]")):
        text = f"{case.mnemonic} {name(8)}, {mask}, {name(chosen)}, {name(2)}, {name(0)}"
        result = run(f"{text}\ns_nop 4\ns_mov_b64 s[30:31], {mask}", vgprs=vgprs | {8: vgprs[0], 9: vgprs[0]},
                     exec_mask=EXEC_WITH_HOLES, num_waves=WAVES)  # fmt: skip
        got = from_registers([result.vgpr(8 + i) for i in range(width)])
        flags = [np.asarray(result.sgpr(30 + i)).reshape(-1).tolist() for i in (0, 1)]
        for i, (d, n) in enumerate(zip(denominators, numerators, strict=True)):
            wave, lane = divmod(i, LANES)
            want = div_scale(case, d if chosen == 2 else n, d, n)
            if want is None or not EXEC_WITH_HOLES >> lane & 1:
                continue
            flag = int(flags[lane // 32][wave]) >> lane % 32 & 1
            checked += 1
            report.check(
                compare(fmt, got[i], want[0]) and flag == want[1],
                lambda t=text, d=d, n=n, g=got[i], f=flag, w=want: (
                    f"`{t}` denominator {d:#x} numerator {n:#x} gave {g:#x}, {f}, want {w[0]:#x}, {w[1]}"
                ),
            )
    assert checked > NUM
    report.finish()


SEQUENCES = {
    "f32": """v_div_scale_f32 v4, s[20:21], v2, v2, v0
v_div_scale_f32 v5, vcc, v0, v2, v0
v_rcp_f32_e32 v6, v4
v_fma_f32 v7, -v4, v6, 1.0
v_fmac_f32_e32 v6, v7, v6
v_mul_f32_e32 v7, v5, v6
v_fma_f32 v8, -v4, v7, v5
v_fmac_f32_e32 v7, v8, v6
v_fma_f32 v4, -v4, v7, v5
v_div_fmas_f32 v4, v4, v6, v7
v_div_fixup_f32 v12, v4, v2, v0""",
    "f64": """v_div_scale_f64 v[4:5], s[20:21], v[2:3], v[2:3], v[0:1]
v_rcp_f64_e32 v[6:7], v[4:5]
v_fma_f64 v[8:9], -v[4:5], v[6:7], 1.0
v_fma_f64 v[6:7], v[6:7], v[8:9], v[6:7]
v_fma_f64 v[8:9], -v[4:5], v[6:7], 1.0
v_fma_f64 v[6:7], v[6:7], v[8:9], v[6:7]
v_div_scale_f64 v[8:9], vcc, v[0:1], v[2:3], v[0:1]
v_mul_f64 v[10:11], v[8:9], v[6:7]
v_fma_f64 v[4:5], -v[4:5], v[10:11], v[8:9]
v_div_fmas_f64 v[4:5], v[4:5], v[6:7], v[10:11]
v_div_fixup_f64 v[12:13], v[4:5], v[2:3], v[0:1]""",
}


def quotient(fmt: Format, numerator: int, denominator: int) -> int:
    """numerator / denominator, correctly rounded."""
    n, d = decode(fmt, numerator), decode(fmt, denominator)
    sign = (n.sign ^ d.sign) << fmt.bits - 1
    if n.is_nan or d.is_nan or (n.is_zero and d.is_zero) or (n.kind == "inf" and d.kind == "inf"):
        return fmt.nan_bits
    if n.kind == "inf" or d.is_zero:
        return sign | fmt.inf_bits
    if d.kind == "inf" or n.is_zero:
        return sign
    return encode(fmt, ref.from_fraction(n.fraction / d.fraction, 300))


@pytest.mark.parametrize("case", implemented(CASES), ids=case_id)
def test_division_sequence(case: ScaleCase) -> None:
    fmt, report = case.fmt, Report(case.mnemonic)
    denominators, numerators = operands(fmt, rng_for(case.mnemonic, "sequence"))
    result = run(SEQUENCES[fmt.name], vgprs=registers_of(fmt, denominators, numerators), num_waves=WAVES)
    got = from_registers([result.vgpr(12 + i) for i in range(TYPES[fmt.name].registers)])
    for have, d, n in zip(got, denominators, numerators, strict=True):
        want = quotient(fmt, n, d)
        report.check(
            compare(fmt, have, want),
            lambda n=n, d=d, g=have, w=want: f"{n:#x} / {d:#x} gave {g:#x}, want {w:#x}",
        )
    report.finish()
