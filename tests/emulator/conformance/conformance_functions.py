# SPDX-License-Identifier: Apache-2.0
"""Reference functions of floating-point instructions, on register bits.

Each factory takes a `Format` and returns a function from operand bits to result bits (or to a tolerance where
the ISA gives one).  Elementary functions come from 60-digit decimal arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, getcontext
from fractions import Fraction
from math import isqrt

import conformance_reference as ref
from conformance_harness import Expected, OneOf, Within
from conformance_reference import Format, Num

getcontext().prec = 60
LN2 = Decimal(2).ln()
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
Function = Callable[..., Expected]


def exact(fmt: Format, f: Callable[..., Num]) -> Function:
    """Decode, compute exactly, round once."""
    return lambda *v: ref.encode(fmt, f(*(ref.decode(fmt, x) for x in v)))


def multiply_then_add(fmt: Format) -> Function:
    """V_MAD and V_MAC: a rounding after each step; whether subnormals are kept is not documented for f16."""

    def f(a: int, b: int, c: int) -> Expected:
        found = []
        for flush_in in (False, True):
            x, y, z = (ref.decode(fmt, ref.flush(fmt, v) if flush_in else v) for v in (a, b, c))
            product = ref.encode(fmt, ref.multiply(x, y))
            for inner in (product, ref.flush(fmt, product)):
                total = ref.encode(fmt, ref.add(ref.decode(fmt, inner), z))
                found += [total, ref.flush(fmt, total)]
        return OneOf(tuple(dict.fromkeys(found)))

    return f


def subtract(a: Num, b: Num) -> Num:
    """a - b."""
    return ref.add(a, b.neg())


def legacy_multiply(a: Num, b: Num) -> Num:
    """V_MUL_LEGACY: zero times anything is +0."""
    return Num("num") if a.is_zero or b.is_zero else ref.multiply(a, b)


def rounded(fmt: Format, how: str) -> Function:
    """floor, ceil, trunc or round to nearest even."""
    return exact(fmt, lambda a: ref.floor_number(a, how))  # type: ignore[arg-type]


def fract(fmt: Format) -> Function:
    """x - floor(x), kept below one (LLVM matches min(x - floor(x), largest below 1) to it)."""

    def f(bits: int) -> int:
        a = ref.decode(fmt, bits)
        if a.kind != "num":
            return fmt.nan_bits
        result = ref.encode(fmt, subtract(a, ref.floor_number(a, "floor")))
        one = fmt.bias << fmt.mbits
        return one - 1 if result == one else result & ~(1 << (fmt.bits - 1))

    return f


def ldexp(fmt: Format, power_bits: int) -> Function:
    """S0 * 2**S1."""

    def f(a: int, power: int) -> int:
        exponent = ref.saturate(ref.sx(power, power_bits), -5000, 5000)
        return ref.encode(fmt, ref.scale_by(ref.decode(fmt, a), exponent))

    return f


def frexp_mant(fmt: Format) -> Function:
    """Significand in [0.5, 1) with the sign of the input; zero, infinity and NaN pass."""

    def f(bits: int) -> int:
        a = ref.decode(fmt, bits)
        if a.kind == "nan":
            return fmt.nan_bits
        if a.kind == "inf" or a.is_zero:
            return bits
        return ref.encode(fmt, Num("num", a.sign, a.man, -a.man.bit_length()))

    return f


def frexp_exp(fmt: Format, bits_out: int) -> Function:
    """The exponent that goes with `frexp_mant`; 0 for zero, infinity and NaN."""

    def f(bits: int) -> int:
        a = ref.decode(fmt, bits)
        if a.kind != "num" or a.is_zero:
            return 0
        return (a.man.bit_length() + a.exp) & ((1 << bits_out) - 1)

    return f


def minmax(fmt: Format, want_max: bool) -> Function:
    """V_MIN / V_MAX in IEEE mode."""
    return lambda a, b: ref.minmax_ieee(fmt, a, b, want_max)


def minmax3(fmt: Format, want_max: bool) -> Function:
    """V_MIN3 / V_MAX3."""
    return lambda a, b, c: ref.minmax_ieee(fmt, ref.minmax_ieee(fmt, a, b, want_max), c, want_max)


def med3(fmt: Format) -> Function:
    """V_MED3, as the ISA's pseudocode has it."""
    low, high3 = minmax3(fmt, False), minmax3(fmt, True)
    high = minmax(fmt, True)

    def equal(a: int, b: int) -> bool:
        return ref.order(fmt, a) == ref.order(fmt, b) and not ref.is_nan(fmt, a)

    def f(a: int, b: int, c: int) -> Expected:
        if any(ref.is_nan(fmt, v) for v in (a, b, c)):
            return low(a, b, c)
        largest = high3(a, b, c)
        assert isinstance(largest, int)
        result = high(b, c) if equal(largest, a) else high(a, c) if equal(largest, b) else high(a, b)
        assert isinstance(result, int)
        if ref.decode(fmt, result).is_zero:  # which zero is the middle one is not worth a promise
            return OneOf((0, 1 << (fmt.bits - 1)))
        return result

    return f


