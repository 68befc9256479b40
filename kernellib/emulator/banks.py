# SPDX-License-Identifier: Apache-2.0
"""LDS banks of gfx950: how many passes an access takes, and how many of them are bank conflicts.

The LDS of a compute unit has 160 KiB in banks 4 bytes wide; a bank serves one dword a pass, to any number of
lanes that want that same dword.  An instruction is served in phases, each a fixed set of lanes; lanes of
different phases never conflict.  A phase takes as many passes as the bank with the most distinct dwords.
Which lanes make up a phase, and whether 64 or 32 banks count, depends on the instruction:

    access             banks   lanes of a phase
    read  b8 b16 b32     32    32 consecutive
    read  b64            64    32 consecutive
    read  b96            32    8: see READ_B96
    read  b128           64    16: see READ_B128
    write b8 b16 b32     32    32 consecutive
    write b64            32    16 consecutive
    write b96 b128       32    8 consecutive

Sources, which agree where they overlap: AMD, rocRoller's LDS model (lanes per clock and banks by width: reads
of b64 and b128 over 64 banks, all else as with 32); HipKittens, "paper experiments: phases" (banks and phases
of ds_read_b64, ds_read_b96, ds_read_b128 and ds_write_b64, measured with SQ_LDS_BANK_CONFLICT); Triton, pull
request 11365 (phases of ds_read_b128 on MI350); AMD, Composable Kernel documentation, "LDS bank conflicts"
(phases of ds_write_b128).

Assumed, as nothing was found: the two halves of ds_read2 and ds_write2 are two accesses; transposing reads
behave like ds_read_b64; of an atomic's lanes that hit one dword, each takes a pass of its own.  Conflicts
between the waves of a compute unit, and the queue in front of the LDS, are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from kernellib.emulator.errors import EmulatorError

Array = np.ndarray[Any, Any]
Direction = Literal["read", "write", "atomic"]
LANES = 64
# The first lanes of runs of four that share a phase, within a half wave; the upper half does the same.
READ_B96 = ((0, 20), (4, 16), (8, 28), (12, 24))
READ_B128 = ((0, 12, 20, 24), (4, 8, 16, 28))


@dataclass(frozen=True)
class BankRule:
    """How one kind of access is served: `phases` is [num_phases, lanes per phase] of lane numbers."""

    num_banks: int
    phases: tuple[tuple[int, ...], ...]


def _consecutive(lanes: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(first, first + lanes)) for first in range(0, LANES, lanes))


def _runs_of_four(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(half + first + i for first in group for i in range(4)) for half in (0, 32) for group in groups
    )


@cache
def bank_rule(direction: Direction, num_bytes: int) -> BankRule:
    """The rule for accesses of `num_bytes` (1, 2, 4, 8, 12 or 16) a lane.  Atomics follow the writes.

    Raises EmulatorError for another width.
    """
    if num_bytes not in (1, 2, 4, 8, 12, 16):
        raise EmulatorError(f"no LDS instruction moves {num_bytes} bytes a lane: wants 1, 2, 4, 8, 12 or 16")
    if num_bytes <= 4:
        return BankRule(32, _consecutive(32))
    if direction == "read":
        return {
            8: BankRule(64, _consecutive(32)),
            12: BankRule(32, _runs_of_four(READ_B96)),
            16: BankRule(64, _runs_of_four(READ_B128)),
        }[num_bytes]
    return BankRule(32, _consecutive(16 if num_bytes == 8 else 8))


def bank_passes(addresses: Array, active: Array, num_bytes: int, direction: Direction) -> tuple[Array, Array]:
    """Passes that each wave's access takes, and how many of them are conflicts.

    Args:
        addresses: int [n, 64], byte address of each lane's datum.
        active: bool [n, 64]; lanes that are off want nothing.
        num_bytes: bytes a lane.
        direction: "read", "write" or "atomic".
    Returns:
        passes, conflicts: int64 [n] each; conflicts are the passes beyond one for each phase with a lane on.

    >>> lanes = np.arange(64)[None]
    >>> bank_passes(lanes * 128, lanes >= 0, 4, "read")         # every lane on bank 0
    (array([64]), array([62]))
    """
    rule = bank_rule(direction, num_bytes)
    num_waves = addresses.shape[0]
    dwords = (addresses[..., None] >> 2) + np.arange(-(-num_bytes // 4))
    passes = np.zeros(num_waves, np.int64)
    busy = np.zeros(num_waves, np.int64)
    for phase in rule.phases:
        lanes = list(phase)
        wanted = np.where(active[:, lanes, None], dwords[:, lanes], -1).reshape(num_waves, -1)
        passes += _most_wanted(wanted, rule.num_banks, direction != "atomic")
        busy += active[:, lanes].any(axis=1)
    return passes, passes - busy


def _most_wanted(wanted: Array, num_banks: int, shares: bool) -> Array:
    """Per row, the largest number of dwords on one bank; -1 is none.  `shares`: equal dwords count once."""
    counts = wanted >= 0
    if shares:
        wanted = np.sort(wanted, axis=1)
        counts = wanted >= 0
        counts[:, 1:] &= wanted[:, 1:] != wanted[:, :-1]
    rows = np.arange(len(wanted))[:, None] * num_banks + wanted % num_banks
    per_bank = np.bincount(rows[counts], minlength=len(wanted) * num_banks)
    result: Array = per_bank.reshape(len(wanted), num_banks).max(axis=1)
    return result
