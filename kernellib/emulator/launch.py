# SPDX-License-Identifier: Apache-2.0
"""Starts a kernel: initial registers, cohorts, and the report at the end."""

from __future__ import annotations

import itertools
import numbers
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernellib.emulator.assembly import Kernel, Program, parse
from kernellib.emulator.binding.program import Block, BoundProgram, bind_program
from kernellib.emulator.counters import AccessCounters
from kernellib.emulator.dispatcher import Dispatcher, run_until_one_ends
from kernellib.emulator.errors import LaunchArgumentError
from kernellib.emulator.kernarg import PRIVATE_APERTURE, SHARED_APERTURE, Dim3, build_kernarg, check_arguments
from kernellib.emulator.memory import MemoryMap
from kernellib.emulator.operands import EXEC, M0, SPECIAL_SOURCES
from kernellib.emulator.recycled import Recycled
from kernellib.emulator.report import ByteTracker, LaunchReport
from kernellib.emulator.resources import (
    LDS_BYTES_PER_CU,
    MAX_WORKGROUP_THREADS,
    NUM_COMPUTE_UNITS,
    KernelResources,
    get_kernel,
    kernel_resources,
)
from kernellib.emulator.sanitizers.names import DEFAULT
from kernellib.emulator.scheduler import Cohort
from kernellib.emulator.state import FloatMode, RegisterFile

if TYPE_CHECKING:
    from kernellib.emulator.sanitizers.monitor import Monitor

Array = np.ndarray[Any, Any]
_epochs = itertools.count(1)
REGISTER_BYTES_PER_GROUP = 16 << 20
MAX_SPARE_BYTES = 2 << 20
_spare_lock = threading.Lock()
MAX_INITIAL_SGPRS = 102
# COMPUTE_TMPRING_SIZE holds 13 bits of 1 KiB per wave: 8 MiB, 128 KiB per lane.
MAX_SCRATCH_BYTES = 128 * 1024


@dataclass(frozen=True)
class Tuning:
    """Knobs of the emulation itself; none changes results of a race-free kernel.

    `waves_per_group`: how many waves advance in one numpy step; 0 chooses from the register count, so that a
    group's registers fit the processor's last-level cache (measured: more waves spread the interpreter's cost
    further, until the registers leave the cache); `quantum`: instructions a cohort issues before the next one
    gets its turn; `instruction_limit`: issues by one wave before an InstructionLimitError; `ulp_bias`: shifts
    results of v_rcp, v_rsq, v_sqrt, v_exp, v_log, v_sin and v_cos by -1, 0 or +1 ulp, within their documented
    accuracy; `check_hazards`: whether missing wait states are findings (hazards.py); `relaxed`: memory
    behaves as the memory model leaves it open (relaxed/); `counters`: count lines touched and bank conflicts
    (counters.py); `sanitizers`: names of those that watch (sanitizers/names.py).
    """

    waves_per_group: int = 0
    quantum: int = 20_000
    instruction_limit: int = 10_000_000
    ulp_bias: int = 0
    check_hazards: bool = True
    relaxed: bool = False
    counters: bool = False
    sanitizers: frozenset[str] = DEFAULT

    @property
    def instrumented(self) -> bool:
        """Whether memory instructions go through `Launch.chip` and tell the sanitizers."""
        return self.relaxed or bool(self.sanitizers - DEFAULT)


@dataclass(frozen=True)
class Device:
    """What instrumented launches run on: a chip (relaxed/chip.py, sanitizers/direct.py), who watches it."""

    chip: Any
    monitor: Monitor | None = None
    rank: int = 0
    num_ranks: int = 1


