# SPDX-License-Identifier: Apache-2.0
"""Operand forms of vector ALU cases: SGPRs, constants, neg and abs, op_sel, clamp, SDWA and DPP."""

from __future__ import annotations

from collections.abc import Callable

import conformance_reference as ref
from conformance_harness import LANES, TYPES, Expected, OneOf, sname
from conformance_vector import SCALAR_SOURCE, Builder, VectorCase

INLINE_FLOATS = {"0.5": 0.5, "-2.0": -2.0}


def constant(kind: str, text: str) -> int:
    """Bits of an inline constant as an operand of a type sees it."""
    t = TYPES[kind]
    if text in INLINE_FLOATS:
        fmt = t.fmt or {16: ref.F16, 32: ref.F32, 64: ref.F64}[t.bits]
        return ref.encode(fmt, ref.decode(ref.F64, ref.f64_bits(INLINE_FLOATS[text])))
    return int(text) & ((1 << t.bits) - 1)


def _text_sources(case: VectorCase) -> list[int]:
    return [i for i, k in enumerate(case.sources) if k not in ("mask", "vcc") and not k.startswith("old:")]


def _scalar_forms(build: Builder, encoding: str, sources: list[int]) -> None:
    """SGPR, inline constants and a literal, in each position that the encoding allows."""
    case = build.case
    has_mask = "mask" in case.sources or "vcc" in case.sources
    places = sources[:1] if encoding == "e32" else sources
    for index in places:
        kind = case.sources[index]
        t = TYPES[kind]
        if kind.startswith("pk_") or t.bits not in (16, 32, 64):
            continue
        if not has_mask:
            name = sname(SCALAR_SOURCE, t.registers)
            build.emit(encoding, f"sgpr src{index}", {index: name}, {index: build.scalar_value(index)})
        texts = ["0.5", "-2.0", "-16"] if t.fmt else ["64", "-1"] + (["0.5"] if t.bits == 32 else [])
        for text in texts:
            values = [constant(kind, text)] * build.num
            build.emit(encoding, f"inline {text} src{index}", {index: text}, {index: values})
        if encoding == "e32" and t.bits == 32 and not has_mask:
            literal = 0x3FB8AA3B if t.fmt else 0x89ABCDEF
            build.emit(encoding, "literal", {index: hex(literal)}, {index: [literal] * build.num})


def _modifier_forms(build: Builder, encoding: str, sources: list[int]) -> None:
    """neg and abs on float sources, op_sel on 16-bit operands, clamp on a float result."""
    case = build.case
    floats = [i for i in sources if TYPES[case.sources[i]].fmt is not None]
    for choice in ("neg", "abs", "both"):
        names, columns = {}, {}
        for order, index in enumerate(floats):
            sign = 1 << (TYPES[case.sources[index]].bits - 1)
            how = {"neg": "neg", "abs": "abs", "both": ("both", "neg", "abs")[order % 3]}[choice]
            register, column = build.register_of(index), build.source_columns()[index]
            if how != "neg":
                column = [v & ~sign for v in column]
            if how != "abs":
                column = [v ^ sign for v in column]
            names[index] = {"neg": f"-{register}", "abs": f"|{register}|", "both": f"-|{register}|"}[how]
            columns[index] = column
        if floats:
            build.emit(encoding, choice, names, columns)


