# SPDX-License-Identifier: Apache-2.0
"""Matrix instructions: v_mfma, v_mfma_scale and v_smfmac in every shape gfx950 has. Semantics: CDNA4 ISA 7.

Execution ignores exec, MODE's rounding and (but for f32 operands) its denormal bits. Layouts and the
statement on accumulation are in `arith/mfma_layout.py` and `arith/mfma.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.arith import mfma as matrix
from kernellib.emulator.arith.mfma import BF8, BF16, F16, F32, F64, FP8, I8, ItemType
from kernellib.emulator.arith.mfma_layout import Shape
from kernellib.emulator.errors import UnsupportedOperandError
from kernellib.emulator.instructions.registry import define_vector
from kernellib.emulator.state import FloatMode

Array = np.ndarray[Any, Any]


def _registers(base: str, count: int) -> str:
    return base if count == 1 else f"{base}x{count}"


def _full(registers: Array, count: int) -> Array:
    """[count, n, 64] of a register range, of one register, or of a constant."""
    if registers.ndim == 2 or registers.shape[0] != count:
        registers = np.broadcast_to(registers, (count, *registers.shape[-2:]))
    return registers


def _words(registers: Array, count: int) -> Array:
    """The operand as uint32 [count, n, 64]."""
    if registers.dtype.itemsize == 8:
        pairs = np.ascontiguousarray(_full(registers, count // 2))[..., None].view(np.uint32)
        return np.moveaxis(pairs, -1, 1).reshape(count, *registers.shape[-2:])
    return _full(registers.view(np.uint32), count)


def _target(out: Array | None) -> Array | None:
    """The destination view as [items, n, 64]."""
    return out[None] if out is not None and out.ndim == 2 else out


def _dense(shape: Shape, types: tuple[ItemType, ItemType]) -> Callable[..., Array]:
    counts = (types[0].num_registers(shape, shape.m), types[1].num_registers(shape, shape.n))

    def function(
        a: Array, b: Array, c: Array, *, mode: FloatMode, cbsz: int, abid: int, blgp: int, clamp: bool,
        out: Array | None = None,
    ) -> Array:  # fmt: skip
        if cbsz > 4 or abid >= 1 << cbsz or blgp > 7:
            raise UnsupportedOperandError(f"cbsz:{cbsz} abid:{abid} blgp:{blgp} is not a legal broadcast")
        result = matrix.mfma(
            _words(a, counts[0]), _words(b, counts[1]), _full(c, shape.num_outputs), shape, types=types,
            cbsz=cbsz, abid=abid, blgp=blgp, saturate=mode.fp16_overflow or (clamp and types[0] is I8),
            flush_inputs=not mode.denorm32 & 1, out=_target(out),
        )  # fmt: skip
        return result[0] if shape.num_outputs == 1 else result

    return function


def _dense_f64(shape: Shape) -> Callable[..., Array]:
    counts = (F64.num_registers(shape, shape.m), F64.num_registers(shape, shape.n))

    def function(a: Array, b: Array, c: Array, *, neg: tuple[int, ...] | int) -> Array:
        """`neg:[a,b,c]` negates the operands; the encoding's BLGP bits, which LLVM prints so (7.1.6.4)."""
        signs = neg if isinstance(neg, tuple) else ()
        if len(signs) not in (0, 3) or any(bit not in (0, 1) for bit in signs):
            raise UnsupportedOperandError(f"neg:{list(signs)} wants three bits")
        result = matrix.mfma(
            _words(a, counts[0]), _words(b, counts[1]), _full(c, shape.num_outputs), shape, types=(F64, F64),
            blgp=sum(bit << place for place, bit in enumerate(signs)),
        )  # fmt: skip
        return result[0] if shape.num_outputs == 1 else result

    return function