class CompiledListing:
    """A parsed and bound listing, reusable for any number of launches."""

    def __init__(
        self,
        text: str,
        ulp_bias: int = 0,
        check_hazards: bool = True,
        instrumented: bool = False,
        relaxed: bool = False,
        check_registers: bool = False,
    ) -> None:
        self.program: Program = parse(text)
        self.bound: BoundProgram = bind_program(
            self.program,
            ulp_bias,
            check_hazards=check_hazards,
            instrumented=instrumented,
            relaxed=relaxed,
            check_registers=check_registers,
        )
        self._resources: dict[str, KernelResources] = {}
        self._spare: tuple[int, RegisterFile] | None = None
        self._mnemonics: dict[int, Counter[str]] = {}

    @classmethod
    def from_program(cls, program: Program, bound: BoundProgram) -> CompiledListing:
        """A listing that has been parsed and bound by the caller."""
        self = cls.__new__(cls)
        self.program, self.bound = program, bound
        self._resources, self._spare, self._mnemonics = {}, None, {}
        return self

    def mnemonics(self, block: Block) -> Counter[str]:
        """How often each mnemonic stands in a block; counted once."""
        found = self._mnemonics.get(block.number)
        if found is None:
            instructions = self.program.instructions
            found = Counter(instructions[index].mnemonic for index in block.instructions)
            self._mnemonics[block.number] = found
        return found

    def take_spare(self, num_waves: int) -> RegisterFile | None:
        """The register file of an earlier launch, when it is of this size."""
        with _spare_lock:  # ranks launch one listing from several threads
            if self._spare is None or self._spare[0] != num_waves:
                return None
            (_, regs), self._spare = self._spare, None
            return regs

    def keep_spare(self, pool: dict[int, list[RegisterFile]]) -> None:
        """Keep one small register file, with its views, for the next launch of the listing."""
        for num_waves, files in pool.items():
            for regs in files:
                if regs.vector.nbytes <= MAX_SPARE_BYTES:
                    with _spare_lock:
                        self._spare = num_waves, regs
                    return

    def resources(self, kernel: str) -> KernelResources:
        """Cached `kernel_resources`."""
        found = self._resources.get(kernel)
        if found is None:
            found = self._resources[kernel] = kernel_resources(self.program, kernel)
        return found


_listings: Recycled[tuple[str, int, bool, bool, bool, bool], CompiledListing] = Recycled(
    lambda key: CompiledListing(*key), limit=256
)
_listings_lock = threading.Lock()


def compiled_listing(text: str, tuning: Tuning) -> CompiledListing:
    """Parse and bind a listing, once per text and process."""
    key = (
        text, tuning.ulp_bias, tuning.check_hazards, tuning.instrumented, tuning.relaxed,
        "uninitialised_registers" in tuning.sanitizers,
    )  # fmt: skip
    with _listings_lock:  # ranks are threads, and all launch the same listing at once
        return _listings[key]


def _run_alone(dispatcher: Dispatcher) -> None:
    run_until_one_ends([dispatcher])


