# SPDX-License-Identifier: Apache-2.0
"""Expert weights: quantised to e2m1 with e8m0 scales, packed for the GEMM, and labelled with their layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from kernellib.numerics import mx

from .config import MegaMoEShape
from .layout import GATE_UP_INTERLEAVED, GATE_UP_SEPARATED, PLAIN, LayoutError, PackedMatrixLayout

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
PACKING = "b16x128_e2m1_e8m0x4"  # of PackedMatrixLayout; changes when the byte order does


@dataclass(frozen=True)
class ExpertWeights:
    """One expert, unpacked: e2m1 nibbles and e8m0 scales in logical order, gates before ups.

    Attributes:
        w1: uint8 [2 * inter_dim, model_dim / 2]; rows of gates, then of ups.
        w1_scales: uint8 [2 * inter_dim, model_dim / 32].
        w2: uint8 [model_dim, inter_dim / 2].
        w2_scales: uint8 [model_dim, inter_dim / 32].
    """

    w1: U8
    w1_scales: U8
    w2: U8
    w2_scales: U8

    def dequantized(self) -> tuple[F32, F32]:
        """fp32 (w1 [2 * inter_dim, model_dim], w2 [model_dim, inter_dim]), exact."""
        return mx.dequantize_packed(self.w1, self.w1_scales), mx.dequantize_packed(self.w2, self.w2_scales)


ExpertSource = Callable[[int], ExpertWeights]  # global expert id -> its weights


def quantize_expert(gate: F32, up: F32, down: F32) -> ExpertWeights:
    """Quantises one expert's fp32 (or bf16) matrices: gate, up [inter_dim, model_dim], down [model_dim,
    inter_dim]."""
    first = mx.quantize(np.concatenate([gate, up]), mx.E2M1)
    second = mx.quantize(down, mx.E2M1)
    return ExpertWeights(
        mx.pack_nibbles(first.codes), first.scales, mx.pack_nibbles(second.codes), second.scales
    )


def random_experts(shape: MegaMoEShape, seed: int) -> ExpertSource:
    """Experts drawn directly in quantised form, each from (seed, expert): the same on every rank, and no
    more than one in memory.

    Elements take every e2m1 code; scales vary from block to block so that a row of the product has
    variance near one for inputs of variance one.
    """

    def matrix(rng: np.random.Generator, rows: int, columns: int) -> tuple[U8, U8]:
        nibbles = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
        # Codes have a mean square of 8.56; scales of 2^-1, 2^0 and 2^1 around the centre one of 1.75.
        centre = 127 - round(0.5 * np.log2(columns * 8.56 * 1.75))
        scales = rng.integers(centre - 1, centre + 2, (rows, columns // mx.BLOCK), dtype=np.uint8)
        return nibbles, scales

    def expert(index: int) -> ExpertWeights:
        rng = np.random.default_rng([seed, index])
        w1, w1_scales = matrix(rng, 2 * shape.inter_dim, shape.model_dim)
        w2, w2_scales = matrix(rng, shape.model_dim, shape.inter_dim)
        return ExpertWeights(w1, w1_scales, w2, w2_scales)

    return expert


@dataclass(frozen=True)
class PackedWeights:
    """A rank's experts as the kernels load them; says which layout that is.

    Attributes:
        shape: the layer.
        num_local_experts: experts, in ascending order of their global id.
        w1, w1_scales, w2, w2_scales: flat uint8 tensors, one ``PackedMatrixLayout`` after another.
        gate_up: order of w1's rows: "gate_up_separated" or "gate_up_interleaved".
        packing: the byte order's name.
    """

    shape: MegaMoEShape
    num_local_experts: int
    w1: torch.Tensor
    w1_scales: torch.Tensor
    w2: torch.Tensor
    w2_scales: torch.Tensor
    gate_up: str = GATE_UP_SEPARATED
    packing: str = PACKING

    def require(self, shape: MegaMoEShape, num_local_experts: int) -> None:
        """Raises LayoutError unless these are weights of that shape in the kernels' own layout."""
        for what, got, wanted, remedy in (
            ("packing", self.packing, PACKING, "pack them with pack_experts"),
            ("gate_up", self.gate_up, GATE_UP_SEPARATED, "convert with separate_gate_up before packing"),
            ("shape", self.shape, shape, "use weights of this layer"),
            ("num_local_experts", self.num_local_experts, num_local_experts, "pack this rank's experts"),
        ):
            if got != wanted:
                raise LayoutError(f"weights: {what} got {got}, wanted {wanted}; {remedy}")
        first, second = matrix_layouts(shape)
        for name, tensor, each in (
            ("w1", self.w1, first.element_bytes),
            ("w1_scales", self.w1_scales, first.scale_bytes),
            ("w2", self.w2, second.element_bytes),
            ("w2_scales", self.w2_scales, second.scale_bytes),
        ):
            size = each * num_local_experts
            wanted = f"wanted {size} contiguous uint8"
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise LayoutError(f"weights: {name} got {kind}, {wanted}")
            if tensor.dtype != torch.uint8 or tensor.shape != (size,) or not tensor.is_contiguous():
                raise LayoutError(f"weights: {name} got {tensor.dtype} {list(tensor.shape)}, {wanted}")


