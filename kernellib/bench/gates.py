# SPDX-License-Identifier: Apache-2.0
"""Correctness gates: before timing, on every timed sample, and after timing.

Outputs are poisoned with NaN before each of these, so that a result left over from another call, from
another arm or from nothing at all cannot pass.

========================  =====================================================================
cheat                     what catches it
========================  =====================================================================
constant output           the gate before timing: slots have different inputs
cached output             the second version before timing, and each trial's new version
skipped work              NaN poison in the outputs of the timed replay itself
right only when watched   the outputs that are checked are those of the timed replay's last pass
weights kept from before  the fresh version after timing, which changes every input
inputs overwritten        fingerprints of all inputs around the gates
buffers shared            addresses: each slot of each capture has an output of its own
========================  =====================================================================

What these do not catch: work that is left out of a timed replay although its last pass gives right outputs. A
replay is led in with the same inputs, versions take turns, and earlier passes have the same inputs, too; an
arm that remembers results by the inputs' values, or that works in the lead-in or in one pass only, is right
each time. What it writes does not tell it from a fast arm; being too fast does: a call that would have read
its bytes at more than ``assemble.MAX_SHARE`` times the copy bandwidth, or multiplied at as many times the
matrix product's rate, makes the record invalid. Below that, and for an arm that reaches into the workload for
the versions to come, only reading its code helps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernellib.numerics.bf16 import bf16_ulp
from kernellib.numerics.errors import compare

from .workload import F64, Expected, Tolerance, Workload


@dataclass(frozen=True)
class GateResult:
    """Worst metrics of one arm over all slots, and why it failed (None when it passed).

    ``num_alternatives``: outputs further off than one unit that equal one of the oracle's alternatives, in
    all slots of one version.
    """

    reason: str | None
    num_slots: int
    max_ulp_error: float
    num_alternatives: int
    min_bit_equal_fraction: float
    max_relative_rmse: float

    @property
    def passed(self) -> bool:
        """Whether every slot kept to the tolerance."""
        return self.reason is None

    def to_json(self) -> dict[str, Any]:
        """For a record; metrics that are not finite become null."""

        def finite(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return {
            "source": "checked",
            "passed": self.passed,
            "num_slots": self.num_slots,
            "max_ulp_error": finite(self.max_ulp_error),
            "num_alternatives": self.num_alternatives,
            "min_bit_equal_fraction": finite(self.min_bit_equal_fraction),
            "max_relative_rmse": finite(self.max_relative_rmse),
        }


def worst(first: GateResult | None, second: GateResult) -> GateResult:
    """The worse of each metric, and the first reason, of two checks of one arm."""
    if first is None:
        return second
    return GateResult(
        first.reason or second.reason,
        second.num_slots,
        max(first.max_ulp_error, second.max_ulp_error),
        max(first.num_alternatives, second.num_alternatives),
        min(first.min_bit_equal_fraction, second.min_bit_equal_fraction),
        max(first.max_relative_rmse, second.max_relative_rmse),
    )


def poison(outputs: Sequence[torch.Tensor]) -> None:
    """Fills outputs with NaN."""
    for output in outputs:
        output.fill_(math.nan)


def shared_memory(outputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether an output shares a byte with another one, or with one of ``others``."""
    spans = []
    for tensor in (*outputs, *others):
        start = tensor.data_ptr()
        spans.append((start, start + tensor.numel() * tensor.element_size()))
    return any(
        start < other_end and other_start < end
        for index, (start, end) in enumerate(spans[: len(outputs)])
        for other_start, other_end in spans[index + 1 :]
    )


def _magnitudes(expected: Expected, tolerance: Tolerance) -> tuple[F64, ...]:
    if not tolerance.floor_at_rms:
        return expected.magnitudes
    rms = float(np.sqrt(np.mean(np.square(expected.value))))
    return (*expected.magnitudes, np.full_like(expected.value, rms))


