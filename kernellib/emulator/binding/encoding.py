# SPDX-License-Identifier: Apache-2.0
"""Whether an instruction's operands and modifiers fit the encoding that its text asks for.

Each rule holds for gfx950 by the CDNA4 ISA document ("Vector ALU operands", "Microcode formats") and by
LLVM's assembler, to which tests/emulator/test_refused_lines.py holds this module:

* Vector and accumulation registers in groups begin at an even number (since gfx90a), scalar ones at an even
  number or a multiple of four.
* VOP1, VOP2 and VOPC (32 bits, `_e32`) read anything as source 0 and a VGPR as source 1; they have no
  modifiers, masks are vcc.  Only they take a literal.  VOP3, VOP3P, SDWA and DPP take none.
* One value a vector instruction comes over the constant bus: a scalar register, or the literal.
* A scalar instruction has one literal, of 32 bits.
* Modifiers and offsets fit their fields.

An integer in the text may be the bits of an inline constant (0x3f800000 is 1.0): it is no literal then.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding.lanes import DPP_CONTROLS
from kernellib.emulator.binding.sources import refuse
from kernellib.emulator.instructions.registry import AluDef, MemoryDef, OperandType, split_mnemonic
from kernellib.emulator.operands import M0, VCC, Operand

# VOP1 and VOP2 without their `v_`; VOPC are all v_cmp and v_cmpx.
_SHORT_NAMES = (
    "add_co_u32 add_f16 add_f32 add_u16 add_u32 addc_co_u32 and_b32 ashrrev_i16 ashrrev_i32 bfrev_b32 "
    "ceil_f16 ceil_f32 ceil_f64 cndmask_b32 cos_f16 cos_f32 cvt_f16_f32 cvt_f16_i16 cvt_f16_u16 "
    "cvt_f32_bf16 cvt_f32_bf8 cvt_f32_f16 cvt_f32_f64 cvt_f32_fp8 cvt_f32_i32 cvt_f32_u32 cvt_f32_ubyte0 "
    "cvt_f32_ubyte1 cvt_f32_ubyte2 cvt_f32_ubyte3 cvt_f64_f32 cvt_f64_i32 cvt_f64_u32 cvt_flr_i32_f32 "
    "cvt_i16_f16 cvt_i32_f32 cvt_i32_f64 cvt_norm_i16_f16 cvt_norm_u16_f16 cvt_off_f32_i4 cvt_pk_f32_bf8 "
    "cvt_pk_f32_fp8 cvt_rpi_i32_f32 cvt_u16_f16 cvt_u32_f32 cvt_u32_f64 dot2c_f32_bf16 dot2c_f32_f16 "
    "dot2c_i32_i16 dot4c_i32_i8 dot8c_i32_i4 exp_f16 exp_f32 ffbh_i32 ffbh_u32 ffbl_b32 floor_f16 "
    "floor_f32 floor_f64 fmac_f32 fmac_f64 fract_f16 fract_f32 fract_f64 frexp_exp_i16_f16 "
    "frexp_exp_i32_f32 frexp_exp_i32_f64 frexp_mant_f16 frexp_mant_f32 frexp_mant_f64 ldexp_f16 log_f16 "
    "log_f32 lshlrev_b16 lshlrev_b32 lshrrev_b16 lshrrev_b32 mac_f16 max_f16 max_f32 max_i16 max_i32 "
    "max_u16 max_u32 min_f16 min_f32 min_i16 min_i32 min_u16 min_u32 mov_b32 mov_b64 mul_f16 mul_f32 "
    "mul_hi_i32_i24 mul_hi_u32_u24 mul_i32_i24 mul_lo_u16 mul_u32_u24 not_b32 or_b32 permlane16_swap_b32 "
    "permlane32_swap_b32 pk_fmac_f16 prng_b32 rcp_f16 rcp_f32 rcp_f64 rcp_iflag_f32 readfirstlane_b32 "
    "rndne_f16 rndne_f32 rndne_f64 rsq_f16 rsq_f32 rsq_f64 sat_pk_u8_i16 sin_f16 sin_f32 sqrt_f16 "
    "sqrt_f32 sqrt_f64 sub_co_u32 sub_f16 sub_f32 sub_u16 sub_u32 subb_co_u32 subbrev_co_u32 "
    "subrev_co_u32 subrev_f16 subrev_f32 subrev_u16 subrev_u32 swap_b32 trunc_f16 trunc_f32 trunc_f64 "
    "xnor_b32 xor_b32"
)
_SHORT = frozenset(_SHORT_NAMES.split())
_WITH_LITERAL = ("v_fmamk_", "v_fmaak_", "v_madmk_", "v_madak_")
_VOP3P = ("v_pk_", "v_dot", "v_mfma_", "v_smfmac_", "v_fma_mix", "v_mad_mix", "v_accvgpr_")
_FIELDS = {"cbsz": 7, "abid": 15, "blgp": 7, "bitop3": 255, "byte_sel": 3, "row_mask": 15, "bank_mask": 15}
_INVERSE_TWO_PI = 0.15915494309189532
_FLOATS = (0.5, 1.0, 2.0, 4.0, -0.5, -1.0, -2.0, -4.0, _INVERSE_TWO_PI)
_PATTERNS = {
    16: frozenset(int(np.float16(v).view(np.uint16)) for v in _FLOATS)
    | frozenset(int(np.asarray(v, ml_dtypes.bfloat16).view(np.uint16)) for v in _FLOATS),
    32: frozenset(int(np.float32(v).view(np.uint32)) for v in _FLOATS),
    64: frozenset(int(np.float64(v).view(np.uint64)) for v in _FLOATS),
}
_OFFSETS = {"global": (-4096, 4095), "scratch": (-4096, 4095), "flat": (0, 4095)}


def is_literal(operand: Operand, base: str) -> bool:
    """Whether a constant of base type `base` ("f32", ...) needs a literal: it is no inline constant."""
    value, width = operand.value, max(int(base.lstrip("bfui")), 16)
    if isinstance(value, float):
        if value == 0.0:
            return bool(np.signbit(value))
        return value not in _FLOATS and abs(value - _INVERSE_TWO_PI) > 1e-4 * _INVERSE_TWO_PI
    signed = value - (1 << width) if 1 << (width - 1) <= value < 1 << width else value
    if -16 <= signed <= 64 or value in _PATTERNS[width]:
        return False
    return not (base == "f64" and (value << 32) in _PATTERNS[64])


def check_registers(inst: Instruction) -> None:
    """Refuse a group of registers that begins at a number that no encoding takes."""
    for operand in inst.operands:
        if operand.count < 2 or not operand.is_register:
            continue
        step = 4 if operand.kind == "sgpr" and operand.count > 2 else 2
        if operand.index % step and not inst.mnemonic.startswith("ds_read_b96_tr"):
            raise refuse(inst, f"{operand.text}: wants a first register that is a multiple of {step}")


def check_fields(inst: Instruction) -> None:
    """Refuse a modifier's value that does not fit its field."""
    for name, limit in _FIELDS.items():
        value = inst.modifiers.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
            raise refuse(inst, f"{name}:{value} wants a number from 0 to {limit}")


