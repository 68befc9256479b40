# SPDX-License-Identifier: Apache-2.0
"""What one launch of the gfx950 kernel does, counted by the emulator from the instructions it executed.

Counted, not inferred: which bytes of the weight each load asks for and how often, how wide the
requests are, how many instructions issue, what the compiler allotted. The claims made here:

- one launch computes the operator;
- each of the weight's 51,380,224 bytes is requested exactly once;
- every byte of it is requested by loads of 16 bytes a lane;
- no scratch memory: nothing spilled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernellib.ops.latent_moe_tail.api import latent_moe_tail
from kernellib.ops.latent_moe_tail.config import (
    LOAD_BYTES,
    RESULT_BYTES,
    ROW_BYTES,
    WEIGHT_BYTES,
    TailConfig,
)
from kernellib.ops.latent_moe_tail.reference import make_inputs

from ..artifact import Claim
from ..display import HtmlTable, Note
from .correctness import poisoned_output

if TYPE_CHECKING:
    from kernellib.emulator.report import LaunchReport

# Inputs, by name, in the order of the operator's arguments.
TENSORS = ("routed", "norm_weight", "up_weight", "shared", "out")


@dataclass(frozen=True)
class TensorTraffic:
    """Bytes of one tensor that all lanes of a launch asked for, and how often the least and the most
    wanted byte was loaded (for the output: stored)."""

    name: str
    loaded_bytes: int
    stored_bytes: int
    requests_per_byte: tuple[int, int]


@dataclass(frozen=True)
class LaunchCounts:
    """Counters of one launch.

    Attributes:
        num_launches: kernels started by one call of the operator.
        kernel_name, num_workgroups, num_waves: what was launched.
        traffic: by tensor.
        loads_by_width: bytes requested from global memory, by bytes a lane and instruction.
        vgprs, agprs, sgprs, lds_bytes, scratch_bytes: what the compiler allotted.
        waves_per_simd: occupancy that the registers allow.
        instructions: wave-level issues by class: "vector", "scalar", "memory", "other".
    """

    num_launches: int
    kernel_name: str
    num_workgroups: int
    num_waves: int
    traffic: tuple[TensorTraffic, ...]
    loads_by_width: Mapping[int, int]
    vgprs: int
    agprs: int
    sgprs: int
    lds_bytes: int
    scratch_bytes: int
    waves_per_simd: int
    instructions: Mapping[str, int]

    @property
    def num_instructions(self) -> int:
        """All wave-level issues."""
        return sum(self.instructions.values())

    def of(self, name: str) -> TensorTraffic:
        """The traffic of one tensor."""
        return next(entry for entry in self.traffic if entry.name == name)


def instruction_class(mnemonic: str) -> str:
    """Which of a SIMD's issue ports an instruction takes, from its mnemonic's prefix.

    Example:
        >>> [instruction_class(m) for m in ("v_pk_fma_f32", "buffer_load_dwordx4", "s_waitcnt")]
        ['vector', 'memory', 'scalar']
    """
    if mnemonic.startswith(("buffer_", "global_", "flat_", "scratch_", "ds_", "s_load", "s_buffer_load")):
        return "memory"
    return {"v_": "vector", "s_": "scalar"}.get(mnemonic[:2], "other")


def instructions_by_class(counts: Mapping[str, int]) -> dict[str, int]:
    """Sums wave-level issues over the classes of ``instruction_class``."""
    totals = dict.fromkeys(("vector", "scalar", "memory", "other"), 0)
    for mnemonic, count in counts.items():
        totals[instruction_class(mnemonic)] += count
    return totals


def load_widths(report: LaunchReport) -> dict[int, int]:
    """Bytes requested by vector loads from global memory, by bytes a lane: {16: ..., 2: ...}."""
    widths: dict[int, int] = {}
    for (mnemonic, bytes_per_lane), count in report.requests.items():  # count: of lanes
        if "load" in mnemonic and instruction_class(mnemonic) == "memory" and not mnemonic.startswith("s_"):
            widths[bytes_per_lane] = widths.get(bytes_per_lane, 0) + count * bytes_per_lane
    return widths


def summarise(reports: Sequence[LaunchReport], traffic: Sequence[TensorTraffic]) -> LaunchCounts:
    """The counters of the last of ``reports``, which one call of the operator caused."""
    report = reports[-1]
    resources = report.resources
    grid = report.grid
    return LaunchCounts(
        num_launches=len(reports),
        kernel_name=report.kernel_name,
        num_workgroups=grid[0] * grid[1] * grid[2],
        num_waves=report.num_waves,
        traffic=tuple(traffic),
        loads_by_width=load_widths(report),
        vgprs=resources.vgprs,
        agprs=resources.agprs,
        sgprs=resources.sgprs,
        lds_bytes=report.lds_bytes,
        scratch_bytes=resources.scratch_bytes,
        waves_per_simd=resources.occupancy_waves_per_simd,
        instructions=instructions_by_class(report.instruction_counts),
    )


def count_launch(seed: int = 0, config: TailConfig | None = None) -> LaunchCounts:
    """Runs the operator once on the emulator with every tensor tracked.

    Args:
        seed: of the inputs; the counters do not depend on values.
        config: of the kernel; None for the tuned one.
    """
    from kernellib.emulator import emulated  # noqa: PLC0415  (only where something is to be counted)

    inputs = make_inputs(seed)
    _, out = poisoned_output("cpu")
    tensors = dict(zip(TENSORS, (*inputs, out), strict=True))
    with emulated(track=list(tensors.values())) as session:
        latent_moe_tail(*inputs, out=out, target="emulator", config=config)
        report = session.launches[-1]
        traffic = []
        for name, tensor in tensors.items():
            seen = report.bytes_of(tensor)
            verb = "store" if name == "out" else "load"
            often = (seen[f"{verb}_min"], seen[f"{verb}_max"])
            traffic.append(TensorTraffic(name, seen["load"], seen["store"], often))
        return summarise(session.launches, traffic)


def traffic_claims(counts: LaunchCounts | None) -> list[Claim]:
    """The claims in this module's docstring; none where nothing could be counted."""
    if counts is None:
        return []
    weight = counts.of("up_weight")
    # The norm's two vectors are read by every wave with the same wide loads; what is left is the weight's.
    norm_bytes = counts.of("routed").loaded_bytes + counts.of("norm_weight").loaded_bytes
    wide_weight_bytes = counts.loads_by_width.get(LOAD_BYTES, 0) - norm_bytes
    return [
        Claim.check(
            "one launch", counts.num_launches == 1, f"{counts.num_launches} launch, wanted 1", "counted"
        ),
        Claim.check(
            "every weight byte is requested exactly once",
            weight.loaded_bytes == WEIGHT_BYTES and weight.requests_per_byte == (1, 1),
            f"{weight.loaded_bytes:,} bytes requested of {WEIGHT_BYTES:,}, each between "
            f"{weight.requests_per_byte[0]} and {weight.requests_per_byte[1]} times",
            "counted",
        ),
        Claim.check(
            "the weight is read by 16-byte loads only",
            wide_weight_bytes == WEIGHT_BYTES,
            f"{wide_weight_bytes:,} of {WEIGHT_BYTES:,} weight bytes in loads of {LOAD_BYTES} bytes a lane",
            "counted",
        ),
        Claim.check(
            "nothing spills",
            counts.scratch_bytes == 0,
            f"{counts.scratch_bytes} bytes of scratch a lane, wanted 0",
            "counted",
        ),
    ]


