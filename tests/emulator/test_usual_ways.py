# SPDX-License-Identifier: Apache-2.0
"""The short ways that usual operands take: same results as the general ones, at the edges where they end."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kernellib.emulator.arith import integer
from kernellib.emulator.errors import MisalignedAccessError, OutOfBoundsError
from kernellib.emulator.snippet import run_snippet

Array = np.ndarray[Any, Any]
LANES = np.arange(64, dtype=np.uint32)
PLACES = [*itertools.product((0, 2, 4), repeat=3)]


def _pairs(seed: int) -> dict[int, Array]:
    """Six registers of random dwords, a third of them near the end, so that sums carry."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << 32, (6, 64), dtype=np.uint32)
    values[rng.random(values.shape) < 0.3] = 0xFFFFFFFF
    return dict(enumerate(values))


@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("exec_mask", [2**64 - 1, 0x5555_0000_FFFF_1234])
def test_address_sums_whatever_registers_overlap(shift: int, exec_mask: int) -> None:
    """v_lshl_add_u64 with the three pairs in each other's places, with all lanes on and with some off."""
    on = np.array([exec_mask >> lane & 1 for lane in range(64)], bool)
    for target, a, c in PLACES:
        before = _pairs(target * 16 + a * 4 + c)
        text = f"v_lshl_add_u64 v[{target}:{target + 1}], v[{a}:{a + 1}], {shift}, v[{c}:{c + 1}]"
        found = run_snippet(text, vgprs=before, exec_mask=exec_mask)
        joined = [
            before[i].astype(np.uint64) | before[i + 1].astype(np.uint64) << np.uint64(32) for i in range(5)
        ]
        total = (joined[a] << np.uint64(shift)) + joined[c]
        wanted = dict(before)
        for place, part in ((target, total), (target + 1, total >> np.uint64(32))):
            wanted[place] = np.where(on, (part & np.uint64(0xFFFFFFFF)).astype(np.uint32), before[place])
        for register, value in wanted.items():
            np.testing.assert_array_equal(found.vgpr(register), value, f"v{register} of {text}")


def test_address_sum_of_scalar_pairs() -> None:
    """A uniform addend that carries in every lane but lane 0."""
    found = run_snippet(
        "v_lshl_add_u64 v[2:3], v[0:1], 4, s[2:3]",
        vgprs={0: LANES, 1: 0x10000000}, sgprs={2: 0xFFFFFFF0, 3: 7},
    )  # fmt: skip
    total = ((LANES.astype(np.uint64) | 0x10000000 << 32) << np.uint64(4)) + np.uint64(0x7_FFFFFFF0)
    np.testing.assert_array_equal(found.vgpr(2), (total & 0xFFFFFFFF).astype(np.uint32))
    np.testing.assert_array_equal(found.vgpr(3), (total >> np.uint64(32)).astype(np.uint32))


@pytest.mark.parametrize("table", range(256))
def test_truth_tables_keep_shapes(table: int) -> None:
    """Operands of different shapes, also where the table does not look at some of them."""
    a, b, c = (
        np.full((3, 1), 0xF0, np.uint32),
        np.full((1, 4), 0xCC, np.uint32),
        np.full((1, 1), 0xAA, np.uint32),
    )
    got = integer.bitop3(a, b, c, table)
    assert got.shape == (3, 4)
    np.testing.assert_array_equal(got & np.uint32(0xFF), table)


def test_lds_pieces_at_the_end_of_the_allocation() -> None:
    """96 bytes are no power of two: together the addresses' bits reach past the end, none does."""
    data = np.arange(24, dtype=np.uint32)
    places = (LANES % 6) * 16
    text = "ds_read_b128 v[4:7], v0\ns_waitcnt lgkmcnt(0)"
    found = run_snippet(text, vgprs={0: places}, lds=data, lds_bytes=96)
    for register in range(4):
        np.testing.assert_array_equal(found.vgpr(4 + register), places // 4 + register)
    with pytest.raises(OutOfBoundsError):
        run_snippet(text, vgprs={0: places + 4}, lds=data, lds_bytes=96)
    with pytest.raises(OutOfBoundsError):
        run_snippet(text.replace("v0\n", "v0 offset:16\n"), vgprs={0: places}, lds=data, lds_bytes=96)


@pytest.mark.parametrize("shift", [0, 4, 8, 12])
def test_lds_data_across_pieces(shift: int) -> None:
    """Dword-aligned 16-byte accesses, by address and by offset; other alignments are findings."""
    data = np.arange(512, dtype=np.uint32)
    for address, offset in ((LANES * 16 + shift, 0), (LANES * 16, shift)):
        text = f"ds_read_b128 v[4:7], v0 offset:{offset}\ns_waitcnt lgkmcnt(0)\n"
        text += "ds_write_b128 v0, v[4:7] offset:1024"
        found = run_snippet(text, vgprs={0: address.astype(np.uint32)}, lds=data, lds_bytes=2064)
        for register in range(4):
            np.testing.assert_array_equal(found.vgpr(4 + register), LANES * 4 + shift // 4 + register)
        written = found.lds.view(np.uint32)[256 + int(address[0]) // 4 :][:256]
        np.testing.assert_array_equal(written, np.arange(256) + shift // 4)
    with pytest.raises(MisalignedAccessError):
        run_snippet("ds_read_b32 v4, v0", vgprs={0: LANES * 4 + 2}, lds=data, lds_bytes=2048)


def test_last_lane_wins_at_one_lds_address() -> None:
    """Lanes that store to one place take their turns in order."""
    found = run_snippet("ds_write_b32 v0, v1", vgprs={0: LANES * 0 + 8, 1: LANES}, lds_bytes=16)
    assert found.lds.view(np.uint32)[2] == 63


def test_two_elements_of_one_read() -> None:
    """ds_read2_b32, ds_read2_b64 and ds_read2st64_b32: both elements, each at its own offset."""
    data = np.arange(1024, dtype=np.uint32)
    for name, registers, first, second, unit in (
        ("ds_read2_b32", 2, 3, 7, 4), ("ds_read2_b64", 4, 1, 2, 8), ("ds_read2st64_b32", 2, 0, 2, 256)
    ):  # fmt: skip
        text = f"{name} v[4:{3 + registers}], v0 offset0:{first} offset1:{second}\ns_waitcnt lgkmcnt(0)"
        found = run_snippet(text, vgprs={0: LANES * 8}, lds=data, lds_bytes=4096)
        each = registers // 2
        for register in range(registers):
            offset = (first, second)[register // each] * unit // 4 + register % each
            np.testing.assert_array_equal(found.vgpr(4 + register), LANES * 2 + offset, f"{name} v{register}")