def matrix_layouts(shape: MegaMoEShape) -> tuple[PackedMatrixLayout, PackedMatrixLayout]:
    """The layouts of w1 and w2."""
    return (
        PackedMatrixLayout(2 * shape.inter_dim, shape.model_dim),
        PackedMatrixLayout(shape.model_dim, shape.inter_dim),
    )


def pack_experts(
    shape: MegaMoEShape, experts: Iterable[ExpertWeights], device: torch.device | str = "cpu"
) -> PackedWeights:
    """Packs a rank's experts, given in ascending order of id."""
    first, second = matrix_layouts(shape)
    parts: list[list[U8]] = [[], [], [], []]
    count = 0
    for expert in experts:
        packed = (*first.pack(expert.w1, expert.w1_scales), *second.pack(expert.w2, expert.w2_scales))
        for part, array in zip(parts, packed, strict=True):
            part.append(array)
        count += 1
    w1, w1_scales, w2, w2_scales = (torch.from_numpy(np.concatenate(part)).to(device) for part in parts)
    return PackedWeights(shape, count, w1, w1_scales, w2, w2_scales)


def unpack_expert(weights: PackedWeights, index: int) -> ExpertWeights:
    """The ``index``-th local expert of packed weights, unpacked again.

    Raises:
        LayoutError: the weights are in another layout.
    """
    weights.require(weights.shape, weights.num_local_experts)
    first, second = matrix_layouts(weights.shape)

    def part(tensor: torch.Tensor, size: int) -> U8:
        found: U8 = tensor[index * size : (index + 1) * size].cpu().numpy()
        return found

    w1 = first.unpack(part(weights.w1, first.element_bytes), part(weights.w1_scales, first.scale_bytes))
    w2 = second.unpack(part(weights.w2, second.element_bytes), part(weights.w2_scales, second.scale_bytes))
    return ExpertWeights(*w1, *w2)


def separate_gate_up(rows: U8, gate_up: str) -> U8:
    """Rows [2 * inter_dim, ...] in a named order -> gates, then ups; works on elements and scales alike.

    Raises:
        LayoutError: an order without a name here.
    """
    if gate_up == GATE_UP_INTERLEAVED:
        return np.concatenate([rows[0::2], rows[1::2]])
    if gate_up == GATE_UP_SEPARATED:
        return rows
    wanted = f"{GATE_UP_SEPARATED} or {GATE_UP_INTERLEAVED}"
    raise LayoutError(
        f"gate_up got {gate_up!r}, wanted {wanted}" + (", not plain" if gate_up == PLAIN else "")
    )


def bf16(values: npt.ArrayLike) -> F32:
    """fp32 values rounded once to bf16, nearest, ties to even."""
    return np.asarray(np.asarray(values, np.float32).astype(ml_dtypes.bfloat16), dtype=np.float32)
