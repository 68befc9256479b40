# SPDX-License-Identifier: Apache-2.0
"""Notes what the conformance tests execute, and holds every line of it to the assembler."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import conformance_assembler
import conformance_harness
import pytest


@pytest.fixture(autouse=True)
def _subject(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tell the record which mnemonics this test is about: its case's, or its module's."""
    callspec = getattr(request.node, "callspec", None)
    case = callspec.params.get("case") if callspec else None
    cases = [case] if case is not None else getattr(request.module, "CASES", [])
    conformance_harness.RECORD.subjects = frozenset(c.mnemonic for c in cases)
    yield
    conformance_harness.RECORD.subjects = frozenset()


@pytest.fixture(scope="session", autouse=True)
def _every_line_assembles() -> Iterator[None]:
    """At the end of the session: no test may have run a line that LLVM's assembler refuses for gfx950."""
    yield
    record = conformance_harness.RECORD
    if not conformance_assembler.is_available():
        warnings.warn("ziglang is not installed: lines are not held to the assembler", stacklevel=1)
        return
    bad = conformance_assembler.rejected(record.lines - record.unassembled)
    shown = "\n".join(f"  {line}: {text}" for line, text in sorted(bad.items())[:20])
    assert not bad, f"{len(bad)} lines of conformance tests do not exist on gfx950:\n{shown}"
