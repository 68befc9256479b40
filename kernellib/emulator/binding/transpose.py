# SPDX-License-Identifier: Apache-2.0
"""Binds the transposing LDS reads (ds_read_b64_tr_b16, _b8, _b4, ds_read_b96_tr_b6)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernellib.emulator.arith.transpose import transpose_tile
from kernellib.emulator.binding.addresses import gather
from kernellib.emulator.binding.memory import MemoryPlan
from kernellib.emulator.binding.movers import RegisterMover
from kernellib.emulator.binding.place import place_in_lds
from kernellib.emulator.binding.sources import Fetch
from kernellib.emulator.errors import UnsupportedOperandError
from kernellib.emulator.state import WaveGroup


def bind_transpose(
    plan: MemoryPlan, address: Fetch, offset: int, issue: Callable[[WaveGroup], None]
) -> Callable[[WaveGroup], None]:
    """A step that reads each lane's datum and exchanges elements within groups of 16 lanes.

    What the exchange gives when some lanes of a wave are off is not published: refused.
    """
    definition, inst = plan.definition, plan.inst
    size = definition.bytes_per_lane
    mover = RegisterMover(plan.ctx, inst, definition, plan.result)
    piece = mover.piece

    def step(g: WaveGroup) -> None:
        issue(g)
        if g.exec is not None:
            raise UnsupportedOperandError(
                "transposing LDS read with lanes switched off", inst.line_no, inst.text
            )
        local = address(g) + offset
        g.cohort.count("lds", "load", inst.mnemonic, size, local, g)
        place = place_in_lds(g, inst, local, size, None, None, "load")
        words = np.stack([gather(g.cohort.lds, place + at, 4) for at in range(0, size, 4)])
        moved = transpose_tile(words, definition.transpose)
        if piece == 4:
            mover.write(g, list(moved), None, None)
        else:
            joined = np.ascontiguousarray(moved.transpose(1, 2, 0)).view("u8")[..., 0]
            mover.write(g, [joined], None, None)

    return step
