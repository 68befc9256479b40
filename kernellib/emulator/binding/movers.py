# SPDX-License-Identifier: Apache-2.0
"""Moves data between vector registers and memory items, and applies atomics."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernellib.emulator.assembly import Instruction
from kernellib.emulator.binding import sources as src
from kernellib.emulator.binding.addresses import ByteStore, gather, scatter
from kernellib.emulator.binding.sources import Array, BindContext, refuse
from kernellib.emulator.instructions.registry import MemoryDef
from kernellib.emulator.operands import Operand
from kernellib.emulator.state import WaveGroup

U32, U16, U8 = np.dtype(np.uint32), np.dtype(np.uint16), np.dtype(np.uint8)
# Bytes per memory item for a datum of so many bytes; 12 bytes move as three dwords.
_PIECES = {1: 1, 2: 2, 4: 4, 8: 8, 12: 4, 16: 16}


class RegisterMover:
    """Reads the items that a store writes, or writes the items that a load has read.

    `piece` is the size in bytes of one item; a datum is one item, or three (12 bytes).  `doubled`: the
    operand holds two data (compare-and-swap: new value, then compare value).  `register` shifts the first
    register (ds_read2).
    """

    def __init__(
        self,
        ctx: BindContext,
        inst: Instruction,
        definition: MemoryDef,
        operand: Operand | None,
        doubled: bool = False,
        register: int = 0,
        registers: int | None = None,
    ) -> None:
        if operand is None or operand.kind not in ("vgpr", "agpr"):
            raise refuse(inst, f"data operand {operand.text if operand else ''}: wants vector registers")
        data = definition.data
        self.size = data.dtype.itemsize * max(data.count, 1)
        self.piece = _PIECES[self.size]
        self.registers = max(self.size // 4, 1)
        wanted = registers if registers is not None else self.registers * (2 if doubled else 1)
        if operand.count != wanted:
            raise refuse(inst, f"{operand.text}: wants {wanted} register(s), got {operand.count}")
        self.row = src.vector_row(ctx, operand) + register
        self.doubled = doubled
        self.signed = data.base in ("i8", "i16")
        self.half = definition.half
        part = 1 if self.half == "hi" else 0
        self.words = src.vgpr_range_slot(ctx, self.row, self.registers, U32)
        self.first = src.vgpr_slot(ctx, self.row, U32)
        self.part16 = src.vgpr_part_slot(ctx, self.row, part, U16)
        self.part8 = src.vgpr_part_slot(ctx, self.row, 2 * part, U8)
        self.second = (
            src.vgpr_range_slot(ctx, self.row + self.registers, self.registers, U32)
            if doubled
            else self.words
        )

    # -------------------------------------------------------------------- memory -> registers
    def write(self, g: WaveGroup, items: list[Array], waves: Array | None, lanes: Array | None) -> None:
        """Put loaded items into the result registers of all lanes, or of the given (wave, lane) pairs."""
        if self.size < 4:
            self._write_narrow(g, items[0], waves, lanes)
            return
        if self.size == 4:
            view = g.views[self.first]
            if waves is None:
                view[...] = items[0]
            else:
                view[waves, lanes] = items[0]
            return
        if len(items) == 1 and waves is None:
            raw = items[0] if items[0].flags.c_contiguous else np.ascontiguousarray(items[0])
            words = raw.view(np.uint32).reshape(g.n, 64, self.registers)
            g.views[self.words][...] = words.transpose(2, 0, 1)
            return
        if len(items) == 1:
            words = np.ascontiguousarray(items[0]).view(np.uint32).reshape(*items[0].shape, self.registers)
        else:
            words = np.stack(items, axis=-1)
        view = g.views[self.words]
        if waves is None:
            view[...] = words.reshape(g.n, 64, self.registers).transpose(2, 0, 1)
        else:
            view[:, waves, lanes] = words.T

    def write_rows(self, g: WaveGroup, rows: Array) -> None:
        """Put whole rows (uint32 [n, 64 * registers]) into the registers of every lane."""
        g.views[self.words][...] = rows.reshape(g.n, 64, self.registers).transpose(2, 0, 1)

    def _write_narrow(self, g: WaveGroup, items: Array, waves: Array | None, lanes: Array | None) -> None:
        if self.signed:
            items = items.view(f"i{self.size}")
        if self.half:
            values: Array = items.astype(np.int16 if self.signed else np.uint16).view(np.uint16)
            view = g.views[self.part16]
        else:
            values = items.astype(np.int32 if self.signed else np.uint32).view(np.uint32)
            view = g.views[self.first]
        if waves is None:
            view[...] = values
        else:
            view[waves, lanes] = values

    # -------------------------------------------------------------------- registers -> memory
    def read(self, g: WaveGroup, waves: Array | None, lanes: Array | None) -> list[Array]:
        """Items to store, 1-D in wave and lane order; two lists' worth when `doubled`."""
        if self.doubled:
            return [*self._read(g, self.words, waves, lanes), *self._read(g, self.second, waves, lanes)]
        return self._read(g, self.words, waves, lanes)

    def read_rows(self, g: WaveGroup) -> Array:
        """The data of every lane of a wave side by side: uint32 [n, 64 * registers], contiguous."""
        return np.ascontiguousarray(g.views[self.words].transpose(1, 2, 0)).reshape(g.n, -1)

    def _read(self, g: WaveGroup, slot: int, waves: Array | None, lanes: Array | None) -> list[Array]:
        if self.size < 4:
            view = g.views[self.part16 if self.size == 2 else self.part8]
            return [np.ascontiguousarray(view).reshape(-1) if waves is None else view[waves, lanes]]
        view = g.views[slot]
        words = view.reshape(self.registers, -1) if waves is None else view[:, waves, lanes]
        if self.registers == 1:
            return [words[0]]
        if self.registers == 3:
            return [words[0], words[1], words[2]]
        joined = np.empty(words.shape[::-1], np.uint32)
        for number, row in enumerate(words):  # faster than one copy whose inner loop has so few steps
            joined[:, number] = row
        return [joined.view("u8" if self.registers == 2 else "c16").reshape(-1)]


def combine_atomic(definition: MemoryDef, store: ByteStore, offsets: Array, operands: list[Array]) -> Array:
    """Apply an atomic for every lane and return the values before.

    Lanes that hit the same address take their turns in wave and lane order, as if they had been issued one by
    one.
    """
    function, data = definition.function, definition.data
    assert function is not None, f"{definition.mnemonic} has no function"
    size = data.dtype.itemsize * max(data.count, 1)
    view_as = data.dtype if data.count <= 1 and data.form == "lane" else np.dtype(f"u{size}")
    values = [operand.view(view_as) for operand in operands]
    order = np.argsort(offsets, kind="stable")
    ordered = offsets[order]
    starts = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    first = np.maximum.accumulate(np.where(starts, np.arange(len(ordered)), 0))
    turn = np.empty(len(ordered), np.int64)
    turn[order] = np.arange(len(ordered)) - first
    old: Array = np.empty(len(offsets), view_as)
    for number in range(int(turn.max()) + 1):
        lanes: Any = slice(None) if number == 0 and turn.max() == 0 else np.nonzero(turn == number)[0]
        before = gather(store, offsets[lanes], size).view(view_as)
        old[lanes] = before
        after = np.asarray(function(before, *[value[lanes] for value in values]))
        scatter(store, offsets[lanes], np.ascontiguousarray(after).view(f"u{size}"))
    return old.view(f"u{size}")
