# SPDX-License-Identifier: Apache-2.0
"""Floating-point vector instructions: exact arithmetic, one rounding, special values.

Sources: AMD "CDNA4 Instruction Set Architecture Reference Guide", chapter 12 (pseudocode of each
instruction), table 26 (denormal modes), section 6.2.2 (clamp, and: output modifiers are ignored in IEEE mode
or with output denormals on); IEEE 754-2019 (rounding, minimum/maximum); LLVM, AMDGPUCodeGenPrepare
("v_rcp_f32 and v_rsq_f32 do not support denormals ... worst case error of 1 ulp", "v_rcp_f16 and v_rsq_f16 DO
support denormals"), the matcher of V_FRACT, and GCNSubtarget::zeroesHigh16BitsOfDest (which 16-bit results
clear the upper half on gfx9, and that V_FMA_F16, V_MAD_F16 and V_DIV_FIXUP_F16 keep it).

Beliefs that these inputs prove wrong: fma as multiply then add (products whose rounding decides the sum);
flushing of subnormals; numpy's fmax for V_MAX (a signalling NaN must win, -0 is below +0); maximum3 as max3.
"""

from __future__ import annotations

from fractions import Fraction

import conformance_functions as fn
import conformance_reference as ref
import pytest
from conformance_forms import check_vector_case
from conformance_harness import Case, case_id, implemented
from conformance_reference import F16, F32, F64
from conformance_vector import VectorCase, row

ALL, WIDE = "e32 e64 sdwa dpp", "e32 e64 dpp"
F, FF, FFF = "f32 -> f32", "f32 f32 -> f32", "f32 f32 f32 -> f32"
H, HH, HHH = "f16 -> f16", "f16 f16 -> f16", "f16 f16 f16 -> f16"
D, DD, DDD = "f64 -> f64", "f64 f64 -> f64", "f64 f64 f64 -> f64"
ONE_ULP = Fraction(1)
NO_DENORMALS = "1 ulp, subnormals are zero"

