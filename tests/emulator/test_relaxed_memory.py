# SPDX-License-Identifier: Apache-2.0
"""Relaxed mode: what may be seen late, what may not, and what every schedule must leave right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernellib import emulator
from kernellib.emulator.relaxed.chip import AGENT, CUS_PER_XCD, L2, NUM_CUS, SYSTEM, Chip
from kernellib.emulator.relaxed.table import LINE, LineTable
from tests.emulator import flydsl_kernels as kernels
from tests.emulator.listings import listing

SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 50))]
every_seed = pytest.mark.parametrize("seed", SEEDS)


def relaxed(seed: int, **options: Any) -> Any:
    return emulator.emulated(mode="relaxed", schedule_seed=seed, **options)


# ------------------------------------------------------------------------------------------------ caches
@pytest.mark.parametrize("seed", range(20))
def test_line_table_against_bytes(seed: int) -> None:
    """Random stores through one small cache, with evictions, end up as plain stores would."""
    rng = np.random.default_rng(seed)
    table = LineTable(2, 4)
    plain = np.zeros((2, 16 * LINE), np.uint8)
    memory = np.zeros((2, 16 * LINE), np.uint8)

    def evict(slots: np.ndarray) -> None:
        line, data, level = table.take(slots)
        for cache, number, row, mask in zip(slots // 4, line, data, level > 0, strict=True):
            memory[cache, number * LINE : (number + 1) * LINE][mask] = row[mask]

    for _ in range(30):
        count, size = int(rng.integers(1, 40)), int(rng.choice([1, 2, 4, 8]))
        cache = rng.integers(2, size=count)
        at = rng.integers(16 * LINE // size, size=count) * size
        items = rng.integers(1 << 8 * size if size < 8 else 1 << 62, size=count, dtype=np.uint64)
        items = items.astype(f"u{size}")
        table.write(cache, at // LINE, at % LINE, items, L2, evict)
        for one, place, item in zip(cache, at, items, strict=True):
            plain[one, place : place + size] = np.frombuffer(item.tobytes(), np.uint8)
        look = rng.integers(16 * LINE // 4, size=50) * 4
        owner = rng.integers(2, size=50)
        seen = memory[owner[:, None], look[:, None] + np.arange(4)].view(np.uint32)[:, 0].copy()
        table.overlay(seen, owner, look // LINE, look % LINE)
        assert np.array_equal(seen, plain[owner[:, None], look[:, None] + np.arange(4)].view(np.uint32)[:, 0])


def make_chip(seed: int, *cus: int, num_ranks: int = 1) -> Chip:
    chip = Chip(seed, num_ranks)
    chip.residents[list(cus)] = 1
    for rank in range(num_ranks):
        chip.begin(rank)
    return chip


def test_what_each_level_shows() -> None:
    data = np.zeros(256, np.uint8)
    with relaxed(0) as session:
        memory = session.register(data)
    near, far, peer = 1, 5 * CUS_PER_XCD, NUM_CUS
    chip = make_chip(0, 0, near, far, peer, num_ranks=2)
    at = np.array([64])

    def store(value: int, level: int) -> None:
        chip.store(memory, at, np.array([value], np.uint32), np.array([0]), level)

    def load(cu: int, level: int = L2) -> int:
        return int(chip.load(memory, at, 4, np.array([cu]), level)[0])

    store(7, L2)
    assert (load(0), load(near), load(far), load(peer)) == (7, 0, 0, 0)  # on its way
    chip.drain(np.nonzero(chip.l1.has_dirty)[0])
    chip.invalidate(np.array([near, far, peer]), L2)
    assert (load(0), load(near), load(far, AGENT), load(peer, SYSTEM)) == (7, 7, 0, 0)  # in the die's L2
    chip.write_back(np.array([0]), AGENT)
    assert (load(far, AGENT), load(peer, SYSTEM)) == (7, 0)  # released at agent scope
    chip.invalidate(np.array([far]), AGENT)
    assert load(far) == 7
    assert data[64] == 0
    chip.write_back(np.array([0]), SYSTEM)
    assert load(peer, SYSTEM) == 7
    assert data[64] == 7
    store(9, SYSTEM)  # with scope bits a store goes all the way once it is performed
    chip.drain(np.nonzero(chip.l1.has_dirty)[0])
    assert data[64] == 9
    assert load(peer, SYSTEM) == 9


def test_a_copy_stays_until_it_is_invalidated() -> None:
    """A plain load may go on seeing the old value after the flag's release; an acquire ends that."""
    stale = 0
    for seed in range(30):
        data = np.zeros(64, np.uint32)
        with relaxed(seed) as session:
            memory = session.register(data)
        far = 5 * CUS_PER_XCD
        chip = make_chip(seed, 0, far)
        chip.store(memory, np.array([0]), np.array([1], np.uint32), np.array([0]), L2)
        chip.drain(np.nonzero(chip.l1.has_dirty)[0])
        chip.write_back(np.array([0]), AGENT)
        stale += int(chip.load(memory, np.array([0]), 4, np.array([far]), L2)[0]) == 0
        assert int(chip.load(memory, np.array([0]), 4, np.array([far]), AGENT)[0]) == 1
        chip.invalidate(np.array([far]), AGENT)
        assert int(chip.load(memory, np.array([0]), 4, np.array([far]), L2)[0]) == 1
    assert 0 < stale < 30


