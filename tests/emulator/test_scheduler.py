# SPDX-License-Identifier: Apache-2.0
"""Divergence, barriers, deadlock, limits, waits: on snippets whose outcome is worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kernellib.emulator import (
    DeadlockError,
    InstructionLimitError,
    MisalignedAccessError,
    MissingWaitError,
    OutOfBoundsError,
    TrapError,
    UnknownInstructionError,
    UnsupportedOperandError,
    run_snippet,
)
from kernellib.emulator.errors import EmulatorError
from kernellib.emulator.waits import parse_waitcnt

LANES = np.arange(64)


def test_scalar_branch_splits_and_merges_waves() -> None:
    # wave w adds 10 when s0 < 2 and 20 otherwise, then all add 1
    result = run_snippet(
        """
        s_cmp_lt_u32 s0, 2
        s_cbranch_scc0 .Lelse
        v_add_u32_e32 v0, 10, v0
        s_branch .Lend
        .Lelse:
        v_add_u32_e32 v0, 20, v0
        .Lend:
        v_add_u32_e32 v0, 1, v0
        """,
        vgprs={0: LANES},
        sgprs={0: np.arange(5)},
        num_waves=5,
    )
    for wave in range(5):
        assert np.array_equal(result.vgpr(0)[wave], LANES + (11 if wave < 2 else 21))


def test_waves_loop_different_counts() -> None:
    counts = np.array([3, 1, 7, 2, 5, 4, 1])
    result = run_snippet(
        """
        s_mov_b32 s1, 0
        .Lloop:
        s_add_i32 s1, s1, s0
        s_sub_i32 s0, s0, 1
        s_cmp_lg_u32 s0, 0
        s_cbranch_scc1 .Lloop
        s_mul_i32 s1, s1, 2
        """,
        sgprs={0: counts},
        num_waves=len(counts),
    )
    assert np.array_equal(result.sgpr(1), counts * (counts + 1))


def test_barrier_orders_lds() -> None:
    # wave 0 writes, wave 1 spins a while first: after the barrier wave 1 reads what wave 0 wrote
    result = run_snippet(
        """
        v_lshlrev_b32_e32 v1, 2, v0
        s_cmp_eq_u32 s0, 0
        s_cbranch_scc0 .Lwait
        s_movk_i32 s2, 0x40
        .Lspin:
        s_sub_i32 s2, s2, 1
        s_cmp_lg_u32 s2, 0
        s_cbranch_scc1 .Lspin
        v_add_u32_e32 v2, 0x100, v0
        ds_write_b32 v1, v2
        s_waitcnt lgkmcnt(0)
        .Lwait:
        s_barrier
        ds_read_b32 v3, v1
        s_waitcnt lgkmcnt(0)
        """,
        vgprs={0: LANES},
        sgprs={0: np.arange(3)},
        lds_bytes=256,
        num_waves=3,
    )
    for wave in range(3):
        assert np.array_equal(result.vgpr(3)[wave], LANES + 0x100)


def test_a_wave_that_never_arrives_is_a_deadlock_unless_it_ends() -> None:
    spin = """
        s_cmp_eq_u32 s0, 0
        s_cbranch_scc1 .Lout
        s_barrier
        s_branch .Lend
        .Lout:
        {}
        .Lend:
        """
    # a wave that has ended no longer counts
    assert run_snippet(spin.format("s_endpgm"), sgprs={0: np.arange(2)}, num_waves=2).scc is not None
    with pytest.raises(DeadlockError) as caught:
        run_snippet(
            spin.format(".Lself:\n s_sleep 1\n s_branch .Lself"), sgprs={0: np.arange(2)}, num_waves=2
        )
    text = "\n".join(caught.value.waiting)
    assert "waits at barrier" in text
    assert "wave 1" in text
    assert "spins at" in text


def test_endless_loops_end_in_errors() -> None:
    with pytest.raises(DeadlockError):
        run_snippet(".Lself:\n s_branch .Lself", instruction_limit=1_000_000)
    counting = ".Lself:\n s_add_u32 s0, s0, 1\n s_branch .Lself"
    with pytest.raises(InstructionLimitError, match="5000"):
        run_snippet(counting, sgprs={0: 0}, instruction_limit=5000)
    with pytest.raises(EmulatorError, match="past its last instruction"):
        run_past_end()


def run_past_end() -> None:
    """A kernel whose code stops without s_endpgm."""
    from kernellib.emulator.assembly import Kernel, parse  # noqa: PLC0415
    from kernellib.emulator.binding.program import bind_program  # noqa: PLC0415
    from kernellib.emulator.launch import CompiledListing, Launch  # noqa: PLC0415
    from kernellib.emulator.memory import MemoryMap  # noqa: PLC0415

    program = parse("k:\n\ts_nop 0\n")
    kernel = Kernel("k", 0, {}, {})
    program.kernels["k"] = kernel
    listing = CompiledListing.from_program(program, bind_program(program))
    Launch(listing, kernel, (1, 1, 1), (64, 1, 1), bytearray(16), MemoryMap()).run()


def test_trap() -> None:
    with pytest.raises(TrapError, match="s_trap 2"):
        run_snippet("s_trap 2")


@pytest.mark.parametrize(
    ("text", "register"),
    [
        ("global_load_dword v2, v[0:1], off\n v_mov_b32_e32 v3, v2", "v2"),
        ("global_load_dwordx2 v[2:3], v[0:1], off\n v_mov_b32_e32 v3, 0", "v3"),
        ("global_load_dword v2, v[0:1], off\n global_load_dword v3, v[0:1], off\n s_waitcnt vmcnt(1)"
         "\n v_mov_b32_e32 v4, v3", "v3"),
        ("s_load_dword s4, s[0:1], 0x0\n s_mov_b32 s5, s4", "s4"),
        ("s_load_dword s4, s[0:1], 0x0\n s_load_dword s5, s[0:1], 0x0\n s_waitcnt lgkmcnt(1)"
         "\n s_mov_b32 s6, s4", "s4"),
        ("ds_read_b32 v2, v5\n v_add_u32_e32 v2, 1, v2", "v2"),
        ("ds_read_b32 v2, v5\n s_waitcnt vmcnt(0)\n v_add_u32_e32 v2, 1, v2", "v2"),
        ("ds_bpermute_b32 v2, v5, v5\n v_add_u32_e32 v2, 1, v2", "v2"),
        ("ds_read_b32 v2, v5\n global_load_dword v2, v[0:1], off", "v2"),
        ("global_atomic_add v2, v[0:1], v5, off sc0\n v_mov_b32_e32 v3, v2", "v2"),
    ],
)  # fmt: skip
def test_missing_wait(text: str, register: str) -> None:
    data = np.zeros(64, np.int32)
    address = data.ctypes.data
    low, high = address & 0xFFFFFFFF, address >> 32
    setup = {"vgprs": {0: low, 1: high, 5: 0}, "sgprs": {0: low, 1: high}, "lds_bytes": 64}
    memory = memory_of(data)
    with pytest.raises(MissingWaitError) as caught:
        run_snippet(text, **setup, memory=memory)
    assert f" {register}," in str(caught.value)
    assert "listing line" in str(caught.value)


def memory_of(*arrays: np.ndarray) -> object:
    """A memory map that knows the given arrays only."""
    from kernellib.emulator.memory import MemoryMap  # noqa: PLC0415

    memory = MemoryMap()
    for array in arrays:
        memory.register_array(array)
    return memory


@pytest.mark.parametrize(
    "text",
    [
        "global_load_dword v2, v[0:1], off\n s_waitcnt vmcnt(0)\n v_mov_b32_e32 v3, v2",
        "global_load_dword v2, v[0:1], off\n global_load_dword v3, v[0:1], off\n s_waitcnt vmcnt(1)"
        "\n v_mov_b32_e32 v4, v2\n s_waitcnt vmcnt(0)",
        # a later load of the same kind returns later: no wait needed between them
        "global_load_dword v2, v[0:1], off\n global_load_dword v2, v[0:1], off\n s_waitcnt vmcnt(0)",
        # a store's sources are read when it is issued
        "global_store_dword v[0:1], v5, off\n v_mov_b32_e32 v5, 7",
        "ds_read_b32 v2, v5\n ds_read_b32 v3, v5\n s_waitcnt lgkmcnt(1)\n v_mov_b32_e32 v4, v2"
        "\n s_waitcnt lgkmcnt(0)",
        "s_waitcnt 0xc07f",  # gfx9 encoding of lgkmcnt(0) alone
    ],
)
def test_sufficient_waits_are_silent(text: str) -> None:
    data = np.zeros(64, np.int32)
    address = data.ctypes.data
    registers = {0: address & 0xFFFFFFFF, 1: address >> 32, 5: 0}
    assert run_snippet(text, vgprs=registers, lds_bytes=64, memory=memory_of(data)).scc == 0


def test_waitcnt_forms() -> None:
    assert parse_waitcnt("vmcnt(3) lgkmcnt(0)") == (3, 0)
    assert parse_waitcnt("vmcnt(0) & lgkmcnt(2)") == (0, 2)
    assert parse_waitcnt("expcnt(0)") == (None, None)
    assert parse_waitcnt("0") == (0, 0)
    assert parse_waitcnt("0xc07f") == (None, 0)
    for bad in ("", "vmcnt", "vmcnt(64)", "vscnt(0)", "vmcnt(0) vmcnt(1)", "lgkmcnt(16)"):
        with pytest.raises(ValueError, match=r"."):
            parse_waitcnt(bad)


def test_lds_bounds_and_alignment() -> None:
    with pytest.raises(OutOfBoundsError, match="workgroup has 64 bytes") as caught:
        run_snippet("ds_write_b32 v0, v0", vgprs={0: 4 * LANES}, lds_bytes=64, exec_mask=0x1FFFF)
    assert caught.value.location.lane == 16
    with pytest.raises(MisalignedAccessError):
        run_snippet("ds_read_b32 v1, v0", vgprs={0: 2}, lds_bytes=64)


def test_unknown_and_malformed_instructions() -> None:
    with pytest.raises(UnknownInstructionError, match="v_frobnicate_b32"):
        run_snippet("v_frobnicate_b32 v0, v1")
    for text in (
        "v_add_f32_e32 v0, v1",
        "v_add_f32_e32 v0, v1, v2 wobble:3",
        "v_add_u32_e32 v0, -v1, v2",
        "v_add_f32_e32 s0, v1, v2",
        "s_add_u32 v0, s1, s2",
        "s_add_u32 s0, s1, s2 nt",
        "global_load_dword v0, v1, off",
        "global_load_dword v0, v[2:3], off offen",
        "s_cbranch_scc0 .Lnowhere",
        "s_waitcnt banana(0)",
        "ds_read_b32 v0, v[1:2]",
        "v_mov_b32_dpp v0, v1 quad_perm:[0,1,2,4] row_mask:0xf bank_mask:0xf",
        "v_mov_b32_sdwa v0, v1 dst_sel:BYTE_9",
        "s_mov_b64 s[1:2], 0",
        "s_getreg_b32 s0, hwreg(HW_REG_NONSENSE)",
    ):
        with pytest.raises(UnsupportedOperandError):
            run_snippet(text)


def test_exec_mask_keeps_inactive_lanes() -> None:
    result = run_snippet("v_mov_b32_e32 v1, 5", vgprs={1: LANES}, exec_mask=0xF0F0)
    active = (0xF0F0 >> LANES.astype(np.uint64)) & np.uint64(1) == 1
    assert np.array_equal(result.vgpr(1), np.where(active, 5, LANES))


def test_direct_to_lds_load_must_be_waited_for() -> None:
    data = np.arange(64, dtype=np.uint32) + 1000
    low, high = data.ctypes.data & 0xFFFFFFFF, data.ctypes.data >> 32
    text = """
        global_load_lds_dword v0, s[2:3]
        {}
        ds_read_b32 v1, v0
        s_waitcnt lgkmcnt(0)
        """
    setup = {"vgprs": {0: 4 * LANES}, "sgprs": {2: low, 3: high}, "m0": 0, "lds_bytes": 512}
    result = run_snippet(text.format("s_waitcnt vmcnt(0)"), **setup, memory=memory_of(data))
    assert np.array_equal(result.vgpr(1), data)
    with pytest.raises(MissingWaitError, match="direct-to-LDS"):
        run_snippet(text.format("s_nop 0"), **setup, memory=memory_of(data))
    # other bytes may be read meanwhile
    elsewhere = text.format("v_add_u32_e32 v0, 0x100, v0") + "s_waitcnt vmcnt(0)"
    assert run_snippet(elsewhere, **setup, memory=memory_of(data)).scc == 0
