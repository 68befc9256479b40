# SPDX-License-Identifier: Apache-2.0
"""A stated model of the tail's time on an MI355X, for machines that have none. Nothing here is measured.

The model takes the largest of three bounds and adds the start: one memory latency, since the first byte
of the weight arrives that long after it was asked for, and one more where a wave must load its arguments
before it can ask::

    stream  = bytes / bandwidth
    latency = (bytes of one compute unit / bytes it keeps in flight) * memory latency    (Little's law)
    issue   = vector instructions of one SIMD * cycles each / clock
    time    = start + max(stream, latency, issue)

What a compute unit keeps in flight: the workgroups that are resident there at once, times the weight
bytes that each keeps outstanding. The model knows nothing of caches, of the path to memory, of
launch overhead or of clocks under load; it ranks configurations by what they ask of the machine, and
that is all it may be used for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernellib.ops.latent_moe_tail.config import (
    MODEL_DIM,
    NUM_COMPUTE_UNITS,
    ROW_BYTES,
    SIMDS_PER_UNIT,
    WEIGHT_BYTES,
    TailConfig,
)
from kernellib.targets import TargetInfo


def can_time(target: TargetInfo) -> bool:
    """Whether this target has both a fused kernel and a GPU's clock; everything else is modelled."""
    return target.times == "measured" and target.name != "reference"


@dataclass(frozen=True)
class MachineModel:
    """The model's assumptions about the machine; change one and rerun.

    Attributes:
        bandwidth_bytes_per_s: of HBM. 8 TB/s is the data sheet's peak [AMD Instinct MI355X data sheet].
        latency_s: from a load's issue to its data, out of HBM. An assumption, of the order that published
            pointer-chasing tests show for this family.
        clock_hz: the peak engine clock [same data sheet].
        cycles_per_vector_instruction: 64 lanes pass a SIMD of 16 lanes in four cycles [AMD, "Introducing
            AMD CDNA Architecture"].
    """

    bandwidth_bytes_per_s: float = 8.0e12
    latency_s: float = 1.0e-6
    clock_hz: float = 2.4e9
    cycles_per_vector_instruction: float = 4.0


@dataclass(frozen=True)
class ModelledTime:
    """The model's bounds for one launch, in seconds, and which of them decides."""

    stream_s: float
    latency_bound_s: float
    issue_s: float
    start_s: float
    bytes_in_flight_per_unit: float

    @property
    def total_s(self) -> float:
        """The modelled time of the launch."""
        return self.start_s + max(self.stream_s, self.latency_bound_s, self.issue_s)

    @property
    def bound(self) -> str:
        """The bound that decides: "stream", "latency" or "issue"."""
        bounds = {"stream": self.stream_s, "latency": self.latency_bound_s, "issue": self.issue_s}
        return max(bounds, key=bounds.__getitem__)


def resident_workgroups(config: TailConfig, waves_per_simd: int) -> int:
    """Workgroups of ``config`` on one compute unit at once, when its kernel's registers let
    ``waves_per_simd`` waves share a SIMD; at least one, at most its even share of the grid."""
    fitting = waves_per_simd * SIMDS_PER_UNIT // config.waves_per_workgroup
    share = math.ceil(config.num_workgroups / NUM_COMPUTE_UNITS)
    return max(1, min(fitting, share))


def modelled_time(
    config: TailConfig, waves_per_simd: int, vector_instructions: int, machine: MachineModel | None = None
) -> ModelledTime:
    """The model's answer for one configuration.

    Args:
        config: of the kernel.
        waves_per_simd: occupancy from the compiled kernel's registers.
        vector_instructions: that all waves of the launch issue together, counted by the emulator.
        machine: assumptions; the defaults when None.

    Example:
        >>> config = TailConfig(rows_per_wave=4, waves_per_workgroup=7)
        >>> modelled_time(config, waves_per_simd=2, vector_instructions=0).bound
        'stream'
    """
    machine = machine or MachineModel()
    unit_bytes = math.ceil(config.num_workgroups / NUM_COMPUTE_UNITS) * config.rows_per_workgroup * ROW_BYTES
    in_flight = min(resident_workgroups(config, waves_per_simd) * config.weight_bytes_in_flight, unit_bytes)
    simds = min(NUM_COMPUTE_UNITS, config.num_workgroups) * SIMDS_PER_UNIT
    # Waves go to SIMDs one by one: seven waves leave two on three of the SIMDs and one on the fourth.
    waves_on_fullest = math.ceil(
        math.ceil(config.num_workgroups / NUM_COMPUTE_UNITS) * config.waves_per_workgroup / SIMDS_PER_UNIT
    )
    num_waves = MODEL_DIM // config.rows_per_wave
    per_simd = vector_instructions / num_waves * max(waves_on_fullest, num_waves / simds)
    return ModelledTime(
        stream_s=WEIGHT_BYTES / machine.bandwidth_bytes_per_s,
        latency_bound_s=unit_bytes / in_flight * machine.latency_s if in_flight < unit_bytes else 0.0,
        issue_s=per_simd * machine.cycles_per_vector_instruction / machine.clock_hz,
        start_s=machine.latency_s * (2 if config.arguments == "load" else 1),
        bytes_in_flight_per_unit=float(in_flight),
    )


@dataclass(frozen=True)
class KernelTraffic:
    """One kernel of a chain: its name, and the bytes it must read and write at the least."""

    name: str
    read_bytes: int
    written_bytes: int

    @property
    def total_bytes(self) -> int:
        """Read and written."""
        return self.read_bytes + self.written_bytes


VECTOR_BYTES = ROW_BYTES  # of routed, norm_weight and the normalised row: 3584 bf16 each
RESULT_BYTES = MODEL_DIM * 2  # of p, shared and y

UNFUSED_CHAIN = (
    KernelTraffic("rms_norm", 2 * VECTOR_BYTES, VECTOR_BYTES),
    KernelTraffic("linear", WEIGHT_BYTES + VECTOR_BYTES, RESULT_BYTES),
    KernelTraffic("add", 2 * RESULT_BYTES, RESULT_BYTES),
)
FUSED_CHAIN = (
    KernelTraffic("latent_moe_tail", WEIGHT_BYTES + 2 * VECTOR_BYTES + RESULT_BYTES, RESULT_BYTES),
)


def chain_bound_s(chain: tuple[KernelTraffic, ...], machine: MachineModel | None = None) -> float:
    """A lower bound on a chain of dependent kernels: each streams its bytes, and each starts with one
    memory latency that nothing hides, since it needs its predecessor's result. Launch gaps are left out."""
    machine = machine or MachineModel()
    return sum(kernel.total_bytes / machine.bandwidth_bytes_per_s + machine.latency_s for kernel in chain)
