# SPDX-License-Identifier: Apache-2.0
"""bf16, fp8, fp6, fp4 and E8M0 of the emulator against ml_dtypes and against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernellib.emulator.arith import bf16, e8m0, fp4, fp6, smallfloat
from kernellib.emulator.arith.smallfloat import E2M1, E2M3, E3M2, E4M3, E5M2, SmallFormat

Array = np.ndarray[Any, Any]
SEED = 20261202
PAIRS = [
    (E4M3, ml_dtypes.float8_e4m3fn),
    (E5M2, ml_dtypes.float8_e5m2),
    (E2M3, ml_dtypes.float6_e2m3fn),
    (E3M2, ml_dtypes.float6_e3m2fn),
    (E2M1, ml_dtypes.float4_e2m1fn),
]
IDS = [fmt.name for fmt, _ in PAIRS]


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def values(rng: np.random.Generator, fmt: SmallFormat) -> Array:
    """Values of every magnitude, all ties and their neighbours, the range's edges, both signs."""
    table = np.sort(fmt.table[np.isfinite(fmt.table)].astype(np.float64))
    middles = (table[:-1] + table[1:]) / 2
    exact = np.concatenate([table, middles, np.float64([table[-1] * s for s in (1.01, 1.07, 2, 1e6)])])
    exact = np.concatenate([exact, np.nextafter(exact.astype(np.float32), np.float32(np.inf))])
    spread = rng.standard_normal(4000) * np.exp2(rng.integers(-20, 20, 4000))
    both = np.concatenate([exact, spread]).astype(np.float32)
    return np.concatenate([both, -both])


@pytest.mark.parametrize(("fmt", "dtype"), PAIRS, ids=IDS)
def test_decode_every_code(fmt: SmallFormat, dtype: Any) -> None:
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    np.testing.assert_array_equal(smallfloat.decode(codes, fmt), codes.view(dtype).astype(np.float32))


@pytest.mark.parametrize(("fmt", "dtype"), PAIRS, ids=IDS)
def test_encode_rounds_to_nearest_even(rng: np.random.Generator, fmt: SmallFormat, dtype: Any) -> None:
    x = values(rng, fmt)
    want = x.astype(dtype).view(np.uint8) & ((1 << fmt.bits) - 1)
    got = smallfloat.encode(x, fmt)
    same = (got == want) | (np.isnan(fmt.table[got]) & np.isnan(fmt.table[want]))
    assert same.all(), [(x[i], hex(got[i]), hex(want[i])) for i in np.nonzero(~same)[0][:5]]


def test_overflow_rules_of_the_isa() -> None:
    x = np.float32([np.nan, np.inf, -np.inf, 1e9, -1e9])
    assert smallfloat.encode(x, E4M3).tolist() == [0x7F, 0x7F, 0xFF, 0x7F, 0xFF]
    assert smallfloat.encode(x, E4M3, saturate=True).tolist() == [0x7F, 0x7E, 0xFE, 0x7E, 0xFE]
    assert smallfloat.encode(x, E5M2).tolist() == [0x7E, 0x7C, 0xFC, 0x7C, 0xFC]
    assert smallfloat.encode(x, E5M2, saturate=True).tolist() == [0x7E, 0x7B, 0xFB, 0x7B, 0xFB]
    for fmt in (E2M3, E3M2, E2M1):
        top = fmt.max_code
        assert smallfloat.encode(x, fmt).tolist() == [top, top, top | fmt.sign_mask, top, top | fmt.sign_mask]


@pytest.mark.parametrize(("fmt", "dtype"), PAIRS, ids=IDS)
def test_scale_divides_when_packing_and_multiplies_when_unpacking(
    rng: np.random.Generator, fmt: SmallFormat, dtype: Any
) -> None:
    x = values(rng, fmt)
    for exponent in (0, 100, 127, 130, 254):
        scale = np.full(x.shape, exponent, np.uint8)
        factor = 2.0 ** (exponent - 127)
        unscaled = smallfloat.encode(x.astype(np.float64) / factor, fmt)
        np.testing.assert_array_equal(smallfloat.encode_scaled(x, fmt, scale), unscaled)
        codes = np.arange(1 << fmt.bits, dtype=np.uint8)
        back = smallfloat.decode_scaled(codes, fmt, np.full(codes.shape, exponent, np.uint8))
        np.testing.assert_array_equal(back, codes.view(dtype).astype(np.float64) * factor)
    nan = np.full(3, 255, np.uint8)
    packed = smallfloat.encode_scaled(np.float32([1, -2, 0]), fmt, nan)
    wanted = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    assert packed.tolist() == [wanted, wanted | fmt.sign_mask, wanted]
    assert np.isnan(smallfloat.decode_scaled(np.uint8([0, 1, 2]), fmt, nan)).all()


