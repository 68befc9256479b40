# SPDX-License-Identifier: Apache-2.0
"""GEMM1 and GEMM2 of one tile against numpy, all elements and scales different; altered placements show.

The oracle knows nothing of lanes: it multiplies dequantised matrices and quantises by kernellib.numerics.mx.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import mega_moe_device as device
import ml_dtypes
import numpy as np
import pytest
import torch

from kernellib.emulator import emulated
from kernellib.numerics import mx
from kernellib.ops.mega_moe import gemm_gfx950
from kernellib.ops.mega_moe.config import MegaMoEConfig, MegaMoEShape, kernel_name
from kernellib.ops.mega_moe.gemm1_gfx950 import Gemm1
from kernellib.ops.mega_moe.gemm2_gfx950 import Gemm2
from kernellib.ops.mega_moe.layout import ScaleOrder, SymmetricLayout, source_code
from kernellib.ops.mega_moe.reference import activate, relative_l2
from kernellib.ops.mega_moe.weights import ExpertWeights, pack_experts, random_experts

POISON = 0xA5
SEED = 20
EXPERT = 1  # the second of two, so that the expert's offset shows
SHAPE = MegaMoEShape(4, 1024, 256, 2)
ONE_CHUNK = MegaMoEShape(4, 256, 384, 2)
CAPACITY = 128


def quantized_rows(rows: int, dim: int) -> mx.MXArray:
    """Rows whose blocks differ in magnitude by up to 2^6."""
    rng = np.random.default_rng([SEED, rows, dim])
    values = rng.standard_normal((rows, dim // mx.BLOCK, mx.BLOCK))
    spread = np.exp2(rng.integers(-3, 4, (rows, dim // mx.BLOCK, 1)))
    return mx.quantize((values * spread).reshape(rows, dim).astype(np.float32), mx.E4M3)


def padded(array: np.ndarray, rows: int) -> torch.Tensor:
    """Bytes of the valid rows, then poison up to ``rows``."""
    out = np.full((rows, *array.shape[1:]), POISON, np.uint8)
    out[: len(array)] = array
    return torch.from_numpy(out)


def nan_scaled(array: np.ndarray, rows: int) -> torch.Tensor:
    """Scales whose padding rows are NaN."""
    out = padded(array, rows)
    out[len(array) :] = mx.E8M0_NAN
    return out


@dataclass(frozen=True)
class Hidden:
    """GEMM1's output bytes, and what they stand for."""

    codes: np.ndarray
    scales: np.ndarray
    error: float


def run_gemm1(
    gemm: Gemm1, num_rows: int, name: str = "", alter: Callable[[ExpertWeights], ExpertWeights] | None = None
) -> Hidden:
    """One tile of ``num_rows`` valid rows; ``alter`` changes the weights that the kernel is given."""
    shape, tile_m = gemm.shape, gemm.config.tile_m
    x = quantized_rows(num_rows, shape.model_dim)
    source = random_experts(shape, SEED)
    given = [source(i) if alter is None else alter(source(i)) for i in range(2)]
    packed = pack_experts(shape, given)
    rows = padded(x.codes, tile_m)
    row_scales = nan_scaled(ScaleOrder(shape.model_dim).to_device(x.scales), tile_m)
    hidden = torch.full((tile_m, shape.inter_dim), POISON, dtype=torch.uint8)
    hidden_scales = torch.full((tile_m, gemm.hidden_scales.row_bytes), POISON, dtype=torch.uint8)
    tensors = (rows, row_scales, packed.w1, packed.w1_scales, hidden, hidden_scales)
    with emulated() as session:
        for tensor in tensors:
            session.register(tensor)
        r, s, w, ws, h, hs = (tensor.data_ptr() for tensor in tensors)
        label = kernel_name("gemm1_tile", gemm.config, shape=shape.name, act=gemm.activation, what=name)
        device.gemm1_launcher(gemm, label)(r, s, num_rows, w, ws, EXPERT, h, hs)
    assert (hidden[num_rows:] == POISON).all(), "rows past the valid ones were written"
    assert (hidden_scales[num_rows:] == POISON).all()
    product = x.dequantize() @ source(EXPERT).dequantized()[0].T
    expected = activate(gemm.activation, shape, product[:, : shape.inter_dim], product[:, shape.inter_dim :])
    wanted = mx.quantize(expected, mx.E4M3).dequantize()
    codes = hidden[:num_rows].numpy()
    scales = gemm.hidden_scales.to_logical(hidden_scales[:num_rows].numpy())
    return Hidden(codes, scales, relative_l2(mx.dequantize(codes, scales, mx.E4M3), wanted))