def _define_dense(name: str, shape: Shape, accumulator: str, types: tuple[ItemType, ItemType]) -> None:
    item = "b64" if types[0] is F64 else "b32"
    counts = [t.num_registers(shape, r) for t, r in zip(types, (shape.m, shape.n), strict=True)]
    if item == "b64":
        counts = [c // 2 for c in counts]
    output = _registers(accumulator, shape.num_outputs)
    define_vector(
        name, f"{_registers(item, counts[0])}, {_registers(item, counts[1])}, {output} -> {output}",
        _dense_f64(shape) if types[0] is F64 else _dense(shape, types),
        ignores_exec=True, cross_lane=True, kind="mfma", flops=shape.flops,
    )  # fmt: skip


def _shape(text: str) -> Shape:
    """`"32x32x4_2b"` to a Shape."""
    size, _, blocks = text.partition("_")
    m, n, k = (int(v) for v in size.split("x"))
    return Shape(m, n, k, int(blocks.removesuffix("b") or 1))


_DENSE: dict[str, tuple[ItemType, tuple[str, ...]]] = {
    "f32": (F32, ("32x32x1_2b", "16x16x1_4b", "4x4x1_16b", "32x32x2", "16x16x4")),
    "f16": (F16, ("32x32x4_2b", "16x16x4_4b", "4x4x4_16b", "32x32x8", "16x16x16", "16x16x32", "32x32x16")),
    "bf16": (BF16, ("32x32x4_2b", "16x16x4_4b", "4x4x4_16b", "32x32x8", "16x16x16", "16x16x32", "32x32x16")),
    "i8": (I8, ("32x32x4_2b", "16x16x4_4b", "4x4x4_16b", "32x32x16", "16x16x32", "16x16x64", "32x32x32")),
}
for _suffix, (_item, _shapes) in _DENSE.items():
    for _text in _shapes:
        _acc = "i32" if _item is I8 else "f32"
        _define_dense(f"v_mfma_{_acc}_{_text}_{_suffix}", _shape(_text), _acc, (_item, _item))
_BYTE_TYPES = {"fp8": FP8, "bf8": BF8}
for _a, _left in _BYTE_TYPES.items():
    for _b, _right in _BYTE_TYPES.items():
        for _text in ("16x16x32", "32x32x16"):
            _define_dense(f"v_mfma_f32_{_text}_{_a}_{_b}", _shape(_text), "f32", (_left, _right))
_define_dense("v_mfma_f64_16x16x4_f64", Shape(16, 16, 4, group=1), "f64", (F64, F64))
_define_dense("v_mfma_f64_4x4x4_4b_f64", Shape(4, 4, 4, 4, group=1), "f64", (F64, F64))


# -----------------------------------------------------------------------------------------------------------
# f8f6f4
def _formats(a: Array, b: Array, cbsz: int, blgp: int) -> tuple[int, int]:
    """Check the two formats against the register counts of the text."""
    for letter, registers, index in (("A", a, cbsz), ("B", b, blgp)):
        if index >= len(matrix.F8F6F4_FORMATS):
            raise UnsupportedOperandError(f"format {index} of {letter}: wants 0 to 4")
        wanted = matrix.F8F6F4_FORMATS[index].bits
        if registers.shape[0] < wanted:  # 32 items of so many bits fill as many registers
            raise UnsupportedOperandError(
                f"{letter} has {registers.shape[0]} registers, its format {index} wants {wanted}"
            )
    return cbsz, blgp


def _f8f6f4(shape: Shape) -> Callable[..., Array]:
    def function(
        a: Array, b: Array, c: Array, *, mode: FloatMode, cbsz: int, blgp: int, reused: tuple[bool, bool],
        out: Array | None = None,
    ) -> Array:  # fmt: skip
        return matrix.mfma_f8f6f4(
            a,
            b,
            _full(c, shape.num_outputs),
            shape,
            formats=_formats(a, b, cbsz, blgp),
            saturate=mode.fp16_overflow,
            reused=reused,
            out=out,
        )

    return function


def _scale_byte(scale: Array, position: int, op_sel: tuple[int, ...], op_sel_hi: tuple[int, ...]) -> Array:
    """Byte {op_sel_hi, op_sel} of a scale operand. An absent op_sel_hi prints as all ones in VOP3P."""
    low = op_sel[position] if position < len(op_sel) else 0
    high = op_sel_hi[position] if position < len(op_sel_hi) else 1
    return ((scale >> np.uint32(8 * (low + 2 * high))) & np.uint32(0xFF)).astype(np.uint8)


def _scaled(shape: Shape) -> Callable[..., Array]:
    def function(
        a: Array, b: Array, c: Array, scale_a: Array, scale_b: Array, *, mode: FloatMode,
        cbsz: int, blgp: int, op_sel: tuple[int, ...], op_sel_hi: tuple[int, ...],
        reused: tuple[bool, bool], out: Array | None = None,
    ) -> Array:  # fmt: skip
        scales = tuple(
            np.broadcast_to(_scale_byte(s, position, op_sel, op_sel_hi), a.shape[1:])
            for position, s in enumerate((scale_a, scale_b))
        )
        return matrix.mfma_f8f6f4(
            a, b, _full(c, shape.num_outputs), shape, formats=_formats(a, b, cbsz, blgp),
            scales=(scales[0], scales[1]), saturate=mode.fp16_overflow, reused=reused, out=out,
        )  # fmt: skip

    return function


for _text in ("16x16x128", "32x32x64"):
    _size = _shape(_text)
    _output = f"f32x{_size.num_outputs}"
    define_vector(
        f"v_mfma_f32_{_text}_f8f6f4", f"b32x*, b32x*, {_output} -> {_output}", _f8f6f4(_size),
        ignores_exec=True, cross_lane=True, kind="mfma", flops=_size.flops,
    )  # fmt: skip
    define_vector(
        f"v_mfma_scale_f32_{_text}_f8f6f4", f"b32x*, b32x*, {_output}, scale, scale -> {_output}",
        _scaled(_size), ignores_exec=True, cross_lane=True, kind="mfma", flops=_size.flops,
    )  # fmt: skip


# -----------------------------------------------------------------------------------------------------------
# sparse
def _sparse(shape: Shape, types: tuple[ItemType, ItemType]) -> Callable[..., Array]:
    def function(
        a: Array, b: Array, index: Array, old: Array, *, mode: FloatMode, cbsz: int, abid: int, clamp: bool
    ) -> Array:
        return matrix.smfmac(
            a, b, old, index, shape, types=types, cbsz=cbsz, abid=abid,
            saturate=mode.fp16_overflow or (clamp and types[0] is I8),
        )  # fmt: skip

    return function


def _define_sparse(name: str, shape: Shape, accumulator: str, types: tuple[ItemType, ItemType]) -> None:
    count = types[1].num_registers(shape, shape.n)
    define_vector(
        name, f"b32x{count // 2}, b32x{count}, b32, old -> {accumulator}x{shape.num_outputs}",
        _sparse(shape, types), ignores_exec=True, cross_lane=True, kind="mfma", flops=shape.flops,
    )  # fmt: skip


for _text in ("16x16x32", "32x32x16", "16x16x64", "32x32x32"):
    _define_sparse(f"v_smfmac_f32_{_text}_f16", _shape(_text), "f32", (F16, F16))
    _define_sparse(f"v_smfmac_f32_{_text}_bf16", _shape(_text), "f32", (BF16, BF16))
for _text in ("16x16x64", "32x32x32", "16x16x128", "32x32x64"):
    _define_sparse(f"v_smfmac_i32_{_text}_i8", _shape(_text), "i32", (I8, I8))
    for _a, _left in _BYTE_TYPES.items():
        for _b, _right in _BYTE_TYPES.items():
            _define_sparse(f"v_smfmac_f32_{_text}_{_a}_{_b}", _shape(_text), "f32", (_left, _right))
