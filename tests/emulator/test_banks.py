# SPDX-License-Identifier: Apache-2.0
"""LDS bank conflicts: cases worked by hand, and a count written another way."""

from __future__ import annotations

import numpy as np
import pytest

from kernellib.emulator.banks import bank_passes, bank_rule
from kernellib.emulator.errors import EmulatorError

LANES = np.arange(64)
ALL = np.ones((1, 64), np.bool_)


def passes(
    addresses: np.ndarray, num_bytes: int, direction: str, active: np.ndarray = ALL
) -> tuple[int, int]:
    total, conflicts = bank_passes(np.asarray(addresses)[None], active, num_bytes, direction)
    return int(total[0]), int(conflicts[0])


@pytest.mark.parametrize(
    ("addresses", "num_bytes", "direction", "wanted"),
    [
        # side by side: as many passes as phases, none of them a conflict
        pytest.param(LANES * 4, 4, "read", (2, 0), id="b32-side-by-side"),
        pytest.param(LANES * 8, 8, "read", (2, 0), id="b64-read-side-by-side"),
        pytest.param(LANES * 8, 8, "write", (4, 0), id="b64-write-side-by-side"),
        pytest.param(LANES * 16, 16, "write", (8, 0), id="b128-write-side-by-side"),
        # one phase of ds_read_b128: lanes 0-3, 12-15, 20-27 read dwords 0-15, 48-63, 80-111: banks 0-15,
        # 48-63, 16-47 of 64: all different
        pytest.param(LANES * 16, 16, "read", (4, 0), id="b128-read-side-by-side"),
        # all lanes want the same dword: served together
        pytest.param(LANES * 0, 4, "read", (2, 0), id="broadcast"),
        # a stride of 32 dwords puts all 32 lanes of a phase on bank 0: 32 passes, 31 too many, twice
        pytest.param(LANES * 128, 4, "read", (64, 62), id="b32-one-bank"),
        # a stride of two dwords uses every second bank of 32, twice
        pytest.param(LANES * 8, 4, "read", (4, 2), id="b32-stride-2"),
        # padding to 33 dwords: the classic remedy
        pytest.param(LANES * 132, 4, "read", (2, 0), id="b32-padded"),
        # ds_read_b64, rows of 256 bytes: every lane on banks 0 and 1 of 64
        pytest.param(LANES * 256, 8, "read", (64, 62), id="b64-read-one-bank"),
        # rows of 128 bytes: with 64 banks even lanes are on banks 0, 1, odd ones on 32, 33: 16 deep
        pytest.param(LANES * 128, 8, "read", (32, 30), id="b64-read-two-banks"),
        # the same stores see 32 banks: 16 lanes on banks 0 and 1, four phases
        pytest.param(LANES * 128, 8, "write", (64, 60), id="b64-write-one-bank"),
        # a half-word each: two lanes share a dword
        pytest.param(LANES * 2, 2, "read", (2, 0), id="b16-side-by-side"),
        # atomics on one dword: one lane at a time
        pytest.param(LANES * 0, 4, "atomic", (64, 62), id="atomic-one-dword"),
    ],
)
def test_hand_worked(addresses: np.ndarray, num_bytes: int, direction: str, wanted: tuple[int, int]) -> None:
    assert passes(addresses, num_bytes, direction) == wanted


def test_read_b128_phases_are_the_published_ones() -> None:
    rule = bank_rule("read", 16)
    assert rule.num_banks == 64
    assert [sorted(phase) for phase in rule.phases] == [
        [*range(4), *range(12, 16), *range(20, 28)],
        [*range(4, 12), *range(16, 20), *range(28, 32)],
        [*range(32, 36), *range(44, 48), *range(52, 60)],
        [*range(36, 44), *range(48, 52), *range(60, 64)],
    ]
    assert sorted(bank_rule("read", 12).phases[1]) == [4, 5, 6, 7, 16, 17, 18, 19]
    assert bank_rule("read", 12).num_banks == 32


def test_lanes_of_different_phases_do_not_conflict() -> None:
    # lanes 0 and 4 are in different phases of ds_read_b128, lanes 0 and 12 in the same
    addresses = np.zeros(64, np.int64)
    for other, wanted in ((4, (2, 0)), (12, (2, 1))):
        active = np.zeros((1, 64), np.bool_)
        active[0, [0, other]] = True
        addresses[other] = 256
        assert passes(addresses, 16, "read", active) == wanted


def test_mfma_operand_rows_swizzled_and_not() -> None:
    """16 rows of 128 bytes, a 16-byte chunk a lane (row lane % 16, chunk lane // 16): an fp8 operand."""
    row, chunk = LANES % 16, LANES // 16
    plain = row * 128 + chunk * 16
    swizzled = row * 128 + (chunk ^ (row % 8)) * 16
    # plain: the first phase has chunk 0 of rows 0-3 and 12-15, chunk 1 of rows 4-11; rows of one parity share
    # banks, so four lanes want each of banks 0-3, 32-35, 4-7 and 36-39: four passes, in each of four phases
    assert passes(plain, 16, "read") == (16, 12)
    assert passes(swizzled, 16, "read") == (4, 0)


def test_lanes_that_are_off_want_nothing() -> None:
    active = np.zeros((3, 64), np.bool_)
    active[1, 5] = True
    active[2, 32:] = True
    total, conflicts = bank_passes(np.tile(LANES * 128, (3, 1)), active, 4, "read")
    assert total.tolist() == [0, 1, 32]
    assert conflicts.tolist() == [0, 0, 31]


@pytest.mark.parametrize("num_bytes", [1, 2, 4, 8, 12, 16])
@pytest.mark.parametrize("direction", ["read", "write", "atomic"])
def test_random_accesses_against_a_count_by_dictionaries(num_bytes: int, direction: str) -> None:
    rng = np.random.default_rng(num_bytes)
    step = min(num_bytes, 4)
    addresses = rng.integers(0, 2048 // step, (5, 64)) * step
    active = rng.random((5, 64)) < 0.8
    total, conflicts = bank_passes(addresses, active, num_bytes, direction)
    rule = bank_rule(direction, num_bytes)
    for wave in range(5):
        wanted, busy = 0, 0
        for phase in rule.phases:
            banks: dict[int, list[int]] = {}
            for lane in phase:
                if active[wave, lane]:
                    first = int(addresses[wave, lane]) // 4
                    for dword in range(first, first + max(num_bytes // 4, 1)):
                        banks.setdefault(dword % rule.num_banks, []).append(dword)
            depth = [len(v if direction == "atomic" else set(v)) for v in banks.values()]
            wanted += max(depth, default=0)
            busy += bool(banks)
        assert (int(total[wave]), int(conflicts[wave])) == (wanted, wanted - busy)


def test_a_width_that_no_instruction_has() -> None:
    with pytest.raises(EmulatorError, match="6 bytes"):
        bank_rule("read", 6)
