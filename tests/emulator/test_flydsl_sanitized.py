# SPDX-License-Identifier: Apache-2.0
"""The users' kernels once more under every sanitizer, in simple and in relaxed mode: right, no finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernellib import emulator
from kernellib.emulator import session
from tests.emulator import test_flydsl_assorted as assorted
from tests.emulator import test_flydsl_coordination as coordination
from tests.emulator import test_flydsl_matrix as matrix
from tests.emulator import test_flydsl_rows as rows

KERNELS: dict[str, Callable[[], None]] = {
    "transpose": lambda: rows.test_transpose_through_padded_lds((70, 45)),
    "softmax": lambda: rows.test_softmax(2, 257),
    "layer norm": lambda: rows.test_layer_norm(5, 512),
    "top k": lambda: rows.test_top_k_with_ties(64, 4, True),
    "prefix scan": lambda: coordination.test_chained_prefix_scan(1000),
    "histogram": lambda: coordination.test_histogram_with_lds_and_global_atomics(3001, 3),
    "work queue": lambda: coordination.test_persistent_work_queue(7, 3),
    "bitonic sort": lambda: coordination.test_bitonic_sort_in_lds(128),
    "compaction": coordination.test_compaction_by_ballot,
    "all-reduce": lambda: coordination.test_all_reduce_with_flags(2),
    "bf16 GEMM": lambda: matrix.test_gemm_bf16_with_swizzled_lds(64, 64, 64),
    "fp8 GEMM": matrix.test_gemm_fp8_with_row_scales,
    "mxfp4 GEMM": matrix.test_gemm_mxfp4_with_scales_that_all_differ,
    "split-K GEMM": lambda: matrix.test_split_k_gemm_with_a_semaphore(4),
    "causal attention": lambda: assorted.test_causal_attention_with_online_softmax(1, 64, 32),
    "int8 GEMM": assorted.test_gemm_int8_requantised,
    "segmented scan": assorted.test_segmented_scan_by_dpp,
    "indexed array": assorted.test_array_of_registers_indexed_by_values,
    "grid barrier": lambda: assorted.test_heat_steps_with_a_grid_barrier(4),
    "direct-to-LDS pipeline": lambda: matrix.test_direct_to_lds_pipeline(7, 1024),
}
SCHEDULES = [
    ("simple", 0),
    ("relaxed", 1),
    *(pytest.param("relaxed", seed, marks=pytest.mark.slow) for seed in range(2, 12)),
]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("mode", "seed"), SCHEDULES)
def test_no_false_alarm(mode: str, seed: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    def strict(**options: Any) -> Any:
        entered.append(mode)
        return session.emulated(sanitize="all", mode=mode, schedule_seed=seed, **options)

    monkeypatch.setattr(emulator, "emulated", strict)
    KERNELS[name]()
    assert entered
