# SPDX-License-Identifier: Apache-2.0
"""Nothing is left out: every instruction has its cases in every encoding, and the document says so truly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import conformance_assembler
import conformance_encodings
import pytest
import write_document
from conformance_harness import Case, all_cases

from kernellib.emulator.instructions import REGISTRY, lookup

MNEMONICS = Path(__file__).with_name("flydsl_mnemonics.txt")
# (mnemonic, encoding): why no test executes it.
EXCUSED = {
    (
        "v_pk_fmac_f16",
        "sdwa",
    ): "what a byte or word of packed halves would mean is not documented; refused",
}


def uncovered(cases: Iterable[Case]) -> list[str]:
    """Mnemonics of the instruction table that have no case."""
    have = {case.mnemonic for case in cases}
    return [name for name in REGISTRY if name not in have]


def unexecuted(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    """(mnemonic, encoding) that exist but were not executed, by the document's table."""
    missing = []
    for name in REGISTRY:
        cells = table.get(name, [""])
        wanted = conformance_encodings.stored().get(name, frozenset({"plain"}))
        for encoding in sorted(wanted):
            done = cells[0].split(", ") if cells[0] else []
            if encoding not in done and not (encoding == "plain" and "e64" in done):
                missing.append((name, encoding))
    return [entry for entry in missing if entry not in EXCUSED]


def test_every_instruction_has_a_case() -> None:
    assert uncovered(all_cases()) == []


def test_every_case_is_of_an_instruction() -> None:
    """A mnemonic that is not in the table would be skipped silently."""
    assert sorted({c.mnemonic for c in all_cases()} - set(REGISTRY)) == []


def test_a_missing_case_is_noticed() -> None:
    cases = all_cases()
    for victim in ("v_add_f32", "s_waitcnt", "v_mfma_scale_f32_16x16x128_f8f6f4", "ds_cmpst_f64"):
        assert uncovered(c for c in cases if c.mnemonic != victim) == [victim]


def test_every_encoding_is_executed() -> None:
    assert unexecuted(write_document.table_of(write_document.DOCUMENT.read_text())) == []


def test_a_missing_encoding_is_noticed() -> None:
    table = write_document.table_of(write_document.DOCUMENT.read_text())
    table["v_add_f32"] = [table["v_add_f32"][0].replace(", sdwa", ""), *table["v_add_f32"][1:]]
    del table["v_add3_u32"]
    assert sorted(unexecuted(table)) == [("v_add3_u32", "plain"), ("v_add_f32", "sdwa")]


def test_instructions_of_compiled_kernels_are_all_there() -> None:
    """The list of mnemonics that FlyDSL's kernels use; a suffix names an encoding that must be executed."""
    table = write_document.table_of(write_document.DOCUMENT.read_text())
    lines = MNEMONICS.read_text().splitlines()
    names = [name for line in lines if not line.startswith("#") for name in line.split()]
    assert len(names) == len(set(names)) > 150
    missing = []
    for name in names:
        definition = lookup(name)
        cells = table.get(definition.mnemonic, []) if definition is not None else []
        needs_sdwa = name.endswith("_sdwa")
        if not cells or cells[2] == "0" or (needs_sdwa and "sdwa" not in cells[0]):
            missing.append(name)
    assert missing == []


def test_document_is_fresh() -> None:
    document = write_document.DOCUMENT.read_text()
    assert write_document.stated_digest(document) == write_document.inputs_digest(), (
        "docs/emulator_conformance.md is stale: python tests/emulator/conformance/write_document.py --write"
    )
    assert sorted(write_document.table_of(document)) == sorted(REGISTRY)


def test_staleness_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed test changes the digest."""
    for path in write_document.FOLDER.glob("*.txt"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(write_document, "FOLDER", tmp_path)
    before = write_document.inputs_digest()
    (tmp_path / "test_conformance_new.py").write_text("CASES = []\n")
    assert write_document.inputs_digest() != before


@pytest.mark.skipif(not conformance_assembler.is_available(), reason="ziglang is not installed")
def test_encodings_are_the_assemblers() -> None:
    assert conformance_encodings.stored() == conformance_encodings.asked()


@pytest.mark.skipif(not conformance_assembler.is_available(), reason="ziglang is not installed")
def test_assembler_can_refuse() -> None:
    bad = "v_add3_u32_sdwa v0, v1, v2, v3"
    assert list(conformance_assembler.rejected(["v_add_u32_e32 v0, v1, v2", bad, ".label:"])) == [bad]


@pytest.mark.slow
def test_document_is_what_the_tests_execute() -> None:
    """Runs every conformance test once more and compares the whole text."""
    command = [sys.executable, str(Path(write_document.__file__)), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]
