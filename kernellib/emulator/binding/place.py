# SPDX-License-Identifier: Apache-2.0
"""Checks of LDS addresses: bounds of the workgroup's allocation and alignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding.memory import out_of_alignment
from kernellib.emulator.errors import MissingWaitError, OutOfBoundsError
from kernellib.emulator.state import WaveGroup

Array = np.ndarray[Any, Any]


def place_in_lds(
    g: WaveGroup,
    inst: Instruction,
    local: Array,
    size: int,
    waves: Array | None,
    lanes: Array | None,
    verb: str,
) -> Array:
    """Bytes of the cohort's LDS store for local addresses; checks bounds and dword alignment of dword
    accesses.
    """
    cohort = g.cohort
    low, high = int(local.min()), int(local.max()) + size
    if low < 0 or high > cohort.lds_bytes:
        flat = local.reshape(-1)
        bad = int(np.argmax(flat)) if high > cohort.lds_bytes else int(np.argmin(flat))
        wave = bad // 64 if waves is None else int(waves[bad])
        lane = bad % 64 if lanes is None else int(lanes[bad])
        raise OutOfBoundsError(
            f"{size}-byte LDS {verb} at byte {int(flat[bad])}, the workgroup has {cohort.lds_bytes} bytes",
            cohort.location(g, inst, wave, lane, int(flat[bad])),
        )
    align = min(size, 4)
    if align > 1 and int(np.bitwise_or.reduce(local, axis=None)) & (align - 1):
        flat = local.reshape(-1)
        bad = int(np.nonzero(flat & (align - 1))[0][0])
        raise out_of_alignment(g, inst, int(flat[bad]), align, bad, waves, lanes)
    base = cohort.lds_base[g.waves]
    placed: Array = local + (base[:, None] if waves is None else base[waves])
    if cohort.lds_in_flight is not None:
        _check_landed(g, inst, placed, local, size, waves, lanes)
    if cohort.lds_delay is not None and verb != "store":
        cohort.lds_delay.flush(g.waves)
    if cohort.lds_monitor is not None:
        cohort.lds_monitor.access(g, inst, placed, local, size, verb, waves, lanes)
    return placed


def usual_items(
    offsets: list[int], size: int, piece: int
) -> Callable[[WaveGroup, Array], list[Array] | None]:
    """The usual access, with fewer passes than `place_in_lds`: for each offset, item numbers int64 [n, 64].

    Every lane is on, nobody watches, every address is a multiple of the piece, and the bits of all addresses
    together (never less than the greatest of them) lie within the allocation.  The function gives None
    otherwise.  It takes the group and its addresses before the offset, uint32 [n, 64].

    Args:
        size: bytes at each offset, in pieces of `piece` bytes (a power of two, at most 16).
    """
    unaligned = max(piece, min(size, 4)) - 1
    possible = not any(offset & unaligned for offset in offsets)
    first, end, shift = offsets[0], max(offsets) + size, piece.bit_length() - 1
    further = [(offset - first) >> shift for offset in offsets[1:]]

    def find(g: WaveGroup, raw: Array) -> list[Array] | None:
        cohort = g.cohort
        if not possible or g.exec is not None or cohort.lds_in_flight is not None:
            return None
        if cohort.lds_delay is not None or cohort.lds_monitor is not None:
            return None
        bits = int(np.bitwise_or.reduce(raw, axis=None))
        if bits & unaligned or bits + end > cohort.lds_bytes or cohort.launch.accesses is not None:
            return None
        items = raw.astype(np.int64)
        items += g.lds_base + first  # a multiple of 16, and of the piece
        if shift:
            items >>= shift
        return [items, *[items + more for more in further]]

    return find


def _check_landed(
    g: WaveGroup,
    inst: Instruction,
    placed: Array,
    local: Array,
    size: int,
    waves: Array | None,
    lanes: Array | None,
) -> None:
    """Refuse bytes that a direct-to-LDS load may not have written yet."""
    flags = g.cohort.lds_in_flight
    assert flags is not None
    for dword in range(-(-size // 4)):
        bad = np.nonzero(flags[placed // 4 + dword].reshape(-1))[0]
        if len(bad):
            first = int(bad[0])
            wave = first // 64 if waves is None else int(waves[first])
            lane = first % 64 if lanes is None else int(lanes[first])
            byte = int(local.reshape(-1)[first]) + 4 * dword
            raise MissingWaitError(
                f"LDS byte {byte} is written by a direct-to-LDS load that no s_waitcnt on vmcnt covers",
                g.cohort.location(g, inst, wave, lane, byte),
            )
