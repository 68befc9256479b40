# SPDX-License-Identifier: Apache-2.0
"""Turns lane addresses into bytes of an allocation, with bounds checks that name the offender."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kernellib.emulator.errors import OutOfBoundsError, UseAfterFreeError
from kernellib.emulator.memory import ITEM_CODES, Allocation, MemoryMap

if TYPE_CHECKING:
    from kernellib.emulator.assembly import Instruction
    from kernellib.emulator.state import WaveGroup

Array = np.ndarray[Any, Any]


def out_of_bounds(
    memory: MemoryMap,
    g: WaveGroup,
    inst: Instruction,
    address: int,
    size: int,
    wave: int,
    lane: int,
    verb: str,
) -> OutOfBoundsError:
    """The finding for one bad address."""
    location = g.cohort.location(g, inst, wave, lane, address)
    freed = memory.freed(address)
    if freed is not None:
        return UseAfterFreeError(f"{size}-byte {verb} inside {freed}, which has been freed", location)
    nearest = memory.nearest(address)
    hint = "no allocation is known"
    if nearest is not None:
        if address >= nearest.end:
            hint = f"{address - nearest.end} bytes past the end of {nearest}"
        elif address < nearest.base:
            hint = f"{nearest.base - address} bytes before {nearest}"
        else:
            hint = f"it starts inside, but runs past the end of {nearest}"
    return OutOfBoundsError(f"{size}-byte {verb} at {address:#x}: {hint}", location)


class Resolver:
    """Looks up the allocation of one memory instruction; remembers the last one (it is nearly always the
    same).
    """

    def __init__(self, inst: Instruction, size: int, verb: str) -> None:
        self.inst = inst
        self.size = size
        self.verb = verb
        self.last: Allocation | None = None
        self.epoch = -1

    def resolve_rows(self, g: WaveGroup, first: Array, row_bytes: int) -> Allocation | None:
        """The allocation that holds `row_bytes` bytes at each address; None: `resolve` tells why not."""
        low, high = int(first.min()), int(first.max()) + row_bytes
        last = self.last
        if last is not None and self.epoch == g.cohort.epoch and last.base <= low and high <= last.end:
            return last
        return g.cohort.memory.find(low, high)

    def resolve(
        self, g: WaveGroup, addresses: Array, waves: Array | None, lanes: Array | None
    ) -> Allocation | None:
        """The allocation that holds every address (plus size), or None when they lie in several.

        `addresses` are int64, of any shape; `waves`/`lanes` say which wave and lane each belongs to (None:
        the array is [n, 64]).  Raises OutOfBoundsError when an address lies in no allocation.
        """
        memory, size = g.cohort.memory, self.size
        # reductions by name: the methods of the same names go through Python
        low = int(np.minimum.reduce(addresses, axis=None))
        high = int(np.maximum.reduce(addresses, axis=None)) + size
        last = self.last
        if last is not None and self.epoch == g.cohort.epoch and last.base <= low and high <= last.end:
            return last
        found = memory.find(low, high, lambda: memory.covers(addresses.reshape(-1), size))
        if found is not None:
            if self.verb == "store" and not found.writable:
                raise OutOfBoundsError(
                    f"store to read-only {found}", g.cohort.location(g, self.inst, 0, 0, low)
                )
            self.last, self.epoch = found, g.cohort.epoch
            return found
        flat = addresses.reshape(-1)
        if memory.covers(flat, size):
            return None
        for position in np.argsort(flat, kind="stable"):
            address = int(flat[position])
            if memory.find(address, address + size) is None:
                wave = int(position) // 64 if waves is None else int(waves[position])
                lane = int(position) % 64 if lanes is None else int(lanes[position])
                raise out_of_bounds(memory, g, self.inst, address, size, wave, lane, self.verb)
        return None


def gather_rows(allocation: Allocation, offsets: Array, row_bytes: int) -> Array:
    """uint32 [k, row_bytes / 4]: `row_bytes` contiguous bytes at each byte offset."""
    rows = np.lib.stride_tricks.as_strided(
        allocation.bytes[:row_bytes].view(f"V{row_bytes}"), (allocation.size - row_bytes + 1,), (1,)
    )
    taken: Array = rows[offsets]
    return taken.view(np.uint32).reshape(len(offsets), -1)


def scatter_rows(allocation: Allocation, offsets: Array, rows: Array) -> None:
    """The inverse of `gather_rows`: rows uint32 [k, row_bytes / 4]; the last of equal ones wins."""
    row_bytes = 4 * rows.shape[1]
    target = np.lib.stride_tricks.as_strided(
        allocation.bytes[:row_bytes].view(f"V{row_bytes}"), (allocation.size - row_bytes + 1,), (1,)
    )
    target[offsets] = rows.view(f"V{row_bytes}")[:, 0]


class ByteStore(Protocol):
    """What gather and scatter need: an `Allocation`, the LDS of a cohort, its scratch memory."""

    bytes: Array

    def view(self, itemsize: int, phase: int) -> Array:
        """Items of `itemsize` bytes, the first at byte `phase`."""


class LocalStore:
    """LDS or scratch memory of one cohort as a ByteStore."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(max(size, 16), np.uint8)
        self._views: dict[tuple[int, int], Array] = {}

    def view(self, itemsize: int, phase: int) -> Array:
        """Items of `itemsize` bytes, the first at byte `phase`."""
        found = self._views.get((itemsize, phase))
        if found is None:
            count = (len(self.bytes) - phase) // itemsize
            code = ITEM_CODES[itemsize] if phase % min(itemsize, 8) == 0 else f"V{itemsize}"
            found = self._views[itemsize, phase] = self.bytes[phase : phase + count * itemsize].view(code)
        return found


def gather(store: ByteStore, offsets: Array, size: int) -> Array:
    """Items of `size` bytes (a power of two, at most 16) at byte offsets, as unsigned or complex128."""
    phase = int(offsets[(0,) * offsets.ndim]) & (size - 1)
    if size > 1 and int(np.bitwise_or.reduce(offsets ^ phase if phase else offsets, axis=None)) & (size - 1):
        index = offsets[..., None] + np.arange(size)
        return np.ascontiguousarray(store.bytes[index]).view(ITEM_CODES[size])[..., 0]
    shift = size.bit_length() - 1
    if phase:
        offsets = offsets - phase
    items: Array = store.view(size, phase).take(offsets >> shift if shift else offsets)
    return items.view(ITEM_CODES[size])


def scatter(store: ByteStore, offsets: Array, items: Array) -> None:
    """Store items (1-D, in wave and lane order: the last of equal addresses wins) at byte offsets."""
    size = items.dtype.itemsize
    phase = int(offsets[0]) & (size - 1)
    if size > 1 and int(np.bitwise_or.reduce(offsets ^ phase if phase else offsets)) & (size - 1):
        raw = np.ascontiguousarray(items).view(np.uint8).reshape(-1, size)
        store.bytes[offsets[:, None] + np.arange(size)] = raw
        return
    shift = size.bit_length() - 1
    target = store.view(size, phase)
    if phase:
        offsets = offsets - phase
    target[offsets >> shift if shift else offsets] = items.view(target.dtype)
