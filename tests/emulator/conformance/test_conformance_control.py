# SPDX-License-Identifier: Apache-2.0
"""Program control: branches, waits, barrier, hints, mode register, time, trap, cache control.

Sources: AMD "CDNA4 Instruction Set Architecture Reference Guide", chapter 4 (program flow, S_WAITCNT and its
counters, S_BARRIER), section 3 (MODE register fields), chapter 12 (SOPP, S_GETREG, S_SETREG); LLVM,
AMDGPUOperandSyntax (hwreg, waitcnt).

Waves of one snippet disagree on every condition, so a branch that looks at one wave only fails.  Hints and
cache control must change no register, SCC, VCC or EXEC.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conformance_harness import LANES, Case, case_id, implemented, run, run_with_memory
from test_conformance_memory import address_registers

from kernellib.emulator.errors import (
    MissingWaitError,
    OutOfBoundsError,
    TrapError,
    UnsupportedOperandError,
)
from kernellib.emulator.state import FloatMode

BRANCHES: dict[str, tuple[str, str]] = {  # set-up from s[2:3], restoring line
    "scc0": ("s_cmp_lg_u32 s2, 0", ""),
    "scc1": ("s_cmp_lg_u32 s2, 0", ""),
    "vccz": ("s_mov_b64 vcc, s[2:3]", ""),
    "vccnz": ("s_mov_b64 vcc, s[2:3]", ""),
    "execz": ("s_mov_b64 exec, s[2:3]", "s_mov_b64 exec, -1"),
    "execnz": ("s_mov_b64 exec, s[2:3]", "s_mov_b64 exec, -1"),
}
BRANCH_CASES = [
    *(Case(f"s_cbranch_{name}", ("label",), "taken and not, waves that disagree") for name in BRANCHES),
    Case("s_branch", ("label",), "forwards and backwards"),
    Case("s_endpgm", ("",), "nothing after it runs"),
]


@pytest.mark.parametrize("case", implemented(BRANCH_CASES[:6]), ids=case_id)
@pytest.mark.parametrize("values", [[0, 1, 5, 0], [0, 0, 0, 0], [7, 7, 7, 7]])
def test_conditional_branch(case: Case, values: list[int]) -> None:
    name = case.mnemonic.removeprefix("s_cbranch_")
    setup, restore = BRANCHES[name]
    text = f"""{setup}
{case.mnemonic} .taken
s_mov_b32 s4, 1
s_branch .joined
.taken:
s_mov_b32 s4, 2
.joined:
{restore}
s_add_u32 s5, s4, 10"""
    result = run(text, sgprs={2: np.array(values), 3: np.zeros(4, int)}, num_waves=4)
    wanted_nonzero = name.endswith(("1", "nz"))
    want = [2 if bool(v) == wanted_nonzero else 1 for v in values]
    assert result.sgpr(4).tolist() == want
    assert result.sgpr(5).tolist() == [w + 10 for w in want]


def test_upper_half_of_a_mask_counts() -> None:
    """vccnz looks at all 64 bits."""
    text = "s_mov_b64 vcc, s[2:3]\ns_mov_b32 s4, 0\ns_cbranch_vccz .empty\ns_mov_b32 s4, 1\n.empty:\ns_nop 0"
    assert run(text, sgprs={2: 0, 3: 0x80000000}).sgpr(4) == 1


def test_branch_backwards_makes_a_loop() -> None:
    """Each wave leaves the loop after its own number of rounds."""
    text = """s_mov_b32 s4, 0
.again:
s_add_u32 s4, s4, 3
s_sub_u32 s2, s2, 1
s_cmp_eq_u32 s2, 0
s_cbranch_scc1 .out
s_branch .again
.out:
s_nop 0"""
    assert run(text, sgprs={2: np.array([1, 4, 2, 9])}, num_waves=4).sgpr(4).tolist() == [3, 12, 6, 27]


def test_endpgm_ends_the_wave() -> None:
    text = """s_mov_b32 s4, 1
s_cmp_eq_u32 s2, 0
s_cbranch_scc1 .stop
s_mov_b32 s4, 2
s_endpgm
.stop:
s_mov_b32 s5, 9
s_endpgm
s_mov_b32 s4, 3"""
    result = run(text, sgprs={2: np.array([0, 1]), 5: 0}, num_waves=2)
    assert result.sgpr(4).tolist() == [1, 2]
    assert result.sgpr(5).tolist() == [9, 0]


# -------------------------------------------------------------------------------------------------- waiting
WAIT_CASES = [
    Case(
        "s_waitcnt",
        ("vmcnt", "lgkmcnt", "number"),
        "covers the oldest operations; reading before is a finding",
    ),
    Case("s_barrier", ("",), "all waves of the workgroup meet; LDS written before is seen"),
]


def load_two(between: str) -> Any:
    """Two loads, then `between`, then reads of both."""
    memory = torch.arange(256, dtype=torch.int32)
    text = f"""global_load_dword v4, v[2:3], off
