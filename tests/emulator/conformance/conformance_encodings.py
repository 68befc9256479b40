# SPDX-License-Identifier: Apache-2.0
"""Which encodings gfx950 has of each vector instruction, as LLVM's assembler tells.

    python tests/emulator/conformance/conformance_encodings.py --write

asks it about every mnemonic of the instruction table and writes `gfx950_encodings.txt`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from conformance_assembler import rejected

from kernellib.emulator.instructions import REGISTRY
from kernellib.emulator.instructions.registry import AluDef, OperandType

FILE = Path(__file__).with_name("gfx950_encodings.txt")
_DPP = ("quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", "row_newbcast:3 row_mask:0xf bank_mask:0xf")
_HEADER = """# SPDX-License-Identifier: Apache-2.0
# Encodings of the vector instructions that are not VOP3-only, as LLVM's assembler has them for gfx950.
# Written by conformance_encodings.py.
"""


def _operand(kind: OperandType, register: int) -> str:
    if kind.form in ("mask", "vcc"):
        return "vcc"
    if kind.form == "imm":
        return "0"
    size = kind.dtype.itemsize // 4
    if kind.form == "scalar":
        return f"s{register}" if size <= 1 else f"s[{register}:{register + 1}]"
    count = (
        (kind.count or 8) * size if kind.form == "multi" else 2 if kind.form == "packed32" else max(size, 1)
    )
    return f"v{register}" if count == 1 else f"v[{register}:{register + count - 1}]"


def _lines(name: str, definition: AluDef) -> dict[str, list[str]]:
    """Example lines of each encoding; one that assembles proves it."""
    results = [_operand(t, 64) for t in definition.signature.results if t.in_text]
    sources = [t for t in definition.signature.sources if t.in_text]
    text = ", ".join(results + [_operand(t, 2 + 40 * i) for i, t in enumerate(sources)])
    return {
        "e32": [f"{name}_e32 {text}"],
        "e64": [f"{name}_e64 {text}"],
        "sdwa": [f"{name}_sdwa {text} src0_sel:DWORD"],
        "dpp": [f"{name}_dpp {text} {control}" for control in _DPP],
    }


def asked() -> dict[str, frozenset[str]]:
    """Encodings by mnemonic from the assembler; instructions that have no e32 form are left out."""
    lines = {
        name: _lines(name, definition)
        for name, definition in REGISTRY.items()
        if isinstance(definition, AluDef) and not definition.is_scalar and name.startswith("v_")
    }
    bad = rejected(line for found in lines.values() for examples in found.values() for line in examples)
    encodings = {
        name: frozenset(e for e, examples in found.items() if any(line not in bad for line in examples))
        for name, found in lines.items()
    }
    return {name: found for name, found in encodings.items() if "e32" in found}


def stored() -> dict[str, frozenset[str]]:
    """Encodings by mnemonic from the file."""
    found: dict[str, frozenset[str]] = {}
    kinds: frozenset[str] = frozenset()
    for line in FILE.read_text().splitlines():
        if line.endswith(":"):
            kinds = frozenset(line[:-1].split())
        elif not line.startswith("#"):
            found |= dict.fromkeys(line.split(), kinds)
    return found


def text_of(encodings: dict[str, frozenset[str]]) -> str:
    """The file's text: mnemonics grouped by their encodings."""
    groups: dict[str, list[str]] = {}
    for name, kinds in encodings.items():
        groups.setdefault(" ".join(k for k in ("e32", "e64", "sdwa", "dpp") if k in kinds), []).append(name)
    out = [_HEADER.rstrip()]
    for kinds_text in sorted(groups):
        out.append(f"{kinds_text}:")
        row = ""
        for name in sorted(groups[kinds_text]):
            if row and len(row) + len(name) >= 109:
                out.append(row)
                row = ""
            row = f"{row} {name}".strip()
        out.append(row)
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    FILE.write_text(text_of(asked()))
