# SPDX-License-Identifier: Apache-2.0
"""LDS reads and writes (DS encoding), transposing reads included. Semantics: CDNA4 ISA 11 and 12.12."""

from __future__ import annotations

from kernellib.emulator.instructions.registry import define_memory

for _name, _data in (
    ("b32", "b32"), ("b64", "b32x2"), ("b96", "b32x3"), ("b128", "b32x4"),
    ("u8", "u8"), ("i8", "i8"), ("u16", "u16"), ("i16", "i16"),
):  # fmt: skip
    define_memory(f"ds_read_{_name}", "lds", "load", _data)
for _name, _data in (("u8", "u8"), ("i8", "i8"), ("u16", "u16")):
    define_memory(f"ds_read_{_name}_d16", "lds", "load", _data, half="lo")
    define_memory(f"ds_read_{_name}_d16_hi", "lds", "load", _data, half="hi")
for _name, _data in (
    ("b8", "b8"), ("b16", "b16"), ("b32", "b32"), ("b64", "b32x2"), ("b96", "b32x3"), ("b128", "b32x4"),
):  # fmt: skip
    define_memory(f"ds_write_{_name}", "lds", "store", _data)
for _name in ("b8", "b16"):
    define_memory(f"ds_write_{_name}_d16_hi", "lds", "store", _name, half="hi")
for _name, _data in (("b32", "b32"), ("b64", "b32x2")):
    for _stride, _is_64 in (("", False), ("st64", True)):
        define_memory(f"ds_read2{_stride}_{_name}", "lds", "load", _data, pairs=True, stride64=_is_64)
        define_memory(f"ds_write2{_stride}_{_name}", "lds", "store", _data, pairs=True, stride64=_is_64)
for _bits, _name, _data in (
    (16, "b64_tr_b16", "b32x2"), (8, "b64_tr_b8", "b32x2"), (4, "b64_tr_b4", "b32x2"),
    (6, "b96_tr_b6", "b32x3"),
):  # fmt: skip
    define_memory(f"ds_read_{_name}", "lds", "load", _data, transpose=_bits)