global_load_dword v5, v[2:3], off offset:4
{between}
v_mov_b32_e32 v6, v4
s_waitcnt vmcnt(0)
v_mov_b32_e32 v7, v5"""
    addresses = address_registers([memory.data_ptr() + 8 * n for n in range(LANES)], 2)
    result = run_with_memory(memory, text, vgprs=addresses)
    return [np.asarray(result.vgpr(i)).tolist() for i in (6, 7)]


@pytest.mark.parametrize(
    "between", ["s_waitcnt vmcnt(1)", "s_waitcnt vmcnt(0) lgkmcnt(0)", "s_waitcnt 0xf71"]
)
def test_waitcnt_covers_the_oldest(between: str) -> None:
    """0xf71 is vmcnt(1) with the other counters at their largest."""
    assert load_two(between) == [list(range(0, 128, 2)), list(range(1, 129, 2))]


@pytest.mark.parametrize("between", ["s_nop 0", "s_waitcnt vmcnt(2)", "s_waitcnt lgkmcnt(0)"])
def test_read_before_its_wait_is_a_finding(between: str) -> None:
    with pytest.raises(MissingWaitError, match="v4"):
        load_two(between)


def test_lgkmcnt_covers_lds_and_scalar_loads() -> None:
    lds = np.arange(512, dtype=np.uint32)
    text = "ds_read_b32 v4, v2\ns_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v5, v4"
    got = run(text, vgprs={2: np.arange(LANES) * 4}, lds=lds).vgpr(5)
    assert np.asarray(got).tolist() == list(range(64))
    with pytest.raises(MissingWaitError):
        run(text.replace("lgkmcnt(0)", "vmcnt(0)"), vgprs={2: np.arange(LANES) * 4}, lds=lds)


def test_barrier_lets_waves_exchange() -> None:
    """Four waves write their row, meet, and read the next wave's."""
    waves = 4
    own = np.arange(waves * LANES, dtype=np.uint32).reshape(waves, LANES)
    following = np.roll(own, -1, axis=0)
    text = """ds_write_b32 v2, v3
s_waitcnt lgkmcnt(0)
s_barrier
ds_read_b32 v4, v5
s_waitcnt lgkmcnt(0)"""
    vgprs = {2: own * 4, 3: own + 1000, 5: following * 4, 4: np.zeros((waves, LANES), np.uint32)}
    result = run(text, vgprs=vgprs, lds=np.zeros(waves * LANES, np.uint32), num_waves=waves)
    assert np.array_equal(result.vgpr(4), following + 1000)


# ---------------------------------------------------------------------------------------------------- hints
HINTS = {
    "s_nop": ("0", "7"), "s_setprio": ("0", "3"), "s_sleep": ("0", "5"), "s_incperflevel": ("1",),
    "s_decperflevel": ("1",), "s_icache_inv": ("",), "s_ttracedata": ("",),
    "s_dcache_inv": ("",), "s_dcache_wb": ("",), "s_dcache_inv_vol": ("",), "s_dcache_wb_vol": ("",),
    "buffer_inv": ("", "sc1", "sc0 sc1"), "buffer_wbl2": ("sc1", "sc0 sc1"),
}  # fmt: skip
HINT_CASES = [
    Case(name, tuple(forms), "changes no register and no condition") for name, forms in HINTS.items()
]


@pytest.mark.parametrize("case", implemented(HINT_CASES), ids=case_id)
@pytest.mark.parametrize("scc", [0, 1])
def test_hint_changes_nothing(case: Case, scc: int) -> None:
    mask = 0x0123456789ABCDEF
    lines = [f"{case.mnemonic} {form}".strip() for form in HINTS[case.mnemonic]]
    lanes = np.arange(LANES, dtype=np.uint32) * 77
    result = run(
        "\n".join(lines) + "\nv_mov_b32_e32 v2, v1",
        vgprs={1: lanes, 2: np.full(LANES, 5)},
        sgprs={4: 0x1234, 5: 0x5678},
        scc=scc,
        vcc=mask,
        exec_mask=mask,
    )
    assert (result.scc, result.vcc, result.exec_mask) == (scc, mask, mask)
    assert (result.sgpr(4), result.sgpr(5)) == (0x1234, 0x5678)
    assert np.array_equal(result.vgpr(1), lanes)
    want = [int(lanes[n]) if mask >> n & 1 else 5 for n in range(LANES)]
    assert np.asarray(result.vgpr(2)).tolist() == want


