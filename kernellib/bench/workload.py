# SPDX-License-Identifier: Apache-2.0
"""What is measured: a workload (inputs in rotating slots, and their oracle) and the arms that compute it.

Vocabulary:

slot      one complete set of inputs at its own addresses. A sample calls the arm once for each slot, in
          order; together the slots are larger than the last-level cache, so each call reads memory.
version   one set of values. Between trials the next version is copied into the same addresses, which the
          captured graphs read: an arm that keeps an old result is wrong in the next trial.
arm       one way to compute the operator, such as the eager chain or the fused kernel.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from .errors import RotationError, TimedInputsError

F64 = npt.NDArray[np.float64]
Launch = Callable[[int], torch.Tensor]  # slot index -> the output tensor, valid until the slot's next call
Role = Literal["baseline", "peer", "candidate"]

MAX_EQUAL_SHARE = 0.5  # of a timed input's elements; zeros switch no bits, and draw less power


@dataclass(frozen=True)
class Expected:
    """The oracle's answer for one slot.

    Attributes:
        value: float64, flat, exactly representable in the output's dtype.
        magnitudes: further values whose last place may show in the result (see ``numerics.compare``).
        alternatives: further right answers, element by element (see ``numerics.neighbour_sums``).
    """

    value: F64
    magnitudes: tuple[F64, ...] = ()
    alternatives: tuple[F64, ...] = ()


@dataclass(frozen=True)
class Tolerance:
    """What an arm must keep to, against the oracle, on every slot.

    Attributes:
        max_ulp: largest error of an element, in bf16 units in the last place at the largest of the
            oracle's magnitudes. An element that equals one of the oracle's alternatives is right anyway.
        floor_at_rms: take the unit at the result's root mean square at least. For an arm that rounds
            elsewhere than the oracle: there an element near zero inherits the error of its large terms.
        min_bit_equal: least share of elements equal bit by bit.
        max_relative_rmse: largest root mean square error relative to the reference's.
    """

    max_ulp: float
    floor_at_rms: bool
    min_bit_equal: float
    max_relative_rmse: float


# An arm with the oracle's own rounding points, and one that may keep fp32 where the oracle rounds.
EXACT_ROUNDING = Tolerance(1.0, False, 0.995, 5e-4)
FREE_ROUNDING = Tolerance(4.0, True, 0.0, 1e-2)


@dataclass(frozen=True)
class Arm:
    """One way to compute the operator.

    Attributes:
        name: unique in a comparison.
        role: "baseline" (one), "candidate" (what is being judged) or "peer".
        description: one line for tables.
        prepare: makes the launch function for a workload; compiles whatever is to be compiled. It
            may raise: the arm is then recorded as failed.
        tolerance: of its gate.
        config: its configuration, JSON values, or None.
    """

    name: str
    role: Role
    description: str
    prepare: Callable[[Any], Launch]
    tolerance: Tolerance
    config: Mapping[str, Any] | None = None


class Workload(ABC):
    """Inputs of one operator in rotating slots.

    Subclasses keep ``slots`` (for each slot: argument name -> tensor, never reallocated) and fill it in
    ``set_version``. Versions 0 .. num_versions - 1 are for trials; version ``num_versions`` is fresh: used
    only after timing, and it must change every input, the constant ones (weights) too.
    """

    operator: str
    slots: Sequence[Mapping[str, torch.Tensor]]
    num_versions: int
    bytes_per_call: int  # least bytes a call must move, from the shapes
    flops_per_call: int
    rotating: tuple[str, ...]  # arguments whose bytes count for the rotation

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Copies the version's values into the slots' tensors, in place."""

    @abstractmethod
    def oracle(self, slot_idx: int) -> Expected:
        """The right answer for what the slot holds now."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of the rotating arguments of one slot."""
        return sum(self.slots[0][name].numel() * self.slots[0][name].element_size() for name in self.rotating)