SINGLE: list[VectorCase] = [
    row("v_add_f32", FF, fn.exact(F32, ref.add), ALL, "rounding, signed zero, subnormals, NaN", count=640),
    row(
        "v_sub_f32", FF, fn.exact(F32, fn.subtract), ALL, "rounding, signed zero, subnormals, NaN", count=640
    ),
    row("v_subrev_f32", FF, fn.exact(F32, lambda a, b: fn.subtract(b, a)), ALL, "S1 - S0"),
    row(
        "v_mul_f32",
        FF,
        fn.exact(F32, ref.multiply),
        ALL,
        "rounding into subnormals, overflow, NaN",
        count=640,
    ),
    row("v_mul_legacy_f32", FF, fn.exact(F32, fn.legacy_multiply), checks="0 * inf = 0"),
    row("v_fma_f32", FFF, fn.exact(F32, ref.fma), checks="one rounding", count=640),
    row(
        "v_fmac_f32",
        "f32 f32 old:f32 -> f32",
        fn.exact(F32, ref.fma),
        WIDE,
        "one rounding",
        count=640,
    ),
    row("v_fmamk_f32", FFF, fn.exact(F32, ref.fma), checks="literal factor", literal_at=1),
    row("v_fmaak_f32", FFF, fn.exact(F32, ref.fma), checks="literal addend", literal_at=2),
    row("v_min_f32", FF, fn.minmax(F32, False), ALL, "NaN, signalling NaN, signed zero", count=640),
    row("v_max_f32", FF, fn.minmax(F32, True), ALL, "NaN, signalling NaN, signed zero", count=640),
    row("v_min3_f32", FFF, fn.minmax3(F32, False), checks="NaN, signed zero"),
    row("v_max3_f32", FFF, fn.minmax3(F32, True), checks="NaN, signed zero"),
    row("v_med3_f32", FFF, fn.med3(F32), checks="NaN gives min3"),
    row("v_minimum3_f32", FFF, fn.minmax3_2019(F32, False), checks="NaN propagates, -0 < +0", count=640),
    row("v_maximum3_f32", FFF, fn.minmax3_2019(F32, True), checks="NaN propagates, -0 < +0", count=640),
    row("v_floor_f32", F, fn.rounded(F32, "floor"), ALL),
    row("v_ceil_f32", F, fn.rounded(F32, "ceil"), ALL),
    row("v_trunc_f32", F, fn.rounded(F32, "trunc"), ALL),
    row("v_rndne_f32", F, fn.rounded(F32, "even"), ALL, "halfway to even"),
    row("v_fract_f32", F, fn.fract(F32), ALL, "below 1 for tiny negative inputs"),
    row("v_ldexp_f32", "f32 i32 -> f32", fn.ldexp(F32, 32), checks="rounds into subnormals, overflows"),
    row("v_frexp_mant_f32", F, fn.frexp_mant(F32), ALL, "subnormals normalised"),
    row("v_frexp_exp_i32_f32", "f32 -> i32", fn.frexp_exp(F32, 32), ALL, "subnormals normalised"),
    row(
        "v_div_fixup_f32",
        FFF,
        fn.div_fixup(F32),
        checks="0/0, x/0, inf; middle of the range",
        scalar=False,
        keep=lambda q, d, n: abs((n >> 23 & 255) - (d >> 23 & 255)) < 120 and not ref.is_nan(F32, q),
    ),
    row(
        "v_div_fmas_f32",
        "f32 f32 f32 vcc -> f32",
        fn.div_fmas(F32, 64),
        checks="scales by 2^64 or 2^-64 under vcc",
        scalar=False,
    ),
]
ELEMENTARY: list[VectorCase] = [
    row("v_rcp_f32", F, fn.approximate(F32, fn.reciprocal(F32), ONE_ULP, True), ALL, NO_DENORMALS),
    row("v_rcp_iflag_f32", F, fn.approximate(F32, fn.reciprocal(F32), ONE_ULP, True), ALL, NO_DENORMALS),
    row("v_rsq_f32", F, fn.approximate(F32, fn.reciprocal_root(F32), ONE_ULP, True), ALL, NO_DENORMALS),
    row(
        "v_sqrt_f32",
        F,
        fn.approximate(F32, fn.root(F32), ONE_ULP, False),
        ALL,
        "1 ulp; subnormal inputs not promised",
        keep=lambda a: a & 0x7F800000 != 0 or a & 0x7FFFFF == 0,
    ),
    row("v_exp_f32", F, fn.approximate(F32, fn.exponential(F32), ONE_ULP, True), ALL, NO_DENORMALS),
    row("v_log_f32", F, fn.approximate(F32, fn.logarithm(F32), ONE_ULP, True), ALL, NO_DENORMALS),
    row(
        "v_rcp_f16", H, fn.approximate(F16, fn.reciprocal(F16), ONE_ULP, False), ALL, "1 ulp, subnormals kept"
    ),
    row(
        "v_rsq_f16",
        H,
        fn.approximate(F16, fn.reciprocal_root(F16), ONE_ULP, False),
        ALL,
        "1 ulp, subnormals kept",
    ),
    row("v_sqrt_f16", H, fn.approximate(F16, fn.root(F16), ONE_ULP, False), ALL, "1 ulp"),
    row("v_exp_f16", H, fn.approximate(F16, fn.exponential(F16), ONE_ULP, False), ALL, "1 ulp"),
    row(
        "v_log_f16",
        H,
        fn.approximate(F16, fn.logarithm(F16), ONE_ULP, False, Fraction(1, 1 << 12)),
        ALL,
        "1 ulp",
    ),
    row(
        "v_rcp_f64",
        D,
        fn.approximate(F64, fn.reciprocal(F64), Fraction(1 << 29), False),
        WIDE,
        "2^29 ulp",
        keep=lambda a: 1 < (a >> 52 & 2047) < 2044 or a << 1 & ref.M64 in (0, 0x7FF << 53),
    ),
    row(
        "v_rsq_f64",
        D,
        fn.approximate(F64, fn.reciprocal_root(F64), Fraction(1 << 29), False),
        WIDE,
        "2^29 ulp",
        keep=lambda a: (a >> 52 & 2047) > 0,
    ),
    row(
        "v_sqrt_f64",
        D,
        fn.approximate(F64, fn.root(F64), Fraction(1 << 29), False),
        WIDE,
        "2^29 ulp",
        keep=lambda a: (a >> 52 & 2047) > 0,
    ),
]


def trig(fmt: ref.Format, quarter: int, absolute: Fraction) -> fn.Function:
    """sin or cos of a number of turns."""
    return fn.approximate(
        fmt,
        lambda a: fmt.nan_bits if a.kind == "inf" else fn.sine_of_turns(a.fraction, quarter),
        Fraction(2),
        False,
        absolute,
    )


def within_turns(limit: int, mbits: int, bias: int) -> object:
    """Keep |x| <= limit turns, the documented domain."""
    exponents = (1 << (31 - mbits if mbits == 23 else 15 - mbits)) - 1
    return lambda a: (
        (a >> mbits & exponents) <= bias + limit.bit_length() - 2 or (a >> mbits & exponents) == exponents
    )


