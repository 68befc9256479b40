# SPDX-License-Identifier: Apache-2.0
"""The public entry: `with emulated() as session:` runs FlyDSL launchers on the emulator."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

from kernellib.emulator.errors import Finding, LaunchArgumentError, SessionError
from kernellib.emulator.flydsl_backend import HOST, assembly_backend
from kernellib.emulator.kernarg import Dim3, build_kernarg, check_arguments, explicit_arguments
from kernellib.emulator.launch import Device, Launch, Tuning, as_dim3, compiled_listing, register_argument
from kernellib.emulator.memory import Allocation, MemoryMap
from kernellib.emulator.report import ByteTracker, LaunchReport, address_range
from kernellib.emulator.resources import get_kernel
from kernellib.emulator.sanitizers.monitor import Monitor, Poison
from kernellib.emulator.sanitizers.names import parse_sanitizers
from kernellib.emulator.world import World, make_world

Mode = Literal["simple", "relaxed"]
Counters = Literal["default", "all"]

# Shared by all sessions: what has been allocated does not depend on who asks.
_memory = MemoryMap()


class Session:
    """One activation of the emulator.

    Attributes:
        launches: a LaunchReport per kernel launch, in order.
        memory: the allocations kernels may touch; `register(tensor_or_array)` adds one explicitly.
    """

    def __init__(
        self,
        sanitize: str | Collection[str],
        mode: Mode,
        tuning: Tuning,
        track: Sequence[Any],
        schedule_seed: int = 0,
    ) -> None:
        self.sanitize = sanitize
        self.mode = mode
        self.schedule_seed = schedule_seed
        self.tuning = tuning
        self.poisoned = Poison()
        self.device = self.make_device(1)
        self.track = _ranges(track)
        self.memory = _memory
        self.launches: list[LaunchReport] = []
        self.world: World | None = None
        self._lock = threading.Lock()
        self._alone = threading.Lock()
        for target in track:
            register_argument(self.memory, target)

    def register(self, buffer: Any) -> Allocation | None:
        """Make a tensor's or array's memory addressable (tensors are otherwise found when they are used)."""
        if hasattr(buffer, "untyped_storage"):
            return self.memory.register_tensor(buffer)
        return self.memory.register_array(buffer)

    def create_world(self, num_ranks: int) -> World:
        """Emulated ranks whose launches run at the same time (see world.py)."""
        return make_world(self, num_ranks)

    def register_range(self, address: int, size: int, name: str) -> Allocation:
        """Make raw memory addressable; `session.memory.unregister` ends it."""
        return self.memory.register_range(address, size, name)

    def poison(self, buffer: Any) -> None:
        """Declare a tensor's or array's bytes uninitialised: loads of bytes that no kernel has written since
        are findings of the sanitizer "poisoned_memory".  What host code writes is not seen: see `unpoison`.
        """
        self._mark(buffer, True)

    def unpoison(self, buffer: Any) -> None:
        """Declare a tensor's or array's bytes initialised."""
        self._mark(buffer, False)

    def _mark(self, buffer: Any, poisoned: bool) -> None:
        base, size = address_range(buffer)
        if size:
            self.register(buffer)
            allocation = self.memory.find(base, base + size)
            if allocation is None:
                raise SessionError(f"poison: [{base:#x}, +{size}) lies in no memory that kernels may touch")
            self.poisoned.mark(allocation, base - allocation.base, size, poisoned)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """A CPU tensor as torch.empty makes it, poisoned."""
        import torch  # noqa: PLC0415

        tensor = torch.empty(tuple(shape), dtype=dtype)
        self.poison(tensor)
        return tensor

    def make_device(self, num_ranks: int) -> Device | None:
        """What launches of `num_ranks` ranks run on; None for plain launches in simple mode."""
        if not self.tuning.instrumented:
            return None
        from kernellib.emulator.relaxed.chip import Chip  # noqa: PLC0415
        from kernellib.emulator.sanitizers.direct import DirectChip  # noqa: PLC0415

        chip = Chip(self.schedule_seed, num_ranks) if self.tuning.relaxed else DirectChip()
        watched = self.tuning.sanitizers & {"global_races", "poisoned_memory"}
        monitor = Monitor(self.tuning.sanitizers, self.poisoned) if watched else None
        return Device(chip, monitor, 0, num_ranks)

    def launch_from_host(
        self,
        assembly: str,
        kernel: str,
        grid: Dim3,
        block: Dim3,
        dynamic_lds_bytes: int,
        stream: int,
        pointers: Any,
        num_pointers: int,
    ) -> None:
        """Run one kernel on behalf of FlyDSL's host code."""
        listing = compiled_listing(assembly, self.tuning)
        found = get_kernel(listing.program, kernel)
        layout = explicit_arguments(found)
        if len(layout) != num_pointers:
            raise LaunchArgumentError(
                f"kernel {kernel}: the host passes {num_pointers} arguments, its metadata has {len(layout)}"
            )
        args = [ctypes.string_at(pointers[i], int(entry[".size"])) for i, entry in enumerate(layout)]
        self._run(listing, found, grid, block, args, dynamic_lds_bytes, stream)

    def run_assembly(
        self,
        text: str,
        kernel: str | None,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        *,
        dynamic_lds_bytes: int = 0,
        stream: int = 0,
    ) -> LaunchReport:
        """Run a kernel of a listing within this session (see `launch.run_assembly`)."""
        listing = compiled_listing(text, self.tuning)
        found = get_kernel(listing.program, kernel)
        check_arguments(args)
        for value in args:
            register_argument(self.memory, value)
        return self._run(
            listing, found, as_dim3(grid, "grid"), as_dim3(block, "block"), args, dynamic_lds_bytes, stream
        )

    def _run(
        self, listing: Any, kernel: Any, grid: Dim3, block: Dim3, args: Sequence[Any], lds: int, stream: int
    ) -> LaunchReport:
        kernarg = build_kernarg(kernel, args, grid, block, lds)
        trackers = [ByteTracker(base, size) for base, size in self.track]
        world = self.world
        device = self.device if world is None else world.current_device()
        launch = Launch(
            listing, kernel, grid, block, kernarg, self.memory, lds, self.tuning, trackers, device
        )
        try:
            if world is not None:
                report = launch.run(stream, world.execute)
            else:  # one chip, one order of events: what is watched runs alone
                with self._alone if device is not None else contextlib.nullcontext():
                    report = launch.run(stream)
                    if device is not None and device.monitor is not None:
                        device.monitor.host_barrier([0])
        except Finding as finding:
            if self.tuning.relaxed:
                finding.name_seed(self.schedule_seed)
            raise
        with self._lock:
            self.launches.append(report)
        return report


