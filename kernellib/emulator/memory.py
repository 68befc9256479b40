# SPDX-License-Identifier: Apache-2.0
"""Global memory: which host addresses a kernel may touch, and typed views of them.

Kernel pointers are host addresses of CPU tensors.  No address is ever dereferenced that does not lie inside a
known, live allocation: buffers registered with the session, storages of torch tensors, and numpy arrays.
Tensors are found when they are needed, through the garbage collector's list of objects, and remembered
weakly, so that an access to memory that has been freed is a `UseAfterFreeError`.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np

Array = np.ndarray[Any, Any]
ITEM_CODES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Allocation:
    """One live range of host memory.

    `alive()` says whether the owner still exists; while the allocation is *pinned* (during a launch) `owner`
    holds a strong reference, so the memory cannot go away under a running kernel.
    """

    def __init__(
        self, base: int, size: int, name: str, alive: Callable[[], bool], writable: bool = True
    ) -> None:
        self.base = base
        self.end = base + size
        self.size = size
        self.name = name
        self.alive = alive
        self.writable = writable
        self.bytes = np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(base)), np.uint8)
        self._views: dict[tuple[int, int], Array] = {}

    def view(self, itemsize: int, phase: int) -> Array:
        """The allocation as items of `itemsize` bytes, the first one starting at byte `phase`."""
        found = self._views.get((itemsize, phase))
        if found is None:
            count = (self.size - phase) // itemsize
            # Opaque items where the address is unaligned: `take` would copy the whole array to align it.
            aligned = (self.base + phase) % min(itemsize, 8) == 0
            dtype = ITEM_CODES.get(itemsize, f"V{itemsize}") if aligned else f"V{itemsize}"
            found = self._views[itemsize, phase] = self.bytes[phase : phase + count * itemsize].view(dtype)
        return found

    def __repr__(self) -> str:
        return f"{self.name} [{self.base:#x}, {self.end:#x}) ({self.size} bytes)"


def _torch() -> Any:
    import torch  # noqa: PLC0415 (the emulator also runs listings without torch's import cost)

    return torch


def _tensor_storage(tensor: Any) -> Any | None:
    """The CPU storage of a tensor; None for meta, fake, sparse, nested and foreign-device tensors."""
    torch = _torch()
    try:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        storage = tensor.untyped_storage()
        return storage if storage.nbytes() and storage.data_ptr() else None
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def _owner(array: Array) -> Array:
    """The array at the end of a chain of views."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return cast(Array, owner)