def check_memory(inst: Instruction, definition: MemoryDef) -> None:
    """Refuse an offset that does not fit, and a literal as a buffer's scalar offset."""
    low, high = _OFFSETS.get(definition.space, (-(1 << 31), 1 << 31))
    offset = inst.modifiers.get("offset", 0)
    if isinstance(offset, int) and not low <= offset <= high:
        raise refuse(inst, f"offset {offset}: a {definition.space} instruction takes {low} to {high}")
    if definition.space == "buffer" and inst.operands:
        last = inst.operands[-1]
        if last.kind == "const" and is_literal(last, "b32"):
            raise refuse(inst, f"{last.text}: a buffer's scalar offset takes no literal")


def check_exchange(inst: Instruction) -> None:
    """Refuse an offset of an LDS lane exchange that does not fit."""
    offset = inst.modifiers.get("offset", 0)
    if isinstance(offset, int) and not 0 <= offset < 1 << 16:
        raise refuse(inst, f"offset {offset} does not fit 16 bits")


def check_scalar(inst: Instruction, definition: AluDef) -> None:
    """Refuse a second literal, and one of more than 32 bits."""
    literals = set()
    for kind, operand in zip(*_sources(inst, definition), strict=True):
        if kind.form != "imm" and operand.kind == "const" and is_literal(operand, kind.base):
            literals.add(operand.value)
            _check_width(inst, operand)
    if len(literals) > 1:
        raise refuse(inst, "a scalar instruction has room for one literal")