def _ranges(track: Any) -> list[tuple[int, int]]:
    try:
        return [address_range(t) for t in track]
    except TypeError as error:
        raise SessionError(
            f"track: wants a sequence of tensors, arrays or (address, bytes) pairs: {error}"
        ) from error


_active: Session | None = None
_active_lock = threading.Lock()


def active_session() -> Session | None:
    """The session that launches go to, or None."""
    return _active


@contextlib.contextmanager
def emulated(
    *,
    sanitize: str | Collection[str] = "default",
    mode: Mode = "simple",
    schedule_seed: int = 0,
    track: Sequence[Any] = (),
    counters: Counters = "default",
    transcendental_ulp_bias: int = 0,
    instruction_limit: int = 10_000_000,
    waves_per_group: int = 0,
    quantum: int = 20_000,
) -> Iterator[Session]:
    """Run every FlyDSL launcher called inside on the gfx950 emulator.

    Args:
        sanitize: "default": bounds, use after free, alignment of atomics and LDS, missing waits and nops;
            "none" leaves the missing nops out (the others cannot be turned off); "all": also uninitialised
            registers, LDS and poisoned memory, races in LDS and global memory, divergent barriers, which
            makes memory instructions several times slower; or names of sanitizers.names.SANITIZERS.
        mode: "simple": every store is visible at once. "relaxed": what the memory model of the ISA allows and
            no more: loads and stores go through caches that are stale until an acquire, stores become visible
            late and out of order until a release, waves run in any order (docs/emulator_memory_model.md).
        schedule_seed: drives every choice of relaxed mode: placement of workgroups, which waves go next, when
            stores become visible, which copies are kept.  The same seed gives the same run; every finding
            names it.
        track: tensors (or (address, bytes)) whose bytes are counted one by one, see `LaunchReport.bytes_of`.
        counters: "default": what costs nothing; "all" also counts lines touched and LDS bank conflicts, which
            makes memory instructions a few times slower (see `LaunchReport.memory`).
        transcendental_ulp_bias: -1, 0 or +1; added to the last place of v_rcp, v_rsq, v_sqrt, v_exp, v_log,
            v_sin and v_cos results, whose exact bits AMD does not publish (1 ulp is documented): results that
            a kernel's tolerance should not depend on.
        instruction_limit: issues by one wave after which the launch is stopped with InstructionLimitError.
        waves_per_group, quantum: see `launch.Tuning`.
    Yields:
        Session; `session.launches[-1]` is the report of the last kernel.
    Raises:
        SessionError when a session is active already (the environment and FlyDSL's registry are
        process-wide).

    >>> with emulated() as session:                     # doctest: +SKIP
    ...     launcher(x, y, n)
    ...     print(session.launches[-1].instruction_counts)
    """
    global _active  # noqa: PLW0603
    sanitizers = parse_sanitizers(sanitize)
    if mode not in ("simple", "relaxed"):
        raise SessionError(f"mode={mode!r}: wants 'simple' or 'relaxed'")
    if not isinstance(schedule_seed, int) or schedule_seed < 0:
        raise SessionError(f"schedule_seed={schedule_seed!r}: wants an integer that is not negative")
    if counters not in ("default", "all"):
        raise SessionError(f"counters={counters!r}: wants 'default' or 'all'")
    if transcendental_ulp_bias not in (-1, 0, 1):
        raise SessionError(f"transcendental_ulp_bias={transcendental_ulp_bias}: wants -1, 0 or 1")
    for name, value, least in (
        ("waves_per_group", waves_per_group, 0), ("quantum", quantum, 1),
        ("instruction_limit", instruction_limit, 1),
    ):  # fmt: skip
        if not isinstance(value, int) or value < least:
            raise SessionError(f"{name}={value!r}: wants an integer of at least {least}")
    tuning = Tuning(
        waves_per_group,
        quantum,
        instruction_limit,
        transcendental_ulp_bias,
        check_hazards="missing_nops" in sanitizers,
        relaxed=mode == "relaxed",
        counters=counters == "all",
        sanitizers=sanitizers,
    )
    session = Session(sanitize, mode, tuning, track, schedule_seed)
    with _active_lock:
        if _active is not None:
            raise SessionError("emulated() is active already: sessions do not nest, use the active one")
        _active = session
    try:
        with assembly_backend():
            HOST.target = session
            yield session
    finally:
        HOST.target = None
        with _active_lock:
            _active = None


__all__ = ["Session", "active_session", "emulated"]