# ------------------------------------------------------------------------------------------------- registers
MODE_CASES = [
    Case("s_getreg_b32", ("hwreg(name, offset, width)", "hwreg(name)"), "MODE fields, XCC_ID, TRAPSTS"),
    Case("s_setreg_b32", ("hwreg(name, offset, width)",), "writes its bits only, takes effect"),
    Case("s_setreg_imm32_b32", ("hwreg(name, offset, width)",), "writes its bits only, takes effect"),
]
FIELDS = {  # MODE: first bit, width
    "round32": (0, 2), "round64_16": (2, 2), "denorm32": (4, 2), "denorm64_16": (6, 2), "dx10_clamp": (8, 1),
    "ieee": (9, 1), "fp16_overflow": (23, 1),
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_getreg_reads_mode(field: str) -> None:
    offset, width = FIELDS[field]
    for value in range(1 << width):
        mode = FloatMode(**{field: bool(value) if width == 1 else value})
        text = f"s_getreg_b32 s4, hwreg(HW_REG_MODE, {offset}, {width})\ns_getreg_b32 s5, hwreg(HW_REG_MODE)"
        result = run(text, mode=mode, scc=1)
        assert result.sgpr(4) == value
        assert result.sgpr(5) >> offset & ((1 << width) - 1) == value
        assert result.scc == 1


def test_getreg_of_other_registers() -> None:
    text = "s_getreg_b32 s4, hwreg(HW_REG_XCC_ID, 0, 4)\ns_getreg_b32 s5, hwreg(HW_REG_TRAPSTS)"
    result = run(text)
    assert 0 <= result.sgpr(4) < 8
    assert result.sgpr(5) == 0


SUBNORMAL, SMALLEST = 0x00400000, 0x00800000  # 2**-127 and 2**-126


@pytest.mark.parametrize("case", implemented(MODE_CASES[1:]), ids=case_id)
def test_setreg_changes_denormals(case: Case) -> None:
    """Denormal mode: 0 flushes sources and results, 1 keeps sources, 2 keeps results, 3 keeps both."""
    for mode in range(4):
        source = "s3" if case.mnemonic == "s_setreg_b32" else hex(mode)
        text = f"""{case.mnemonic} hwreg(HW_REG_MODE, 4, 2), {source}
s_nop 1
v_mul_f32_e32 v2, 1.0, v1
v_mul_f32_e32 v3, 0.5, v4
s_getreg_b32 s5, hwreg(HW_REG_MODE, 0, 10)"""
        result = run(text, vgprs={1: np.full(LANES, SUBNORMAL), 4: np.full(LANES, SMALLEST)}, sgprs={3: mode})
        # 1.0 * subnormal needs both, 0.5 * smallest normal only a subnormal result
        assert int(result.vgpr(2)[0]) == (SUBNORMAL if mode == 3 else 0), mode
        assert int(result.vgpr(3)[0]) == (SUBNORMAL if mode & 2 else 0), mode
        assert result.sgpr(5) == 0x3C0 | mode << 4, "the other fields of MODE stay"


def test_source_denormals_alone() -> None:
    """Mode 1 keeps subnormal sources: times 4 they are normal results."""
    for mode, want in ((0, 0), (1, 0x01000000), (2, 0), (3, 0x01000000)):
        text = f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), {mode}\ns_nop 1\nv_mul_f32_e32 v2, 4.0, v1"
        assert int(run(text, vgprs={1: np.full(LANES, SUBNORMAL)}).vgpr(2)[0]) == want, mode


# ---------------------------------------------------------------------------------------------- VGPR indexing
INDEX_CASES = [
    Case("s_set_gpr_idx_on", ("gpr_idx(SRC0)", "gpr_idx(DST)", "gpr_idx(SRC0,DST)"), "per wave; M0"),
    Case("s_set_gpr_idx_off", ("",), "later instructions name their registers themselves"),
]
INDICES = (1, 3, 0)  # of three waves


