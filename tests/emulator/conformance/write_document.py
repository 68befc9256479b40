# SPDX-License-Identifier: Apache-2.0
"""Writes `docs/emulator_conformance.md` from what the conformance tests execute.

    python tests/emulator/conformance/write_document.py --write    run the tests, write the document
    python tests/emulator/conformance/write_document.py --check    run the tests, compare with the document

The document names the tests it was made from by a digest, so that a test can tell within milliseconds when it
is stale.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import conformance_encodings
import conformance_harness
import pytest
from conformance_harness import Case

from kernellib.emulator.instructions import REGISTRY

FOLDER = Path(__file__).parent
DOCUMENT = FOLDER.parents[2] / "docs" / "emulator_conformance.md"
ENCODINGS = ("e32", "e64", "sdwa", "dpp", "plain")
FORM_ORDER = (
    "sgpr", "agpr", "inline constant", "literal", "neg", "abs", "sext", "op_sel", "op_sel_hi", "neg_lo",
    "neg_hi", "clamp", "omod", "src_sel", "dst_sel", "quad_perm", "row_mask", "bank_mask", "bound_ctrl",
    "offset", "offen", "idxen", "lds", "sc0", "sc1", "nt", "cbsz", "abid", "blgp", "bitop3",
)  # fmt: skip
_HEAD = """# Conformance of the emulator's instructions

Written by `python tests/emulator/conformance/write_document.py --write`; do not edit.
<!-- inputs {digest} -->

{count} instructions. Every one is compared with values that were worked out without the emulator: exact
rational arithmetic with one rounding, Python integers, element-by-element placement of matrix operands, bytes
of memory. The sources of the rules are in the docstrings of the tests beside the generator. Where published
sources leave a result open, the tests accept every reading of them, and say so.

- **encodings**: those that LLVM's assembler has for gfx950, each executed; `plain` is the only one there is.
- **forms**: operand forms that were executed, then what the tests vary besides.
- **lanes**: lanes (scalar instructions: waves) whose result a test of this instruction computed.

| instruction | encodings | forms | lanes | what is checked | source of the expected values |
| --- | --- | --- | ---: | --- | --- |
"""


def inputs_digest() -> str:
    """Changes whenever a conformance test or the instruction table does."""
    state = hashlib.sha256("\n".join(sorted(REGISTRY)).encode())
    for path in sorted([*FOLDER.glob("*.py"), *FOLDER.glob("*.txt")]):
        state.update(path.name.encode())
        state.update(path.read_bytes())
    return state.hexdigest()[:32]


def stated_digest(document: str) -> str:
    """The digest that a document names, or ""."""
    match = re.search(r"<!-- inputs (\w+) -->", document)
    return match.group(1) if match else ""


def table_of(document: str) -> dict[str, list[str]]:
    """Cells of each instruction's row."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", document, re.M)
    return {name: [cell.strip() for cell in re.split(r"(?<!\\)\|", rest)] for name, rest in rows}


def encodings_run(name: str) -> list[str]:
    """Encodings of a mnemonic that the tests executed; text without a suffix is e32 where that exists."""
    known = conformance_encodings.stored()
    seen = conformance_harness.RECORD.encodings.get(name, set())
    return sorted({"e32" if e == "plain" and name in known else e for e in seen}, key=ENCODINGS.index)


def row_of(name: str, cases: list[Case]) -> str:
    """The row of one mnemonic."""
    record = conformance_harness.RECORD
    forms = record.forms.get(name, set())
    shown = [f for f in FORM_ORDER if f in forms] + sorted(forms - set(FORM_ORDER))
    shown += [f for case in cases for f in case.forms if f and f not in (*ENCODINGS, "vop3", "vop3p")]
    cells = (
        f"`{name}`",
        ", ".join(encodings_run(name)),
        ", ".join(dict.fromkeys(shown)),
        str(record.lanes[name]),
        "; ".join(dict.fromkeys(c.checks for c in cases if c.checks)),
        "; ".join(dict.fromkeys(c.source for c in cases)),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def document() -> str:
    """Run every conformance test and describe what was executed.  Raises SystemExit when one fails."""
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER)]
    status = pytest.main([*arguments, "--ignore", str(FOLDER / "test_conformance_coverage.py")])
    if status:
        raise SystemExit(f"the conformance tests failed ({status!r}): no document")
    cases: dict[str, list[Case]] = {}
    for case in conformance_harness.all_cases():
        cases.setdefault(case.mnemonic, []).append(case)
    rows = [row_of(name, cases.get(name, [])) for name in sorted(REGISTRY)]
    return _HEAD.format(digest=inputs_digest(), count=len(rows)) + "\n".join(rows) + "\n"


def main(arguments: list[str]) -> int:
    """The command line."""
    if arguments == ["--write"]:
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(document())
        return 0
    if arguments == ["--check"]:
        is_same = DOCUMENT.read_text() == document()
        print("the document is up to date" if is_same else "the document is stale: run with --write")
        return 0 if is_same else 1
    print(__doc__)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
