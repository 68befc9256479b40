# SPDX-License-Identifier: Apache-2.0
"""Movement between lanes: DPP controls with their masks, lane reads and writes, permlane swaps, LDS-free
permutes.

Sources: AMD "CDNA4 Instruction Set Architecture Reference Guide", table 93 (DPP fields: row_mask and
bank_mask disable destination lanes; bound control), table 94 (DPP controls), chapter 12 (V_READLANE,
V_READFIRSTLANE, V_WRITELANE, V_PERMLANE16_SWAP, V_PERMLANE32_SWAP, V_MBCNT, DS_PERMUTE, DS_BPERMUTE,
DS_SWIZZLE); LLVM AMDGPUModifierSyntax (bound_ctrl: an invalid lane reads as zero; without it the destination
keeps its value) and AMDGPUOperandSyntax (swizzle macros); LLVM, llvm.amdgcn.update.dpp.

Every lane holds a different value, so a rotation in the wrong direction, a swap of the wrong halves (the odd
rows of the FIRST operand trade with the even rows of the second) or a swizzle that crosses 32 lanes fails.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from conformance_harness import EXEC_WITH_HOLES, FULL_EXEC, LANES, Case, Report, case_id, implemented, run

EXECS = (FULL_EXEC, EXEC_WITH_HOLES, 0x00FF00FF0F0F3333, 1 << 63)
VALUES = np.array([0x1000 + 7 * lane for lane in range(LANES)], dtype=np.uint32)
OTHERS = np.array([0x20000 + 11 * lane for lane in range(LANES)], dtype=np.uint32)
OLD = np.array([0x5EED0000 + lane for lane in range(LANES)], dtype=np.uint32)


def lane_list(result: object, index: int) -> list[int]:
    """A VGPR as 64 integers."""
    return [int(x) for x in np.asarray(result.vgpr(index)).reshape(-1)]  # type: ignore[attr-defined]


Source = Callable[[int], int | None]  # source lane, or None when it does not exist
DPP: dict[str, Source] = {
    "quad_perm:[3,0,2,1]": lambda n: n & 0x3C | (3, 0, 2, 1)[n & 3],
    "quad_perm:[0,0,2,2]": lambda n: n & 0x3E,
    "row_mirror": lambda n: n & 0x30 | 15 - n % 16,
    "row_half_mirror": lambda n: n & 0x38 | 7 - n % 8,
    "wave_shl:1": lambda n: n + 1 if n < 63 else None,
    "wave_rol:1": lambda n: (n + 1) % 64,
    "wave_shr:1": lambda n: n - 1 if n > 0 else None,
    "wave_ror:1": lambda n: (n - 1) % 64,
    "row_bcast:15": lambda n: (n & 0x30) - 1 if n > 15 else None,
    "row_bcast:31": lambda n: 31 if n > 31 else None,
}
for _k in (1, 3, 8, 15):
    DPP[f"row_shl:{_k}"] = lambda n, k=_k: n + k if n % 16 + k < 16 else None
    DPP[f"row_shr:{_k}"] = lambda n, k=_k: n - k if n % 16 >= k else None
    DPP[f"row_ror:{_k}"] = lambda n, k=_k: n & 0x30 | (n % 16 - k) % 16
for _k in (0, 7, 15):
    DPP[f"row_newbcast:{_k}"] = lambda n, k=_k: n & 0x30 | k


def dpp_result(source: Source, exec_mask: int, row_mask: int, bank_mask: int, bound: bool) -> list[int]:
    """v_mov_b32_dpp: what each lane of the destination holds afterwards."""
    out = []
    for lane in range(LANES):
        enabled = exec_mask >> lane & row_mask >> (lane // 16) & bank_mask >> (lane % 16 // 4) & 1
        origin = source(lane)
        valid = origin is not None and exec_mask >> origin & 1
        if not enabled or (not valid and not bound):
            out.append(int(OLD[lane]))
        else:
            out.append(int(VALUES[origin]) if valid and origin is not None else 0)
    return out


# A lane whose source lane exists but is switched off reads as an invalid lane (bound_ctrl gives zero,
# else no write).
DPP_CASE = Case("v_mov_b32", tuple(f"dpp {c}" for c in DPP), "row_mask, bank_mask, bound_ctrl, exec")


@pytest.mark.parametrize("control", DPP)
def test_dpp_controls(control: str) -> None:
    report = Report(control)
    for exec_mask in EXECS:
        for row_mask, bank_mask in ((0xF, 0xF), (0xA, 0xF), (0xF, 0x6), (0x1, 0x8)):
            for bound in (False, True):
                text = f"v_mov_b32_dpp v0, v1 {control} row_mask:{row_mask:#x} bank_mask:{bank_mask:#x}"
                text += " bound_ctrl:1" if bound else ""
                got = lane_list(run(text, vgprs={0: OLD, 1: VALUES}, exec_mask=exec_mask), 0)
                want = dpp_result(DPP[control], exec_mask, row_mask, bank_mask, bound)
                for lane in range(LANES):
                    report.check(
                        got[lane] == want[lane],
                        lambda t=text, e=exec_mask, n=lane, g=got[lane], w=want[lane]: (
                            f"`{t}` exec {e:#x} lane {n}: {g:#x}, want {w:#x}"
                        ),
                    )
    report.finish()


def test_dpp_applies_to_the_first_source_only() -> None:
    got = lane_list(
        run(
            "v_sub_u32_dpp v0, v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1",
            vgprs={0: OLD, 1: VALUES, 2: OTHERS},
        ),
        0,
    )
    shifted = [0 if lane % 16 == 0 else int(VALUES[lane - 1]) for lane in range(LANES)]
    assert got == [(a - int(b)) & 0xFFFFFFFF for a, b in zip(shifted, OTHERS, strict=True)]


def test_dpp_may_read_its_own_destination() -> None:
    """v_add_f32_dpp v1, v1, v1 row_shr:1: every lane reads the values from before the instruction."""
    floats = np.arange(LANES, dtype=np.float32)
    got = run(
        "v_add_f32_dpp v1, v1, v1 row_shr:1 row_mask:0xf bank_mask:0xf", vgprs={1: floats.view(np.uint32)}
    ).vgpr(1)
    want = [float(n) if n % 16 == 0 else float(2 * n - 1) for n in range(LANES)]
    assert np.asarray(got).reshape(-1).view(np.float32).tolist() == want


READ_CASES = [
    Case("v_readfirstlane_b32", ("exec",), "lowest active lane; lane 0 when none is"),
    Case("v_readlane_b32", ("constant, sgpr",), "ignores exec, lane modulo 64"),
    Case("v_writelane_b32", ("constant, sgpr, m0",), "one lane, ignores exec"),
]


@pytest.mark.parametrize("exec_mask", [FULL_EXEC, 1 << 40 | 1 << 41, 1 << 63, 0])
def test_readfirstlane(exec_mask: int) -> None:
    lane = (exec_mask & -exec_mask).bit_length() - 1 if exec_mask else 0
    result = run("v_readfirstlane_b32 s4, v1", vgprs={1: VALUES}, exec_mask=exec_mask)
    assert int(result.sgpr(4)) == int(VALUES[lane])


@pytest.mark.parametrize("exec_mask", [FULL_EXEC, 2])
def test_readlane_and_writelane(exec_mask: int) -> None:
    text = "\n".join([
        "v_readlane_b32 s4, v1, 37", "v_readlane_b32 s5, v1, s8", "v_readlane_b32 s6, v1, s9",
        "v_writelane_b32 v2, s10, 5", "v_writelane_b32 v2, 25, s8", "v_writelane_b32 v2, 33, 63",
    ])  # fmt: skip
    result = run(text, vgprs={1: VALUES, 2: OLD}, sgprs={8: 62, 9: 64 + 3, 10: 0xAAAA}, exec_mask=exec_mask)
    assert [int(result.sgpr(i)) for i in (4, 5, 6)] == [int(VALUES[i]) for i in (37, 62, 3)]
    want = OLD.copy()
    want[[5, 62, 63]] = [0xAAAA, 25, 33]
    assert lane_list(result, 2) == want.tolist()


SWAP_CASES = [
    Case("v_permlane16_swap_b32", ("e32", "e64"), "odd rows of vdst trade with even rows of vsrc"),
    Case("v_permlane32_swap_b32", ("e32", "e64"), "upper half of vdst trades with lower half of vsrc"),
    Case("v_swap_b32", ("e32",), "active lanes trade"),
]


@pytest.mark.parametrize("case", implemented(SWAP_CASES[:2]), ids=case_id)
@pytest.mark.parametrize("encoding", ["e32", "e64"])
def test_permlane_swap(case: Case, encoding: str) -> None:
    result = run(f"{case.mnemonic}_{encoding} v1, v2", vgprs={1: VALUES, 2: OTHERS})
    a, b = VALUES.copy(), OTHERS.copy()
    width = 16 if "16" in case.mnemonic else 32
    for base in range(0, LANES, 2 * width):
        a[base + width : base + 2 * width] = OTHERS[base : base + width]
        b[base : base + width] = VALUES[base + width : base + 2 * width]
    assert lane_list(result, 1) == a.tolist()
    assert lane_list(result, 2) == b.tolist()


@pytest.mark.parametrize("case", implemented(SWAP_CASES[2:]), ids=case_id)
def test_swap(case: Case) -> None:
    result = run("v_swap_b32 v1, v2", vgprs={1: VALUES, 2: OTHERS}, exec_mask=EXEC_WITH_HOLES)
    active = np.array([EXEC_WITH_HOLES >> n & 1 for n in range(LANES)], dtype=bool)
    assert lane_list(result, 1) == np.where(active, OTHERS, VALUES).tolist()
    assert lane_list(result, 2) == np.where(active, VALUES, OTHERS).tolist()


MBCNT_CASES = [
    Case("v_mbcnt_lo_u32_b32", ("vop3",), "bits below the lane in the low word, plus S1"),
    Case("v_mbcnt_hi_u32_b32", ("vop3",), "bits below the lane in the high word, plus S1"),
]


def test_mbcnt() -> None:
    if not implemented(MBCNT_CASES):
        pytest.skip("no v_mbcnt in the instruction table")
    mask = 0xF00F1234_89ABCDEF
    text = (
        "v_mbcnt_lo_u32_b32 v0, s2, v1\nv_mbcnt_hi_u32_b32 v2, s3, v0\n"
        "v_mbcnt_lo_u32_b32 v3, -1, 0\nv_mbcnt_hi_u32_b32 v3, -1, v3"
    )
    result = run(text, vgprs={1: VALUES}, sgprs={2: mask & 0xFFFFFFFF, 3: mask >> 32})
    below = [(mask & ((1 << n) - 1)) for n in range(LANES)]
    assert lane_list(result, 0) == [
        int(VALUES[n]) + (b & 0xFFFFFFFF).bit_count() for n, b in enumerate(below)
    ]
    assert lane_list(result, 2) == [int(VALUES[n]) + b.bit_count() for n, b in enumerate(below)]
    assert lane_list(result, 3) == list(range(LANES))


def test_ballot_and_prefix_count() -> None:
    """What compilers make of a ballot: a compare into an SGPR pair, its population, a lane's rank in it."""
    keys = np.array([(7 * n) % 16 for n in range(LANES)], dtype=np.uint32)
    text = """v_cmp_gt_u32_e64 s[4:5], 5, v1
s_bcnt1_i32_b64 s6, s[4:5]
s_ff1_i32_b64 s7, s[4:5]
v_mbcnt_lo_u32_b32 v2, s4, 0
v_mbcnt_hi_u32_b32 v2, s5, v2
v_readlane_b32 s8, v1, s7"""
    result = run(text, vgprs={1: keys, 2: OLD}, exec_mask=EXEC_WITH_HOLES)
    chosen = [n for n in range(LANES) if EXEC_WITH_HOLES >> n & 1 and keys[n] < 5]
    assert result.sgpr(4) | result.sgpr(5) << 32 == sum(1 << n for n in chosen)
    assert (result.sgpr(6), result.sgpr(7), result.sgpr(8)) == (len(chosen), chosen[0], int(keys[chosen[0]]))
    ranks = [sum(c < n for c in chosen) if EXEC_WITH_HOLES >> n & 1 else int(OLD[n]) for n in range(LANES)]
    assert lane_list(result, 2) == ranks