@pytest.mark.parametrize("flags", [1, 8, 9])
@pytest.mark.parametrize("exec_mask", [2**64 - 1, 0xF0F0])
def test_indexed_moves(flags: int, exec_mask: int) -> None:
    names = {1: "SRC0", 8: "DST", 9: "SRC0,DST"}[flags]
    before = {n: 100 * n + np.arange(LANES) for n in range(12)}
    text = f"""s_set_gpr_idx_on s2, gpr_idx({names})
v_mov_b32_e32 v6, v2
v_mov_b32_e32 v8, 77
s_set_gpr_idx_off
v_mov_b32_e32 v11, v1"""
    result = run(
        text,
        vgprs=before,
        sgprs={2: np.array(INDICES) | 0x700},
        num_waves=3,
        m0=0xABCD1234,
        exec_mask=exec_mask,
    )
    active = np.array([exec_mask >> n & 1 for n in range(LANES)], np.bool_)
    for wave, index in enumerate(INDICES):
        want = dict(before)
        to, source = (index if flags & 8 else 0), (index if flags & 1 else 0)
        for target, value in ((6 + to, before[2 + source]), (8 + to, 77), (11, before[1])):
            want[target] = np.where(active, value, want.get(target, 0))
        for n in range(12):
            assert np.array_equal(result.vgpr(n)[wave], want[n]), (wave, n)
        assert result.sgpr(124)[wave] == 0xABCD0200 | flags << 12 | index, "the rest of M0 stays"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "s_set_gpr_idx_on s2, gpr_idx(SRC0)\nv_add_u32_e32 v1, v0, v0\ns_set_gpr_idx_off",
            "plain v_mov_b32",
        ),
        ("s_set_gpr_idx_on s2, gpr_idx(SRC0)\nglobal_load_dword v1, v[2:3], off\ns_set_gpr_idx_off", "plain"),
        ("s_set_gpr_idx_on s2, gpr_idx(SRC0)\nv_mov_b32_e32 v1, v0", "switched off"),
        ("s_set_gpr_idx_on s2, gpr_idx(SRC0)\n.on:\ns_set_gpr_idx_off", "switched off"),
        ("s_set_gpr_idx_on s2, gpr_idx(SRC0)\ns_set_gpr_idx_on s2, gpr_idx(DST)", "on already"),
        ("s_set_gpr_idx_off", "no s_set_gpr_idx_on"),
    ],
)
def test_other_uses_of_indexing_are_refused(text: str, words: str) -> None:
    with pytest.raises(UnsupportedOperandError, match=words):
        run(text)


def test_indexed_moves_keep_to_the_registers_and_the_waits() -> None:
    move = "s_set_gpr_idx_on {index}, gpr_idx(SRC0)\nv_mov_b32_e32 v1, v2\ns_set_gpr_idx_off"
    with pytest.raises(OutOfBoundsError, match="names v202"):
        run(move.format(index=200), vgprs={1: 0, 2: 0})
    load = "ds_read_b32 v5, v0\n"
    with pytest.raises(MissingWaitError, match="touches v5"):
        run(load + move.format(index=3), vgprs={0: 0, 1: 0, 2: 0}, lds=np.full(1, 7))
    run(load + move.format(index=2), vgprs={0: 0, 1: 0, 2: 0}, lds=np.full(1, 7))


# ------------------------------------------------------------------------------------------- time, traps, PC
OTHER_CASES = [
    Case("s_memtime", ("",), "grows"),
    Case("s_memrealtime", ("",), "grows"),
    Case("s_trap", ("",), "a named error"),
    *(
        Case(f"s_{n}_b64", ("",), "refused: code addresses are not emulated")
        for n in ("getpc", "setpc", "swappc", "call")
    ),
]


@pytest.mark.parametrize("case", implemented(OTHER_CASES[:2]), ids=case_id)
def test_time_grows(case: Case) -> None:
    text = (
        f"{case.mnemonic} s[4:5]\ns_nop 7\ns_waitcnt lgkmcnt(0)\n{case.mnemonic} s[6:7]\ns_waitcnt lgkmcnt(0)"
    )
    text = f".loop:\n{text}\ns_cmp_eq_u32 s2, 0\ns_mov_b32 s2, 0\ns_cbranch_scc0 .loop"
    result = run(text, sgprs={2: 1})
    first, second = (result.sgpr(i) | result.sgpr(i + 1) << 32 for i in (4, 6))
    assert second >= first > 0


def test_trap_is_an_error() -> None:
    case = OTHER_CASES[2]
    with pytest.raises(TrapError, match="s_trap 2"):
        run(f"{case.mnemonic} 2")


@pytest.mark.parametrize("case", implemented(OTHER_CASES[3:]), ids=case_id)
def test_code_addresses_are_refused(case: Case) -> None:
    operands = {
        "s_getpc_b64": "s[4:5]", "s_setpc_b64": "s[4:5]", "s_swappc_b64": "s[4:5], s[6:7]",
        "s_call_b64": "s[4:5], .label",
    }[case.mnemonic]  # fmt: skip
    with pytest.raises(UnsupportedOperandError, match="code addresses"):
        run(f".label:\ns_nop 0\n{case.mnemonic} {operands}")


CASES: list[Case] = [*BRANCH_CASES, *WAIT_CASES, *HINT_CASES, *MODE_CASES, *INDEX_CASES, *OTHER_CASES]
