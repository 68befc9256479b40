# SPDX-License-Identifier: Apache-2.0
"""Bit-level constants of the IEEE formats the vector ALU computes in, and helpers every module shares.

A `FloatFormat` joins a numpy float type with the unsigned type of the same width, so that sign, quiet bit and
exponent can be examined without arithmetic (arithmetic would quiet NaNs and lose which one it was).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class FloatFormat:
    """One IEEE format: numpy types, field masks and the default NaN.

    The default NaN (of inf - inf, sqrt(-1), ...) has its sign set and an otherwise empty payload: CDNA4 ISA,
    functional examples of V_SQRT_F32 (0xffc00000) and V_SQRT_F16 (0xfe00).
    """

    name: str
    dtype: np.dtype[Any]
    bits_dtype: np.dtype[Any]
    int_dtype: np.dtype[Any]
    mantissa_bits: int
    exponent_bits: int

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def sign_mask(self) -> int:
        return 1 << (self.mantissa_bits + self.exponent_bits)

    @property
    def exponent_mask(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def mantissa_mask(self) -> int:
        return (1 << self.mantissa_bits) - 1

    @property
    def quiet_bit(self) -> int:
        return 1 << (self.mantissa_bits - 1)

    @property
    def default_nan(self) -> int:
        return self.sign_mask | self.exponent_mask | self.quiet_bit

    def scalar(self, value: int) -> Any:
        """`value` as a scalar of the bit type, so that numpy keeps the width in mixed expressions."""
        return self.bits_dtype.type(value)


F16 = FloatFormat("f16", np.dtype(np.float16), np.dtype(np.uint16), np.dtype(np.int16), 10, 5)
F32 = FloatFormat("f32", np.dtype(np.float32), np.dtype(np.uint32), np.dtype(np.int32), 23, 8)
F64 = FloatFormat("f64", np.dtype(np.float64), np.dtype(np.uint64), np.dtype(np.int64), 52, 11)
_BY_DTYPE = {fmt.dtype: fmt for fmt in (F16, F32, F64)}


def format_of(x: Array) -> FloatFormat:
    """The format of a float array; raises KeyError for any other dtype."""
    return _BY_DTYPE[x.dtype]


def bits_of(x: Array) -> Array:
    """The bits of a float array as unsigned integers of the same width (a view where possible)."""
    fmt = format_of(x)
    return np.ascontiguousarray(x).view(fmt.bits_dtype) if x.ndim else x.view(fmt.bits_dtype)


def is_signaling(x: Array) -> Array:
    """True where `x` is a signaling NaN: quiet bit clear (CDNA4 ISA 9.2.3)."""
    fmt = format_of(x)
    return np.asarray(np.isnan(x) & ((bits_of(x) & fmt.scalar(fmt.quiet_bit)) == 0))


def quiet(x: Array) -> Array:
    """`x` with the quiet bit of its NaNs set; other values untouched."""
    fmt = format_of(x)
    bits = bits_of(x)
    return np.asarray(
        np.where(np.isnan(x), bits | fmt.scalar(fmt.quiet_bit), bits).astype(fmt.bits_dtype).view(fmt.dtype)
    )


def is_denormal(x: Array) -> Array:
    """True where `x` is nonzero with an exponent field of zero."""
    fmt = format_of(x)
    bits = bits_of(x)
    no_exponent = (bits & fmt.scalar(fmt.exponent_mask)) == 0
    return np.asarray(no_exponent & ((bits & fmt.scalar(fmt.mantissa_mask)) != 0))


def flush_denormals(x: Array) -> Array:
    """`x` with denormals replaced by zero of the same sign.

    What a MODE.FP_DENORM bit that forbids denormals does to an input or an output (CDNA4 ISA 6.4).
    """
    fmt = format_of(x)
    bits = bits_of(x)
    tiny = (bits & fmt.scalar(fmt.exponent_mask)) == 0
    flushed = np.where(tiny, bits & fmt.scalar(fmt.sign_mask), bits)
    return np.asarray(flushed.astype(fmt.bits_dtype).view(fmt.dtype))


def with_default_nan(result: Array, *sources: Array) -> Array:
    """Give NaNs that no source brought in the default NaN's bits; keep the others.

    numpy's math library picks its own sign for a fresh NaN; the hardware's is fixed.
    """
    fmt = format_of(result)
    fresh = np.isnan(result)
    for source in sources:
        fresh &= ~np.isnan(source)
    if not fresh.any():
        return result
    bits = np.where(fresh, fmt.scalar(fmt.default_nan), bits_of(result)).astype(fmt.bits_dtype)
    return np.asarray(bits.view(fmt.dtype))
