# SPDX-License-Identifier: Apache-2.0
"""Exact reference arithmetic for the conformance tests, on Python integers only.

Nothing here knows the emulator.  A finite float is a dyadic rational `sign * man * 2**exp` with an unbounded
integer `man`; sums and products of such numbers are exact, and one rounding at the end gives the IEEE 754
result.  Formats are described by their field widths (OCP 8-bit, 6-bit and 4-bit formats included).

Sources of the rules: IEEE 754-2019 for rounding and special values; "AMD Instinct CDNA4 Instruction Set
Architecture Reference Guide", table 30 (small float formats), section 7.3 (overflow of conversions), section
9.2.3 (quiet and signalling NaN).
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

M32 = 0xFFFFFFFF
M64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class Format:
    """A binary float format.  `special` says what the top exponent means: IEEE inf/NaN, OCP e4m3 NaN, or
    nothing.
    """

    name: str
    ebits: int
    mbits: int
    bias: int
    special: Literal["ieee", "e4m3", "none"] = "ieee"

    @property
    def bits(self) -> int:
        """Width of an encoding."""
        return 1 + self.ebits + self.mbits

    @property
    def max_bits(self) -> int:
        """Encoding of the largest finite number."""
        top = (1 << (self.ebits + self.mbits)) - 1
        return {"none": top, "e4m3": top - 1, "ieee": top - (1 << self.mbits)}[self.special]

    @property
    def inf_bits(self) -> int:
        """Encoding of +inf (IEEE formats only)."""
        return ((1 << self.ebits) - 1) << self.mbits

    @property
    def nan_bits(self) -> int:
        """Encoding of the canonical quiet NaN."""
        return (
            self.inf_bits | (1 << (self.mbits - 1)) if self.special == "ieee" else (1 << (self.bits - 1)) - 1
        )


F16 = Format("f16", 5, 10, 15)
BF16 = Format("bf16", 8, 7, 127)
F32 = Format("f32", 8, 23, 127)
F64 = Format("f64", 11, 52, 1023)
E4M3 = Format("fp8 e4m3", 4, 3, 7, "e4m3")
E5M2 = Format("bf8 e5m2", 5, 2, 15)
E2M3 = Format("fp6 e2m3", 2, 3, 1, "none")
E3M2 = Format("bf6 e3m2", 3, 2, 3, "none")
E2M1 = Format("fp4 e2m1", 2, 1, 1, "none")
FORMATS = {f.name.split()[0]: f for f in (F16, BF16, F32, F64, E4M3, E5M2, E2M3, E3M2, E2M1)}


@dataclass(frozen=True)
class Num:
    """A decoded float: kind "nan", "inf" or "num"; for "num" the value is (-1)**sign * man * 2**exp, man >=
    0.
    """

    kind: Literal["nan", "inf", "num"]
    sign: int = 0
    man: int = 0
    exp: int = 0
    signalling: bool = False

    @property
    def is_nan(self) -> bool:
        """Whether this is a NaN."""
        return self.kind == "nan"

    @property
    def is_zero(self) -> bool:
        """Whether this is +0 or -0."""
        return self.kind == "num" and self.man == 0

    @functools.cached_property
    def fraction(self) -> Fraction:
        """The exact value of a finite number."""
        man = -self.man if self.sign else self.man
        return Fraction(man << self.exp) if self.exp >= 0 else Fraction(man, 1 << -self.exp)

    def neg(self) -> Num:
        """The number with its sign flipped (NaN included)."""
        return Num(self.kind, self.sign ^ 1, self.man, self.exp, self.signalling)

    def abs(self) -> Num:
        """The number with its sign cleared."""
        return Num(self.kind, 0, self.man, self.exp, self.signalling)


NAN = Num("nan")


@functools.lru_cache(maxsize=1 << 17)
def decode(fmt: Format, bits: int) -> Num:
    """The number that an encoding stands for."""
    sign = bits >> (fmt.bits - 1) & 1
    exponent = bits >> fmt.mbits & ((1 << fmt.ebits) - 1)
    mantissa = bits & ((1 << fmt.mbits) - 1)
    top = (1 << fmt.ebits) - 1
    if fmt.special == "ieee" and exponent == top:
        if mantissa == 0:
            return Num("inf", sign)
        return Num("nan", sign, signalling=not mantissa >> (fmt.mbits - 1))
    if fmt.special == "e4m3" and exponent == top and mantissa == (1 << fmt.mbits) - 1:
        return Num("nan", sign)
    if exponent == 0:
        return Num("num", sign, mantissa, 1 - fmt.bias - fmt.mbits)
    return Num("num", sign, mantissa | 1 << fmt.mbits, exponent - fmt.bias - fmt.mbits)


def encode(
    fmt: Format,
    value: Num,
    rounding: Literal["rne", "zero", "up", "down"] = "rne",
    overflow: Literal["ieee", "saturate", "nan"] = "ieee",
) -> int:
    """Round a number once into a format.  `overflow` says what a too large finite number or an infinity
    becomes.
    """
    top_bit = value.sign << (fmt.bits - 1)
    if value.kind == "nan":
        return fmt.nan_bits
    if value.kind == "inf":
        return top_bit | _overflowed(fmt, value.sign, "rne", overflow)
    if value.man == 0:
        return top_bit
    least = 1 - fmt.bias - fmt.mbits
    shift = max(value.man.bit_length() - (fmt.mbits + 1), least - value.exp)
    man, exp = value.man, value.exp
    if shift > 0:
        kept, dropped, half = man >> shift, man & ((1 << shift) - 1), 1 << (shift - 1)
        away = (
            dropped > half or (dropped == half and kept & 1)
            if rounding == "rne"
            else dropped != 0 and rounding == ("down" if value.sign else "up")
        )
        man, exp = kept + away, exp + shift
    elif shift < 0:
        man, exp = man << -shift, exp + shift
    encoded = man + ((exp - least) << fmt.mbits)
    return top_bit | (
        encoded if encoded <= fmt.max_bits else _overflowed(fmt, value.sign, rounding, overflow)
    )


def _overflowed(fmt: Format, sign: int, rounding: str, overflow: str) -> int:
    if overflow == "saturate" or fmt.special == "none":
        return fmt.max_bits
    if overflow == "nan" or fmt.special == "e4m3":
        return fmt.nan_bits
    if rounding in ("zero", "up" if sign else "down"):
        return fmt.max_bits
    return fmt.inf_bits


def from_fraction(value: Fraction, extra_bits: int = 200) -> Num:
    """A rational as a Num with `extra_bits` significant bits and a sticky bit, enough for one correct
    rounding.
    """
    if value == 0:
        return Num("num")
    sign, value = (1, -value) if value < 0 else (0, value)
    shift = extra_bits - (value.numerator.bit_length() - value.denominator.bit_length())
    scaled = value * Fraction(2) ** shift
    man = scaled.numerator // scaled.denominator
    return Num("num", sign, man << 1 | (man * scaled.denominator != scaled.numerator), -shift - 1)


def from_int(value: int) -> Num:
    """An integer as a Num."""
    return Num("num", int(value < 0), abs(value), 0)


def multiply(a: Num, b: Num) -> Num:
    """The exact product, IEEE rules for specials."""
    if a.is_nan or b.is_nan:
        return NAN
    sign = a.sign ^ b.sign
    if "inf" in (a.kind, b.kind):
        return NAN if a.is_zero or b.is_zero else Num("inf", sign)
    return Num("num", sign, a.man * b.man, a.exp + b.exp)


def add(a: Num, b: Num) -> Num:
    """The exact sum, IEEE rules for specials; an exact zero is +0 unless both terms are -0 (nearest-even)."""
    if a.is_nan or b.is_nan:
        return NAN
    if a.kind == "inf" or b.kind == "inf":
        if a.kind == b.kind and a.sign != b.sign:
            return NAN
        return a if a.kind == "inf" else b
    exp = min(a.exp, b.exp)
    total = (-1) ** a.sign * (a.man << (a.exp - exp)) + (-1) ** b.sign * (b.man << (b.exp - exp))
    if total == 0:
        return Num("num", a.sign & b.sign)
    return Num("num", int(total < 0), abs(total), exp)


def fma(a: Num, b: Num, c: Num) -> Num:
    """The exact a * b + c."""
    return add(multiply(a, b), c)


def scale_by(a: Num, power: int) -> Num:
    """The exact a * 2**power."""
    return Num(a.kind, a.sign, a.man, a.exp + power, a.signalling)


def order(fmt: Format, bits: int) -> int:
    """A key that orders encodings which are not NaN by value: sign and magnitude as an integer (-0 equals
    +0).
    """
    magnitude = bits & ((1 << (fmt.bits - 1)) - 1)
    return -magnitude if bits >> (fmt.bits - 1) else magnitude


def flush(fmt: Format, bits: int) -> int:
    """A subnormal encoding becomes a zero of the same sign."""
    subnormal = bits >> fmt.mbits & ((1 << fmt.ebits) - 1) == 0
    return bits & 1 << (fmt.bits - 1) if subnormal else bits


def floor_number(a: Num, how: Literal["floor", "ceil", "trunc", "even"]) -> Num:
    """Round to an integer; the result of a number that becomes zero keeps the sign."""
    if a.kind != "num" or a.exp >= 0:
        return a
    value = a.fraction
    whole = {
        "floor": value.__floor__,
        "ceil": value.__ceil__,
        "trunc": value.__trunc__,
        "even": lambda: round(value),
    }[how]()
    return from_int(whole) if whole else Num("num", a.sign)


def ulp_exponent(fmt: Format, value: Fraction) -> int:
    """log2 of the spacing of `fmt` around a nonzero value."""
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    return max(exponent, 1 - fmt.bias) - fmt.mbits


def sx(value: int, bits: int) -> int:
    """The low `bits` bits as a signed integer."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def saturate(value: int, low: int, high: int) -> int:
    """Clamp an integer."""
    return max(low, min(high, value))


