# SPDX-License-Identifier: Apache-2.0
"""Compiled resources of a kernel and the occupancy they allow on gfx950.

Facts used (AMD CDNA3/CDNA4 ISA, LLVM "AMDGPU memory and register allocation" for gfx90a and later): a SIMD
lane has 512 vector registers, shared by VGPRs and AGPRs, allocated in granules of 8; AGPRs start at
`accum_offset` (a multiple of 4); at most 8 waves per SIMD; 4 SIMDs per compute unit; 160 KiB LDS per compute
unit, allocated in granules of 1280 bytes (320 dwords); 800 SGPRs per SIMD do not limit (each wave may have
102).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kernellib.emulator.assembly import Kernel, Program
from kernellib.emulator.errors import LaunchArgumentError

VGPRS_PER_LANE, VGPR_GRANULE = 512, 8
MAX_WAVES_PER_SIMD, SIMDS_PER_CU = 8, 4
LDS_BYTES_PER_CU, LDS_GRANULE_BYTES = 160 * 1024, 1280
NUM_COMPUTE_UNITS = 256
MAX_WORKGROUP_THREADS = 1024


@dataclass(frozen=True)
class KernelResources:
    """What a kernel needs.

    `vgprs`/`agprs` are the registers really used, `vector_registers` what is allocated per lane (an occupancy
    hint can inflate it); `lds_bytes`/`scratch_bytes` the static amounts (LDS per workgroup, scratch per
    lane); `occupancy_waves_per_simd` by vector registers alone; `spills` counts spilled VGPRs and SGPRs;
    `instruction_mix` counts mnemonics (with encoding suffix) of the code.
    """

    kernel: str
    vgprs: int
    agprs: int
    sgprs: int
    lds_bytes: int
    scratch_bytes: int
    vector_registers: int
    occupancy_waves_per_simd: int
    vgpr_spills: int
    sgpr_spills: int
    max_workgroup_size: int
    kernarg_bytes: int
    instruction_mix: Counter[str]

    def workgroups_per_cu(self, threads: int, dynamic_lds_bytes: int = 0) -> int:
        """Workgroups of `threads` threads that one compute unit holds at a time (0: none fits)."""
        waves = -(-threads // 64)
        per_simd = self.occupancy_waves_per_simd
        by_waves = per_simd * SIMDS_PER_CU // waves
        lds = self.lds_bytes + dynamic_lds_bytes
        if lds == 0:
            return by_waves
        granules = -(-lds // LDS_GRANULE_BYTES)
        return min(by_waves, LDS_BYTES_PER_CU // LDS_GRANULE_BYTES // granules)


@dataclass(frozen=True)
class Occupancy:
    """How many of a launch's workgroups the chip holds at a time (counted from what the compiler allotted).

    Attributes:
        waves_per_workgroup, workgroups_per_cu: of one compute unit.
        waves_per_simd: waves of this kernel that a SIMD holds on average, when the unit is full.
        limited_by: "vector registers", "lds" or "waves" (the limit of 8 a SIMD).
        num_workgroups: of the launch; rounds: times the chip fills up for it, 1 when all fit at once.
    """

    waves_per_workgroup: int
    workgroups_per_cu: int
    waves_per_simd: float
    limited_by: str
    num_workgroups: int
    rounds: int


def occupancy(
    resources: KernelResources, threads: int, dynamic_lds_bytes: int, num_workgroups: int
) -> Occupancy:
    """Occupancy of a launch of `num_workgroups` workgroups of `threads` threads."""
    waves = -(-threads // 64)
    per_cu = resources.workgroups_per_cu(threads, dynamic_lds_bytes)
    by_waves = resources.occupancy_waves_per_simd * SIMDS_PER_CU // waves
    limit = "vector registers" if resources.occupancy_waves_per_simd < MAX_WAVES_PER_SIMD else "waves"
    return Occupancy(
        waves, per_cu, per_cu * waves / SIMDS_PER_CU, "lds" if per_cu < by_waves else limit, num_workgroups,
        -(-num_workgroups // max(per_cu * NUM_COMPUTE_UNITS, 1)),
    )  # fmt: skip


def kernel_range(program: Program, kernel: Kernel) -> range:
    """Instruction indices of a kernel: from its label to the next function's (or the end)."""
    later = [k.entry for k in program.kernels.values() if k.entry > kernel.entry]
    return range(kernel.entry, min(later, default=len(program.instructions)))


def get_kernel(program: Program, name: str | None) -> Kernel:
    """The kernel of that name, or the only one.  Raises LaunchArgumentError naming what is there."""
    if name is None and len(program.kernels) == 1:
        return next(iter(program.kernels.values()))
    if not isinstance(name, str) or name not in program.kernels:
        raise LaunchArgumentError(
            f"kernel {name!r} is not in the listing, which has {sorted(program.kernels)}"
        )
    return program.kernels[name]


def kernel_resources(program: Program, kernel: str | None = None) -> KernelResources:
    """Resources of a kernel from its descriptor, metadata and `.set` symbols."""
    found = get_kernel(program, kernel)
    descriptor, metadata, symbols = found.descriptor, found.metadata, program.symbols

    def symbol(suffix: str, default: int) -> int:
        return symbols.get(f".L{found.name}.{suffix}", symbols.get(f"{found.name}.{suffix}", default))

    agprs = int(metadata.get(".agpr_count", symbol("num_agpr", 0)))
    total = int(metadata.get(".vgpr_count", descriptor.get("next_free_vgpr", 0)))
    vgprs = symbol("num_vgpr", total - agprs if agprs else total)
    allocated = max(descriptor.get("next_free_vgpr", total), 1)
    allocated = -(-allocated // VGPR_GRANULE) * VGPR_GRANULE
    return KernelResources(
        kernel=found.name,
        vgprs=vgprs,
        agprs=agprs,
        sgprs=int(metadata.get(".sgpr_count", descriptor.get("next_free_sgpr", 0))),
        lds_bytes=descriptor.get("group_segment_fixed_size", 0),
        scratch_bytes=descriptor.get("private_segment_fixed_size", 0),
        vector_registers=allocated,
        occupancy_waves_per_simd=min(MAX_WAVES_PER_SIMD, VGPRS_PER_LANE // allocated),
        vgpr_spills=int(metadata.get(".vgpr_spill_count", 0)),
        sgpr_spills=int(metadata.get(".sgpr_spill_count", 0)),
        max_workgroup_size=int(metadata.get(".max_flat_workgroup_size", MAX_WORKGROUP_THREADS)),
        kernarg_bytes=descriptor.get("kernarg_size", int(metadata.get(".kernarg_segment_size", 0))),
        instruction_mix=Counter(program.instructions[i].mnemonic for i in kernel_range(program, found)),
    )
