# SPDX-License-Identifier: Apache-2.0
"""Loads and stores of every address space (atomics are in atomics.py)."""

from __future__ import annotations

from kernellib.emulator.instructions.registry import Space, define_memory

_LOADS = {
    "ubyte": ("u8", ""), "sbyte": ("i8", ""), "ushort": ("u16", ""), "sshort": ("i16", ""),
    "ubyte_d16": ("u8", "lo"), "ubyte_d16_hi": ("u8", "hi"),
    "sbyte_d16": ("i8", "lo"), "sbyte_d16_hi": ("i8", "hi"),
    "short_d16": ("u16", "lo"), "short_d16_hi": ("u16", "hi"),
    "dword": ("b32", ""), "dwordx2": ("b32x2", ""), "dwordx3": ("b32x3", ""), "dwordx4": ("b32x4", ""),
}  # fmt: skip
_STORES = {
    "byte": ("b8", ""), "byte_d16_hi": ("b8", "hi"), "short": ("b16", ""), "short_d16_hi": ("b16", "hi"),
    "dword": ("b32", ""), "dwordx2": ("b32x2", ""), "dwordx3": ("b32x3", ""), "dwordx4": ("b32x4", ""),
}  # fmt: skip
_SPACES: tuple[Space, ...] = ("global", "flat", "scratch", "buffer")
for _space in _SPACES:
    for _name, (_data, _half) in _LOADS.items():
        define_memory(f"{_space}_load_{_name}", _space, "load", _data, half=_half)
    for _name, (_data, _half) in _STORES.items():
        define_memory(f"{_space}_store_{_name}", _space, "store", _data, half=_half)
for _name in ("ubyte", "sbyte", "ushort", "sshort", "dword", "dwordx3", "dwordx4"):
    define_memory(f"global_load_lds_{_name}", "global", "load_to_lds", _LOADS[_name][0])
for _count in (1, 2, 4, 8, 16):
    _suffix = "" if _count == 1 else f"x{_count}"
    _type = "b32" if _count == 1 else f"b32x{_count}"
    define_memory(f"s_load_dword{_suffix}", "scalar", "load", _type)
    define_memory(f"s_buffer_load_dword{_suffix}", "scalar_buffer", "load", _type)