GEMM1_CASES = {
    "m16": (SHAPE, MegaMoEConfig(tile_m=16, gemm1_tile_n=256), 16),
    "m16_one_row": (SHAPE, MegaMoEConfig(tile_m=16, gemm1_tile_n=128), 1),
    "m32_ragged": (SHAPE, MegaMoEConfig(tile_m=32, gemm1_tile_n=256), 29),
    "m64": (SHAPE, MegaMoEConfig(tile_m=64, gemm1_tile_n=256), 64),
    "m128_ragged": (SHAPE, MegaMoEConfig(tile_m=128, gemm1_tile_n=512), 113),
    "one_wave": (ONE_CHUNK, MegaMoEConfig(tile_m=32, gemm1_tile_n=64), 17),
    "one_chunk_n768": (ONE_CHUNK, MegaMoEConfig(tile_m=16, gemm1_tile_n=768), 5),
    "k128": (MegaMoEShape(4, 128, 128, 2), MegaMoEConfig(tile_m=16, gemm1_tile_n=128), 11),
    "k384": (MegaMoEShape(4, 384, 128, 2), MegaMoEConfig(tile_m=16, gemm1_tile_n=128), 16),
}


def cases(names: Iterable[str]) -> list[object]:
    """The tiles of 64 and 128 rows take longer to compile: slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * name.startswith(("m64", "m128"))) for name in names]


@pytest.mark.parametrize("activation", ["situv2", "silu"])
@pytest.mark.parametrize("case", cases(GEMM1_CASES))
def test_gemm1_is_the_oracle(case: str, activation: str) -> None:
    shape, config, num_rows = GEMM1_CASES[case]
    found = run_gemm1(Gemm1(shape, config, activation), num_rows)
    assert found.error < 1e-3, f"{case}, seed {SEED}"


def test_the_other_activation_is_told_apart() -> None:
    """SiLU computed where SiTUv2 is asked for is not within the tolerance, nor are other betas."""
    shape, config, num_rows = GEMM1_CASES["m32_ragged"]
    right = run_gemm1(Gemm1(shape, config, "situv2"), num_rows)
    expected = mx.dequantize(right.codes, right.scales, mx.E4M3)
    for other in (Gemm1(shape, config, "silu"), Gemm1(replace(shape, situ_beta=1.0), config, "situv2")):
        found = run_gemm1(other, num_rows)
        assert relative_l2(mx.dequantize(found.codes, found.scales, mx.E4M3), expected) > 0.02, other


def test_an_expert_beyond_four_gibibytes() -> None:
    """Offsets of weights have 64 bits: the last expert's bytes lie past 2^32, untouched pages before them."""
    shape = MegaMoEShape(4, 128, 128, 2)
    gemm = Gemm1(shape, MegaMoEConfig(tile_m=16, gemm1_tile_n=256), "situv2")
    expert = (1 << 32) // gemm.matrix.element_bytes + 1
    packed = pack_experts(shape, [random_experts(shape, SEED)(0)])
    w1 = torch.empty((expert + 1) * gemm.matrix.element_bytes, dtype=torch.uint8)
    w1_scales = torch.empty((expert + 1) * gemm.matrix.scale_bytes, dtype=torch.uint8)
    assert w1.numel() > 1 << 32
    w1[-packed.w1.numel() :] = packed.w1
    w1_scales[-packed.w1_scales.numel() :] = packed.w1_scales
    x = quantized_rows(16, 128)
    tensors = (
        padded(x.codes, 16),
        padded(ScaleOrder(128).to_device(x.scales), 16),
        w1,
        w1_scales,
        torch.full((16, 128), POISON, dtype=torch.uint8),
        torch.full((16, gemm.hidden_scales.row_bytes), POISON, dtype=torch.uint8),
    )
    with emulated() as session:
        for tensor in tensors:
            session.register(tensor)
        r, s, w, ws, h, hs = (tensor.data_ptr() for tensor in tensors)
        device.gemm1_launcher(gemm, "gemm1_far_expert")(r, s, 16, w, ws, expert, h, hs)
    product = x.dequantize() @ random_experts(shape, SEED)(0).dequantized()[0].T
    expected = mx.quantize(activate("situv2", shape, product[:, :128], product[:, 128:]), mx.E4M3)
    scales = gemm.hidden_scales.to_logical(tensors[5].numpy())
    assert relative_l2(mx.dequantize(tensors[4].numpy(), scales, mx.E4M3), expected.dequantize()) < 1e-3