# ------------------------------------------------------------------------------------------------ programs
@every_seed
def test_a_wave_sees_its_own_accesses_in_order(seed: int) -> None:
    """Stores of all widths and an atomic to one place, each read back at once."""
    text = listing(
        """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 4, v0
        v_lshl_add_u32 v9, s2, 10, v1
        v_mov_b32_e32 v2, 0x11223344
        v_mov_b32_e32 v3, 0x55667788
        v_mov_b32_e32 v4, 0x99
        v_mov_b32_e32 v5, 0xabcd
        s_waitcnt lgkmcnt(0)
        global_store_dwordx2 v9, v[2:3], s[4:5]
        global_store_byte v9, v4, s[4:5] offset:1
        global_store_short v9, v5, s[4:5] offset:6 sc0 sc1
        global_load_dwordx2 v[10:11], v9, s[4:5]
        global_atomic_add v9, v4, s[4:5]
        global_load_dword v12, v9, s[4:5]
        global_load_dword v13, v9, s[4:5] sc1
        global_store_dword v9, v0, s[4:5]
        s_waitcnt vmcnt(0)
        global_store_dwordx4 v9, v[10:13], s[6:7]
        """,
        2,
    )
    data, out = np.zeros((3, 64, 4), np.uint32), np.zeros((3, 64, 4), np.uint32)
    with relaxed(seed, sanitize="all") as session:
        session.run_assembly(text, None, 3, 64, [data, out])
    first = 0x11229944
    assert (out == np.array([first, 0xABCD7788, first + 0x99, first + 0x99], np.uint32)).all()
    assert (data[..., 0] == np.arange(64)).all()