def minmax3_2019(fmt: Format, want_max: bool) -> Function:
    """V_MINIMUM3 / V_MAXIMUM3: NaN propagates."""
    return lambda a, b, c: ref.minmax_2019(fmt, ref.minmax_2019(fmt, a, b, want_max), c, want_max)


def to_fraction(value: Decimal) -> Fraction:
    """A decimal as an exact rational."""
    return Fraction(value)


def to_decimal(value: Fraction) -> Decimal:
    """A dyadic rational as a decimal (60 digits)."""
    return Decimal(value.numerator) / Decimal(value.denominator)


def sine_of_turns(turns: Fraction, quarter: int = 0) -> Fraction:
    """sin(2 pi (turns + quarter / 4)) by its Taylor series."""
    turns = (turns + Fraction(quarter, 4)) % 1
    if turns > Fraction(1, 2):
        turns -= 1
    x = to_decimal(turns) * 2 * PI
    term, total, n = x, x, 1
    while abs(term) > Decimal(10) ** -50:
        term = -term * x * x / ((2 * n) * (2 * n + 1))
        total += term
        n += 1
    return to_fraction(total)


def approximate(
    fmt: Format,
    f: Callable[[Num], Fraction | int],
    ulps: Fraction,
    flushes: bool,
    absolute: Fraction = Fraction(0),
) -> Function:
    """An elementary function of one operand; `f` gives the value, or the bits of a special result."""

    def apply(bits: int) -> Expected:
        a = ref.decode(fmt, ref.flush(fmt, bits) if flushes else bits)
        if a.is_nan:
            return fmt.nan_bits
        value = f(a)
        if isinstance(value, int):
            return value
        if flushes and abs(value) < ref.decode(fmt, 1 << fmt.mbits).fraction * (
            1 - Fraction(1, 1 << fmt.mbits + 1)
        ):
            return a.sign << (fmt.bits - 1) if value and (value < 0) == bool(a.sign) else 0
        return Within(value, ulps, absolute)

    return apply


def reciprocal(fmt: Format) -> Callable[[Num], Fraction | int]:
    """1 / x."""

    def f(a: Num) -> Fraction | int:
        if a.kind == "inf":
            return a.sign << (fmt.bits - 1)
        return a.sign << (fmt.bits - 1) | fmt.inf_bits if a.is_zero else 1 / a.fraction

    return f