class MemoryMap:
    """All allocations that are known, sorted by address."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._items: list[Allocation] = []
        self._freed: list[Allocation] = []
        self._lock = threading.RLock()

    # ------------------------------------------------------------------ registration
    def add(self, allocation: Allocation) -> Allocation:
        """Insert an allocation; whatever it overlaps is dead or the same memory, and is replaced."""
        with self._lock:
            for other in self.overlapping(allocation.base, allocation.end):
                if other.alive() and other.base <= allocation.base and other.end >= allocation.end:
                    return other
                self._remove(other)
            position = bisect.bisect_left(self._bases, allocation.base)
            self._bases.insert(position, allocation.base)
            self._items.insert(position, allocation)
        return allocation

    def _remove(self, allocation: Allocation) -> None:
        position = self._items.index(allocation)
        del self._items[position], self._bases[position]
        self._freed.append(allocation)
        del self._freed[:-256]

    def register_tensor(self, tensor: Any) -> Allocation | None:
        """Make a CPU tensor's whole storage addressable."""
        storage = _tensor_storage(tensor)
        if storage is None:
            return None
        from torch.multiprocessing.reductions import StorageWeakRef  # noqa: PLC0415

        reference: Any = cast(Any, StorageWeakRef)(storage)
        shape = "x".join(str(n) for n in tensor.shape)
        name = f"tensor {str(tensor.dtype).removeprefix('torch.')}[{shape}]"
        return self.add(
            Allocation(storage.data_ptr(), storage.nbytes(), name, lambda: not reference.expired())
        )

    def register_array(self, array: Array, name: str = "array") -> Allocation | None:
        """Make a numpy array (its owner's memory) addressable."""
        owner = _owner(array)
        if not owner.nbytes or not owner.flags.c_contiguous:
            return None
        reference = weakref.ref(owner)
        text = f"{name} {owner.dtype}{list(owner.shape)}"
        allocation = Allocation(
            owner.ctypes.data,
            owner.nbytes,
            text,
            lambda: reference() is not None,
            bool(owner.flags.writeable),
        )
        return self.add(allocation)

    def register_range(self, base: int, size: int, name: str, writable: bool = True) -> Allocation:
        """Make raw memory addressable; the caller keeps it alive until `unregister`."""
        if base <= 0 or size <= 0:
            raise ValueError(f"register_range: wants a positive address and size, got {base:#x}, {size}")
        alive = [True]
        allocation = Allocation(base, size, name, lambda: alive[0], writable)
        allocation.release = lambda: alive.__setitem__(0, False)  # type: ignore[attr-defined]
        return self.add(allocation)

    def unregister(self, allocation: Allocation) -> None:
        """Forget an allocation of `register_range`."""
        release = getattr(allocation, "release", None)
        if release is not None:
            release()
        with self._lock:
            if allocation in self._items:
                self._remove(allocation)

    # ------------------------------------------------------------------ lookup
    def overlapping(self, low: int, high: int) -> list[Allocation]:
        """Known allocations that intersect [low, high)."""
        with self._lock:
            first = bisect.bisect_right(self._bases, low) - 1
            found = []
            for item in self._items[max(first, 0) :]:
                if item.base >= high:
                    break
                if item.end > low:
                    found.append(item)
            return found

    def find(self, low: int, high: int, otherwise: Callable[[], bool] | None = None) -> Allocation | None:
        """The live allocation that holds [low, high) whole; looks for new tensors when none is known, unless
        ``otherwise`` says that the addresses in question lie in several known ones."""
        allocation = self._find_known(low, high)
        if allocation is None and otherwise is not None and otherwise():
            return None
        for scan in (self.scan_tensors, self.scan_arrays):
            if allocation is None:
                scan()
                allocation = self._find_known(low, high)
        return allocation

    def covers(self, low: Array, size: int) -> bool:
        """Whether each [low, low + size) lies whole in a known allocation; looks for no new ones."""
        with self._lock:
            places = np.searchsorted(np.array(self._bases, np.int64), low, side="right") - 1
            for place in np.unique(places):
                if place < 0:
                    return False
                item = self._items[place]
                if not item.alive() or int(low[places == place].max()) + size > item.end:
                    return False
        return True

    def _find_known(self, low: int, high: int) -> Allocation | None:
        with self._lock:
            position = bisect.bisect_right(self._bases, low) - 1
            if position >= 0:
                item = self._items[position]
                if item.base <= low and high <= item.end and item.alive():
                    return item
        return None

    def freed(self, address: int) -> Allocation | None:
        """An allocation that once held `address` and is gone."""
        with self._lock:
            for item in reversed([*self._freed, *self._items]):
                if item.base <= address < item.end and not item.alive():
                    return item
        return None

    def nearest(self, address: int) -> Allocation | None:
        """The live allocation closest to an address, for error messages."""
        with self._lock:
            live = [item for item in self._items if item.alive()]
        return min(live, key=lambda a: max(a.base - address, address - a.end + 1, 0), default=None)

    def scan_tensors(self) -> None:
        """Register every CPU tensor that the garbage collector knows."""
        torch = _torch()
        with self._lock:
            for item in [i for i in self._items if not i.alive()]:
                self._remove(item)
            objects = gc.get_objects()
            # by type(), not isinstance: proxies in the heap may run code on attribute access
            wanted = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
            for candidate in [o for o in objects if type(o) in wanted]:
                self.register_tensor(candidate)

    def scan_arrays(self) -> None:
        """Register numpy arrays that a container holds (the collector does not track arrays themselves)."""
        with self._lock:
            containers = [o for o in gc.get_objects() if type(o) in (dict, list, tuple)]
            for start in range(0, len(containers), 4096):
                for referent in gc.get_referents(*containers[start : start + 4096]):
                    if type(referent) is not np.ndarray or not referent.nbytes or referent.dtype == object:
                        continue
                    # Arrays over foreign memory are left out: among them are the views of freed
                    # allocations, which are alive as objects and would displace what lies there now.
                    if _owner(referent).flags.owndata:
                        self.register_array(referent)
