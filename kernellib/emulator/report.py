# SPDX-License-Identifier: Apache-2.0
"""What a launch did, counted: the numbers carry the source label "counted"."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernellib.emulator.assembly import Program
from kernellib.emulator.counters import (
    AccessCounters,
    AccessTotals,
    by_class,
    count_waits,
    matrix_flops_by_type,
)
from kernellib.emulator.errors import EmulatorError
from kernellib.emulator.resources import KernelResources, Occupancy, occupancy

Array = np.ndarray[Any, Any]
_ONE = np.int32(1)


class CountersOffError(EmulatorError):
    """A counter was asked for that the session did not collect."""


class ByteTracker:
    """Counts how often each byte of a range is asked for by loads, and by stores (atomics count as both).

    Counts are kept per granule; the granule starts at 16 bytes and shrinks to what the accesses need.
    """

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.size = size
        self.granule = 16
        self.counts = {verb: np.zeros(-(-size // 16), np.int32) for verb in ("load", "store")}
        self.bytes = {"load": 0, "store": 0}

    def add(self, action: str, addresses: Array, size: int) -> None:
        """Count an access of `size` bytes at every address."""
        flat = addresses.reshape(-1)
        relative = flat[(flat + size > self.base) & (flat < self.base + self.size)] - self.base
        if not len(relative):
            return
        first, last = relative.clip(0), (relative + size).clip(None, self.size)
        bits = int(np.bitwise_or.reduce(first | np.where(last == self.size, 0, last)))
        while bits & (self.granule - 1):
            self.granule //= 2
            for verb, counts in self.counts.items():
                self.counts[verb] = np.repeat(counts, 2)[: -(-self.size // self.granule)]
        length = -(-last // self.granule) - first // self.granule
        total = int((last - first).sum())
        for verb in ("load", "store") if action == "atomic" else (action,):
            self.bytes[verb] += total
            for step in range(int(length.max())):
                index = (first // self.granule + step)[step < length]
                # unbuffered add, as lanes may share a granule; a scalar of the same dtype takes numpy's fast
                # path
                np.add.at(self.counts[verb], index, _ONE)

    def summary(self) -> dict[str, int]:
        """Bytes asked for, and the least and most often that any byte was."""
        loads, stores = self.counts["load"], self.counts["store"]
        return {
            "load": self.bytes["load"], "store": self.bytes["store"],
            "load_min": int(loads.min()) if loads.size else 0, "load_max": int(loads.max()),
            "store_min": int(stores.min()) if stores.size else 0, "store_max": int(stores.max()),
        }  # fmt: skip


@dataclass
class LaunchReport:
    """One kernel launch.

    Attributes:
        kernel_name, grid, block, lds_bytes (static + dynamic, per workgroup), num_waves, stream: the launch.
        instruction_counts: wave-level issues per mnemonic (with its encoding suffix).
        lane_instructions: wave-level issues of all instructions times 64 lanes.
        bytes_by_space: bytes asked for by active lanes, `{"global": {"load": ..., "store": ..., "atomic":
            ...}, ...}` for global (flat, buffer), lds, scratch, scalar.  Lanes that a buffer descriptor's
            range check turns away ask for nothing.
        requests: `(mnemonic, bytes per lane) -> number of lane requests`.
        resources: compiled resources.
        program: the listing that ran, parsed.
        issues: int64, wave-level issues of each of `program.instructions`.
        accesses: counters of lines and banks, None unless the session was made with `counters="all"`.
        seconds: host time of the emulation (a property of this computer, not of the chip).
    """

    kernel_name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    lds_bytes: int
    num_waves: int
    stream: int
    instruction_counts: Counter[str]
    lane_instructions: int
    bytes_by_space: dict[str, dict[str, int]]
    requests: Counter[tuple[str, int]]
    resources: KernelResources
    program: Program = field(repr=False)
    issues: Array = field(repr=False)
    trackers: list[ByteTracker] = field(default_factory=list, repr=False)
    accesses: AccessCounters | None = field(default=None, repr=False)
    seconds: float = 0.0

    @property
    def assembly(self) -> str:
        """The listing that ran."""
        return self.program.text

    @property
    def classes(self) -> dict[str, int]:
        """Wave-level issues by class of instruction (counters.CLASSES)."""
        return by_class(self.instruction_counts)

    @property
    def matrix_flops(self) -> dict[str, int]:
        """Multiplications and additions of matrix instructions, by operand types."""
        return matrix_flops_by_type(self.program.instructions, self.issues)

    @property
    def waits(self) -> dict[str, int]:
        """Waits issued: vmcnt(n), lgkmcnt(n), barrier, sleep."""
        return count_waits(self.program.instructions, self.issues)

    @property
    def occupancy(self) -> Occupancy:
        """How many of the kernel's waves the chip holds at a time."""
        threads = self.block[0] * self.block[1] * self.block[2]
        dynamic = self.lds_bytes - self.resources.lds_bytes
        return occupancy(self.resources, threads, dynamic, self.grid[0] * self.grid[1] * self.grid[2])

    @property
    def memory(self) -> dict[tuple[str, str], AccessTotals]:
        """Accesses by (space, action), with lines touched and bank conflicts.

        Raises CountersOffError when the session did not collect them.
        """
        if self.accesses is None:
            raise CountersOffError(
                f"lines and bank conflicts of {self.kernel_name} were not counted: "
                'run it under emulated(counters="all")'
            )
        return self.accesses.by_kind()

    def bytes_of(self, target: Any) -> dict[str, int]:
        """Bytes asked for inside a tensor (or `(address, size)`) that the session tracked with `track=[...]`.

        Returns load, store: bytes; load_min, load_max, store_min, store_max: how often the least and the most
        asked-for byte was.  Raises KeyError when the range was not tracked.
        """
        base, size = address_range(target)
        for tracker in self.trackers:
            if tracker.base == base and tracker.size == size:
                return tracker.summary()
        raise KeyError(f"range [{base:#x}, +{size}) was not given to emulated(track=[...])")


def address_range(target: Any) -> tuple[int, int]:
    """(address, bytes) of a contiguous tensor, a numpy array or an (address, size) pair."""
    if isinstance(target, tuple) and len(target) == 2:
        return int(target[0]), int(target[1])
    if isinstance(target, np.ndarray):
        return int(target.ctypes.data), int(target.nbytes)
    if hasattr(target, "data_ptr"):
        return int(target.data_ptr()), int(target.numel() * target.element_size())
    raise TypeError(f"wants a tensor, an array or (address, size), got {type(target).__name__}")
