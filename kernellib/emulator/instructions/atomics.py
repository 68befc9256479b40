# SPDX-License-Identifier: Apache-2.0
"""Atomics of global, flat, buffer and LDS memory. Semantics: CDNA4 ISA 9.2 (float rules), 12.12 to 12.15.

A function gets the value in memory and the lane's data (and, for compare-and-swap, the compare value) and
returns the new value. Float additions round to nearest even. Float32 additions in memory flush denormal
operands; in LDS MODE decides, and they are kept here (MODE's default). Packed and 64-bit float atomics keep
denormals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.arith import bf16, float32, select
from kernellib.emulator.arith.formats import flush_denormals
from kernellib.emulator.instructions.registry import Space, define_memory

Array = np.ndarray[Any, Any]
Function = Callable[..., Array]


def _add(old: Array, data: Array) -> Array:
    with np.errstate(all="ignore"):
        result: Array = old + data
    return result


def _add_flushing(old: Array, data: Array) -> Array:
    with np.errstate(all="ignore"):
        return flush_denormals(np.asarray(flush_denormals(old) + flush_denormals(data)))


def _halves(words: Array) -> tuple[Array, Array]:
    return (words & np.uint32(0xFFFF)).astype(np.uint16), (words >> np.uint32(16)).astype(np.uint16)


def _join(low: Array, high: Array) -> Array:
    result: Array = low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))
    return result


def _pk_add_f16(old: Array, data: Array) -> Array:
    pairs = zip(_halves(old), _halves(data), strict=True)
    return _join(*(float32.add16(a.view(np.float16), b.view(np.float16)).view(np.uint16) for a, b in pairs))


def _pk_add_bf16(old: Array, data: Array) -> Array:
    pairs = zip(_halves(old), _halves(data), strict=True)
    return _join(*(bf16.from_f32(_add(bf16.to_f32(a), bf16.to_f32(b))) for a, b in pairs))


def _inc(old: Array, data: Array) -> Array:
    return np.asarray(np.where(old >= data, old.dtype.type(0), old + old.dtype.type(1)))


def _dec(old: Array, data: Array) -> Array:
    return np.asarray(np.where((old == 0) | (old > data), data, old - old.dtype.type(1)))


def _swap(old: Array, data: Array) -> Array:
    return data


def _compare_swap(old: Array, new: Array, compare: Array) -> Array:
    # NaN never equals, +0 equals -0: numpy's == on the operand's type (CDNA4 ISA 9.2.3).
    return np.where(old == compare, new, old)


def _masked_or(old: Array, new: Array, mask: Array) -> Array:
    result: Array = (old & ~mask) | new
    return result


_INTEGER: dict[str, tuple[str, Function]] = {
    "add": ("u", _add), "sub": ("u", lambda old, data: old - data),
    "smin": ("i", np.minimum), "umin": ("u", np.minimum),
    "smax": ("i", np.maximum), "umax": ("u", np.maximum),
    "and": ("b", np.bitwise_and), "or": ("b", np.bitwise_or), "xor": ("b", np.bitwise_xor),
    "inc": ("u", _inc), "dec": ("u", _dec), "swap": ("b", _swap),
}  # fmt: skip
_FLOAT: dict[str, tuple[str, Function]] = {
    "add_f32": ("f32", _add_flushing), "pk_add_f16": ("b32", _pk_add_f16),
    "pk_add_bf16": ("b32", _pk_add_bf16), "add_f64": ("f64", _add),
    "min_f64": ("f64", select.minimum_number), "max_f64": ("f64", select.maximum_number),
}  # fmt: skip

_SPACES: tuple[Space, ...] = ("global", "flat", "buffer")
for _space in _SPACES:
    for _bits, _suffix in ((32, ""), (64, "_x2")):
        for _name, (_letter, _function) in _INTEGER.items():
            define_memory(
                f"{_space}_atomic_{_name}{_suffix}", _space, "atomic", f"{_letter}{_bits}", function=_function
            )
        define_memory(
            f"{_space}_atomic_cmpswap{_suffix}",
            _space,
            "atomic",
            f"b{_bits}",
            function=_compare_swap,
            compares=True,
        )
    for _name, (_data, _function) in _FLOAT.items():
        define_memory(f"{_space}_atomic_{_name}", _space, "atomic", _data, function=_function)

# LDS: the mnemonic with `_rtn` returns the value before, the one without does not.
_LDS: dict[str, tuple[str, Function, bool]] = {}
for _bits in (32, 64):
    for _name, _letter, _function in (
        ("add", "u", _add), ("sub", "u", lambda old, data: old - data),
        ("rsub", "u", lambda old, data: data - old),
        ("inc", "u", _inc), ("dec", "u", _dec), ("min", "i", np.minimum), ("max", "i", np.maximum),
        ("min", "u", np.minimum), ("max", "u", np.maximum), ("and", "b", np.bitwise_and),
        ("or", "b", np.bitwise_or), ("xor", "b", np.bitwise_xor), ("min", "f", select.minimum_number),
        ("max", "f", select.maximum_number), ("add", "f", _add),
    ):  # fmt: skip
        _LDS[f"{_name}_{_letter}{_bits}"] = (f"{_letter}{_bits}", _function, False)
    _LDS[f"mskor_b{_bits}"] = (f"b{_bits}", _masked_or, True)
    _LDS[f"cmpst_b{_bits}"] = (f"b{_bits}", _compare_swap, True)
    _LDS[f"cmpst_f{_bits}"] = (f"f{_bits}", _compare_swap, True)
_LDS["pk_add_f16"] = ("b32", _pk_add_f16, False)
_LDS["pk_add_bf16"] = ("b32", _pk_add_bf16, False)
for _name, (_data, _function, _compares) in _LDS.items():
    _verb, _, _type = _name.rpartition("_")
    define_memory(f"ds_{_name}", "lds", "atomic", _data, function=_function, compares=_compares)
    define_memory(
        f"ds_{_verb}_rtn_{_type}", "lds", "atomic", _data,
        function=_function, compares=_compares, always_returns=True,
    )  # fmt: skip
for _bits in (32, 64):
    define_memory(
        f"ds_wrxchg_rtn_b{_bits}", "lds", "atomic", f"b{_bits}", function=_swap, always_returns=True
    )