def _sources(inst: Instruction, definition: AluDef) -> tuple[list[OperandType], list[Operand]]:
    """Source types that the text shows, and their operands."""
    signature = definition.signature
    kinds = [t for t in signature.sources if t.in_text]
    first = sum(t.in_text for t in signature.results)
    return kinds, list(inst.operands[first : first + len(kinds)])


def _check_width(inst: Instruction, operand: Operand) -> None:
    if isinstance(operand.value, int) and not -(1 << 31) <= operand.value < 1 << 32:
        raise refuse(inst, f"{operand.text}: a literal has 32 bits")


def check_vector(inst: Instruction, definition: AluDef) -> None:
    """Refuse operands or modifiers that the vector encoding of `inst` has no room for."""
    base, suffix = split_mnemonic(inst.mnemonic)
    has_literal_form = base.startswith(_WITH_LITERAL)
    has_short = base[2:] in _SHORT or base.startswith("v_cmp") or has_literal_form
    if suffix in ("e32", "sdwa", "dpp") and not has_short:
        raise refuse(inst, f"{base} has no {suffix} encoding")
    kinds, sources = _sources(inst, definition)
    _check_kinds(inst, base, kinds, sources)
    selects = inst.modifiers.get("op_sel", ())
    # Conversions that write one byte of the result select it with the last two of four bits.
    byte_result = base.startswith(("v_cvt_sr_", "v_cvt_scalef32_pk_fp4_"))
    bits = 4 if byte_result else len(kinds) + 1
    if isinstance(selects, tuple) and len(selects) > bits:
        raise refuse(inst, f"op_sel has {len(selects)} bits for {len(kinds)} sources and a result")
    if not has_short and base.startswith(_VOP3P) and ("mul" in inst.modifiers or "div" in inst.modifiers):
        raise refuse(inst, "packed, dot and matrix instructions have no output modifier")
    encoding = _encoding(inst, definition, suffix, has_short)
    if encoding == "dpp":
        _check_dpp(inst, definition, sources)
    elif encoding == "e32":
        problem = None if has_literal_form else _not_short(inst, definition)
        if problem:
            raise refuse(inst, problem)
    literals = {
        operand.value
        for kind, operand in zip(kinds, sources, strict=True)
        if operand.kind == "const" and kind.form not in ("imm", "mask") and is_literal(operand, kind.base)
    }
    if literals and encoding != "e32":
        raise refuse(
            inst, f"constant {_text(sources, literals)} is a literal, which this encoding cannot hold"
        )
    for operand in sources:
        if operand.value in literals:
            _check_width(inst, operand)
    _check_bus(inst, definition, sources, literals)


def _text(sources: Sequence[Operand], literals: set[int | float]) -> str:
    return next(operand.text for operand in sources if operand.kind == "const" and operand.value in literals)


def _encoding(inst: Instruction, definition: AluDef, suffix: str, has_short: bool) -> str:
    """The encoding that the suffix asks for, or the shortest that fits."""
    if suffix:
        return suffix
    if any(name in inst.modifiers for name in DPP_CONTROLS):
        return "dpp"
    if not has_short or (not inst.mnemonic.startswith(_WITH_LITERAL) and _not_short(inst, definition)):
        return "e64"
    return "e32"