# ------------------------------------------------------------------------------------------- GEMM2


@dataclass(frozen=True)
class Sent:
    """What GEMM2 put on the wire: values by source rank, token and slot, and the error of the rows sent."""

    error: float


def sources(num_rows: int, top_k: int) -> list[tuple[int, int, int]]:
    """Distinct (rank, token, slot), in no order; the largest token and slot among them."""
    rng = np.random.default_rng(SEED)
    pairs = rng.permutation(2 * CAPACITY * top_k)[:num_rows].tolist()
    pairs[0] = 2 * CAPACITY * top_k - 1 if 2 * CAPACITY * top_k - 1 not in pairs else pairs[0]
    return [(p // (CAPACITY * top_k), p // top_k % CAPACITY, p % top_k) for p in pairs]


def decode_wire(layout: SymmetricLayout, row: np.ndarray) -> np.ndarray:
    dim = layout.shape.model_dim
    if layout.wire == "bf16":
        return row.view(ml_dtypes.bfloat16).astype(np.float32)
    return mx.dequantize(row[:dim], row[dim : dim + dim // mx.BLOCK], mx.E4M3)


def run_gemm2(
    gemm: Gemm2, num_rows: int, name: str = "", alter: Callable[[ExpertWeights], ExpertWeights] | None = None
) -> Sent:
    layout, tile_m = gemm.layout, gemm.config.tile_m
    shape = layout.shape
    h = quantized_rows(num_rows, shape.inter_dim)
    source = random_experts(shape, SEED)
    packed = pack_experts(shape, [source(i) if alter is None else alter(source(i)) for i in range(2)])
    places = sources(num_rows, shape.top_k)
    weight = np.random.default_rng([SEED, 1]).uniform(0.1, 1.0, num_rows).astype(np.float32)
    row_weight = torch.full((tile_m,), float("nan"))
    row_weight[:num_rows] = torch.from_numpy(weight)
    codes = [source_code(*place, CAPACITY) for place in places]
    row_source = torch.full((tile_m,), -1, dtype=torch.int32)
    row_source[:num_rows] = torch.from_numpy(np.array(codes, np.uint32).view(np.int32))
    regions = [torch.full((layout.num_bytes,), POISON, dtype=torch.uint8) for _ in range(2)]
    peers = torch.tensor([region.data_ptr() for region in regions])
    hidden = padded(h.codes, tile_m)
    hidden_scales = nan_scaled(layout.hidden_scales.to_device(h.scales), tile_m)
    arguments = (hidden, hidden_scales, row_weight, row_source, packed.w2, packed.w2_scales, peers)
    with emulated() as session:
        for tensor in (*arguments, *regions):
            session.register(tensor)
        a, b, c, d, w, ws, p = (tensor.data_ptr() for tensor in arguments)
        label = kernel_name("gemm2_tile", gemm.config, layout=layout.name, what=name)
        device.gemm2_launcher(gemm, label)(a, b, c, d, num_rows, w, ws, EXPERT, p)
    expected = (h.dequantize() @ source(EXPERT).dequantized()[1].T) * weight[:, None]
    if layout.wire != "bf16":
        expected = mx.quantize(expected, mx.E4M3).dequantize()
    wire = layout.buffers["wire"]
    found = [wire.view(regions[rank].numpy())[token, slot].copy() for rank, token, slot in places]
    for rank, token, slot in places:
        end = shape.model_dim * 2 if layout.wire == "bf16" else shape.model_dim * 33 // 32
        wire.view(regions[rank].numpy())[token, slot, :end] = POISON
    for rank, region in enumerate(regions):
        written = int((region != POISON).sum())  # a number: pytest would print the region, element by element
        assert written == 0, f"{written} other bytes were written at rank {rank}"
    return Sent(relative_l2([decode_wire(layout, row) for row in found], expected))


GEMM2_SHAPES = {"k1024": MegaMoEShape(4, 256, 1024, 2), "k384": MegaMoEShape(4, 384, 384, 2)}
GEMM2_CASES = {
    "m16": ("k1024", MegaMoEConfig(tile_m=16, gemm2_tile_n=256), 16),
    "m16_b2_one_row": ("k1024", MegaMoEConfig(tile_m=16, gemm2_tile_n=256, b2stage=True), 1),
    "m32_n128": ("k1024", MegaMoEConfig(tile_m=32, gemm2_tile_n=128), 27),
    "m64_b2": ("k1024", MegaMoEConfig(tile_m=64, gemm2_tile_n=256, b2stage=True), 64),
    "m128_b2": ("k1024", MegaMoEConfig(tile_m=128, gemm2_tile_n=256, b2stage=True), 100),
    "one_chunk": ("k384", MegaMoEConfig(tile_m=32, gemm2_tile_n=384), 31),
    "one_chunk_b2_n64": ("k384", MegaMoEConfig(tile_m=16, gemm2_tile_n=64, b2stage=True), 16),
}
WIRES = ("bf16", "fp8_blockwise_1x32")


def gemm2_of(case: str, wire: str) -> tuple[Gemm2, int]:
    shape, config, num_rows = GEMM2_CASES[case]
    return Gemm2(SymmetricLayout(GEMM2_SHAPES[shape], 2, CAPACITY, wire), config), num_rows


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("case", cases(GEMM2_CASES))
def test_gemm2_is_the_oracle(case: str, wire: str) -> None:
    """1e-3 with fp8: an ulp of fp32 moves a few codes. bf16 rounds once more than the expectation: 2^-9."""
    gemm, num_rows = gemm2_of(case, wire)
    assert run_gemm2(gemm, num_rows).error < (2e-3 if wire == "bf16" else 1e-3), f"{case}, seed {SEED}"


def test_gemm2_sends_to_any_of_256_slots() -> None:
    """A source code's slot takes all of its top eight bits, the sign's among them."""
    shape = MegaMoEShape(256, 128, 128, 256)
    gemm = Gemm2(SymmetricLayout(shape, 2, CAPACITY, "bf16"), MegaMoEConfig(tile_m=16, gemm2_tile_n=128))
    assert max(slot for _, _, slot in sources(16, 256)) == 255
    assert run_gemm2(gemm, 16, "slots").error < 2e-3, f"seed {SEED}"


# --------------------------------------------------------------------------------------- placements


def consecutive_fp8(step: int, half: int, group: object) -> object:
    """fp8 as fp4 lies: 32 consecutive bytes at 32 g."""
    return step * 8 + group * 2 + half


def exchanged_fp8(step: int, half: int, group: object) -> object:
    return step * 8 + (1 - half) * 4 + group


def scales_of_held_data(lane_group: object) -> object:
    """Scales by the data a lane holds first (K = 16 g ..), not by logical block: 0, 0, 1, 1."""
    return lane_group >> 1


def reversed_scales(lane_group: object) -> object:
    return 3 - lane_group


def fp4_as_fp8_lies(weights: ExpertWeights) -> ExpertWeights:
    """Each step's 64 bytes so that lane group g gets K = 16 g .. and 64 + 16 g .. instead of 32 g .."""

    def alter(nibbles: np.ndarray) -> np.ndarray:
        steps = nibbles.reshape(len(nibbles), -1, 2, 4, 8)  # [half][group][8 bytes]
        return np.ascontiguousarray(steps.transpose(0, 1, 3, 2, 4)).reshape(nibbles.shape)

    return replace(weights, w1=alter(weights.w1), w2=alter(weights.w2))


def nibbles_exchanged(weights: ExpertWeights) -> ExpertWeights:
    def alter(nibbles: np.ndarray) -> np.ndarray:
        return (nibbles >> 4) | (nibbles << 4)

    return replace(weights, w1=alter(weights.w1), w2=alter(weights.w2))


def weight_scales_reversed(weights: ExpertWeights) -> ExpertWeights:
    """The four scales of a step in the opposite order."""

    def alter(scales: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(scales.reshape(len(scales), -1, 4)[..., ::-1]).reshape(scales.shape)

    return replace(weights, w1_scales=alter(weights.w1_scales), w2_scales=alter(weights.w2_scales))


def weight_scales_of_other_steps(weights: ExpertWeights) -> ExpertWeights:
    """Steps of a scale dword in the opposite order: the wrong byte is selected."""

    def alter(scales: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(scales.reshape(len(scales), -1, 2, 4)[:, :, ::-1]).reshape(scales.shape)

    return replace(weights, w1_scales=alter(weights.w1_scales), w2_scales=alter(weights.w2_scales))


ALTERED_WEIGHTS = (
    fp4_as_fp8_lies,
    nibbles_exchanged,
    weight_scales_reversed,
    weight_scales_of_other_steps,
)
ALTERED_DEVICE = {
    "operand_a_piece": (consecutive_fp8, exchanged_fp8),
    "scale_group": (scales_of_held_data, reversed_scales),
}


def small_gemm1() -> Gemm1:
    shape = MegaMoEShape(4, 256, 256, 2)
    return Gemm1(shape, MegaMoEConfig(tile_m=16, gemm1_tile_n=256), "situv2")


def small_gemm2() -> Gemm2:
    layout = SymmetricLayout(MegaMoEShape(4, 256, 256, 2), 2, CAPACITY, "bf16")
    return Gemm2(layout, MegaMoEConfig(tile_m=16, gemm2_tile_n=128))


def test_the_small_tiles_are_right_unaltered() -> None:
    assert run_gemm1(small_gemm1(), 16).error < 1e-3
    assert run_gemm2(small_gemm2(), 16).error < 2e-3


@pytest.mark.parametrize("alter", ALTERED_WEIGHTS)
def test_an_altered_weight_placement_shows(alter: Callable[[ExpertWeights], ExpertWeights]) -> None:
    assert run_gemm1(small_gemm1(), 16, alter=alter).error > 0.05
    assert run_gemm2(small_gemm2(), 16, alter=alter).error > 0.05


@pytest.mark.parametrize(
    ("name", "altered"), [(name, altered) for name, several in ALTERED_DEVICE.items() for altered in several]
)
def test_an_altered_row_placement_shows(
    name: str, altered: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_gfx950, name, altered)
    assert run_gemm1(small_gemm1(), 16, name=altered.__name__).error > 0.05
    assert run_gemm2(small_gemm2(), 16, name=altered.__name__).error > 0.05