def min_rotation(slot_bytes: int, llc_bytes: int) -> int:
    """Fewest slots with which no slot can still be in the last-level cache when its turn comes again.

    Between two uses of a slot the other R - 1 are read; (R - 1) * slot_bytes >= llc_bytes.

    Example:
        >>> min_rotation(51_380_224, 256 * 2**20)  # the tail's weight, 256 MiB
        7
    """
    return math.ceil(llc_bytes / slot_bytes) + 1


def check_rotation(workload: Workload, llc_bytes: int) -> float:
    """How many times over the other slots fill the last-level cache.

    Raises:
        RotationError: less than once.
    """
    num_slots, wanted = len(workload.slots), min_rotation(workload.slot_bytes, llc_bytes)
    if num_slots < wanted:
        raise RotationError(
            f"rotation got {num_slots} slots of {workload.slot_bytes:,} bytes, wanted at least {wanted}: the "
            f"last-level cache holds {llc_bytes:,} bytes and would serve the calls; raise the rotation"
        )
    return (num_slots - 1) * workload.slot_bytes / llc_bytes if llc_bytes else math.inf


def fingerprint(tensor: torch.Tensor) -> int:
    """A sum over a tensor's bits that changes with (almost) any change of its values."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = flat[: flat.numel() // 4 * 4].view(torch.int32)
    return int(whole.sum(dtype=torch.int64)) * 31 + int(flat[whole.numel() * 4 :].sum(dtype=torch.int64))


def fingerprints(workload: Workload) -> list[dict[str, int]]:
    """The fingerprint of every input tensor, by slot and argument."""
    return [{name: fingerprint(tensor) for name, tensor in slot.items()} for slot in workload.slots]


def check_values(workload: Workload) -> None:
    """Refuses inputs that make timed code look faster than it is.

    Raises:
        TimedInputsError: a tensor that is constant, mostly one value, or not finite.
    """
    for slot_idx, slot in enumerate(workload.slots):
        for name, tensor in slot.items():
            if not bool(torch.isfinite(tensor).all()):
                raise TimedInputsError(
                    f"{name} of slot {slot_idx} got NaN or infinities; time ordinary values"
                )
            flat = tensor.reshape(-1)
            # A value that more than half of the elements have is their median.
            for value, what in ((0.0, "zero"), (float(flat.float().median()), "one value")):
                share = int((flat == value).sum()) / flat.numel()
                if flat.numel() > 1 and share > MAX_EQUAL_SHARE:
                    raise TimedInputsError(
                        f"{name} of slot {slot_idx} got {share:.0%} of its elements {what} ({value:g}), "
                        f"wanted at most {MAX_EQUAL_SHARE:.0%}; time random values"
                    )


def check_versions(workload: Workload) -> None:
    """Goes through every version and checks its values, and that slots and versions really differ.

    Raises:
        TimedInputsError: as ``check_values``; two slots with equal inputs; a version that changes nothing in
            a slot; a fresh version that leaves an argument as it was; fewer than two versions.
    """
    if workload.num_versions < 2:
        raise TimedInputsError(
            f"num_versions got {workload.num_versions}, wanted at least 2: inputs must change between trials"
        )
    history: list[list[dict[str, int]]] = []
    for version in range(workload.num_versions + 1):
        workload.set_version(version)
        check_values(workload)
        prints = fingerprints(workload)
        for name in prints[0]:
            if len({slot[name] for slot in prints}) < len(prints):
                raise TimedInputsError(f"{name} got equal values in two slots; give each slot its own")
        for slot_idx, now in enumerate(prints):
            if any(now == before[slot_idx] for before in history):
                raise TimedInputsError(f"slot {slot_idx} got no new values in version {version}; change them")
        history.append(prints)
    stale = {
        name
        for before, fresh in zip(history[-2], history[-1], strict=True)
        for name in fresh
        if fresh[name] == before[name]
    }
    if stale:
        raise TimedInputsError(
            f"the fresh version left {', '.join(sorted(stale))} unchanged; change every input"
        )
