# SPDX-License-Identifier: Apache-2.0
"""Layouts: source codes, scale order, packed matrices, symmetric buffers; weights that name their layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernellib.numerics import mx
from kernellib.ops.mega_moe.config import KIMI_K3, MegaMoEConfigError, MegaMoEShape
from kernellib.ops.mega_moe.layout import (
    GATE_UP_INTERLEAVED,
    LayoutError,
    PackedMatrixLayout,
    ScaleOrder,
    SymmetricLayout,
    decode_source,
    source_code,
)
from kernellib.ops.mega_moe.weights import (
    pack_experts,
    quantize_expert,
    random_experts,
    separate_gate_up,
    unpack_expert,
)

SHAPE = MegaMoEShape(16, 256, 128, 4)
SEED = 5


# ------------------------------------------------------------------------------------- source codes
def test_source_codes_round_trip_at_the_limits() -> None:
    capacity = 1 << 21  # 8 ranks fill all 24 bits
    for rank, token, slot in [(0, 0, 0), (7, capacity - 1, 255), (3, 12345, 17)]:
        code = source_code(rank, token, slot, capacity)
        assert 0 <= code < 1 << 32
        assert decode_source(code, capacity) == (rank, token, slot)


@pytest.mark.parametrize(
    "parts", [(8, 0, 0), (0, 1 << 21, 0), (0, 0, 256), (-1, 0, 0), (0, -1, 0), (0, 0, -1)]
)
def test_source_codes_out_of_range_are_refused(parts: tuple[int, int, int]) -> None:
    with pytest.raises(LayoutError):
        source_code(*parts, 1 << 21)


# -------------------------------------------------------------------------------------- scale order
@pytest.mark.parametrize("num_elements", [128, 256, 384, 512, 3072, 3584])
def test_scale_order_serves_four_steps_with_one_dword(num_elements: int) -> None:
    order = ScaleOrder(num_elements)
    scales = np.arange(order.num_blocks, dtype=np.uint8)[None]
    stored = order.to_device(scales)[0]
    assert len(stored) == order.row_bytes
    assert order.row_bytes % 16 == 0
    for step in range(num_elements // 128):
        for group in range(4):
            byte = stored[16 * (step // 4) + 4 * group + step % 4]
            assert byte == 4 * step + group  # the block of K = 128 step + 32 group
    assert np.array_equal(order.to_logical(stored[None]), scales)


def test_scale_order_refuses_wrong_sizes() -> None:
    with pytest.raises(LayoutError, match="num_elements"):
        ScaleOrder(96)
    with pytest.raises(LayoutError, match="wanted 8"):
        ScaleOrder(256).to_device(np.zeros((1, 7), np.uint8))
    with pytest.raises(LayoutError, match="wanted 16"):
        ScaleOrder(256).to_logical(np.zeros((1, 8), np.uint8))


# ---------------------------------------------------------------------------------- packed matrices
@pytest.mark.parametrize(("rows", "columns"), [(16, 128), (32, 256), (64, 512), (32, 1024)])
def test_packed_matrix_has_the_operands_own_placement(rows: int, columns: int) -> None:
    layout = PackedMatrixLayout(rows, columns)
    rng = np.random.default_rng(SEED)
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    scales = rng.integers(0, 255, (rows, columns // 32), dtype=np.uint8)
    elements, packed_scales = layout.pack(mx.pack_nibbles(codes), scales)
    assert (elements.size, packed_scales.size) == (layout.element_bytes, layout.scale_bytes)
    by_lane = elements.reshape(rows // 16, columns // 128, 64, 16)
    scale_by_lane = packed_scales.reshape(rows // 16, -1, 64, 4)
    for tile, step, lane in [(0, 0, 0), (rows // 16 - 1, columns // 128 - 1, 63), (0, 0, 17), (0, 0, 34)]:
        row, first = 16 * tile + lane % 16, 128 * step + 32 * (lane // 16)
        wanted = codes[row, first : first + 32]
        assert np.array_equal(mx.unpack_nibbles(by_lane[tile, step, lane]), wanted)
        assert scale_by_lane[tile, step // 4, lane, step % 4] == scales[row, first // 32]
    back = layout.unpack(elements, packed_scales)
    assert np.array_equal(back[0], mx.pack_nibbles(codes))
    assert np.array_equal(back[1], scales)


def test_packed_matrix_refuses_wrong_shapes() -> None:
    with pytest.raises(LayoutError, match="multiples"):
        PackedMatrixLayout(20, 128)
    with pytest.raises(LayoutError, match="nibbles"):
        PackedMatrixLayout(16, 128).pack(np.zeros((16, 128), np.uint8), np.zeros((16, 4), np.uint8))


# -------------------------------------------------------------------------------- symmetric buffers
@pytest.mark.parametrize("capacity", [1, 16, 512])
@pytest.mark.parametrize("wire", ["bf16", "fp8_blockwise_1x32"])
def test_buffers_do_not_overlap_and_views_address_them(capacity: int, wire: str) -> None:
    layout = SymmetricLayout(SHAPE, 8, capacity, wire)  # type: ignore[arg-type]
    end = 0
    for buffer in layout.buffers.values():
        assert buffer.offset >= end
        assert buffer.offset % 256 == 0
        end = buffer.offset + buffer.num_bytes
    assert end <= layout.num_bytes
    region = np.zeros(layout.num_bytes, np.uint8)
    for name, index in [
        ("row_base", (1, 3, 1)),
        ("tile_meta", (1, 2, 2)),
        ("epoch", (0,)),
        ("wire", (0, 3, 7)),
    ]:
        view = layout.buffers[name].view(region)
        where = layout.offset(name, *index)
        view[index] = 7
        assert region[where] == 7
        region[where] = 0
        assert not view.any()
    assert layout.offset("row_base", 1) == layout.offset("row_base") + layout.stride("row_base")


def test_fault_12_capacity_must_be_a_power_of_two() -> None:
    for capacity in (0, 3, 48, -16, 16.0):
        with pytest.raises(MegaMoEConfigError, match="capacity"):
            SymmetricLayout(SHAPE, 8, capacity, "bf16")  # type: ignore[arg-type]
    with pytest.raises(MegaMoEConfigError, match=r"2\^24"):
        SymmetricLayout(SHAPE, 8, 1 << 22, "bf16")


def test_fault_21_offsets_past_4_gib_are_exact() -> None:
    layout = SymmetricLayout(KIMI_K3, 8, 32768, "bf16")
    rows = layout.buffers["rows"]
    assert rows.num_bytes > 1 << 33
    last = rows.shape[0] - 1
    assert layout.offset("rows", last, 3583) == rows.offset + rows.num_bytes - 1


def test_room_for_the_worst_routing() -> None:
    """2 experts a rank, top 4: a token may name one expert in all its slots."""
    layout = SymmetricLayout(SHAPE, 8, 16, "bf16")
    worst = 8 * 16 * 4
    assert layout.max_received_rows == worst
    for tile_m in (16, 32, 64, 128):
        rng = np.random.default_rng(SEED)
        for first in (0, 1, worst, *rng.integers(0, worst + 1, 50)):
            rows = np.array([first, worst - first])
            tiles = -(-rows // tile_m)
            assert tiles.sum() <= layout.max_tiles(tile_m)
            assert tiles.sum() * tile_m <= layout.max_rows


# ------------------------------------------------------------------------------------------ weights
def test_weights_survive_packing_the_last_expert_included() -> None:
    experts = random_experts(SHAPE, SEED)
    packed = pack_experts(SHAPE, (experts(e) for e in range(3)))
    for index in range(3):
        back, wanted = unpack_expert(packed, index), experts(index)
        for name in ("w1", "w1_scales", "w2", "w2_scales"):
            assert np.array_equal(getattr(back, name), getattr(wanted, name)), name


def test_fault_1_the_other_gate_up_layout_is_refused() -> None:
    experts = random_experts(SHAPE, SEED)
    packed = pack_experts(SHAPE, (experts(e) for e in range(2)))
    packed.require(SHAPE, 2)
    with pytest.raises(LayoutError, match="gate_up got gate_up_interleaved"):
        replace(packed, gate_up=GATE_UP_INTERLEAVED).require(SHAPE, 2)
    with pytest.raises(LayoutError, match="packing"):
        replace(packed, packing="b32x64").require(SHAPE, 2)
    with pytest.raises(LayoutError, match="shape"):
        packed.require(replace(SHAPE, top_k=3), 2)
    with pytest.raises(LayoutError, match="num_local_experts"):
        packed.require(SHAPE, 3)
    with pytest.raises(LayoutError, match="w2_scales"):
        replace(packed, w2_scales=packed.w2_scales[:-1]).require(SHAPE, 2)
    with pytest.raises(LayoutError, match="w1 got"):  # fault 24: a float dtype is not raw bytes
        replace(packed, w1=packed.w1.view(torch.float8_e4m3fnuz)).require(SHAPE, 2)


def test_interleaved_rows_can_be_separated() -> None:
    rows = np.arange(8, dtype=np.uint8)[:, None]
    assert separate_gate_up(rows, GATE_UP_INTERLEAVED)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert separate_gate_up(rows, "gate_up_separated") is rows
    with pytest.raises(LayoutError, match="plain"):
        separate_gate_up(rows, "plain")


def test_quantized_experts_are_near_their_matrices() -> None:
    rng = np.random.default_rng(SEED)
    gate, up = rng.standard_normal((2, 128, 256)).astype(np.float32)
    down = rng.standard_normal((256, 128)).astype(np.float32)
    w1, w2 = quantize_expert(gate, up, down).dequantized()
    for got, wanted in ((w1[:128], gate), (w1[128:], up), (w2, down)):
        assert 0.05 < np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < 0.2