class Launch:
    """One kernel launch while it runs."""

    def __init__(
        self,
        listing: CompiledListing,
        kernel: Kernel,
        grid: Dim3,
        block: Dim3,
        kernarg: bytearray,
        memory: MemoryMap,
        dynamic_lds_bytes: int = 0,
        tuning: Tuning | None = None,
        trackers: Sequence[ByteTracker] = (),
        device: Device | None = None,
    ) -> None:
        self.chip: Any = device.chip if device else None
        self.monitor = device.monitor if device else None
        self.rank, self.ranks = (device.rank, device.num_ranks) if device else (0, 1)
        self.number = 0  # among those that the monitor watches
        self.listing, self.kernel, self.grid, self.block = listing, kernel, grid, block
        self.bound = listing.bound
        self.resources = listing.resources(kernel.name)
        self.memory = memory
        self.tuning = tuning or Tuning()
        self.trackers = list(trackers)
        self.accesses = AccessCounters(len(self.bound.program.instructions)) if self.tuning.counters else None
        self.epoch = next(_epochs)
        self.lds_bytes = self.resources.lds_bytes + dynamic_lds_bytes
        self.scratch_bytes = self.resources.scratch_bytes
        self.threads = block[0] * block[1] * block[2]
        check_shape(kernel, self.resources, grid, block, self.lds_bytes)
        self.waves_per_workgroup = -(-self.threads // 64)
        self.num_workgroups = grid[0] * grid[1] * grid[2]
        self.float_mode = float_mode(kernel)
        self.entry_block = self.bound.block_of[kernel.entry]
        self.block_counts = [0] * len(self.bound.blocks)
        self.instruction_limit = self.tuning.instruction_limit
        self.stores = 0
        self.clock = 0
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.requests: Counter[tuple[str, int]] = Counter()
        self._pool: dict[int, list[RegisterFile]] = {}
        self.kernarg = np.frombuffer(kernarg, np.uint8)
        self._lanes: tuple[Array, Array] | None = None

    # ------------------------------------------------------------------ registers
    def take_registers(self, num_waves: int) -> RegisterFile:
        """A poisoned register file, recycled when one of that size is free."""
        free = self._pool.get(num_waves)
        regs = free.pop() if free else self.listing.take_spare(num_waves)
        if regs is not None:
            regs.reset()
            return regs
        return RegisterFile.allocate(self.bound.slots, self.bound.num_vgprs + self.bound.num_agprs, num_waves)

    def initialise(self, cohort: Cohort) -> None:
        """Registers at a wave's start (LLVM AMDGPU guide, "Initial Kernel Execution State")."""
        scalar, descriptor = cohort.regs.scalar, self.kernel.descriptor
        ids, masks = self._first_lanes()
        cohort.regs.vector[0] = ids[cohort.wave_idx]
        scalar.view(np.uint64)[:, EXEC // 2] = masks[cohort.wave_idx]
        scalar[:, M0] = 0
        for name, value in (
            ("src_shared_base", SHARED_APERTURE), ("src_shared_limit", SHARED_APERTURE | 0xFFFF),
            ("src_private_base", PRIVATE_APERTURE), ("src_private_limit", PRIVATE_APERTURE | 0xFFFFFFFF),
        ):  # fmt: skip
            scalar.view(np.uint64)[:, SPECIAL_SOURCES[name][0] // 2] = np.uint64(value)
        position = self._user_sgprs(scalar, descriptor)
        if position > MAX_INITIAL_SGPRS - 4:
            raise LaunchArgumentError(
                f"kernel {self.kernel.name} asks for {position} initial scalar registers"
            )
        for axis, name in enumerate("xyz"):
            if descriptor.get(f"system_sgpr_workgroup_id_{name}", 1 if axis == 0 else 0):
                scalar[:, position] = cohort.workgroup_id[:, axis]
                position += 1
        if descriptor.get("system_sgpr_workgroup_info", 0):
            scalar[:, position] = 0

    def _first_lanes(self) -> tuple[Array, Array]:
        """Of each wave of a workgroup: v0, uint32 [waves, 64], and EXEC, uint64 [waves]."""
        if self._lanes is None:
            bx, by, _ = self.block
            thread = np.arange(self.waves_per_workgroup * 64).reshape(-1, 64)
            # gfx90a and later pack the work-item id: x in bits 9:0, y in 19:10, z in 29:20 of v0
            packed = thread % bx | thread // bx % by << 10 | thread // (bx * by) << 20
            active = [(1 << min(self.threads - first, 64)) - 1 for first in range(0, self.threads, 64)]
            self._lanes = packed.astype(np.uint32), np.array(active, np.uint64)
        return self._lanes

    def _user_sgprs(self, scalar: Array, descriptor: dict[str, int]) -> int:
        """Fill the user SGPRs; returns the number of the first system SGPR."""
        position = 0
        for name, count in (
            ("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2),
            ("dispatch_id", 2), ("flat_scratch_init", 2), ("private_segment_size", 1),
        ):  # fmt: skip
            if not descriptor.get(f"user_sgpr_{name}", 0):
                continue
            if name == "kernarg_segment_ptr":
                scalar[:, position : position + 2] = np.array([self.kernarg.ctypes.data], np.uint64).view(
                    np.uint32
                )
            elif name == "dispatch_ptr":
                scalar[:, position : position + 2] = np.array([self._packet().ctypes.data], np.uint64).view(
                    np.uint32
                )
            elif name == "private_segment_size":
                scalar[:, position] = self.scratch_bytes
            elif name in ("queue_ptr", "dispatch_id", "flat_scratch_init"):
                # LLVM asks for all of these where it cannot tell what a kernel needs (direct-to-LDS loads,
                # for one).  There is no queue: its pointer is null, and a load from it is out of bounds.
                scalar[:, position : position + count] = 0
            else:
                raise LaunchArgumentError(f"kernel {self.kernel.name} asks for {name}, which is not emulated")
            position += count
        preload = descriptor.get("user_sgpr_kernarg_preload_length", 0)
        if position + preload > MAX_INITIAL_SGPRS:
            raise LaunchArgumentError(f"kernel {self.kernel.name} preloads {preload} dwords: too many")
        if preload:
            first = 4 * descriptor.get("user_sgpr_kernarg_preload_offset", 0)
            words = np.zeros(preload, np.uint32)
            raw = self.kernarg[first : first + 4 * preload]
            words[: len(raw) // 4] = raw[: len(raw) // 4 * 4].view(np.uint32)
            scalar[:, position : position + preload] = words
            position += preload
        return max(position, descriptor.get("user_sgpr_count", position))

    def _packet(self) -> Array:
        """The dispatch packet (HSA AQL kernel dispatch packet) that dispatch_ptr points at."""
        if not hasattr(self, "_dispatch_packet"):
            packet = np.zeros(64, np.uint8)
            packet[4:10] = np.array(self.block, np.uint16).view(np.uint8)
            sizes = [g * b for g, b in zip(self.grid, self.block, strict=True)]
            packet[12:24] = np.array(sizes, np.uint32).view(np.uint8)
            packet[24:32] = np.array([self.scratch_bytes, self.lds_bytes], np.uint32).view(np.uint8)
            packet[40:48] = np.array([self.kernarg.ctypes.data], np.uint64).view(np.uint8)
            self._dispatch_packet = packet
            self.memory.register_range(packet.ctypes.data, 64, "dispatch packet", writable=False)
        return self._dispatch_packet

    # ------------------------------------------------------------------ running
    def finish(self, cohort: Cohort) -> None:
        """Collect a finished cohort's counters and recycle its registers."""
        cohort.finish()
        self.bytes.update(cohort.bytes)
        self.requests.update(cohort.requests)
        self._pool.setdefault(cohort.num_waves, []).append(cohort.regs)

    def run(self, stream: int = 0, execute: Callable[[Dispatcher], None] = _run_alone) -> LaunchReport:
        """Run to the end and report; `execute` runs the dispatcher (a World interleaves several)."""
        begin = time.perf_counter()
        segment = self.memory.register_range(
            int(self.kernarg.ctypes.data), len(self.kernarg), "kernel arguments", writable=False
        )
        per_cu = self.resources.workgroups_per_cu(self.threads, self.lds_bytes - self.resources.lds_bytes)
        per_cohort = max(1, self._waves_per_group() // self.waves_per_workgroup)
        resident = per_cu * NUM_COMPUTE_UNITS
        try:
            with np.errstate(all="ignore"):
                execute(self._dispatcher(resident, min(per_cohort, resident)))
        finally:
            self.memory.unregister(segment)
        self.listing.keep_spare(self._pool)
        return self._report(stream, time.perf_counter() - begin)

    def _dispatcher(self, resident: int, per_cohort: int) -> Dispatcher:
        if self.chip is None:
            return Dispatcher(self, resident, per_cohort, self.tuning.quantum)
        from kernellib.emulator.relaxed.schedule import RelaxedDispatcher  # noqa: PLC0415 (it builds on this)
        from kernellib.emulator.sanitizers.cohort import InstrumentedDispatcher  # noqa: PLC0415

        kind = RelaxedDispatcher if self.tuning.relaxed else InstrumentedDispatcher
        return kind(self, resident, per_cohort, self.tuning.quantum)

    def _waves_per_group(self) -> int:
        if self.tuning.waves_per_group:
            return self.tuning.waves_per_group
        row_bytes = 256 * (self.bound.num_vgprs + self.bound.num_agprs)
        return min(max(REGISTER_BYTES_PER_GROUP // row_bytes, 32), 256)

    def _report(self, stream: int, seconds: float) -> LaunchReport:
        counts: Counter[str] = Counter()
        instructions = self.bound.program.instructions
        issues = np.zeros(len(instructions), np.int64)
        for block, times in zip(self.bound.blocks, self.block_counts, strict=True):
            if times:
                issues[block.instructions] = times
                for mnemonic, number in self.listing.mnemonics(block).items():
                    counts[mnemonic] += number * times
        spaces: dict[str, dict[str, int]] = {
            space: {"load": 0, "store": 0, "atomic": 0} for space in ("global", "lds", "scratch", "scalar")
        }
        for (space, action), number in self.bytes.items():
            spaces[space][action] += number
        return LaunchReport(
            kernel_name=self.kernel.name, grid=self.grid, block=self.block, lds_bytes=self.lds_bytes,
            num_waves=self.num_workgroups * self.waves_per_workgroup, stream=stream,
            instruction_counts=counts, lane_instructions=64 * sum(counts.values()), bytes_by_space=spaces,
            requests=self.requests, resources=self.resources, program=self.bound.program, issues=issues,
            trackers=self.trackers, accesses=self.accesses, seconds=seconds,
        )  # fmt: skip


def float_mode(kernel: Kernel) -> FloatMode:
    """Initial MODE register of a kernel, from its descriptor."""
    d = kernel.descriptor
    return FloatMode(
        d.get("float_round_mode_32", 0), d.get("float_round_mode_16_64", 0), d.get("float_denorm_mode_32", 3),
        d.get("float_denorm_mode_16_64", 3), bool(d.get("dx10_clamp", 1)), bool(d.get("ieee_mode", 1)),
        bool(d.get("fp16_overflow", 0)),
    )  # fmt: skip


def check_shape(kernel: Kernel, resources: KernelResources, grid: Dim3, block: Dim3, lds_bytes: int) -> None:
    """Refuse a grid, block or LDS size that the hardware or the kernel cannot be launched with."""
    for name, dims in (("grid", grid), ("block", block)):
        if len(dims) != 3 or any(not 1 <= d < 1 << 31 for d in dims):
            raise LaunchArgumentError(f"{name} {dims}: wants three positive sizes below 2**31")
    threads = block[0] * block[1] * block[2]
    if threads > min(resources.max_workgroup_size, MAX_WORKGROUP_THREADS):
        raise LaunchArgumentError(
            f"block {block} has {threads} threads, kernel {kernel.name} allows {resources.max_workgroup_size}"
        )
    wanted = kernel.metadata.get(".reqd_workgroup_size")
    if wanted and tuple(int(w) for w in wanted) != tuple(block):
        raise LaunchArgumentError(f"block {block}: kernel {kernel.name} is compiled for {tuple(wanted)}")
    if grid[0] * grid[1] * grid[2] > 1 << 24:
        raise LaunchArgumentError(f"grid {grid}: more than 2**24 workgroups would not end in a sensible time")
    if lds_bytes > LDS_BYTES_PER_CU:
        raise LaunchArgumentError(f"{lds_bytes} bytes of LDS: a compute unit has {LDS_BYTES_PER_CU}")
    if resources.scratch_bytes > MAX_SCRATCH_BYTES:
        raise LaunchArgumentError(
            f"{resources.scratch_bytes} bytes of scratch: a lane has {MAX_SCRATCH_BYTES}"
        )
    if resources.workgroups_per_cu(threads, max(lds_bytes - resources.lds_bytes, 0)) < 1:
        raise LaunchArgumentError(
            f"a workgroup of {threads} threads of kernel {kernel.name} does not fit a compute unit"
        )


def as_dim3(value: int | Sequence[int], name: str) -> Dim3:
    """A grid or block size as three ints; numpy integers count as integers, bools and floats do not."""
    sequence = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if isinstance(value, np.ndarray) and value.ndim == 1:
        sequence = True
    dims: tuple[Any, ...] = tuple(value) if sequence else (value,)  # type: ignore[arg-type]
    if not 1 <= len(dims) <= 3 or not all(_is_integer(d) for d in dims):
        raise LaunchArgumentError(f"{name} {value!r}: wants one to three integers")
    x, y, z = (int(d) for d in (*dims, 1, 1)[:3])
    return x, y, z


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def run_assembly(
    text: str,
    kernel: str | None,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    *,
    dynamic_lds_bytes: int = 0,
    memory: MemoryMap | None = None,
    tuning: Tuning | None = None,
    track: Sequence[Any] = (),
    stream: int = 0,
) -> LaunchReport:
    """Run a kernel of a gfx950 listing.

    Args:
        text: assembly text with `.amdhsa_kernel` descriptor and `.amdgpu_metadata`.
        kernel: its name; None when the listing has only one.
        grid, block: workgroups, and threads per workgroup.
        args: one value per explicit kernel argument: tensors or arrays (their address is passed), ints,
            floats, numpy scalars or raw bytes of the argument's size.
        dynamic_lds_bytes: LDS on top of the static amount.
        track: tensors whose bytes are counted one by one (see `LaunchReport.bytes_of`).
    Raises:
        LaunchArgumentError, AssemblySyntaxError and its subclasses, and every Finding.
    """
    from kernellib.emulator.report import address_range  # noqa: PLC0415

    tuning = tuning or Tuning()
    listing = compiled_listing(text, tuning)
    found = get_kernel(listing.program, kernel)
    grid3, block3 = as_dim3(grid, "grid"), as_dim3(block, "block")
    if memory is None:
        memory = MemoryMap()
    check_arguments(args)
    for value in args:
        register_argument(memory, value)
    kernarg = build_kernarg(found, args, grid3, block3, dynamic_lds_bytes)
    trackers = [ByteTracker(*address_range(t)) for t in track]
    launch = Launch(listing, found, grid3, block3, kernarg, memory, dynamic_lds_bytes, tuning, trackers)
    return launch.run(stream)


def register_argument(memory: MemoryMap, value: Any) -> None:
    """Make the memory behind a tensor or array argument addressable."""
    if hasattr(value, "data_ptr") and hasattr(value, "untyped_storage"):
        memory.register_tensor(value)
    elif isinstance(value, np.ndarray) and value.ndim:
        memory.register_array(value, "argument")
