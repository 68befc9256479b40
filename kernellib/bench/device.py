# SPDX-License-Identifier: Apache-2.0
"""The clock: graph capture, replay between device events, ceilings. Injectable: tests bring a fake one.

What one sample is, and why it is fair:

- A graph holds ``num_rounds`` passes over the slots, one call for each slot in order, on one stream. A
  sample is the time of a whole replay divided by the number of passes, so both arms pay for their launches
  and gaps the way a captured decode step does; host time is not part of it.
- Cache priorities are reset first (``residency``), so that no arm lives on lines that another one kept.
- The same graph is replayed, untimed, right before: clocks are up, instruction caches are warm, the
  caches are in the state that the arm itself leaves behind, and the host can queue the start event, the
  replay and the end event while the device is still busy, so the device does not wait for the host in
  between. What is left between the start event and the first kernel, a few microseconds at most, is
  charged to both arms alike and pulls every ratio towards 1; several passes in a replay divide it.
- Between the lead-in and the start event the outputs are poisoned with NaN.
- Times come from device events only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from .errors import BenchError
from .residency import priority_reset
from .state import device_state
from .workload import Launch

# cudaEventElapsedTime: "resolution of around 0.5 microseconds" [CUDA Runtime API, Event Management]; HIP's
# events tick at 100 MHz or finer, the same bound holds.
EVENT_RESOLUTION_S = 0.5e-6
MIN_CEILING_BYTES = 1 << 30
CEILING_MATMUL_DIM = 8192
# AMD's last-level cache is the Infinity Cache in front of HBM, which no property reports: 256 MiB on gfx942
# and gfx950 [AMD CDNA 3 white paper; AMD CDNA 4 white paper].
INFINITY_CACHE_BYTES = {"gfx942": 256 * 2**20, "gfx950": 256 * 2**20}


@dataclass
class Capture:
    """One arm's captured calls: where they write, slot by slot, and how to run them again."""

    outputs: Sequence[torch.Tensor]
    replay: Callable[[], None]
    keep: tuple[Any, ...] = field(default=(), repr=False)  # what the graph needs alive


