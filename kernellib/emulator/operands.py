# SPDX-License-Identifier: Apache-2.0
"""Operands and modifiers of one instruction, parsed from the text that LLVM prints for gfx9 targets.

An instruction line is `mnemonic operand, operand, ... modifier modifier ...`.  Operands are separated by
commas; modifiers follow the last operand, separated by blanks, either flags (`nt`, `offen`) or `name:value`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from kernellib.emulator.errors import AssemblySyntaxError, UnsupportedOperandError

OperandKind = Literal["vgpr", "agpr", "sgpr", "const", "symbol", "off", "hwreg", "message", "text"]
ModifierValue = int | str | tuple[int, ...] | bool

# Operand encodings 0..127 of the scalar file: named registers have a fixed number there (CDNA ISA, "SGPR
# operands").
NAMED_SGPRS: dict[str, tuple[int, int]] = {
    "flat_scratch": (102, 2), "flat_scratch_lo": (102, 1), "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2), "xnack_mask_lo": (104, 1), "xnack_mask_hi": (105, 1),
    "vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1), "m0": (124, 1),
    "exec": (126, 2), "exec_lo": (126, 1), "exec_hi": (127, 1),
}  # fmt: skip
# Read-only sources that live beyond the register file; the emulator keeps them in rows 128.. of the same
# array.
SPECIAL_SOURCES: dict[str, tuple[int, int]] = {
    "src_shared_base": (128, 2), "src_shared_limit": (130, 2), "src_private_base": (132, 2),
    "src_private_limit": (134, 2), "src_vccz": (136, 1), "vccz": (136, 1), "src_execz": (137, 1),
    "execz": (137, 1), "src_scc": (138, 1), "scc": (138, 1),
}  # fmt: skip
NUM_SGPRS = 140
VCC, M0, EXEC = 106, 124, 126
VCCZ, EXECZ, SCC = 136, 137, 138

# Flags that stand alone; anything else without a colon is an operand (or an error).
FLAG_MODIFIERS = frozenset(
    {
        "nt",
        "sc0",
        "sc1",
        "glc",
        "slc",
        "dlc",
        "offen",
        "idxen",
        "addr64",
        "lds",
        "gds",
        "tfe",
        "clamp",
        "high",
    }
    | {"row_mirror", "row_half_mirror", "unorm", "da", "lwe", "r128", "a16", "d16"}
)
_NUMBER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)$")
_FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?$")
_REGISTER = re.compile(r"(v|a|s|ttmp|acc)(?:(\d+)|\[(\d+)(?::(\d+))?\])$")
_SYMBOL = re.compile(r"[A-Za-z_.$][\w.$@]*([-+][\w.$@()]+)*$")
_MODIFIER = re.compile(r"([a-z][a-z0-9_]*):(.+)$", re.S)
_HUGE = 1 << 64


@dataclass(frozen=True)
class Operand:
    """One operand.  `index`/`count` for registers, `value` for constants (an int, or a float as written)."""

    kind: OperandKind
    text: str
    index: int = 0
    count: int = 1
    value: int | float = 0
    neg: bool = False
    abs: bool = False
    sext: bool = False

    @property
    def is_register(self) -> bool:
        """True for a vector, accumulation or scalar register."""
        return self.kind in ("vgpr", "agpr", "sgpr")


def split_top_level(text: str, separator: str) -> list[str]:
    """Split at `","` or `" "` outside brackets and quotes.  Raises ValueError when unbalanced."""
    parts: list[str] = []
    depth, quoted = 0, False
    current: list[str] = []
    for char in text:
        if char == '"':
            quoted = not quoted
        elif not quoted:
            if char in "[(":
                depth += 1
            elif char in "])":
                depth -= 1
                if depth < 0:
                    raise ValueError("unbalanced brackets")
        hit = char == separator or (separator == " " and char.isspace())
        if hit and depth == 0 and not quoted:
            parts.append("".join(current))
            current = []
        else:
            current.append(char)
    if depth or quoted:
        raise ValueError("unbalanced brackets or quotes")
    parts.append("".join(current))
    return [p.strip() for p in parts] if separator == "," else [p for p in parts if p]


def parse_int(text: str) -> int | None:
    """Decimal, hexadecimal or binary integer, or None."""
    if not _NUMBER.match(text) or len(text) > 40:
        return None
    try:
        return int(text, 0)
    except ValueError:  # decimal with leading zeros: GNU as would call it octal
        return int(text, 8) if re.fullmatch(r"[-+]?[0-7]+", text) else None


def _register(text: str) -> Operand | None:
    if text in NAMED_SGPRS:
        index, count = NAMED_SGPRS[text]
        return Operand("sgpr", text, index, count)
    if text in SPECIAL_SOURCES:
        index, count = SPECIAL_SOURCES[text]
        return Operand("sgpr", text, index, count)
    match = _REGISTER.match(text)
    if not match:
        return None
    name, single, first, last = match.groups()
    lo = int((single or first)[:6])
    hi = int(last[:6]) if last else lo
    limit = {"v": 256, "a": 256, "acc": 256, "s": 102, "ttmp": 16}[name]
    if not lo <= hi < limit or hi - lo >= 32:
        raise ValueError(f"register range {text} does not exist")
    if name == "ttmp":
        return Operand("sgpr", text, 108 + lo, hi - lo + 1)  # trap temporaries have encodings 108..123
    kind: OperandKind = "vgpr" if name == "v" else "sgpr" if name == "s" else "agpr"
    return Operand(kind, text, lo, hi - lo + 1)


def _register_list(text: str) -> Operand | None:
    """`[v4, v5]`: a register list; only consecutive registers exist in any encoding."""
    if not (text.startswith("[") and text.endswith("]")):
        return None
    items = [_register(t.strip()) for t in text[1:-1].split(",")]
    first = items[0]
    for offset, item in enumerate(items):
        if first is None or item is None or item.kind != first.kind or item.index != first.index + offset:
            raise ValueError(f"register list {text} is not consecutive")
    assert first is not None
    return Operand(first.kind, text, first.index, len(items))


def _modified(text: str) -> Operand | None:
    """`-v1`, `|v1|`, `-|v1|`, `neg(v1)`, `abs(v1)`, `sext(v1)`."""
    for name in ("neg", "abs", "sext"):
        if text.startswith(name + "(") and text.endswith(")"):
            inner = parse_operand(text[len(name) + 1 : -1].strip())
            return Operand(**{**inner.__dict__, "text": text, name: True})
    if text.startswith("|") and text.endswith("|") and len(text) > 2:
        inner = parse_operand(text[1:-1].strip())
        return Operand(**{**inner.__dict__, "text": text, "abs": True})
    if text.startswith("-"):
        inner = parse_operand(text[1:].strip())
        return Operand(**{**inner.__dict__, "text": text, "neg": not inner.neg})
    return None


def parse_operand(text: str) -> Operand:  # noqa: PLR0911 (one return per operand form)
    """Parse one operand.  Raises ValueError when it has no known form."""
    if not text or len(text) > 300:
        raise ValueError("empty operand" if not text else "operand too long")
    if text in ("off", "null"):
        return Operand("off", text)
    if (register := _register(text) or _register_list(text)) is not None:
        return register
    if (number := parse_int(text)) is not None:
        if abs(number) >= _HUGE:
            raise ValueError("constant needs more than 64 bits")
        return Operand("const", text, value=number)
    if _FLOAT.match(text):
        return Operand("const", text, value=float(text))
    if match := re.fullmatch(r"lit(?:64)?\((.+)\)", text):
        return parse_operand(match.group(1).strip())
    for name, kind in (("hwreg", "hwreg"), ("sendmsg", "message"), ("gpr_idx", "message")):
        if text.startswith(name + "(") and text.endswith(")"):
            return Operand(kind, text)  # type: ignore[arg-type]
    if (modified := _modified(text)) is not None:
        return modified
    if _SYMBOL.match(text):
        return Operand("symbol", text)
    raise ValueError(f"operand {text!r} has no known form")


def parse_modifier(token: str) -> tuple[str, ModifierValue] | None:
    """`"offset:1024"` -> `("offset", 1024)`, `"nt"` -> `("nt", True)`; None when the token is no modifier."""
    if token in FLAG_MODIFIERS:
        return token, True
    match = _MODIFIER.match(token)
    if not match:
        return None
    name, value = match.group(1), match.group(2).strip()
    if (number := parse_int(value)) is not None:
        return name, number
    if value.startswith("[") and value.endswith("]"):
        items = [parse_int(v.strip()) for v in value[1:-1].split(",")]
        if any(item is None for item in items):
            raise ValueError(f"modifier {token!r}: not a list of integers")
        return name, tuple(item for item in items if item is not None)
    return name, value


def parse_operands(
    body: str, line_no: int, line: str
) -> tuple[tuple[Operand, ...], dict[str, ModifierValue]]:
    """Operands and modifiers of everything after the mnemonic."""
    operands: list[Operand] = []
    modifiers: dict[str, ModifierValue] = {}
    try:
        chunks = split_top_level(body, ",") if body else []
        for chunk in chunks:
            tokens = split_top_level(chunk, " ")
            if not tokens:
                raise ValueError("empty operand")
            for position, token in enumerate(tokens):
                # `a16` is an image modifier and a register; where an operand starts it is the register.
                modifier = None if not position and _register(token) else parse_modifier(token)
                if modifier is None:
                    if position or modifiers:
                        raise UnsupportedOperandError(f"modifier {token!r} is not known", line_no, line)
                    operands.append(parse_operand(token))
                elif modifier[0] in modifiers:
                    raise ValueError(f"modifier {modifier[0]!r} is given twice")
                else:
                    modifiers[modifier[0]] = modifier[1]
    except ValueError as error:
        raise AssemblySyntaxError(str(error), line_no, line) from None
    except RecursionError:
        raise AssemblySyntaxError("operand is nested too deeply", line_no, line) from None
    return tuple(operands), modifiers
