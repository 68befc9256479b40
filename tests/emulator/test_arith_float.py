# SPDX-License-Identifier: Apache-2.0
"""Float arithmetic of the emulator against exact rational arithmetic and IEEE rules stated here anew."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kernellib.emulator.arith import convert, division, float32, rounding, select, transcendental

Array = np.ndarray[Any, Any]
SEED = 20261201


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def random_bits(rng: np.random.Generator, dtype: type, count: int) -> Array:
    """Floats of every kind: uniformly random bits."""
    size = np.dtype(dtype).itemsize
    return rng.integers(0, 256, count * size, dtype=np.uint8).view(dtype)


def near_one(rng: np.random.Generator, count: int, exponents: tuple[int, int]) -> Array:
    scale = np.exp2(rng.integers(*exponents, count).astype(np.float64))
    return (rng.integers(-(2**24), 2**24, count) * scale).astype(np.float32)


def round_to(value: Fraction, mantissa_bits: int, min_exponent: int, max_exponent: int) -> float:
    """Nearest-even rounding of an exact nonzero value to a binary format, denormals included."""
    magnitude = abs(value)
    exponent = max(
        math.floor(math.log2(magnitude.numerator) - math.log2(magnitude.denominator)), min_exponent
    )
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    while exponent > min_exponent and Fraction(2) ** exponent > magnitude:
        exponent -= 1
    quantum = Fraction(2) ** (exponent - mantissa_bits)
    steps = round(magnitude / quantum)  # Fraction rounds half to even
    result = steps * quantum
    if result >= Fraction(2) ** (max_exponent + 1):
        return math.inf if value > 0 else -math.inf
    return float(result) if value > 0 else -float(result)


def check_fma(
    got: Array, a: Array, b: Array, c: Array, mantissa_bits: int, exponents: tuple[int, int]
) -> None:
    checked = 0
    for lane in range(len(got)):
        x, y, z = float(a[lane]), float(b[lane]), float(c[lane])
        if not all(map(math.isfinite, (x, y, z))):
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        want = round_to(exact, mantissa_bits, *exponents) if exact else x * y + z
        assert struct.pack("d", got[lane]) == struct.pack("d", want), (lane, x, y, z, got[lane], want)
        checked += 1
    assert checked > len(got) // 2


F32_EXPONENTS, F64_EXPONENTS, F16_EXPONENTS = (-126, 127), (-1022, 1023), (-14, 15)


@pytest.mark.parametrize("kind", ["bits", "cancelling", "ties", "denormal_ties", "bf16"])
def test_fma32_rounds_once(rng: np.random.Generator, kind: str) -> None:
    count = 1500
    if kind == "bits":
        a, b, c = (random_bits(rng, np.float32, count) for _ in range(3))
    elif kind == "cancelling":
        a, b = near_one(rng, count, (-30, -20)), near_one(rng, count, (-30, -20))
        c = -(a * b) * (1 + rng.integers(-2, 3, count).astype(np.float32) * np.float32(2**-23))
    elif kind == "ties":
        # c plus half of its last place, plus or minus far less than float64 can hold beside c
        c = (1 + rng.integers(0, 2**23, count) * 2.0**-23).astype(np.float32)
        a = (2.0**-12 * (1 + 2.0 ** -rng.integers(14, 24, count).astype(float))).astype(np.float32)
        b = (2.0**-12 * (1 - 2.0 ** -rng.integers(14, 24, count).astype(float))).astype(np.float32)
    elif kind == "denormal_ties":
        c = (rng.integers(0, 2**23, count) * 2.0**-149).astype(np.float32)
        a = (2.0**-75 * (1 + 2.0 ** -rng.integers(14, 24, count).astype(float))).astype(np.float32)
        b = (2.0**-75 * (1 - 2.0 ** -rng.integers(14, 24, count).astype(float))).astype(np.float32)
    else:
        a, b = (
            (near_one(rng, count, (-24, -20)).view(np.uint32) & 0xFFFF0000).view(np.float32) for _ in range(2)
        )
        c = near_one(rng, count, (-24, -20))
    check_fma(float32.fma32(a, b, c), a, b, c, 23, F32_EXPONENTS)


def test_fma32_bf16_operands_whose_products_leave_the_range(rng: np.random.Generator) -> None:
    """The short cut for bf16 operands must not be taken where a product overflows or is denormal."""
    scale = np.exp2(np.repeat([-70, 62, -63], 100).astype(np.float64))
    a, b = (((1 + rng.integers(0, 64, 300) / 64) * scale).astype(np.float32) for _ in range(2))
    c = np.where(scale > 1, -np.float32(2.0**127), np.float32(1e-40)).astype(np.float32)
    check_fma(float32.fma32(a, b, c), a, b, c, 23, F32_EXPONENTS)


@pytest.mark.parametrize("alias", [0, 1, 2])
def test_fma32_may_write_over_an_operand(rng: np.random.Generator, alias: int) -> None:
    for scale in (1.0, 2.0**100, 2.0**-80):
        operands = [(rng.standard_normal(256) * scale).astype(np.float32) for _ in range(3)]
        want = float32.fma32(*(v.copy() for v in operands))
        got = float32.fma32(*operands, out=operands[alias])
        assert got is operands[alias]
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_fma32_broadcasts_and_propagates_nan() -> None:
    a = np.arange(128, dtype=np.float32).reshape(2, 64)
    scalar, constant = np.array([[2.0], [3.0]], np.float32), np.array(0.5, np.float32)
    np.testing.assert_array_equal(float32.fma32(a, scalar, constant), a * scalar + constant)
    payload = np.uint32([0x7FA00001, 0xFF800005]).view(np.float32)
    for position in range(3):
        operands = [np.float32([1, 1])] * 3
        operands[position] = payload
        assert float32.fma32(*operands).view(np.uint32).tolist() == [0x7FE00001, 0xFFC00005]


def test_fma64_rounds_once(rng: np.random.Generator) -> None:
    count = 1000
    for scale in ((-3, 3), (-60, 60), (-500, 500)):
        a, b, c = (rng.standard_normal(count) * np.exp2(rng.integers(*scale, count)) for _ in range(3))
        check_fma(float32.fma64(a, b, c), a, b, c, 52, F64_EXPONENTS)
        c = -(a * b) * (1 + 2.0**-52)
        check_fma(float32.fma64(a, b, c), a, b, c, 52, F64_EXPONENTS)
    a, b, c = (random_bits(rng, np.float64, 300) for _ in range(3))
    check_fma(float32.fma64(a, b, c), a, b, c, 52, F64_EXPONENTS)


def test_f16_operations_round_once(rng: np.random.Generator) -> None:
    a, b, c = (random_bits(rng, np.float16, 4000) for _ in range(3))
    check_fma(float32.fma16(a, b, c), a, b, c, 10, F16_EXPONENTS)
    one = np.float16([1])
    check_fma(float32.add16(a, b), a, np.broadcast_to(one, a.shape), b, 10, F16_EXPONENTS)


def test_clamp_and_output_modifier() -> None:
    x = np.float32([-1, -0.0, 0.25, 1.5, np.inf, -np.inf, np.nan])
    assert (
        float32.clamp01(x).view(np.uint32).tolist()
        == np.float32([0, 0, 0.25, 1, 1, 0, 0]).view(np.uint32).tolist()
    )
    assert np.isnan(float32.clamp01(x, dx10_clamp=False)[-1])
    modified = float32.output_modifier(np.float32([-0.0, 1.5, 2.0**-126, 1e38]), 4.0)
    assert modified.view(np.uint32).tolist() == np.float32([0, 6, 2.0**-124, np.inf]).view(np.uint32).tolist()
    assert float32.output_modifier(np.float32([2.0**-126]), 0.5)[0] == 0


# -------------------------------------------------------------------------------------------------- selection
def test_minimum_and_maximum_rules_for_nan_and_zero() -> None:
    quiet, signaling = np.uint32([0x7FC00001, 0x7F800001]).view(np.float32)
    one = np.float32(1)
    cases = [  # a, b, min, max with ieee
        (one, quiet, 0x3F800000, 0x3F800000), (quiet, one, 0x3F800000, 0x3F800000),
        (signaling, one, 0x7FC00001, 0x7FC00001), (one, signaling, 0x7FC00001, 0x7FC00001),
        (np.float32(-0.0), np.float32(0.0), 0x80000000, 0),
        (np.float32(0.0), np.float32(-0.0), 0x80000000, 0),
    ]  # fmt: skip
    for first, second, smallest, largest in cases:
        a, b = np.float32([first]), np.float32([second])
        assert select.minimum_number(a, b).view(np.uint32)[0] == smallest
        assert select.maximum_number(a, b).view(np.uint32)[0] == largest
    signaling_array = np.uint32([0x7F800001]).view(np.float32)
    assert select.minimum_number(signaling_array, np.float32([1]), ieee=False)[0] == 1
    assert np.isnan(select.maximum3(np.float32([1]), np.float32([np.nan]), np.float32([2]))[0])
    assert select.maximum3(np.float32([-0.0]), np.float32([0.0]), np.float32([-0.0])).view(np.uint32)[0] == 0
    assert select.minimum3(np.float32([3]), np.float32([2]), np.float32([7]))[0] == 2


def test_median_is_the_middle_value(rng: np.random.Generator) -> None:
    a, b, c = (rng.integers(-3, 4, 500).astype(np.float32) for _ in range(3))
    np.testing.assert_array_equal(select.median3(a, b, c), np.sort([a, b, c], axis=0)[1])
    with_nan = select.median3(np.float32([5]), np.float32([np.nan]), np.float32([2]))
    assert with_nan[0] == 2  # CDNA4 ISA: any NaN gives v_min3


def test_class_bits() -> None:
    words = [
        0x7F800001,
        0x7FC00000,
        0xFF800000,
        0xBF800000,
        0x80000001,
        0x80000000,
        0,
        1,
        0x3F800000,
        0x7F800000,
    ]
    x = np.uint32(words).view(np.float32)
    for bit in range(10):
        got = select.compare_class(x, np.full(10, 1 << bit, np.uint32))
        assert np.nonzero(got)[0].tolist() == [bit]


# --------------------------------------------------------------------------------------- rounding and scaling
def test_integral_rounding_against_integers(rng: np.random.Generator) -> None:
    x = (rng.integers(-4000, 4000, 800) / 8).astype(np.float32)
    exact = [Fraction(float(v)) for v in x]
    assert rounding.floor(x).tolist() == [math.floor(v) for v in exact]
    assert rounding.ceil(x).tolist() == [math.ceil(v) for v in exact]
    assert rounding.trunc(x).tolist() == [math.trunc(v) for v in exact]
    assert rounding.round_even(x).tolist() == [round(v) for v in exact]
    assert rounding.fract(x).tolist() == [float(v - math.floor(v)) for v in exact]
    assert rounding.fract(np.float32([-1e-9])).view(np.uint32)[0] == 0x3F7FFFFF


def test_frexp_and_ldexp_undo_each_other(rng: np.random.Generator) -> None:
    x = random_bits(rng, np.float32, 2000)
    mantissa, exponent = rounding.frexp_mantissa(x), rounding.frexp_exponent(x)
    finite = np.isfinite(x) & (x != 0)
    assert np.all((np.abs(mantissa[finite]) >= 0.5) & (np.abs(mantissa[finite]) < 1))
    np.testing.assert_array_equal(rounding.ldexp(mantissa, exponent)[finite], x[finite])
    assert rounding.frexp_exponent(np.float32([np.inf, np.nan, 0.0])).tolist() == [0, 0, 0]
    assert rounding.ldexp(np.float32([1.0]), np.int32([2**31 - 1]))[0] == np.inf


# --------------------------------------------------------------------------------------------- transcendental
def test_transcendental_tables_of_the_isa() -> None:
    cases = {
        transcendental.exp2: {0xFF800000: 0, 0x80000000: 0x3F800000, 0x7F800000: 0x7F800000},
        transcendental.log2: {0xFF800000: 0xFFC00000, 0xBF800000: 0xFFC00000, 0x80000000: 0xFF800000,
                              0: 0xFF800000, 0x3F800000: 0, 0x7F800000: 0x7F800000},
        transcendental.reciprocal: {0xFF800000: 0x80000000, 0xC0000000: 0xBF000000, 0x80000000: 0xFF800000,
                                    0: 0x7F800000, 0x7F800000: 0},
        transcendental.reciprocal_sqrt: {0xFF800000: 0xFFC00000, 0x80000000: 0xFF800000, 0: 0x7F800000,
                                         0x40800000: 0x3F000000, 0x7F800000: 0},
        transcendental.square_root: {0xFF800000: 0xFFC00000, 0x80000000: 0x80000000, 0: 0,
                                     0x40800000: 0x40000000, 0x7F800000: 0x7F800000},
        transcendental.sine_turns: {0xFF800000: 0xFFC00000, 0xFF7FFFFF: 0, 0x80000000: 0x80000000,
                                    0x3E800000: 0x3F800000, 0x7F800000: 0xFFC00000},
        transcendental.cosine_turns: {0xFF800000: 0xFFC00000, 0xFF7FFFFF: 0x3F800000, 0x80000000: 0x3F800000,
                                      0x3E800000: 0, 0x7F800000: 0xFFC00000},
    }  # fmt: skip
    for function, table in cases.items():
        source = np.uint32(list(table)).view(np.float32)
        got = function(source).view(np.uint32).tolist()
        assert got == list(table.values()), function.__name__


def test_f32_transcendentals_flush_denormals_and_f16_do_not() -> None:
    tiny = np.uint32([1, 0x80000001]).view(np.float32)
    assert transcendental.reciprocal(tiny).tolist() == [np.inf, -np.inf]
    assert transcendental.square_root(tiny).view(np.uint32).tolist() == [0, 0x80000000]
    assert transcendental.exp2(np.float32([-126.5]))[0] == 0
    assert transcendental.reciprocal(np.float32([2.0**127]))[0] == 0
    assert transcendental.square_root(np.uint16([1]).view(np.float16))[0] == np.float16(2.0**-12)
    assert transcendental.exp2(np.float16([-20]))[0] == np.float16(2.0**-20)


def test_ulp_bias_moves_results_by_ulps() -> None:
    x = np.float32([3.0, -7.0])
    plain, moved = transcendental.reciprocal(x), transcendental.reciprocal(x, ulp_bias=1)
    assert (moved.view(np.int32) - plain.view(np.int32)).tolist() == [1, 1]


# --------------------------------------------------------------------------------------------------- division
def divide(n: Array, d: Array) -> Array:
    """The expansion compilers emit for a correctly rounded float32 division."""
    fma = float32.fma32
    scaled_d, _ = division.div_scale(d, d, n)
    scaled_n, back = division.div_scale(n, d, n)
    r = transcendental.reciprocal(scaled_d)
    r = fma(fma(-scaled_d, r, np.ones_like(r)), r, r)
    with np.errstate(all="ignore"):
        q = scaled_n * r
    q = fma(fma(-scaled_d, q, scaled_n), r, q)
    return division.div_fixup(division.div_fmas(fma(-scaled_d, q, scaled_n), r, q, back), d, n)


@pytest.mark.parametrize("kind", ["normal", "bits", "denormal quotients"])
def test_division_sequence_is_correctly_rounded(rng: np.random.Generator, kind: str) -> None:
    count = 20000
    n, d = (random_bits(rng, np.float32, count) for _ in range(2))
    if kind == "normal":
        n, d = (rng.standard_normal(count).astype(np.float32) for _ in range(2))
    elif kind == "denormal quotients":
        n = (rng.standard_normal(count) * 2.0**-100).astype(np.float32)
        d = (rng.standard_normal(count) * np.exp2(rng.integers(20, 60, count))).astype(np.float32)
    with np.errstate(all="ignore"):
        want = n / d
    got = divide(n, d)
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), [(n[i], d[i], got[i], want[i]) for i in np.nonzero(~same)[0][:5]]


# ------------------------------------------------------------------------------------------------ conversions
def test_float_to_integer_saturates() -> None:
    x = np.float32([np.nan, np.inf, -np.inf, 2147483520.0, 3e9, -3e9, -0.9, 1.9, 4294967040.0])
    assert convert.float_to_int(x, np.int32).tolist() == [
        0, 2**31 - 1, -(2**31), 2147483520, 2**31 - 1, -(2**31), 0, 1, 2**31 - 1
    ]  # fmt: skip
    assert convert.float_to_int(x, np.uint32).tolist() == [
        0, 2**32 - 1, 0, 2147483520, 3000000000, 0, 0, 1, 4294967040
    ]  # fmt: skip


def test_f16_conversions(rng: np.random.Generator) -> None:
    x = np.concatenate([random_bits(rng, np.float32, 4000), near_one(rng, 4000, (-44, -8))])
    x = x[~np.isnan(x)]
    for saturate in (False, True):
        got = convert.f32_to_f16(x, saturate)
        for value, result in zip(x.tolist(), got.tolist(), strict=True):
            if value and math.isfinite(value):
                want = round_to(Fraction(value), 10, *F16_EXPONENTS)
                want = math.copysign(65504.0, value) if saturate and math.isinf(want) else want
                assert result == want, (value, result, want)
    toward_zero = convert.f32_to_f16_toward_zero(x)
    finite = np.isfinite(x)
    assert np.all(np.abs(toward_zero[finite].astype(np.float64)) <= np.abs(x[finite].astype(np.float64)))
    assert np.all(np.isfinite(toward_zero[finite]))
    with np.errstate(over="ignore"):
        step = np.nextafter(np.abs(toward_zero[finite]), np.float16(np.inf)).astype(np.float64)
    assert np.all(step > np.abs(x[finite].astype(np.float64)))


def test_stochastic_rounding_of_f16_and_bf16_is_unbiased_and_bounded(rng: np.random.Generator) -> None:
    random = rng.integers(0, 2**32, 40000, dtype=np.uint64).astype(np.uint32)
    for value in (1.0003, -3.1415927, 2.0**-15 * 1.0004, 2.0**-20 * 1.3):
        x = np.full(random.shape, value, np.float32)
        results = convert.f16_stochastic(x, random).astype(np.float64)
        assert set(np.unique(results)) <= {
            float(np.nextafter(np.float16(value), np.float16(s))) for s in (9, -9)
        } | {float(np.float16(value))}
        assert abs(results.mean() - float(x[0])) < 0.02 * (results.max() - results.min())
    assert convert.f16_stochastic(np.float32([np.inf, 65519.0]), np.uint32([0, 0])).tolist() == [
        np.inf,
        65504.0,
    ]
    exact = np.float32([1.5, -0.25])
    assert convert.bf16_stochastic(exact, np.uint32([2**32 - 1] * 2)).tolist() == [0x3FC0, 0xBE80]
