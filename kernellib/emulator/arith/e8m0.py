# SPDX-License-Identifier: Apache-2.0
"""E8M0 block scales: a byte E stands for 2**(E - 127), 255 for NaN.

Source: CDNA4 ISA 7.2 and 7.3. Conversions take their scale from the exponent field of a float32 operand
("scale = 32'U(exponent(S2.f32))" in 12.11), so mantissa and sign have no effect, and zero means 2**-127.
"""

from __future__ import annotations

import numpy as np

from kernellib.emulator.arith.formats import Array

NAN = 255
BIAS = 127


def decode(scale: Array) -> Array:
    """float32 values of E8M0 bytes; NaN for 255.

    >>> decode(np.uint8([127, 128, 0]))
    array([1.000000e+00, 2.000000e+00, 5.877472e-39], dtype=float32)
    """
    with np.errstate(over="ignore"):  # 255 overflows, and is replaced
        value = np.ldexp(np.float32(1), scale.astype(np.int32) - BIAS)
    return np.where(scale == NAN, np.float32(np.nan), value).astype(np.float32)


# Of every byte, as float64, in which products with them are exact.
VALUES = decode(np.arange(256, dtype=np.uint8)).astype(np.float64)


def exponent_of_f32(bits: Array) -> Array:
    """The E8M0 byte (uint8) that a conversion reads from a float32 scale operand's bits (uint32)."""
    return np.asarray(((bits >> np.uint32(23)) & np.uint32(0xFF)).astype(np.uint8))