def square_root(value: Fraction, bits: int = 120) -> Fraction:
    """A root from below with `bits` correct bits."""
    shift = 2 * max(0, bits - (value.numerator.bit_length() - value.denominator.bit_length()) // 2)
    return Fraction(isqrt((value.numerator << shift) // value.denominator), 1 << shift // 2)


def root(fmt: Format) -> Callable[[Num], Fraction | int]:
    """sqrt(x); -0 stays, negative gives NaN."""

    def f(a: Num) -> Fraction | int:
        if a.is_zero:
            return a.sign << (fmt.bits - 1)
        if a.sign:
            return fmt.nan_bits
        return fmt.inf_bits if a.kind == "inf" else square_root(a.fraction)

    return f


def reciprocal_root(fmt: Format) -> Callable[[Num], Fraction | int]:
    """1 / sqrt(x)."""

    def f(a: Num) -> Fraction | int:
        if a.is_zero:
            return a.sign << (fmt.bits - 1) | fmt.inf_bits
        if a.sign:
            return fmt.nan_bits
        return 0 if a.kind == "inf" else 1 / square_root(a.fraction)

    return f


def exponential(fmt: Format) -> Callable[[Num], Fraction | int]:
    """2 ** x."""

    def f(a: Num) -> Fraction | int:
        if a.kind == "inf" or abs(a.fraction) > 5000:
            return 0 if a.sign else fmt.inf_bits
        value = a.fraction
        whole = value.__floor__()
        result = to_fraction((to_decimal(value - whole) * LN2).exp()) * Fraction(2) ** whole
        limit = ref.decode(fmt, fmt.max_bits).fraction
        return fmt.inf_bits if result > limit * (1 + Fraction(1, 1 << fmt.mbits)) else result

    return f


def logarithm(fmt: Format) -> Callable[[Num], Fraction | int]:
    """log2(x)."""

    def f(a: Num) -> Fraction | int:
        if a.is_zero:
            return 1 << (fmt.bits - 1) | fmt.inf_bits
        if a.sign:
            return fmt.nan_bits
        if a.kind == "inf":
            return fmt.inf_bits
        shift = a.man.bit_length()
        significand = to_decimal(Fraction(a.man, 1 << shift))
        if a.man & (a.man - 1) == 0:
            return Fraction(a.exp + shift - 1)
        return to_fraction(significand.ln() / LN2) + a.exp + shift

    return f


def div_fixup(fmt: Format) -> Function:
    """V_DIV_FIXUP: S0 the quotient, S1 the denominator, S2 the numerator."""
    sign_bit = 1 << (fmt.bits - 1)

    def f(quotient: int, denominator: int, numerator: int) -> Expected:
        d, n = ref.decode(fmt, denominator), ref.decode(fmt, numerator)
        sign = sign_bit if d.sign ^ n.sign else 0
        if n.is_nan or d.is_nan or (d.is_zero and n.is_zero) or (d.kind == "inf" and n.kind == "inf"):
            return fmt.nan_bits
        if d.is_zero or n.kind == "inf":
            return sign | fmt.inf_bits
        if d.kind == "inf" or n.is_zero:
            return sign
        return sign | quotient & ~sign_bit

    return f


def div_fmas(fmt: Format, power: int) -> Function:
    """V_DIV_FMAS: fma, scaled when the lane's vcc bit is set, so as to undo V_DIV_SCALE.

    The ISA document prints one factor, 2**32, which undoes neither of V_DIV_SCALE's factors of 2**64 and
    2**-64. tinygrad's emulator, checked on RDNA hardware, scales up by 2**64 where S2's exponent is above the
    bias and down by 2**-64 elsewhere, and only that makes LLVM's division sequence right.
    """

    def f(a: int, b: int, c: int, scaled: int) -> Expected:
        result = ref.fma(*(ref.decode(fmt, v) for v in (a, b, c)))
        once = ref.encode(fmt, result)
        if not scaled:
            return once
        shift = power if c >> fmt.mbits & ((1 << fmt.ebits) - 1) > fmt.bias else -power
        twice = ref.encode(fmt, ref.scale_by(ref.decode(fmt, once), shift))
        # Whether the sum is rounded before it is scaled is not documented: both are allowed.
        return OneOf((twice, ref.encode(fmt, ref.scale_by(result, shift))))

    return f


def class_test(fmt: Format) -> Callable[[int, int], int]:
    """V_CMP_CLASS: bit 0 sNaN, 1 qNaN, 2 -inf, 3 -normal, 4 -subnormal, 5 -0, 6 +0, 7 +subnormal, 8 +normal,
    9 +inf.
    """

    def f(bits: int, mask: int) -> int:
        a = ref.decode(fmt, bits)
        if a.is_nan:
            index = 0 if a.signalling else 1
        elif a.kind == "inf":
            index = 2 if a.sign else 9
        elif a.is_zero:
            index = 5 if a.sign else 6
        elif bits >> fmt.mbits & ((1 << fmt.ebits) - 1):
            index = 3 if a.sign else 8
        else:
            index = 4 if a.sign else 7
        return mask >> index & 1

    return f