def traffic_table(counts: LaunchCounts) -> HtmlTable:
    """Bytes requested by tensor, with the least that the operator needs beside them."""
    least = {
        "routed": ROW_BYTES,
        "norm_weight": ROW_BYTES,
        "up_weight": WEIGHT_BYTES,
        "shared": RESULT_BYTES,
        "out": RESULT_BYTES,
    }
    rows = [
        [
            entry.name,
            least[entry.name],
            entry.loaded_bytes,
            entry.stored_bytes,
            "{} to {}".format(*entry.requests_per_byte),
        ]
        for entry in counts.traffic
    ]
    return HtmlTable(
        ["tensor", "size (bytes)", "loaded (bytes)", "stored (bytes)", "requests for each byte"],
        rows,
        f"Bytes that {counts.num_waves:,} waves in {counts.num_workgroups} workgroups asked for",
        "counted",
    )


def resource_table(counts: LaunchCounts) -> HtmlTable:
    """What the compiler allotted, and what the waves issued."""
    rows = [
        ["vector registers a lane", counts.vgprs],
        ["accumulation registers a lane", counts.agprs],
        ["scalar registers a wave", counts.sgprs],
        ["LDS a workgroup (bytes)", counts.lds_bytes],
        ["scratch a lane (bytes)", counts.scratch_bytes],
        ["waves on a SIMD that the registers allow", counts.waves_per_simd],
        *[
            [f"{name} instructions a wave", count / counts.num_waves]
            for name, count in counts.instructions.items()
        ],
        ["weight bytes for each instruction", WEIGHT_BYTES / counts.num_instructions],
    ]
    return HtmlTable(["quantity", "value"], rows, counts.kernel_name, "counted")


def counter_tables(counts: LaunchCounts | None) -> list[Any]:
    """What to display: both tables, or a note where nothing could be counted."""
    if counts is None:
        return [Note("Nothing is counted on this target; run with target = 'emulator' to see the counters.")]
    return [traffic_table(counts), resource_table(counts)]
