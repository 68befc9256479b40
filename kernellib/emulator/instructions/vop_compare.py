# SPDX-License-Identifier: Apache-2.0
"""Vector comparisons (VOPC): v_cmp writes a lane mask, v_cmpx that mask and exec. Semantics: CDNA4 ISA 12.9.

A result bit of an inactive lane is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.arith.select import FLOAT_COMPARISONS, INTEGER_COMPARISONS, compare_class
from kernellib.emulator.instructions.registry import define_vector

Array = np.ndarray[Any, Any]


def _twice(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], tuple[Array, Array]]:
    """One mask for both results of v_cmpx."""

    def wrapped(a: Array, b: Array) -> tuple[Array, Array]:
        mask = function(a, b)
        return mask, mask

    return wrapped


def _define(name: str, sources: str, function: Callable[[Array, Array], Array]) -> None:
    define_vector(f"v_cmp_{name}", f"{sources} -> mask", function)
    define_vector(f"v_cmpx_{name}", f"{sources} -> mask, exec", _twice(function))


for _type in ("f16", "f32", "f64"):
    for _name, _function in FLOAT_COMPARISONS.items():
        _define(f"{_name}_{_type}", f"{_type}, {_type}", _function)
for _type in ("i16", "u16", "i32", "u32", "i64", "u64"):
    for _name, _function in INTEGER_COMPARISONS.items():
        _define(f"{_name}_{_type}", f"{_type}, {_type}", _function)
for _type in ("f16", "f32", "f64"):
    _define(f"class_{_type}", f"{_type}, {'b16' if _type == 'f16' else 'b32'}", compare_class)
