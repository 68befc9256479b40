# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-generics
# mypy: no-warn-return-any, no-check-untyped-defs
"""What the benchmark GEMMs share: pointers, and tiles of LDS with swizzled 16-byte chunks.

A tile has 64 rows of `chunks` 16-byte chunks.  A read of 16 bytes a lane is served 16 lanes at a time from 64
banks, 256 bytes: the rows that one such stretch holds share an exchange of chunks, the next stretch has
another, so that a chunk of 16 neighbouring rows lies on all banks.  Row and chunk counts are powers of two:
indices are cut by shifts and masks (`//` and `%` of signed integers cost more instructions).
"""

import flydsl.expr as fx

T = fx.T
TILE_ROWS = 64
THREADS = 256
BANK_CHUNKS = 16  # 64 banks of 4 bytes


def gp(addr, ty, align):
    """Global pointer from a raw 64-bit address."""
    return fx.inttoptr(fx.PointerType.get(ty.ir_type, fx.AddressSpace.Global, align), addr)


def request(source, row_bytes, first_row, first_byte, chunks):
    """The workgroup's 256 threads load a tile from global memory: pending Int32x4, one per 256 chunks."""
    pointer = gp(source, fx.Int32, 16)
    loads = []
    for part in range(TILE_ROWS * chunks // THREADS):
        index = part * THREADS + fx.thread_idx.x
        place = (first_row + (index >> _log2(chunks))) * row_bytes + first_byte + (index & (chunks - 1)) * 16
        loads.append(fx.generic_load(pointer + (place >> 2), count=4))
    return loads


def fill(tile, loads, chunks):
    """Put what `request` returned into the tile."""
    for part, data in enumerate(loads):
        index = part * THREADS + fx.thread_idx.x
        fx.generic_store(tile.ptr + _place(index >> _log2(chunks), index & (chunks - 1), chunks), data)


def chunk_of(tile, row, chunk, chunks):
    """16 bytes of row `row`, as Int32x4."""
    return fx.generic_load(tile.ptr + _place(row, chunk, chunks), count=4)


def _place(row, chunk, chunks):
    """Dword index of a chunk."""
    stretch = row >> _log2(BANK_CHUNKS // chunks)
    return (row * chunks + (chunk ^ (stretch & (chunks - 1)))) * 4


def _log2(power):
    return power.bit_length() - 1