@every_seed
def test_atomics_of_all_workgroups_add_up(seed: int) -> None:
    blocks = 6
    data = torch.randint(
        0, 256, (blocks * 256,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    bins, ticket = torch.zeros(256, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    seen = torch.full((blocks * 256,), -1, dtype=torch.int32)
    with relaxed(seed, sanitize="all") as session:
        kernels.histogram()(data.data_ptr(), bins.data_ptr(), ticket.data_ptr(), seen.data_ptr(), blocks)
        assert len(session.launches) == 1
    assert torch.equal(bins.long(), torch.bincount(data.long(), minlength=256))
    for which in range(4):
        assert torch.equal(seen[which::4].sort().values, torch.arange(blocks * 64, dtype=torch.int32))


@every_seed
@pytest.mark.parametrize("sanitize", ["default", "all"])
def test_kernels_are_right_whatever_the_schedule(seed: int, sanitize: str) -> None:
    x = torch.randn(4 * 256, generator=torch.Generator().manual_seed(3))
    sums, counted = torch.zeros(4), torch.zeros(4 * 256, dtype=torch.int32)
    flags, out = torch.zeros(8, dtype=torch.int32), torch.full((7,), -1, dtype=torch.int32)
    flags[0] = 1
    with relaxed(seed, sanitize=sanitize):
        kernels.block_sum()(x.data_ptr(), sums.data_ptr(), 4)
        kernels.diverge()(counted.data_ptr(), 4)
        kernels.relay()(flags.data_ptr(), out.data_ptr(), 7)
    torch.testing.assert_close(sums, x.view(4, 256).sum(1))
    assert torch.equal(out, torch.arange(7, dtype=torch.int32))
    t = torch.arange(256)
    n = t % 7
    expected = torch.stack([n * (n - 1) // 2 + (t // 64 == 1) * 100 * (b + 3) for b in range(4)])
    assert torch.equal(counted.view(4, 256).long(), expected)


def test_without_its_barrier_the_block_sum_is_wrong_for_some_seed() -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(3))
    text = emulator.compile_to_assembly(kernels.block_sum(False), 0, 0, 1)
    wrong = 0
    for seed in range(50):
        out = torch.zeros(1)
        with relaxed(seed) as session:
            session.run_assembly(text, None, 1, 256, [x, out])
        wrong += not torch.allclose(out, x.sum(), atol=1e-4)
    assert wrong


SLOT = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_load_dwordx2 s[8:9], s[0:1], 0x10
    v_lshlrev_b32_e32 v1, 2, v0
    v_mov_b32_e32 v9, 0
    v_mov_b32_e32 v3, 1
    s_waitcnt lgkmcnt(0)
    s_cmp_eq_u32 s2, 0
    s_cbranch_scc0 .Lwriter
    global_load_dword v5, v1, s[4:5] sc1
    {wait}
    global_store_dword v9, v3, s[6:7] sc1
    s_waitcnt vmcnt(0)
    global_store_dword v1, v5, s[8:9]
    s_endpgm
.Lwriter:
    global_load_dword v4, v9, s[6:7] sc1
    s_waitcnt vmcnt(0)
    v_readfirstlane_b32 s10, v4
    s_cmp_eq_u32 s10, 0
    s_cbranch_scc1 .Lwriter
    global_store_dword v1, v3, s[4:5] sc1
"""


@pytest.mark.parametrize("wait", ["s_waitcnt vmcnt(0)", "s_nop 0"])
def test_a_slot_given_back_before_its_load_has_returned(wait: str) -> None:
    """A load may take its value after a later store has become visible, until a wait covers it."""
    overwritten = 0
    for seed in range(50):
        slot, flag, out = np.full(64, 5, np.uint32), np.zeros(1, np.uint32), np.zeros(64, np.uint32)
        with relaxed(seed) as session:
            session.run_assembly(listing(SLOT.format(wait=wait), 3), None, 2, 64, [slot, flag, out])
        assert set(np.unique(out)) <= {1, 5}
        overwritten += bool((out == 1).any())
    assert bool(overwritten) == ("nop" in wait)


def test_an_lds_store_without_its_wait_may_come_after_the_barrier() -> None:
    text = """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 2, v0
        v_xor_b32_e32 v2, 0x100, v1
        ds_write_b32 v1, v0
        {wait}
        s_barrier
        ds_read_b32 v3, v2
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v3, s[4:5]
        """
    for wait, wanted in (("s_waitcnt lgkmcnt(0)", False), ("s_nop 0", True)):
        wrong = False
        for seed in range(50):
            out = np.zeros(128, np.uint32)
            with relaxed(seed) as session:
                session.run_assembly(listing(text.format(wait=wait), 1, 512), None, 1, 128, [out])
            wrong |= not np.array_equal(out, np.arange(128) ^ 64)
        assert wrong == wanted, wait


@pytest.mark.parametrize("mode", ["simple", "relaxed"])
def test_direct_loads_up_to_the_end_of_an_allocation(mode: str) -> None:
    text = listing(
        """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 4, v0
        s_mov_b32 m0, 0
        s_waitcnt lgkmcnt(0)
        global_load_lds_dwordx4 v1, s[4:5]
        s_waitcnt vmcnt(0)
        ds_read_b128 v[4:7], v1
        s_waitcnt lgkmcnt(0)
        global_store_dwordx4 v1, v[4:7], s[6:7]
        """,
        2,
        lds_bytes=1024,
    )
    whole, out = np.arange(64 * 4 + 64, dtype=np.uint32), np.zeros(256, np.uint32)
    with emulator.emulated(mode=mode, sanitize="all") as session:
        part = session.register_range(whole.ctypes.data, 1024, "exactly the data")
        try:
            session.run_assembly(text, None, 1, 64, [whole.ctypes.data, out])
        finally:
            session.memory.unregister(part)
    assert np.array_equal(out, whole[:256])


def test_the_next_kernel_sees_everything() -> None:
    start = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_lshlrev_b32_e32 v1, 2, v0\n"
    store = listing(
        start
        + """v_lshl_add_u32 v1, s2, 8, v1
        v_add_u32_e32 v2, s2, v0
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v2, s[4:5]""",
        1,
    )
    twice = listing(
        start
        + """s_sub_u32 s3, 3, s2
        v_lshl_add_u32 v1, s3, 8, v1
        s_waitcnt lgkmcnt(0)
        global_load_dword v2, v1, s[4:5]
        s_waitcnt vmcnt(0)
        v_lshlrev_b32_e32 v2, 1, v2
        global_store_dword v1, v2, s[4:5]""",
        1,
    )
    for seed in range(10):
        data = np.zeros((4, 64), np.uint32)
        with relaxed(seed, sanitize="all") as session:
            session.run_assembly(store, None, 4, 64, [data])
            assert np.array_equal(data, np.arange(64) + np.arange(4)[:, None]), seed
            session.run_assembly(twice, None, 4, 64, [data])
        assert np.array_equal(data, 2 * (np.arange(64) + np.arange(4)[:, None])), seed


# ------------------------------------------------------------------------------------------------ endings
POLL = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_mov_b32_e32 v9, 0
    s_waitcnt lgkmcnt(0)
.Lpoll:
    global_load_dword v4, v9, s[4:5] offset:8 {scope}
    s_waitcnt vmcnt(0)
    v_readfirstlane_b32 s10, v4
    s_cmp_lg_u32 s10, 3
    s_cbranch_scc1 .Lpoll
"""


@pytest.mark.parametrize("mode", ["simple", "relaxed"])
@pytest.mark.parametrize("seed", range(3))
def test_a_deadlock_names_who_waits_where_on_what(mode: str, seed: int) -> None:
    flag = np.array([0, 0, 77, 0], np.uint32)
    text = listing(POLL.format(scope="sc1"), 1)
    with (
        emulator.emulated(mode=mode, schedule_seed=seed, quantum=300) as session,
        pytest.raises(emulator.DeadlockError) as caught,
    ):
        session.run_assembly(text, None, 2, 64, [flag])
    lines = "\n".join(caught.value.waiting)
    assert f"{flag.ctypes.data + 8:#x}" in lines
    assert "which holds 0x4d" in lines
    assert "workgroup (0, 0, 0), wave 0" in lines
    assert "spins at" in lines
    assert ("schedule_seed" in str(caught.value)) == (mode == "relaxed")


@every_seed
@pytest.mark.parametrize("scope", ["", "sc1", "sc0 sc1"])
def test_a_spin_sees_the_store_in_the_end(seed: int, scope: str) -> None:
    """Delays are bounded: even a plain load, of a plain store that nobody releases."""
    body = f"""
        s_cmp_eq_u32 s2, 0
        s_cbranch_scc1 .Lwaits
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_mov_b32_e32 v9, 0
        v_mov_b32_e32 v3, 3
        s_waitcnt lgkmcnt(0)
        global_store_dword v9, v3, s[4:5] offset:8
        s_endpgm
    .Lwaits:
        {POLL.format(scope=scope)}
        """
    flag = np.zeros(4, np.uint32)
    with relaxed(seed) as session:
        session.run_assembly(listing(body, 1), None, 2, 64, [flag])
    assert flag.tolist() == [0, 0, 3, 0]
    assert session.launches[-1].instruction_counts["global_load_dword"] >= 1  # it did poll


def test_the_instruction_limit_holds() -> None:
    endless = listing(".Lself:\ns_add_u32 s9, s9, 1\ns_branch .Lself", 1)
    limited = relaxed(4, instruction_limit=2000)
    with limited as session, pytest.raises(emulator.InstructionLimitError, match="schedule_seed=4"):
        session.run_assembly(endless, None, 1, 64, [np.zeros(4, np.uint32)])


def test_bad_modes_and_seeds() -> None:
    for options in ({"mode": "strict"}, {"schedule_seed": -1}, {"schedule_seed": "x"}):
        with pytest.raises(emulator.SessionError, match=next(iter(options))), emulator.emulated(**options):
            pass