def to_int(a: Num, low: int, high: int, how: Literal["floor", "ceil", "trunc", "even"] = "trunc") -> int:
    """Float to integer as the ISA's conversions do it: NaN gives 0, out-of-range values saturate."""
    if a.is_nan:
        return 0
    if a.kind == "inf":
        return low if a.sign else high
    whole = floor_number(a, how)
    return saturate(int(whole.fraction), low, high)


def f32_bits(value: float) -> int:
    """Encoding of a Python float as f32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def f64_bits(value: float) -> int:
    """Encoding of a Python float as f64."""
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


def is_nan(fmt: Format, bits: int) -> bool:
    """Whether an encoding is a NaN."""
    return decode(fmt, bits).is_nan


def quieted(fmt: Format, bits: int) -> int:
    """A NaN with its quiet bit set."""
    return bits | 1 << (fmt.mbits - 1)


def minmax_ieee(fmt: Format, a: int, b: int, want_max: bool, ieee: bool = True) -> int:
    """V_MIN/V_MAX: in IEEE mode a signalling NaN wins (quieted); else the number wins over NaN; -0 < +0."""
    x, y = decode(fmt, a), decode(fmt, b)
    if ieee and x.is_nan and x.signalling:
        return quieted(fmt, a)
    if ieee and y.is_nan and y.signalling:
        return quieted(fmt, b)
    if x.is_nan:
        return b
    if y.is_nan:
        return a
    if x.is_zero and y.is_zero:
        return a if (x.sign < y.sign) == want_max and x.sign != y.sign else b
    return a if (order(fmt, b) < order(fmt, a)) == want_max else b


def minmax_2019(fmt: Format, a: int, b: int, want_max: bool) -> int:
    """IEEE 754-2019 minimum/maximum: a NaN in gives a NaN out; -0 < +0."""
    x, y = decode(fmt, a), decode(fmt, b)
    if x.is_nan or y.is_nan:
        return fmt.nan_bits
    if x.is_zero and y.is_zero:
        zero = (x.sign & y.sign) if want_max else (x.sign | y.sign)
        return zero << (fmt.bits - 1)
    return a if (order(fmt, b) < order(fmt, a)) == want_max else b