class Checker:
    """Knows the oracle's answer for every version and slot, and holds outputs against it."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._expected: dict[int, list[Expected]] = {}
        self._on_device: dict[tuple[int, Tolerance], tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]]
        self._on_device = {}

    def learn(self, version: int) -> None:
        """Sets the version and computes its answers (slow: float64 on the CPU)."""
        self._workload.set_version(version)
        self._expected[version] = [self._workload.oracle(i) for i in range(len(self._workload.slots))]

    def full(self, outputs: Sequence[torch.Tensor], version: int, tolerance: Tolerance) -> GateResult:
        """Every metric of every slot, with the first reason for failure."""
        reason, ulp, judged, num_alternatives, equal, rmse = None, 0.0, 0.0, 0, 1.0, 0.0
        for slot_idx, (output, expected) in enumerate(zip(outputs, self._expected[version], strict=True)):
            flat = output.detach().reshape(-1)
            if flat.numel() != expected.value.size:
                why = f"slot {slot_idx}: {flat.numel()} elements, wanted {expected.value.size}"
                return GateResult(why, len(outputs), math.inf, 0, 0.0, math.inf)
            report = compare(
                flat,
                expected.value,
                magnitudes=_magnitudes(expected, tolerance),
                alternatives=expected.alternatives,
            )
            ulp = max(ulp, report.max_ulp_error)
            judged = max(judged, report.judged_ulp_error)
            num_alternatives += report.num_alternatives
            equal = min(equal, report.bit_equal_fraction)
            rmse = max(rmse, report.relative_rmse)
            if reason is None:
                reason = _first_failure(slot_idx, flat, tolerance, (judged, equal, rmse))
        return GateResult(reason, len(outputs), ulp, num_alternatives, equal, rmse)

    def num_wrong(self, outputs: Sequence[torch.Tensor], version: int, tolerance: Tolerance) -> int:
        """Elements that are wrong over all slots, computed where the outputs are: for every sample.

        Wrong is further from the oracle than ``max_ulp`` and not one of its alternatives.
        """
        expected, allowed, alternatives = self._tensors(version, tolerance, outputs[0].device)
        actual = torch.stack([output.reshape(-1) for output in outputs]).float()
        within = (actual - expected).abs() <= allowed  # False for NaN
        for other in alternatives:
            within |= (actual == other) & actual.isfinite()
        return int(within.numel() - within.sum())

    def _tensors(
        self, version: int, tolerance: Tolerance, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        key = (version, tolerance)
        if key not in self._on_device:
            values, allowed = [], []
            for expected in self._expected[version]:
                largest = np.abs(expected.value)
                for other in _magnitudes(expected, tolerance):
                    largest = np.fmax(largest, np.abs(other))
                values.append(expected.value)
                allowed.append(tolerance.max_ulp * bf16_ulp(largest) * (1 + 2.0**-20))
            others = zip(*(expected.alternatives for expected in self._expected[version]), strict=True)
            tensors = [
                torch.from_numpy(np.stack(each)).to(device, torch.float32)
                for each in (values, allowed, *others)
            ]
            self._on_device[key] = (tensors[0], tensors[1], tensors[2:])
        return self._on_device[key]


def _first_failure(
    slot_idx: int, flat: torch.Tensor, tolerance: Tolerance, worst: tuple[float, float, float]
) -> str | None:
    ulp, equal, rmse = worst
    unwritten = int(torch.isnan(flat).sum())
    if unwritten:
        return (
            f"slot {slot_idx}: {unwritten} of {flat.numel()} outputs are NaN (poison not overwritten, or NaN)"
        )
    if not ulp <= tolerance.max_ulp:
        return f"slot {slot_idx}: error of {ulp:.3g} ulp, wanted at most {tolerance.max_ulp:g}"
    if not equal >= tolerance.min_bit_equal:
        return f"slot {slot_idx}: {equal:.3%} of outputs bit-equal, wanted {tolerance.min_bit_equal:.3%}"
    if not rmse <= tolerance.max_relative_rmse:
        return f"slot {slot_idx}: relative RMSE {rmse:.2e}, wanted at most {tolerance.max_relative_rmse:g}"
    return None
