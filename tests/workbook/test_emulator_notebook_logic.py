# SPDX-License-Identifier: Apache-2.0
"""Logic of notebook emulator/01_fidelity: demonstrations, bounds, the conformance document, claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernellib.emulator.benchmarks.cases import prepare_gemm_a8w4
from kernellib.emulator.sanitizers.names import SANITIZERS
from kernellib.workbook.emulator import conformance, demos, kernels, roofline
from kernellib.workbook.errors import UsageError


@pytest.mark.parametrize("mode", ["simple", "relaxed"])
@pytest.mark.parametrize("demo", demos.DEMOS, ids=lambda demo: demo.name)
def test_demonstration(demo: demos.Demo, mode: demos.Mode) -> None:
    result = demos.run_demo(demo, mode, schedule_seed=3)
    assert result.as_wanted, result.summary
    if demo.finding.__name__ != "DeadlockError":
        assert "wave" in demos.where_of(result.caught)
        assert result.caught.location.source is not None


def test_every_sanitizer_has_a_demonstration() -> None:
    assert set(SANITIZERS) <= {demo.sanitizer for demo in demos.DEMOS}


def test_claims_fail_when_a_fault_goes_unseen_or_a_twin_does_not_run() -> None:
    demo = demos.DEMOS[0]
    seen = demos.run_demo(demo)
    blind = demos.DemoResult(demo, "simple", 0, None, "")
    noisy = demos.DemoResult(demo, "relaxed", 0, seen.caught, "a false alarm")
    verdicts = {claim.name: claim.verdict for claim in demos.demo_claims([blind, noisy])}
    assert list(verdicts.values()) == ["fail", "fail", "fail"]
    good = demos.DemoResult(demo, "relaxed", 0, seen.caught, "")
    assert [claim.verdict for claim in demos.demo_claims([seen, good])] == ["pass", "pass", "fail"]


def test_bounds_of_a_gemm_by_hand() -> None:
    counted = kernels.count_kernel("gemm_a8w4", "a GEMM", prepare_gemm_a8w4(1))
    assert counted.error <= 1
    # A and C whole, B in half-bytes, two scales of a byte for 32 elements
    assert counted.touched_bytes == 256 * 256 * (1 + 4) + 256 * 128 + 2 * 256 * 8
    machine = roofline.Machine(bandwidth_bytes_per_s=1e9, clock_hz=1e9)
    found = roofline.bounds(counted, machine)
    assert found.units == 16
    assert found.seconds["memory"] == counted.touched_bytes / 1e9
    assert found.seconds["matrix"] == pytest.approx(2 * 256**3 / (5.0332e15 * 16 / 256))
    assert found.seconds["lds"] == pytest.approx((3072 + 3072) / 16 / 1e9)
    vector = counted.report.classes["vector"] * 4 / 64 / 1e9
    assert found.seconds["vector"] == pytest.approx(vector)
    assert found.binding == "memory"


@pytest.mark.parametrize(
    ("matrix_type", "wanted"),
    [("scaled fp8 x fp4", "8 bit"), ("fp6 x fp4", "6 or 4 bit"), ("bf16 sparse", "16 bit"), ("i8", "8 bit"),
     ("f32", "f32"), ("bf8 x fp8", "8 bit")],
)  # fmt: skip
def test_peak_of_a_matrix_type(matrix_type: str, wanted: str) -> None:
    assert roofline.width_class(matrix_type) == wanted


def test_conformance_rows_and_claims(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    path.write_text(
        "# Title\n\n| instruction | encodings | forms | lanes | what is checked | source |\n| --- |\n"
        "| `v_add_f32` | e32, e64 | vgpr, sgpr | 1,234 | rounding | CDNA4 ISA |\n"
        "| `s_add_i32` | plain | sgpr | 0 | value, scc | CDNA4 ISA |\n"
    )
    rows = conformance.read_rows(path)
    assert [(row.mnemonic, row.lanes) for row in rows] == [("v_add_f32", 1234), ("s_add_i32", 0)]
    claims = conformance.conformance_claims(rows, ["v_add_f32_e32", "v_mul_f32_e32"])
    assert [claim.verdict for claim in claims] == ["fail", "fail"]
    assert "v_mul_f32" in claims[1].detail
    assert [claim.verdict for claim in conformance.conformance_claims(rows[:1], ["v_add_f32_dpp"])] == [
        "pass"
    ] * 2
    html = conformance.FullTable(rows)._repr_html_()
    assert html.count("<tr>") == 3
    path.write_text("no table")
    with pytest.raises(UsageError, match="no table"):
        conformance.read_rows(path)


def test_the_real_document_is_found() -> None:
    rows = conformance.read_rows()
    assert len(rows) > 900
    assert len({row.mnemonic for row in rows}) == len(rows)
