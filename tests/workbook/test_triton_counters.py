# SPDX-License-Identifier: Apache-2.0
"""The FlyDSL and the Triton kernel side by side on the emulator, and the claims made about them."""

from __future__ import annotations

import dataclasses

import pytest

from kernellib.workbook.latent_moe_tail.triton_counters import (
    TritonComparison,
    compare_triton,
    comparison_claims,
    comparison_table,
)

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def comparison() -> TritonComparison:
    seed = 31
    print(f"seed {seed}")
    return compare_triton(seed)


def test_both_kernels_give_the_same_result(comparison: TritonComparison) -> None:
    assert comparison.num_different <= 0.005 * 7168
    assert [claim.verdict for claim in comparison_claims(comparison)] == ["pass", "pass"]


def test_the_table_holds_both_sides(comparison: TritonComparison) -> None:
    table = comparison_table(comparison)
    assert table.columns[1:] == [comparison.flydsl.kernel_name, "portable_tail"]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["weight bytes requested"] == [51_380_224, 51_380_224]
    assert rows["scratch a lane (bytes)"] == [0, 0]
    assert table.source == "counted"


def test_a_different_result_or_missed_bytes_fail_their_claims(comparison: TritonComparison) -> None:
    different = dataclasses.replace(comparison, num_different=100)
    assert [claim.verdict for claim in comparison_claims(different)] == ["fail", "pass"]
    traffic = tuple(
        dataclasses.replace(entry, requests_per_byte=(0, 1)) if entry.name == "up_weight" else entry
        for entry in comparison.triton.traffic
    )
    missed = dataclasses.replace(comparison, triton=dataclasses.replace(comparison.triton, traffic=traffic))
    assert [claim.verdict for claim in comparison_claims(missed)] == ["pass", "fail"]