def _op_sel_forms(build: Builder, encoding: str, sources: list[int]) -> None:
    """VOP3 op_sel on 16-bit operands: upper halves as sources, upper half as destination."""
    case = build.case
    if encoding != "vop3" or not case.op_sel:  # gfx9 has op_sel in instructions that exist in VOP3 only
        return
    halves = [TYPES[case.sources[i]].bits == 16 for i in sources]
    if TYPES[case.results[0]].bits == 32 and any(halves):
        chosen = [i for i, half in zip(sources, halves, strict=True) if half]
        bits = ",".join("1" if half else "0" for half in halves)
        columns = {i: build.high_column(i) for i in chosen}
        build.emit(encoding, "op_sel high sources", columns=columns, suffix=f"op_sel:[{bits},0]")
        return
    if TYPES[case.results[0]].bits != 16 or any(TYPES[case.sources[i]].bits != 16 for i in sources):
        return
    ones = ",".join("1" for _ in sources)
    columns = {i: build.high_column(i) for i in sources}
    build.emit(
        encoding,
        "op_sel all high",
        columns=columns,
        suffix=f"op_sel:[{ones},1]",
        place=lambda result, before: result << 16 | before & 0xFFFF,
    )
    first = ",".join("1" if n == 0 else "0" for n in range(len(sources)))
    build.emit(
        encoding,
        "op_sel src0 high, dst high",
        columns={sources[0]: columns[sources[0]]},
        suffix=f"op_sel:[{first},1]",
        place=lambda result, before: result << 16 | before & 0xFFFF,
    )


def _select(values: list[int], high: list[int], bits: int, sel: str, sext: bool) -> list[int]:
    """SDWA source selection on register contents."""
    out = []
    for lo, hi in zip(values, high, strict=True):
        register = lo | hi << 16 if bits == 16 else lo
        if sel == "DWORD":
            out.append(register & ((1 << bits) - 1))
            continue
        width = 16 if sel.startswith("WORD") else 8
        part = register >> (width * int(sel[-1])) & ((1 << width) - 1)
        out.append(ref.sx(part, width) & ((1 << bits) - 1) if sext else part)
    return out


SDWA_FORMS = (
    # source selects, sext, destination select, what happens to the rest
    (("WORD_1", "BYTE_2"), False, "DWORD", "UNUSED_PAD"),
    (("BYTE_3", "WORD_0"), True, "WORD_1", "UNUSED_PRESERVE"),
    (("BYTE_1", "WORD_1"), False, "WORD_1", "UNUSED_PAD"),
    (("WORD_0", "BYTE_0"), False, "WORD_0", "UNUSED_SEXT"),
)


def _place_sdwa(dst: str, unused: str) -> Callable[[int, int], int] | None:
    if dst == "DWORD":
        return None
    shift = 16 * int(dst[-1])

    def place(result: int, before: int) -> int:
        part = result & 0xFFFF
        if unused == "UNUSED_PRESERVE":
            return before & ~(0xFFFF << shift) | part << shift
        if unused == "UNUSED_SEXT" and shift == 0:
            return ref.sx(part, 16) & ref.M32
        return part << shift

    return place


def _sdwa_forms(build: Builder, sources: list[int]) -> None:
    case = build.case
    result = case.results[0]
    for selects, sext, dst, unused in SDWA_FORMS:
        names, columns, words = {}, {}, []
        where, rest = dst, unused
        if result == "mask" and dst != "DWORD":
            continue
        if TYPES[result].bits == 64 or result == "f32":
            where, rest = "DWORD", "UNUSED_PAD"  # half of an f32 result is of no use
        for order, index in enumerate(sources):
            t = TYPES[case.sources[index]]
            sel, extend = selects[order % 2], sext and case.sdwa_sext
            if t.fmt is not None:  # float operands: whole words only, no sign extension
                sel, extend = (
                    ("DWORD" if t.bits == 32 else sel.replace("BYTE_3", "WORD_1").replace("BYTE", "WORD")),
                    False,
                )
                sel = "WORD_0" if sel in ("WORD_2", "WORD_3") else sel
            high = build.high_column(index)
            columns[index] = _select(build.source_columns()[index], high, t.bits, sel, extend)
            if extend:
                names[index] = f"sext({build.register_of(index)})"
            words.append(f"src{order}_sel:{sel}")
        if result == "mask" or not case.sdwa_dst:
            text = " ".join(words)
            for in_vcc in (True, False)[: 2 if result == "mask" else 1]:  # a compare may write any SGPR pair
                build.emit("sdwa", text, names, columns, suffix=text, mask_in_vcc=in_vcc)
            continue
        text = f"dst_sel:{where} dst_unused:{rest} {' '.join(words)}"
        place = _place_sdwa(where, rest)
        if TYPES[result].bits == 16 and where == "DWORD":
            place = lambda value, before: value  # noqa: E731  the 16-bit result, zero extended
        build.emit("sdwa", text, names, columns, suffix=text, place=place)


