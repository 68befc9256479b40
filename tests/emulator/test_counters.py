# SPDX-License-Identifier: Apache-2.0
"""Counters of a launch: classes, matrix operations, waits, occupancy, lines touched, bank conflicts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernellib import emulator
from kernellib.emulator.counters import CLASSES, distinct_lines, instruction_class, matrix_type
from kernellib.emulator.report import CountersOffError
from kernellib.emulator.resources import occupancy
from tests.emulator import flydsl_kernels
from tests.emulator.kernels import access, matrix, rows

POISON = float("nan")


@pytest.mark.parametrize(
    ("mnemonic", "wanted"),
    [
        ("v_pk_fma_f32", "vector"), ("v_cvt_f32_f16_e32", "vector"), ("v_rsq_f32_e32", "transcendental"),
        ("v_mfma_f32_16x16x32_bf16", "matrix"), ("v_accvgpr_read_b32", "vector"), ("s_add_i32", "scalar"),
        ("v_readfirstlane_b32", "vector"), ("global_load_dword", "vector memory"), ("ds_swizzle_b32", "lds"),
        ("buffer_load_dword", "vector memory"), ("ds_read_b128", "lds"), ("s_load_dwordx2", "scalar memory"),
        ("s_waitcnt", "wait"), ("s_sleep", "wait"), ("s_barrier", "barrier"), ("s_cbranch_scc1", "branch"),
        ("s_endpgm", "other"), ("buffer_inv", "other"),
    ],
)  # fmt: skip
def test_classes(mnemonic: str, wanted: str) -> None:
    assert instruction_class(mnemonic) == wanted


def test_classes_add_up_to_all_instructions() -> None:
    x, out = torch.zeros(512), torch.zeros(2)
    with emulator.emulated() as session:
        flydsl_kernels.block_sum()(x.data_ptr(), out.data_ptr(), 2)
    report = session.launches[0]
    assert set(report.classes) == set(CLASSES)
    assert sum(report.classes.values()) == sum(report.instruction_counts.values()) == int(report.issues.sum())
    assert report.classes["barrier"] == report.waits["barrier"] == 8
    waits = {name: number for name, number in report.waits.items() if name.startswith("lgkmcnt(0)")}
    assert waits["lgkmcnt(0)"] >= 8
    with pytest.raises(CountersOffError, match="counters="):
        _ = report.memory


def test_matrix_operations_by_type() -> None:
    m, n, k = 64, 64, 512
    raw = [torch.zeros(rows_, k // 2, dtype=torch.uint8) for rows_ in (m, n)]
    scales = [torch.full((rows_, k // 32), 127, dtype=torch.uint8) for rows_ in (m, n)]
    c = torch.full((m, n), POISON)
    with emulator.emulated() as session:
        matrix.gemm_mxfp4()(*[t.data_ptr() for t in (*raw, *scales, c)], m, n, k)
    assert session.launches[0].matrix_flops == {"scaled fp4 x fp4": 2 * m * n * k}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("v_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[20:23], v[0:15]", "bf16"),
        ("v_mfma_f32_16x16x32_fp8_bf8 v[0:3], v[4:5], v[6:7], v[0:3]", "fp8 x bf8"),
        ("v_mfma_i32_16x16x64_i8 v[0:3], v[4:7], v[8:11], v[0:3]", "i8"),
        ("v_mfma_f32_4x4x4_16b_f16 v[0:3], v[4:5], v[6:7], v[0:3]", "f16"),
        ("v_mfma_f64_16x16x4_f64 v[0:7], v[8:9], v[10:11], v[0:7]", "f64"),
        ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:15], v[0:3] blgp:4", "fp8 x fp4"),
        ("v_smfmac_f32_16x16x64_bf16 v[0:3], v[4:7], v[8:15], v16", "bf16 sparse"),
        ("v_add_f32_e32 v0, v1, v2", None),
    ],
)
def test_types_of_matrix_instructions(line: str, wanted: str | None) -> None:
    program = emulator.parse(f'.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\nk:\n{line}\ns_endpgm\n')
    assert matrix_type(program.instructions[0]) == wanted


def test_lines_of_hand_worked_patterns() -> None:
    lanes, on = np.arange(64)[None], np.ones((1, 64), np.bool_)
    assert distinct_lines(lanes * 4, on, 4, 64) == 4
    assert distinct_lines(lanes * 4, on, 4, 128) == 2
    assert distinct_lines(lanes * 4 + 4, on, 4, 64) == 5
    assert distinct_lines(lanes * 128, on, 4, 64) == 64
    assert distinct_lines(lanes * 0 + 60, on, 8, 64) == 2  # one datum across two lines
    assert distinct_lines(np.concatenate([lanes, lanes]) * 16, np.concatenate([on, ~on]), 16, 128) == 8


@pytest.mark.parametrize(
    ("stride", "lines_64", "lines_128"), [(1, 4, 2), (2, 8, 4), (16, 64, 32), (32, 64, 64), (0, 1, 1)]
)
def test_coalescing_of_strided_loads(stride: int, lines_64: int, lines_128: int) -> None:
    x = torch.zeros(64 * 32 + 64)
    shift = -x.data_ptr() % 128  # the first element on a line
    out = torch.full((2 * 64,), POISON)
    out_shift = -out.data_ptr() % 128
    out = torch.full((2 * 64 + 32,), POISON)[out_shift // 4 :] if out_shift else out
    with emulator.emulated(counters="all") as session:
        session.register(x)
        session.register(out)
        access.strided_load()(x.data_ptr() + shift, out.data_ptr(), stride, 2)
    loads = session.launches[0].memory["global", "load"]
    assert (loads.accesses, loads.lanes, loads.bytes) == (2, 128, 512)
    assert (loads.lines_64, loads.lines_128) == (2 * lines_64, 2 * lines_128)
    assert loads.efficiency == 512 / (64 * 2 * lines_64)


@pytest.mark.parametrize(("pitch", "conflicts"), [(32, 62), (33, 0)])
def test_bank_conflicts_of_a_column(pitch: int, conflicts: int) -> None:
    """64 lanes read one column of 64 rows: with 32 dwords a row all on one bank, with 33 on all."""
    out = torch.full((64,), POISON)
    with emulator.emulated(counters="all") as session:
        access.lds_column(pitch)(out.data_ptr())
    assert torch.equal(out, torch.arange(64) * float(pitch))
    reads = session.launches[0].memory["lds", "load"]
    assert (reads.accesses, reads.passes, reads.conflicts) == (1, 2 + conflicts, conflicts)


def test_lanes_turned_away_by_a_buffer_ask_for_nothing() -> None:
    x, y = torch.arange(1000, dtype=torch.float32), torch.full((1000,), -1.0)
    with emulator.emulated(counters="all") as session:
        flydsl_kernels.buffer_copy()(x, y, 700, 4)
    report = session.launches[0]
    assert report.bytes_by_space["global"]["load"] == report.bytes_by_space["global"]["store"] == 2800
    stores = report.memory["global", "store"]
    assert (stores.lanes, stores.accesses) == (700, 11)  # 10 whole waves and one of 60 lanes


def test_counters_change_no_result_and_agree_with_the_free_ones() -> None:
    x = torch.randn(5, 700, generator=torch.Generator().manual_seed(2))
    outs, reports = [], []
    for counters in ("default", "all"):
        out = torch.full_like(x, POISON)
        with emulator.emulated(counters=counters) as session:
            rows.softmax()(x, out, *x.shape)
        outs.append(out)
        reports.append(session.launches[0])
    assert torch.equal(*outs)
    assert reports[0].instruction_counts == reports[1].instruction_counts
    for (space, action), totals in reports[1].memory.items():
        assert totals.bytes == reports[0].bytes_by_space[space][action]


def test_occupancy_says_what_limits() -> None:
    x, y = torch.zeros(256), torch.zeros(256)
    with emulator.emulated() as session:
        flydsl_kernels.axpy()(x, y.data_ptr(), 256, 1.0)
    found = session.launches[0].occupancy
    assert (found.waves_per_workgroup, found.num_workgroups, found.rounds) == (4, 1, 1)
    resources = session.launches[0].resources
    # 40 KiB of LDS: four workgroups of a 160 KiB unit, one wave a SIMD each
    limited = occupancy(resources, 256, 40 * 1024, 10_000)
    assert (limited.workgroups_per_cu, limited.waves_per_simd, limited.limited_by) == (4, 4.0, "lds")
    assert limited.rounds == -(-10_000 // (4 * 256))


def test_an_unknown_counter_set_is_refused() -> None:
    with pytest.raises(emulator.SessionError, match="counters"), emulator.emulated(counters="some"):
        pass