@pytest.mark.parametrize(("fmt", "dtype"), PAIRS, ids=IDS)
@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
def test_stochastic_rounding_adds_then_truncates(
    rng: np.random.Generator, fmt: SmallFormat, dtype: Any, source: str
) -> None:
    """Against the definition on exact fractions: the significand plus random / 2**drop, rounded down."""
    mantissa_bits, exponent_bits = {"f32": (23, 8), "f16": (10, 5), "bf16": (7, 8)}[source]
    x = (rng.standard_normal(300) * np.exp2(rng.integers(-9, 3, 300))).astype(np.float32)
    if source == "f16":
        x = x.astype(np.float16).astype(np.float32)
        raw = x.astype(np.float16).view(np.uint16)
    elif source == "bf16":
        raw = bf16.from_f32(x)
        x = bf16.to_f32(raw)
    else:
        raw = x.view(np.uint32)
    random = rng.integers(0, 2**32, 300, dtype=np.uint64).astype(np.uint32)
    got = smallfloat.encode_stochastic_bits(
        raw, random, fmt, source_mantissa_bits=mantissa_bits, source_exponent_bits=exponent_bits
    )
    num_random = mantissa_bits - fmt.mantissa_bits
    for value, r, code in zip(x.tolist(), random.tolist(), got.tolist(), strict=True):
        exact = abs(Fraction(value))
        exponent = fmt.min_exponent
        while Fraction(2) ** (exponent + 1) <= exact:
            exponent += 1
        quantum = Fraction(2) ** (exponent - fmt.mantissa_bits)
        # bits that a shift into a denormal's place drops are gone before the random bits are added
        kept = int(exact / quantum * 2**num_random)
        steps = (kept + (r >> (32 - num_random))) >> num_random
        magnitude = min(((exponent - fmt.min_exponent) << fmt.mantissa_bits) + steps, 1 << 20)
        if magnitude > fmt.max_code:
            magnitude = fmt.max_code if fmt.nan_code is None else (fmt.inf_code or fmt.nan_code)
        assert code == magnitude | (fmt.sign_mask if value < 0 else 0), (value, r)


def test_next_random_is_a_shift_register() -> None:
    state, seen = 1, []
    for _ in range(40):
        state = (state << 1 & 0xFFFFFFFF) ^ (197 if state >> 31 else 0)
        seen.append(state)
    got = np.uint32([1])
    for want in seen:
        got = smallfloat.next_random(got)
        assert int(got[0]) == want


def test_bf16_against_ml_dtypes(rng: np.random.Generator) -> None:
    x = rng.integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate(
        [x, np.uint32([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00000001, 0x00008000]).view(np.float32)]
    )
    with np.errstate(invalid="ignore"):  # signalling NaN among the bits
        want = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    got = bf16.from_f32(x)
    nan = np.isnan(x)
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert np.isnan(bf16.to_f32(got[nan])).all()
    assert bf16.from_f32(np.uint32([0x7F800001, 0xFFC12345]).view(np.float32)).tolist() == [0x7FC0, 0xFFC1]
    codes = np.arange(1 << 16, dtype=np.uint16)
    np.testing.assert_array_equal(bf16.to_f32(codes), codes.view(ml_dtypes.bfloat16).astype(np.float32))


def test_e8m0_against_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(e8m0.decode(codes), codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    scales = np.float32([1.0, 1.999, -4.0, 0.0, 2.0**-149, np.inf])
    assert e8m0.exponent_of_f32(scales.view(np.uint32)).tolist() == [127, 127, 129, 0, 0, 255]


def test_packing_of_six_and_four_bit_items_is_bit_order(rng: np.random.Generator) -> None:
    codes = rng.integers(0, 64, (32, 3)).astype(np.uint8)
    for column in range(3):
        word = sum(int(c) << (6 * i) for i, c in enumerate(codes[:, column]))
        assert fp6.pack(codes)[:, column].tolist() == [word >> (32 * r) & 0xFFFFFFFF for r in range(6)]
    np.testing.assert_array_equal(fp6.unpack(fp6.pack(codes)), codes)
    nibbles = codes & 15
    assert fp4.pack(nibbles)[0, 0] == sum(int(c) << (4 * i) for i, c in enumerate(nibbles[:8, 0]))
    np.testing.assert_array_equal(fp4.unpack(fp4.pack(nibbles)), nibbles)
