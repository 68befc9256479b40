# SPDX-License-Identifier: Apache-2.0
"""Denormal flushing of operands and results, where the MODE register asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.instructions.registry import OperandType
from kernellib.emulator.state import FloatMode

Array = np.ndarray[Any, Any]
_EXPONENT = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "f64": 0x7FF0000000000000}
_SIGN = {"f16": 0x8000, "bf16": 0x8000, "f32": 0x80000000, "f64": 0x8000000000000000}


def flush_function(kind: OperandType) -> Callable[[Array, FloatMode, int], Array] | None:
    """`f(array, mode, bit)` that replaces denormals by zeros of the same sign where `mode` flushes that type.

    `bit`: 1 for sources, 2 for results (CDNA4 ISA, table of denormal modes).
    """
    base = "f32" if kind.form == "mix" else kind.base
    if base not in _EXPONENT:
        return None
    exponent, sign, is_single = _EXPONENT[base], _SIGN[base], base in ("f32", "bf16")

    def flush(array: Array, mode: FloatMode, bit: int) -> Array:
        denorm = mode.denorm32 if is_single else mode.denorm64_16
        if denorm & bit:
            return array
        unsigned = np.dtype(f"u{array.dtype.itemsize}")
        bits = np.ascontiguousarray(array).view(unsigned)
        kept = np.where(bits & unsigned.type(exponent) == 0, bits & unsigned.type(sign), bits)
        return kept.view(array.dtype)

    return flush
