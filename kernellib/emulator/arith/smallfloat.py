# SPDX-License-Identifier: Apache-2.0
"""Encoding and decoding of floats of 4, 6 and 8 bits, with and without block scales.

A code without its sign counts the format's values from zero upwards, so rounding is integer arithmetic: a
value of exponent e is `((e - min_exponent) << mantissa_bits) + round(value / quantum)`, normal or denormal,
and a carry out of the significand lands in the exponent by itself.

Sources: CDNA4 ISA 7.3 (formats, table 30; overflow rule; "a value that exceeds the FP4/FP6 range is
saturated"; stochastic rounding adds and truncates) and 12.11 (pseudo code: a scale enters through the
exponent of the f32 scale operand alone). NaN and infinity to FP4/FP6, the alignment of random bits and
denormal results follow AMD's host model of the gfx950 conversions (amd_hip_ocp_host.hpp).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kernellib.emulator.arith.formats import Array, bits_of, format_of

SCALE_NAN = 255


@dataclass(frozen=True)
class SmallFormat:
    """A float format of at most 8 bits.

    `max_code` is the largest finite magnitude's code, `inf_code` what an infinity encodes to (None: the
    format has none), `nan_code` what a NaN encodes to (None: it saturates).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max_code: int
    inf_code: int | None
    nan_code: int | None
    table: Array = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", self._decode_table())

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_mask(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def min_exponent(self) -> int:
        return 1 - self.bias

    def _decode_table(self) -> Array:
        codes = np.arange(1 << self.bits)
        magnitude = codes & (self.sign_mask - 1)
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        lead = np.where(exponent > 0, 1 << self.mantissa_bits, 0)
        scale = np.maximum(exponent, 1) - self.bias - self.mantissa_bits
        value = np.ldexp((lead + mantissa).astype(np.float64), scale)
        if self.inf_code is not None:
            value = np.where(magnitude == self.inf_code, np.inf, value)
        value = np.where(magnitude > max(self.max_code, self.inf_code or 0), np.nan, value)
        table = np.where(codes & self.sign_mask, -value, value).astype(np.float32)
        table.setflags(write=False)
        return table


E4M3 = SmallFormat("e4m3", 4, 3, 0x7E, None, 0x7F)
E5M2 = SmallFormat("e5m2", 5, 2, 0x7B, 0x7C, 0x7E)
E2M3 = SmallFormat("e2m3", 2, 3, 0x1F, None, None)
E3M2 = SmallFormat("e3m2", 3, 2, 0x1F, None, None)
E2M1 = SmallFormat("e2m1", 2, 1, 0x7, None, None)


def decode(codes: Array, fmt: SmallFormat) -> Array:
    """The float32 values of integer codes (bits above the format's are ignored); exact.

    >>> decode(np.uint8([0x38, 0x7E, 0xFF]), E4M3)
    array([  1., 448.,  nan], dtype=float32)
    """
    index = (
        codes if codes.dtype == np.uint8 and fmt.bits == 8 else codes & codes.dtype.type((1 << fmt.bits) - 1)
    )
    return fmt.table[index]


def decode_scaled(codes: Array, fmt: SmallFormat, scale_exponent: Array) -> Array:
    """Values times 2**(scale_exponent - 127), as float64 (exact); NaN where the scale is 255.

    The v_cvt_scalef32_*_{fp8,bf8,fp6,bf6,fp4} instructions round this to f32, f16 or bf16; overflow gives
    infinity.
    """
    with np.errstate(all="ignore"):
        value = np.ldexp(decode(codes, fmt).astype(np.float64), scale_exponent.astype(np.int32) - 127)
    return np.where(scale_exponent == SCALE_NAN, np.nan, value)


def encode(x: Array, fmt: SmallFormat, saturate: bool = False) -> Array:
    """Codes (uint8) of float values, to nearest even: v_cvt_pk_fp8_f32, v_cvt_pk_bf8_f32.

    Args:
        x: float32 or float64 array (f16 and bf16 widen to either without loss).
        saturate: MODE.FP16_OVFL, for the 8-bit formats: overflow and infinity give the largest finite value.
            Without it E4M3 gives NaN and E5M2 infinity. FP4 and FP6 always saturate.
    Source: CDNA4 ISA 7.3, "FP16_OVFL rule". Overflow is judged after rounding.

    >>> hex(int(encode(np.float32([464.0]), E4M3)[0])), hex(int(encode(np.float32([465.0]), E4M3)[0]))
    ('0x7e', '0x7f')
    """
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        magnitude = np.abs(wide)
        _, exponent = np.frexp(magnitude)
        steps = np.where(magnitude > 0, np.maximum(exponent - 1 - fmt.min_exponent, 0), 0)
        quantum = steps + (fmt.min_exponent - fmt.mantissa_bits)
        rounded = np.rint(np.ldexp(magnitude, -quantum))
        code = (steps << fmt.mantissa_bits) + np.where(np.isfinite(rounded), rounded, 0.0).astype(np.int32)
    sign = np.where(np.signbit(x), fmt.sign_mask, 0)
    code = _overflow(code, np.isnan(wide), np.isinf(wide), fmt, saturate)
    return np.asarray((code | sign).astype(np.uint8))


def encode_scaled(x: Array, fmt: SmallFormat, scale_exponent: Array, saturate: bool = False) -> Array:
    """Codes of x / 2**(scale_exponent - 127): v_cvt_scalef32_pk_*; a scale of 255 gives NaN."""
    with np.errstate(all="ignore"):
        scaled = np.ldexp(x.astype(np.float64), 127 - scale_exponent.astype(np.int32))
    nan = np.where(np.signbit(x), -np.nan, np.nan)
    return encode(np.where(scale_exponent == SCALE_NAN, nan, scaled), fmt, saturate)


def encode_stochastic(
    x: Array, random: Array, fmt: SmallFormat, scale_exponent: Array | None = None, saturate: bool = False
) -> Array:
    """Codes of x (over a scale) with stochastic rounding: v_cvt_sr_fp8_f32, v_cvt_scalef32_sr_*.

    Random bits are added below the kept ones, then the sum is truncated. Of `random` (uint32) the top
    (source mantissa bits - result mantissa bits) are used, aligned with the bits that are dropped; for a
    denormal result the significand is shifted into place first.

    Args:
        x: float32 or float16 array; for bf16 use `encode_stochastic_bits`.
    """
    source = format_of(x)
    return encode_stochastic_bits(
        bits_of(x),
        random,
        fmt,
        source_mantissa_bits=source.mantissa_bits,
        source_exponent_bits=source.exponent_bits,
        scale_exponent=scale_exponent,
        saturate=saturate,
    )


def encode_stochastic_bits(
    source: Array,
    random: Array,
    fmt: SmallFormat,
    *,
    source_mantissa_bits: int,
    source_exponent_bits: int,
    scale_exponent: Array | None = None,
    saturate: bool = False,
) -> Array:
    """`encode_stochastic` on the bits of a source format (bf16: 7 mantissa and 8 exponent bits)."""
    bits = source.astype(np.int64)
    m, e = source_mantissa_bits, source_exponent_bits
    field_mask = (1 << e) - 1
    exponent, mantissa = (bits >> m) & field_mask, bits & ((1 << m) - 1)
    special = exponent == field_mask
    is_nan, is_inf = special & (mantissa != 0), special & (mantissa == 0)
    negative = (bits >> (m + e)) & 1
    # Normalise source denormals, so that a scale may lift them.
    lead = np.frexp(np.maximum(mantissa, 1).astype(np.float64))[1] - 1
    shift = np.where(exponent == 0, m - lead, 0)
    mantissa = np.where((exponent == 0) & (mantissa == 0), 0, (mantissa << shift) | (1 << m))
    power = np.maximum(exponent, 1) - ((1 << (e - 1)) - 1) - shift
    if scale_exponent is not None:
        power = power - (scale_exponent.astype(np.int64) - 127)
        is_nan = is_nan | (scale_exponent == SCALE_NAN)
    steps = power - fmt.min_exponent
    down = np.clip(-steps, 0, 62)
    limit = 1 << (fmt.exponent_bits + 2)
    aligned = (np.clip(steps, 0, limit) << m) + (mantissa >> down)
    noise = random.astype(np.int64) >> (32 - m + fmt.mantissa_bits)
    zero = mantissa == 0
    code = np.where(zero, 0, (aligned + noise) >> (m - fmt.mantissa_bits))
    code = _overflow(code, is_nan, is_inf, fmt, saturate)
    return np.asarray((code | np.where(negative, fmt.sign_mask, 0)).astype(np.uint8))


def _overflow(code: Array, is_nan: Array, is_inf: Array, fmt: SmallFormat, saturate: bool) -> Array:
    """Replace magnitude codes beyond the largest, and those of infinities and NaNs."""
    nan_code = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    if saturate or fmt.nan_code is None:
        beyond = fmt.max_code
    else:
        beyond = nan_code if fmt.inf_code is None else fmt.inf_code
    code = np.where(is_inf | (code > fmt.max_code), beyond, code)
    return np.where(is_nan, nan_code, code)


def next_random(seed: Array) -> Array:
    """v_prng_b32: the next state of the pseudo-random sequence, a shift register with taps 197.

    Conversions of several elements draw a new value per element with it, without writing it back.
    Source: CDNA4 ISA, V_PRNG_B32 and 7.3.
    """
    return (seed << np.uint32(1)) ^ np.where(seed >> np.uint32(31), np.uint32(197), np.uint32(0))