DPP_FORMS: tuple[tuple[str, Callable[[int], int]], ...] = (
    ("quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", lambda n: n ^ 1),
    ("row_ror:3 row_mask:0xf bank_mask:0xf", lambda n: (n & 0x30) | (n - 3) % 16),
)
DPP64_FORMS: tuple[tuple[str, Callable[[int], int]], ...] = (  # all that 64-bit instructions have
    ("row_newbcast:3 row_mask:0xf bank_mask:0xf", lambda n: (n & 0x30) | 3),
)


def _dpp_forms(build: Builder, sources: list[int]) -> None:
    case = build.case
    column = build.source_columns()[sources[0]]
    is_wide = any(
        TYPES[k.removeprefix("old:")].bits == 64 for k in (*case.sources, *case.results) if k != "vcc"
    )
    for text, lane_of in DPP64_FORMS if is_wide else DPP_FORMS:
        moved = [column[i // LANES * LANES + lane_of(i % LANES)] for i in range(build.num)]
        build.emit("dpp", text.split()[0], columns={sources[0]: moved}, suffix=text)


def clamped(fmt: ref.Format) -> Callable[[Expected], Expected]:
    """The clamp bit on an exact float result, with DX10_CLAMP: to [0, 1], NaN to 0 (CDNA4 ISA 6.5)."""
    one, sign = fmt.bias << fmt.mbits, 1 << (fmt.bits - 1)

    def apply(value: Expected) -> Expected:
        if not isinstance(value, int):
            return value
        if value == sign:
            return OneOf((0, sign))  # whether -0 becomes +0 is not documented
        if ref.is_nan(fmt, value) or value & sign:
            return 0
        return min(value, one)

    return apply


def _clamp_form(build: Builder, encoding: str) -> None:
    """The clamp bit, where the reference is exact."""
    fmt = TYPES[build.case.results[0]].fmt
    rows = [*zip(*build.source_columns(), strict=True)][:8]
    if fmt is None or not all(isinstance(build.case.reference(*values), int) for values in rows):
        return
    build.emit(encoding, "clamp", suffix="clamp", finish=clamped(fmt))


def check_vector_case(case: VectorCase) -> None:
    """Run a vector case in all its forms (DPP forms in a run with a full exec mask)."""
    build, sources = Builder(case), _text_sources(case)
    for encoding in case.encodings:
        if encoding == "sdwa":
            _sdwa_forms(build, sources)
        elif case.literal_at is not None:
            at = case.literal_at
            is_half = TYPES[case.sources[at]].bits == 16
            for value in (0x3C01, 0xC248, 0x0003) if is_half else (0x3FB8AA3B, 0xC0490FDB, 0x00000003):
                build.emit(encoding, f"literal {value:#x}", {at: hex(value)}, {at: [value] * build.num})
        elif encoding != "dpp":
            build.emit(encoding, "vgprs")
            if case.scalar:
                _scalar_forms(build, encoding, sources)
            if encoding in ("e64", "vop3") and case.modifiers:
                _modifier_forms(build, encoding, sources)
                _op_sel_forms(build, encoding, sources)
                if case.clamp:
                    _clamp_form(build, encoding)
    build.execute()
    if "dpp" in case.encodings:
        build = Builder(case, full_exec=True)
        _dpp_forms(build, sources)
        build.execute()


__all__ = ["check_vector_case", "clamped", "constant"]
