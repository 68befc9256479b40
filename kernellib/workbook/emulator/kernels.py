# SPDX-License-Identifier: Apache-2.0
"""The kernels whose counters the notebook shows: the tail, two GEMMs, an RMSNorm; each checked first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator import emulated
from kernellib.emulator.benchmarks.cases import CASES, Prepared, prepare_rmsnorm
from kernellib.emulator.counters import AccessTotals
from kernellib.emulator.profile import Profile, profile

from ..artifact import Claim
from ..display import HtmlTable

if TYPE_CHECKING:
    from kernellib.emulator.report import LaunchReport

RMSNORM_ROWS = {"quick": 128, "full": 4096}


@dataclass(frozen=True)
class CountedKernel:
    """One launch with every counter on.

    Attributes:
        name, what: the kernel.
        report: the launch.
        touched_bytes: bytes of memory that it touches at all, each counted once.
        error: largest error of its result, relative to what is allowed.
    """

    name: str
    what: str
    report: LaunchReport
    touched_bytes: int
    error: float

    @property
    def profile(self) -> Profile:
        """Counters by source line."""
        return profile(self.report)


def touched_bytes(report: LaunchReport) -> int:
    """Bytes of the tracked tensors that some lane asked for, each counted once."""
    total = 0
    for tracker in report.trackers:
        asked = (tracker.counts["load"] > 0) | (tracker.counts["store"] > 0)
        total += min(int(np.count_nonzero(asked)) * tracker.granule, tracker.size)
    return total


def count_kernel(name: str, what: str, prepared: Prepared) -> CountedKernel:
    """Launch once on the emulator with every counter on."""
    with emulated(counters="all", track=prepared.tensors) as session:
        prepared.poison()
        prepared.launcher(*prepared.arguments)
    report = session.launches[-1]
    return CountedKernel(name, what, report, touched_bytes(report), prepared.error())


def count_kernels(profile_name: str, seed: int) -> list[CountedKernel]:
    """The benchmark's kernels, the RMSNorm on fewer rows in the quick profile."""
    rows = RMSNORM_ROWS[profile_name]
    prepare = {name: case.prepare for name, case in CASES.items()} | {
        "rmsnorm": partial(prepare_rmsnorm, rows=rows)
    }
    what = {name: case.what for name, case in CASES.items()} | {"rmsnorm": f"bf16 RMSNorm, {rows} x 8192"}
    return [count_kernel(name, what[name], prepare[name](seed)) for name in CASES]


def class_table(kernels: Sequence[CountedKernel]) -> HtmlTable:
    """Instructions issued by class, in thousands of wave-level issues."""
    classes = [name for name in kernels[0].report.classes if any(k.report.classes[name] for k in kernels)]
    rows = [[name, *(k.report.classes[name] for k in kernels)] for name in classes]
    rows.append(["all", *(sum(k.report.classes.values()) for k in kernels)])
    return HtmlTable(
        ["class", *(k.what for k in kernels)], rows, "Instructions issued by waves, by class", "counted"
    )


def memory_table(kernels: Sequence[CountedKernel]) -> HtmlTable:
    """Bytes, lines and bank conflicts by address space."""
    rows: list[list[Any]] = []
    for kernel in kernels:
        for (space, action), totals in sorted(kernel.report.memory.items()):
            rows.append([kernel.what, f"{space} {action}", *_memory_cells(space, totals)])
    columns = ["kernel", "access", "bytes", "64-byte lines", "asked / line bytes", "LDS passes", "conflicts"]
    return HtmlTable(columns, rows, "Memory accesses, coalescing and LDS bank conflicts", "counted")


def _memory_cells(space: str, totals: AccessTotals) -> list[Any]:
    if space == "lds":
        return [totals.bytes, None, None, totals.passes, totals.conflicts]
    return [totals.bytes, totals.lines_64, totals.efficiency, None, None]


def occupancy_table(kernels: Sequence[CountedKernel]) -> HtmlTable:
    """What the compiler allotted and what fits on a compute unit because of it."""
    rows = []
    for kernel in kernels:
        found, resources = kernel.report.occupancy, kernel.report.resources
        rows.append([
            kernel.what, resources.vgprs, resources.agprs, kernel.report.lds_bytes, found.workgroups_per_cu,
            found.waves_per_simd, found.limited_by, found.num_workgroups, found.rounds,
        ])  # fmt: skip
    columns = [
        "kernel", "VGPRs", "AGPRs", "LDS bytes", "workgroups a unit", "waves a SIMD", "limited by",
        "workgroups", "rounds",
    ]  # fmt: skip
    return HtmlTable(columns, rows, "Resources and occupancy on 256 compute units", "counted")


def kernel_claims(kernels: Sequence[CountedKernel]) -> list[Claim]:
    """Right results, a profile that loses nothing and has lines, no bank conflicts in the GEMMs."""
    worst = max(kernel.error for kernel in kernels)
    tail = kernels[0]
    located = tail.profile.located
    lost = [k.name for k in kernels if k.profile.total("issues") != sum(k.report.instruction_counts.values())]
    gemms = [kernel for kernel in kernels if kernel.report.matrix_flops]
    conflicts = sum(k.report.memory["lds", "load"].conflicts for k in gemms)
    return [
        Claim.check(
            "the counted kernels are right", worst <= 1, f"largest error {worst:.3g} of what is allowed",
            "checked",
        ),
        Claim.check(
            "the profile loses no instruction", not lost,
            f"{len(kernels) - len(lost)} of {len(kernels)} kernels", "counted",
        ),
        Claim.check(
            "the tail's instructions have source lines", located >= 0.9, f"{located:.1%}, wanted 90%",
            "counted",
        ),
        Claim.check(
            "swizzled tiles are read without bank conflicts", conflicts == 0,
            f"{conflicts} conflicts in the reads of {len(gemms)} GEMMs", "counted",
        ),
    ]  # fmt: skip
