# SPDX-License-Identifier: Apache-2.0
"""Where the elements of matrix operands lie in the lanes and registers of a wave.

Inputs (CDNA4 ISA 7.1.4.1): each lane holds K_L = K / (64 / (M B)) values along K. A[b, i, k] is item `k %
K_L` of lane `i + M (b + B (k / K_L))`; B[b, k, j] likewise with j and N. Items are packed little-endian into
consecutive registers. Operands of more than 16 bytes of 8- or 16-bit items are the exception: they come in
two pieces, the first covering the lower half of K (7.1.5.1 "FP8" for f8f6f4, 7.5.1.3 for the dense operand of
smfmac). 6- and 4-bit operands are not split.

Outputs (7.1.4.2): rows come in groups of H = 4 (f64: 1); see `output_to_matrix`.

Scales (7.2.1): lane `i + M g` supplies the E8M0 byte of row i and K elements 32 g .. 32 g + 31.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernellib.emulator.arith.formats import Array

LANES = 64


@dataclass(frozen=True)
class Shape:
    """An MFMA shape: per block M x K times K x N, `blocks` of them, `group` rows kept together in the
    output."""

    m: int
    n: int
    k: int
    blocks: int = 1
    group: int = 4

    @property
    def flops(self) -> int:
        """Multiplications and additions of one wave."""
        return 2 * self.m * self.n * self.k * self.blocks

    @property
    def num_outputs(self) -> int:
        """Result items per lane."""
        return self.m * self.n * self.blocks // LANES


def operand_to_rows(registers: Array, rows: int, blocks: int, pieces: int = 1) -> Array:
    """Gather an operand's registers by matrix row, K ascending.

    Args:
        registers: uint32 [R, n, 64], R registers of n waves.
        rows: M for A, N for B.
        pieces: 1, or 2 for operands that are split into halves of K.
    Returns:
        uint32 [n, blocks, rows, R * (64 / (rows * blocks))], contiguous. Viewed as the item type, the last
        axis runs over k = 0 .. K-1.
    """
    num_registers, num_waves = registers.shape[:2]
    groups = LANES // (rows * blocks)
    split = registers.reshape(pieces, num_registers // pieces, num_waves, groups, blocks, rows)
    ordered = np.ascontiguousarray(split.transpose(2, 4, 5, 0, 3, 1))
    return ordered.reshape(num_waves, blocks, rows, groups * num_registers)


def output_to_matrix(items: Array, shape: Shape) -> Array:
    """C or D registers [items, n, 64] to a matrix [n, blocks, M, N] (a copy).

    D[b, i, j] is item `i % H + H (i / (H M_I) + G (b / B_I))` of lane `j + N ((i / H) % M_I + M_I (b % B_I))`
    with B_I = ceil(64 / (N M / H)), M_I = 64 / B_I / N, G = M / (H M_I).
    """
    outer, groups, inner, row_groups = _output_axes(shape)
    split = items.reshape(outer, groups, shape.group, items.shape[1], inner, row_groups, shape.n)
    return split.transpose(3, 0, 4, 1, 5, 2, 6).reshape(items.shape[1], shape.blocks, shape.m, shape.n)


def matrix_to_output(matrix: Array, shape: Shape) -> Array:
    """The inverse of `output_to_matrix`: [n, blocks, M, N] to [items, n, 64], contiguous."""
    return np.ascontiguousarray(output_view(matrix, shape)).reshape(shape.num_outputs, -1, LANES)


def output_view(matrix: Array, shape: Shape) -> Array:
    """[n, blocks, M, N] as a view [.., .., .., n, .., .., ..] whose elements, in order, are those of
    `matrix_to_output`."""
    outer, groups, inner, row_groups = _output_axes(shape)
    split = matrix.reshape(-1, outer, inner, groups, row_groups, shape.group, shape.n)
    return split.transpose(1, 3, 5, 0, 2, 4, 6)


def _output_axes(shape: Shape) -> tuple[int, int, int, int]:
    """(B / B_I, G, B_I, M_I) of the output layout."""
    blocks_per_item = -(-LANES // (shape.n * shape.m // shape.group))
    rows_per_item = LANES // blocks_per_item // shape.n
    return (
        shape.blocks // blocks_per_item,
        shape.m // (shape.group * rows_per_item),
        blocks_per_item,
        rows_per_item,
    )


def scales_to_rows(scales: Array, rows: int) -> Array:
    """E8M0 bytes [n, 64] of a wave to [n, rows, K / 32]."""
    num_waves = scales.shape[0]
    return scales.reshape(num_waves, LANES // rows, rows).transpose(0, 2, 1)


def broadcast_a(registers: Array, cbsz: int, abid: int) -> Array:
    """CBSZ and ABID: every block of 64 >> cbsz lanes reads A from block `abid` (CDNA4 ISA 7.1.6.1)."""
    if cbsz == 0:
        return registers
    size = LANES >> cbsz
    return registers[..., np.arange(LANES) % size + size * abid]


_BLGP_LANES = (
    lambda lane: lane,
    lambda lane: lane % 32,
    lambda lane: lane % 32 + 32,
    lambda lane: (lane + 16) % 64,
    lambda lane: lane % 16,
    lambda lane: lane % 16 + 16,
    lambda lane: lane % 16 + 32,
    lambda lane: lane % 16 + 48,
)


def permute_b(registers: Array, blgp: int) -> Array:
    """BLGP: the lane pattern from which B is read (CDNA4 ISA, table 29)."""
    return registers if blgp == 0 else registers[..., _BLGP_LANES[blgp](np.arange(LANES))]