TRIG: list[VectorCase] = [
    row(
        f"v_{name}_{t}",
        f"{t} -> {t}",
        trig(fmt, quarter, error),
        ALL,
        "turns in [-256, 256], absolute error",
        keep=within_turns(256, fmt.mbits, fmt.bias),
        count=256,
    )
    for name, quarter in (("sin", 0), ("cos", 1))
    for t, fmt, error in (("f32", F32, Fraction(1, 1 << 18)), ("f16", F16, Fraction(1, 1 << 9)))
]
HALF: list[VectorCase] = [
    row("v_add_f16", HH, fn.exact(F16, ref.add), ALL, "rounding, subnormals, op_sel", count=640),
    row("v_sub_f16", HH, fn.exact(F16, fn.subtract), ALL, "rounding, subnormals, op_sel"),
    row("v_subrev_f16", HH, fn.exact(F16, lambda a, b: fn.subtract(b, a)), ALL, "S1 - S0"),
    row("v_mul_f16", HH, fn.exact(F16, ref.multiply), ALL, "rounding, subnormals, overflow", count=640),
    row(
        "v_fma_f16",
        HHH,
        fn.exact(F16, ref.fma),
        checks="one rounding, keeps the upper half",
        high="keep",
        count=640,
    ),
    row(
        "v_fma_legacy_f16",
        HHH,
        fn.exact(F16, ref.fma),
        checks="one rounding, clears the upper half",
        op_sel=False,
    ),
    row(
        "v_mad_f16", HHH, fn.multiply_then_add(F16), checks="two roundings, keeps the upper half", high="keep"
    ),
    row("v_mad_legacy_f16", HHH, fn.multiply_then_add(F16), checks="two roundings", op_sel=False),
    row("v_mac_f16", "f16 f16 old:f16 -> f16", fn.multiply_then_add(F16), WIDE, "two roundings"),
    row("v_madmk_f16", HHH, fn.multiply_then_add(F16), checks="literal factor", literal_at=1),
    row("v_madak_f16", HHH, fn.multiply_then_add(F16), checks="literal addend", literal_at=2),
    row(
        "v_div_fixup_legacy_f16",
        HHH,
        fn.div_fixup(F16),
        checks="special quotients, clears the upper half",
        op_sel=False,
        scalar=False,
        keep=lambda q, d, n: not ref.is_nan(F16, q),
    ),
    row("v_min_f16", HH, fn.minmax(F16, False), ALL, "NaN, signalling NaN, signed zero"),
    row("v_max_f16", HH, fn.minmax(F16, True), ALL, "NaN, signalling NaN, signed zero"),
    row("v_min3_f16", HHH, fn.minmax3(F16, False), high="any"),
    row("v_max3_f16", HHH, fn.minmax3(F16, True), high="any"),
    row("v_med3_f16", HHH, fn.med3(F16), high="any"),
    row("v_floor_f16", H, fn.rounded(F16, "floor"), ALL),
    row("v_ceil_f16", H, fn.rounded(F16, "ceil"), ALL),
    row("v_trunc_f16", H, fn.rounded(F16, "trunc"), ALL),
    row("v_rndne_f16", H, fn.rounded(F16, "even"), ALL, "halfway to even"),
    row("v_fract_f16", H, fn.fract(F16), ALL, "below 1 for tiny negative inputs"),
    row("v_ldexp_f16", "f16 i16 -> f16", fn.ldexp(F16, 16), ALL, "rounds into subnormals"),
    row("v_frexp_mant_f16", H, fn.frexp_mant(F16), ALL),
    row("v_frexp_exp_i16_f16", "f16 -> i16", fn.frexp_exp(F16, 16), ALL),
    row(
        "v_div_fixup_f16",
        HHH,
        fn.div_fixup(F16),
        checks="special quotients",
        high="keep",
        scalar=False,
        keep=lambda q, d, n: not ref.is_nan(F16, q),
    ),
]
DOUBLE: list[VectorCase] = [
    row("v_add_f64", DD, fn.exact(F64, ref.add), checks="rounding, subnormals", count=640),
    row("v_mul_f64", DD, fn.exact(F64, ref.multiply), checks="rounding, subnormals", count=640),
    row("v_fma_f64", DDD, fn.exact(F64, ref.fma), checks="one rounding", count=640),
    row("v_fmac_f64", "f64 f64 old:f64 -> f64", fn.exact(F64, ref.fma), WIDE, "one rounding"),
    row("v_min_f64", DD, fn.minmax(F64, False), checks="NaN, signed zero"),
    row("v_max_f64", DD, fn.minmax(F64, True), checks="NaN, signed zero"),
    row("v_floor_f64", D, fn.rounded(F64, "floor"), WIDE),
    row("v_ceil_f64", D, fn.rounded(F64, "ceil"), WIDE),
    row("v_trunc_f64", D, fn.rounded(F64, "trunc"), WIDE),
    row("v_rndne_f64", D, fn.rounded(F64, "even"), WIDE),
    row("v_fract_f64", D, fn.fract(F64), WIDE),
    row("v_ldexp_f64", "f64 i32 -> f64", fn.ldexp(F64, 32), checks="rounds into subnormals"),
    row("v_frexp_mant_f64", D, fn.frexp_mant(F64), WIDE),
    row("v_frexp_exp_i32_f64", "f64 -> i32", fn.frexp_exp(F64, 32), WIDE),
    row(
        "v_div_fixup_f64",
        DDD,
        fn.div_fixup(F64),
        checks="special quotients",
        scalar=False,
        keep=lambda q, d, n: abs((n >> 52 & 2047) - (d >> 52 & 2047)) < 900 and not ref.is_nan(F64, q),
    ),
    row(
        "v_div_fmas_f64",
        "f64 f64 f64 vcc -> f64",
        fn.div_fmas(F64, 128),
        checks="scales by 2^128 or 2^-128 under vcc",
        scalar=False,
    ),
]
CASES: list[Case] = [*SINGLE, *ELEMENTARY, *TRIG, *HALF, *DOUBLE]


@pytest.mark.parametrize("case", implemented(CASES), ids=case_id)
def test_vector_float(case: VectorCase) -> None:
    check_vector_case(case)