def _not_short(inst: Instruction, definition: AluDef) -> str | None:
    """Why the 32-bit encoding does not fit, or None."""
    if inst.modifiers:
        return f"modifier {next(iter(inst.modifiers))!r} wants the 64-bit encoding"
    kinds, sources = _sources(inst, definition)
    masks = [
        operand
        for kind, operand in zip(definition.signature.results, inst.operands, strict=False)
        if kind.form == "mask"
    ]
    for position, (kind, operand) in enumerate(zip(kinds, sources, strict=True)):
        if operand.neg or operand.abs or operand.sext:
            return f"{operand.text}: a source modifier wants the 64-bit encoding"
        if kind.form == "mask":
            masks.append(operand)
        elif position and operand.kind != "vgpr" and kind.form != "imm":
            return f"{operand.text}: source {position} of the 32-bit encoding is a VGPR"
    for operand in masks:
        if operand.kind != "sgpr" or operand.index != VCC:
            return f"{operand.text}: the lane mask of the 32-bit encoding is vcc"
    return None


def _check_dpp(inst: Instruction, definition: AluDef, sources: list[Operand]) -> None:
    for operand in sources:
        if operand.kind != "vgpr" and not (operand.kind == "sgpr" and operand.index == VCC):
            raise refuse(inst, f"{operand.text}: DPP reads VGPRs only")
    for name in ("clamp", "mul", "div"):
        if name in inst.modifiers:
            raise refuse(inst, f"DPP has no room for {name!r}")
    result = definition.signature.results[0] if definition.signature.results else None
    wide = result is not None and result.form == "lane" and result.dtype.itemsize == 8
    if wide and "row_newbcast" not in inst.modifiers:
        raise refuse(inst, "DPP on 64 bits knows row_newbcast only")


def _check_kinds(inst: Instruction, base: str, kinds: list[OperandType], sources: list[Operand]) -> None:
    """Which of the three register files each operand may be in."""
    matrix = base.startswith(("v_mfma_", "v_smfmac_"))
    if matrix:
        _check_matrix(inst, base, sources)
    elif base.startswith("v_accvgpr_"):
        pattern = {"v_accvgpr_read_b32": ("vgpr", "agpr"), "v_accvgpr_mov_b32": ("agpr", "agpr")}
        wanted = pattern.get(base, ("agpr", ""))
        for operand, kind in zip(inst.operands, wanted, strict=True):
            if (kind and operand.kind != kind) or (not kind and operand.kind == "agpr"):
                raise refuse(inst, f"{operand.text}: wants {'an AGPR' if kind == 'agpr' else 'a VGPR'}")
    elif any(operand.kind == "agpr" for operand in inst.operands):
        raise refuse(inst, "AGPRs are operands of matrix, v_accvgpr and memory instructions only")
    if base in ("v_readlane_b32", "v_readfirstlane_b32") and sources[0].kind != "vgpr":
        raise refuse(inst, f"{sources[0].text}: wants a VGPR")


def _check_matrix(inst: Instruction, base: str, sources: list[Operand]) -> None:
    for operand in sources[:2]:
        if operand.kind not in ("vgpr", "agpr"):
            raise refuse(inst, f"{operand.text}: a matrix operand is in VGPRs or AGPRs")
    third = sources[2]
    if base.startswith("v_smfmac_"):
        if third.kind != "vgpr":
            raise refuse(inst, f"{third.text}: the indices of a sparse matrix are in a VGPR")
    elif third.kind == "sgpr":
        raise refuse(inst, f"{third.text}: the third operand is in VGPRs or AGPRs, or an inline constant")
    elif third.kind in ("vgpr", "agpr") and third.kind != inst.operands[0].kind:
        raise refuse(inst, f"{third.text}: the third operand and the result are both VGPRs or both AGPRs")


def _check_bus(
    inst: Instruction, definition: AluDef, sources: list[Operand], literals: set[int | float]
) -> None:
    """One value comes over the constant bus; a lane mask and an implicit vcc come that way too."""
    values: set[object] = {("literal", value) for value in literals}
    values |= {(operand.index, operand.count) for operand in sources if operand.kind == "sgpr"}
    if any(kind.form == "vcc" for kind in definition.signature.sources):
        values.add((VCC, 2))
    if definition.mnemonic == "v_writelane_b32":
        values.discard((M0, 1))  # its lane number may be in m0 besides
    if len(values) > 1:
        raise refuse(inst, "more than one scalar register or literal: the constant bus brings one value")