SCAN = "\n".join(
    f"v_add_u32_dpp v1, v1, v1 {control} bank_mask:0xf\ns_nop 1"
    for control in (
        *(f"row_shr:{n} row_mask:0xf" for n in (1, 2, 4, 8)),
        "row_bcast:15 row_mask:0xa",
        "row_bcast:31 row_mask:0xc",
    )
)


def test_dpp_scan_of_a_wave() -> None:
    """The prefix sum by six DPP additions, and the total by v_readlane of lane 63."""
    result = run(SCAN + "\nv_readlane_b32 s4, v1, 63", vgprs={1: VALUES})
    assert lane_list(result, 1) == np.cumsum(VALUES).tolist()
    assert result.sgpr(4) == int(VALUES.sum())


def test_dpp_reduction_by_xor_steps() -> None:
    """Maximum over a row: quad_perm twice, then half mirror and mirror."""
    controls = ("quad_perm:[1,0,3,2]", "quad_perm:[2,3,0,1]", "row_half_mirror", "row_mirror")
    keys = np.array([(37 * n) % 64 for n in range(LANES)], dtype=np.uint32)
    text = "\n".join(f"v_max_u32_dpp v1, v1, v1 {c} row_mask:0xf bank_mask:0xf\ns_nop 1" for c in controls)
    want = [int(keys[n // 16 * 16 : n // 16 * 16 + 16].max()) for n in range(LANES)]
    assert lane_list(run(text, vgprs={1: keys}), 1) == want


def test_sign_of_a_dpp_source_applies_after_the_move() -> None:
    """A lane without source reads 0 under bound_ctrl, and its negation is -0."""
    ones = np.full(LANES, 0x3F800000, np.uint32)
    text = "v_mul_f32_dpp v0, -v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1"
    got = lane_list(run(text, vgprs={0: OLD, 1: ones, 2: ones}), 0)
    assert got == [0x80000000 if n % 16 == 0 else 0xBF800000 for n in range(LANES)]


PERMUTE_CASES = [
    Case("ds_bpermute_b32", ("offset",), "reads lane addr/4 modulo 64; an inactive source gives 0"),
    Case("ds_permute_b32", ("offset",), "writes lane addr/4 modulo 64; the highest writer wins"),
    Case("ds_swizzle_b32", ("bitmask", "quad perm", "macros"), "within 32 lanes; an inactive source gives 0"),
]


@pytest.mark.parametrize("exec_mask", [FULL_EXEC, EXEC_WITH_HOLES])
def test_bpermute(exec_mask: int) -> None:
    lanes = [(5 * n + 3) % 64 for n in range(LANES)]
    address = np.array([4 * lane + (n % 4) + 256 * (n % 3) for n, lane in enumerate(lanes)], dtype=np.uint32)
    result = run(
        "ds_bpermute_b32 v0, v1, v2 offset:8\ns_waitcnt lgkmcnt(0)",
        vgprs={0: OLD, 1: address, 2: VALUES},
        exec_mask=exec_mask,
    )
    want = []
    for n in range(LANES):
        origin = (int(address[n]) + 8) // 4 % 64
        value = int(VALUES[origin]) if exec_mask >> origin & 1 else 0
        want.append(value if exec_mask >> n & 1 else int(OLD[n]))
    assert lane_list(result, 0) == want


@pytest.mark.parametrize("exec_mask", [FULL_EXEC, EXEC_WITH_HOLES])
def test_permute(exec_mask: int) -> None:
    if not implemented(PERMUTE_CASES[1:2]):
        pytest.skip("no ds_permute_b32 in the instruction table")
    address = np.array([4 * (n // 2 * 3 % 64) for n in range(LANES)], dtype=np.uint32)
    result = run(
        "ds_permute_b32 v0, v1, v2\ns_waitcnt lgkmcnt(0)",
        vgprs={0: OLD, 1: address, 2: VALUES},
        exec_mask=exec_mask,
    )
    sent = [0] * LANES
    for n in range(LANES):
        if exec_mask >> n & 1:
            sent[int(address[n]) // 4 % 64] = int(VALUES[n])
    assert lane_list(result, 0) == [sent[n] if exec_mask >> n & 1 else int(OLD[n]) for n in range(LANES)]


def bitmask(and_mask: int, or_mask: int, xor_mask: int) -> Callable[[int], int]:
    """Swizzle in bitmask mode."""
    return lambda n: n & 0x20 | ((n & 31 & and_mask) | or_mask) ^ xor_mask


SWIZZLES: dict[str, Callable[[int], int]] = {
    "swizzle(SWAP,1)": bitmask(0x1F, 0, 1), "swizzle(SWAP,16)": bitmask(0x1F, 0, 16),
    "swizzle(REVERSE,8)": bitmask(0x1F, 0, 7), "swizzle(BROADCAST,4,2)": bitmask(0x1C, 2, 0),
    "swizzle(QUAD_PERM,2,0,3,1)": lambda n: n & 0x3C | (2, 0, 3, 1)[n & 3],
    'swizzle(BITMASK_PERM,"01pip")': bitmask(0b00111, 0b01000, 0b00010),
    f"{0x1F | 3 << 5 | 9 << 10:#x}": bitmask(0x1F, 3, 9), f"{0x15 | 8 << 5 | 4 << 10}": bitmask(0x15, 8, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", SWIZZLES)
def test_swizzle(name: str) -> None:
    for exec_mask in (FULL_EXEC, EXEC_WITH_HOLES):
        text = f"ds_swizzle_b32 v0, v1 offset:{name}\ns_waitcnt lgkmcnt(0)"
        got = lane_list(run(text, vgprs={0: OLD, 1: VALUES}, exec_mask=exec_mask), 0)
        want = []
        for n in range(LANES):
            origin = SWIZZLES[name](n)
            value = int(VALUES[origin]) if exec_mask >> origin & 1 else 0
            want.append(value if exec_mask >> n & 1 else int(OLD[n]))
        assert got == want, text


ACC_CASES = [
    Case("v_accvgpr_write_b32", ("vgpr, sgpr-free constant",), "active lanes of an AGPR"),
    Case("v_accvgpr_read_b32", ("agpr",), "active lanes of a VGPR"),
    Case("v_accvgpr_mov_b32", ("agpr",), "AGPR to AGPR"),
]


def test_accumulation_registers() -> None:
    text = (
        "v_accvgpr_write_b32 a3, v1\nv_accvgpr_write_b32 a4, -5\ns_nop 4\nv_accvgpr_mov_b32 a5, a3\n"
        "s_nop 4\nv_accvgpr_read_b32 v0, a5\nv_accvgpr_read_b32 v2, a4"
    )
    result = run(
        text,
        vgprs={0: OLD, 1: VALUES, 2: OLD},
        agprs={3: OTHERS, 4: OTHERS, 5: OTHERS},
        exec_mask=EXEC_WITH_HOLES,
    )
    for n in range(LANES):
        active = EXEC_WITH_HOLES >> n & 1
        assert lane_list(result, 0)[n] == int(VALUES[n] if active else OLD[n])
        assert lane_list(result, 2)[n] == (0xFFFFFFFB if active else int(OLD[n]))
    acc = [int(x) for x in np.asarray(result.agpr(5)).reshape(-1)]
    assert acc == [int(VALUES[n]) if EXEC_WITH_HOLES >> n & 1 else int(OTHERS[n]) for n in range(LANES)]


CASES: list[Case] = [DPP_CASE, *READ_CASES, *SWAP_CASES, *MBCNT_CASES, *PERMUTE_CASES, *ACC_CASES]
