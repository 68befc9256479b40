# SPDX-License-Identifier: Apache-2.0
"""MX formats against exact arithmetic (fractions) and the published code tables."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from kernellib.numerics import mx

SEED = 20260801
print(f"seed {SEED}")

# OCP MX v1.0, table 5 and 6: every positive value of e2m1, and landmarks of e4m3.
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3_LANDMARKS = {0x00: 0.0, 0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x7E: 448.0}


def exact_scale_exponent(amax: float, max_normal: int) -> int:
    """ceil(log2(amax / max_normal)), in exact arithmetic."""
    ratio = Fraction(amax) / max_normal
    exponent = math.floor(math.log2(ratio)) - 2
    while Fraction(2) ** exponent < ratio:
        exponent += 1
    return exponent


@pytest.mark.parametrize("element", [mx.E4M3, mx.E2M1], ids=lambda e: e.name)
def test_code_tables(element: mx.ElementFormat) -> None:
    if element is mx.E2M1:
        values = mx.decode(np.arange(16, dtype=np.uint8), element)
        assert values.tolist() == E2M1_VALUES + [-v for v in E2M1_VALUES]
        assert math.copysign(1.0, values[8]) == -1.0
    else:
        for code, value in E4M3_LANDMARKS.items():
            assert mx.decode(np.uint8([code, code | 0x80]), element).tolist() == [value, -value]
        assert np.isnan(mx.decode(np.uint8([0x7F, 0xFF]), element)).all()


@pytest.mark.parametrize("element", [mx.E4M3, mx.E2M1], ids=lambda e: e.name)
def test_scale_rule_is_exact(element: mx.ElementFormat) -> None:
    rng = np.random.default_rng(SEED)
    amax = np.ldexp(rng.uniform(1.0, 2.0, 2000), rng.integers(-100, 120, 2000)).astype(np.float32)
    top = np.ldexp(np.float32(element.max_normal), np.arange(-60, 60))  # the boundary of every binade
    edges = np.concatenate([top, np.nextafter(top, np.float32(np.inf)), np.nextafter(top, np.float32(0))])
    for value in np.concatenate([amax, edges]).astype(np.float32):
        wanted = exact_scale_exponent(float(value), int(element.max_normal)) + 127
        assert mx.scale_bytes([value], element)[0] == min(max(wanted, 0), 254), float(value)


@pytest.mark.parametrize("element", [mx.E4M3, mx.E2M1], ids=lambda e: e.name)
def test_elements_are_the_nearest_code_ties_to_even(element: mx.ElementFormat) -> None:
    rng = np.random.default_rng(SEED)
    x = (rng.standard_normal((64, 32)) * np.exp2(rng.integers(-20, 20, (64, 1)))).astype(np.float32)
    q = mx.quantize(x, element)
    values = mx.decode(np.arange(1 << element.bits, dtype=np.uint8), element).astype(np.float64)
    codes = np.arange(values.size)[np.isfinite(values)]
    values = values[np.isfinite(values)]
    scale = np.ldexp(1.0, q.scales.astype(int) - 127)
    target = x.astype(np.float64) / scale
    distance = np.abs(target[..., None] - values)
    best = distance.min(axis=-1)
    got = np.abs(target - mx.decode(q.codes, element))
    assert (got == best).all()
    tied = (distance == best[..., None]).sum(axis=-1) > 1
    tied &= target != 0  # +0 and -0 are equally near
    assert (q.codes[tied] % 2 == 0).all()
    assert np.array_equal(np.signbit(mx.decode(q.codes, element)), np.signbit(x))
    assert codes.size in (254, 16)


def test_ties_occur_and_go_to_even() -> None:
    block = np.zeros(32, np.float32)
    block[:6] = [448, 1.0625, 1.1875, -1.0625, 17, 19]  # halfway between neighbours of e4m3
    q = mx.quantize(block, mx.E4M3)
    assert q.scales[0] == 127
    assert mx.decode(q.codes, mx.E4M3)[:6].tolist() == [448, 1.0, 1.25, -1.0, 16, 20]


@pytest.mark.parametrize("element", [mx.E4M3, mx.E2M1], ids=lambda e: e.name)
def test_zero_block(element: mx.ElementFormat) -> None:
    block = np.zeros(32, np.float32)
    block[3] = -0.0
    q = mx.quantize(block, element)
    assert q.scales[0] == 0
    values = q.dequantize()
    assert (values == 0).all()
    assert np.signbit(values[3])


@pytest.mark.parametrize("element", [mx.E4M3, mx.E2M1], ids=lambda e: e.name)
@pytest.mark.parametrize("amax", [2.0**-149, 2.0**-133, 2.0**-127, 2.0**-126, 2.0**-119, 1e-37])
def test_subnormal_and_tiny_blocks_stay_finite_and_near(element: mx.ElementFormat, amax: float) -> None:
    block = np.linspace(-amax, amax, 32).astype(np.float32)
    q = mx.quantize(block, element)
    # Half the spacing of the format at the scale that was chosen bounds the error.
    step = 2.0**-9 if element is mx.E4M3 else 0.5
    relative = 2.0**-4 if element is mx.E4M3 else 2.0**-2
    bound = np.maximum(step / 2 * math.ldexp(1.0, int(q.scales[0]) - 127), relative * np.abs(block))
    assert (np.abs(q.dequantize() - block) <= bound + 2.0**-149).all()
    assert np.isfinite(q.dequantize()).all()


@pytest.mark.parametrize("element", [mx.E4M3, mx.E2M1], ids=lambda e: e.name)
def test_huge_block_does_not_overflow(element: mx.ElementFormat) -> None:
    block = np.full(32, np.finfo(np.float32).max, np.float32)
    q = mx.quantize(block, element)
    assert q.scales[0] == 254 - element.max_exponent + 1
    # The nearest e4m3 or e2m1 multiple is 2^128: the code is finite, and only fp32 cannot hold the product.
    product = mx.decode(q.codes, element).astype(np.float64) * math.ldexp(1.0, int(q.scales[0]) - 127)
    assert (product == 2.0**128).all()
    assert (
        mx.quantize(np.full(32, 1.75 * 2.0**127), mx.E4M3).dequantize() == np.float32(1.75 * 2.0**127)
    ).all()


@pytest.mark.parametrize("element", [mx.E4M3, mx.E2M1], ids=lambda e: e.name)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_nonfinite_element_makes_its_block_and_no_other_nan(element: mx.ElementFormat, bad: float) -> None:
    x = np.ones((3, 64), np.float32)
    x[1, 40] = bad
    q = mx.quantize(x, element)
    assert q.scales.tolist() == [[q.scales[0, 0]] * 2, [q.scales[0, 0], 255], [q.scales[0, 0]] * 2]
    assert (q.codes[1, 32:] == element.nan_code).all()
    nan = np.isnan(q.dequantize())
    assert nan[1, 32:].all()
    assert nan.sum() == 32


def test_nan_wins_over_larger_neighbours() -> None:
    block = np.full(32, 1e30, np.float32)
    block[31] = np.nan
    assert mx.quantize(block, mx.E4M3).scales[0] == 255


def test_nibbles_round_trip_and_order() -> None:
    rng = np.random.default_rng(SEED)
    codes = rng.integers(0, 16, (5, 64), dtype=np.uint8)
    packed = mx.pack_nibbles(codes)
    assert packed[2, 7] == codes[2, 14] + 16 * codes[2, 15]
    assert np.array_equal(mx.unpack_nibbles(packed), codes)
    # ml_dtypes' own dtype reads the same nibbles
    assert np.array_equal(
        mx.unpack_nibbles(packed).view(ml_dtypes.float4_e2m1fn).astype(np.float32), mx.decode(codes, mx.E2M1)
    )


def test_dequantize_packed_equals_dequantize() -> None:
    rng = np.random.default_rng(SEED)
    q = mx.quantize(rng.standard_normal((7, 96)).astype(np.float32), mx.E2M1)
    assert np.array_equal(mx.dequantize_packed(mx.pack_nibbles(q.codes), q.scales), q.dequantize())


def test_malformed_arrays_are_refused() -> None:
    with pytest.raises(mx.MXFormatError, match="multiple of 32"):
        mx.quantize(np.zeros(33), mx.E4M3)
    with pytest.raises(mx.MXFormatError, match="multiple of 32"):
        mx.quantize(np.float32(1.0), mx.E4M3)
    with pytest.raises(mx.MXFormatError, match="scales got shape"):
        mx.dequantize(np.zeros(64, np.uint8), np.zeros(1, np.uint8), mx.E4M3)
    with pytest.raises(mx.MXFormatError, match="scales got shape"):
        mx.dequantize_packed(np.zeros(32, np.uint8), np.zeros(1, np.uint8))
    with pytest.raises(mx.MXFormatError, match="four bits"):
        mx.pack_nibbles(np.uint8([16, 0]))
    with pytest.raises(mx.MXFormatError, match="even"):
        mx.pack_nibbles(np.uint8([1, 0, 1]))


def test_empty_arrays_pass_through() -> None:
    q = mx.quantize(np.zeros((0, 64), np.float32), mx.E4M3)
    assert q.codes.shape == (0, 64)
    assert q.scales.shape == (0, 2)
    assert q.dequantize().shape == (0, 64)