@dataclass(frozen=True)
class Ceiling:
    """An upper bound measured in the same run: samples in bytes/s or FLOP/s."""

    name: str
    unit: str
    detail: str
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The value that arms are held against."""
        return float(np.median(self.samples))


class Device(Protocol):
    """What the method needs of a device with a clock. Times are seconds, one for each rank."""

    name: str
    kind: str  # "cuda", "hip" or "fake"
    num_ranks: int
    num_rounds: int  # passes over the slots in one timed replay
    llc_bytes: int
    resolution_s: float  # of a pass

    def describe(self) -> dict[str, Any]:
        """Facts for the record: driver, runtime, compute units, memory."""

    def state(self) -> dict[str, Any]:
        """Clocks, power, temperature, throttle reasons now; see ``state.device_state``."""

    def capture(self, launch: Launch, num_slots: int) -> Capture:
        """Captures ``num_rounds`` passes over the slots; ``outputs`` are the last pass's."""

    def sample(self, capture: Capture, poison: Callable[[], None]) -> tuple[float, ...]:
        """Neutral cache priorities, lead-in replay, poison, timed replay.

        Returns the time of one pass over the slots on each rank.
        """

    def ceilings(self) -> list[Ceiling]:
        """Copy bandwidth and matrix throughput, measured now."""

    def synchronize(self) -> None:
        """Waits for the device."""


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class GpuDevice:
    """A CUDA or ROCm GPU through torch. One rank; a multi-rank device gathers all ranks' times."""

    num_ranks = 1

    def __init__(self, index: int = 0, num_lead_in: int = 2, num_rounds: int = 4) -> None:
        """Takes GPU ``index`` of this process.

        Args:
            index: torch's device index.
            num_lead_in: untimed replays before each timed one.
            num_rounds: passes over the slots in one replay.

        Raises:
            BenchError: torch sees no GPU, or the GPU is not torch's current one, or the driver cannot reset
                cache priorities: nothing can be timed.
        """
        if not torch.cuda.is_available():
            raise BenchError("torch sees no GPU, so there is no clock to time with; use a counted comparison")
        current = torch.cuda.current_device()
        if current != index:  # events, captures and the cache's reset go to the current device
            raise BenchError(
                f"index got {index}, wanted the current device, {current}; "
                f"call torch.cuda.set_device({index}) before"
            )
        self._index = index
        self._num_lead_in = num_lead_in
        self.num_rounds = num_rounds
        self.resolution_s = EVENT_RESOLUTION_S / num_rounds
        self._properties = torch.cuda.get_device_properties(index)
        self.name = str(self._properties.name)
        self.kind = "hip" if torch.version.hip is not None else "cuda"
        arch = str(getattr(self._properties, "gcnArchName", "")).partition(":")[0]
        self._arch = arch if self.kind == "hip" else f"sm_{self._properties.major}{self._properties.minor}"
        self._reset_name, self._reset_priorities = priority_reset(self.kind)
        l2_bytes = int(getattr(self._properties, "L2_cache_size", 0))
        self.llc_bytes = max(l2_bytes, INFINITY_CACHE_BYTES.get(self._arch, 0))

    def describe(self) -> dict[str, Any]:
        """See ``Device``."""
        return {
            "arch": self._arch,
            "num_compute_units": int(self._properties.multi_processor_count),
            "memory_bytes": int(self._properties.total_memory),
            "runtime": torch.version.hip if self.kind == "hip" else torch.version.cuda,
            "cache_priority_reset": self._reset_name,
        }

    def state(self) -> dict[str, Any]:
        """See ``Device``."""
        uuid = getattr(self._properties, "uuid", None)
        return device_state(self.kind, self._index, None if uuid is None else str(uuid))

    def capture(self, launch: Launch, num_slots: int) -> Capture:
        """See ``Device``. Each slot is called twice on a side stream first, for what is set up lazily."""
        stream = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._index))
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(2):
                for slot_idx in range(num_slots):
                    launch(slot_idx)
        torch.cuda.current_stream(self._index).wait_stream(stream)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            for _ in range(self.num_rounds):
                # Held references keep the graph's memory pool from giving one slot's output to the next.
                outputs = [launch(slot_idx) for slot_idx in range(num_slots)]
        return Capture(outputs, graph.replay, (graph, launch))

    def sample(self, capture: Capture, poison: Callable[[], None]) -> tuple[float, ...]:
        """See ``Device`` and this module's docstring."""
        start, end = _event(), _event()
        self.synchronize()  # copies of a new version may still be on their way
        self._reset_priorities()
        for _ in range(self._num_lead_in):
            capture.replay()
        poison()
        start.record()
        capture.replay()
        end.record()
        end.synchronize()
        return (start.elapsed_time(end) * 1e-3 / self.num_rounds,)

    def _rates(self, work: Callable[[], object], amount: float, num_samples: int = 10) -> tuple[float, ...]:
        """``amount`` per second of ``work``, which is queued twice untimed and four times timed."""
        rates = []
        for _ in range(num_samples):
            start, end = _event(), _event()
            for _ in range(2):
                work()
            start.record()
            for _ in range(4):
                work()
            end.record()
            end.synchronize()
            rates.append(4 * amount / (start.elapsed_time(end) * 1e-3))
        return tuple(rates)

    def ceilings(self) -> list[Ceiling]:
        """See ``Device``. Random values: zeros would draw less power, and so run faster."""
        where = torch.device("cuda", self._index)
        num_bytes = max(MIN_CEILING_BYTES, 4 * self.llc_bytes)
        source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=where).normal_()
        copied = self._rates(partial(torch.empty_like(source).copy_, source), 2.0 * num_bytes)
        n = CEILING_MATMUL_DIM
        a, b = (torch.empty(n, n, dtype=torch.bfloat16, device=where).normal_() for _ in range(2))
        product = torch.empty_like(a)
        flops = self._rates(lambda: torch.mm(a, b, out=product), 2.0 * n**3)
        return [
            Ceiling("copy", "byte/s", f"copy of {num_bytes:,} bytes, read and written bytes counted", copied),
            Ceiling("matmul", "FLOP/s", f"bf16 matrix product, {n} x {n} x {n}", flops),
        ]

    def synchronize(self) -> None:
        """See ``Device``."""
        torch.cuda.synchronize(self._index)
