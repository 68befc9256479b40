# SPDX-License-Identifier: Apache-2.0
"""Matrix operations of the emulator against an element-by-element placement from the published formulas.

The reference puts every element of A, B and C, all different, where CDNA4 ISA 7.1.4 and 7.1.5.1 say, and
multiplies with exact integers or float64; it shares no code with the emulator's gathers.
"""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernellib.emulator.arith import mfma
from kernellib.emulator.arith.mfma_layout import Shape

Array = np.ndarray[Any, Any]
SEED = 20261204
DTYPES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32, "f64": np.float64, "i8": np.int8,
    "fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2, "fp6": ml_dtypes.float6_e2m3fn,
    "bf6": ml_dtypes.float6_e3m2fn, "fp4": ml_dtypes.float4_e2m1fn,
}  # fmt: skip
DENSE = [
    ("f32", "32x32x1x2"), ("f32", "16x16x1x4"), ("f32", "4x4x1x16"), ("f32", "32x32x2"), ("f32", "16x16x4"),
    *((t, s) for t in ("f16", "bf16") for s in ("32x32x4x2", "16x16x4x4", "4x4x4x16", "32x32x8", "16x16x16",
                                                "16x16x32", "32x32x16")),
    *(("i8", s) for s in ("32x32x4x2", "16x16x4x4", "4x4x4x16", "32x32x16", "16x16x32", "16x16x64",
                          "32x32x32")),
    *((t, s) for t in ("fp8", "bf8") for s in ("16x16x32", "32x32x16")),
    ("f64", "16x16x4"), ("f64", "4x4x4x4"),
]  # fmt: skip


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def place_operand(matrix: Array, item: mfma.ItemType, split: bool) -> Array:
    """A[block, row, k] of raw integer codes to uint32 [R, 64]: item and lane of each element by formula."""
    blocks, rows, k_size = matrix.shape
    per_lane = k_size * rows * blocks // 64
    lanes = [0] * 64
    for block in range(blocks):
        for row in range(rows):
            for k in range(k_size):
                if split:  # two pieces of half the items, K halves apart
                    half, rest = divmod(k, k_size // 2)
                    group, index = divmod(rest, per_lane // 2)
                    index += half * (per_lane // 2)
                else:
                    group, index = divmod(k, per_lane)
                lane = row + rows * (block + blocks * group)
                lanes[lane] |= int(matrix[block, row, k]) << (item.bits * index)
    count = per_lane * item.bits // 32
    return np.array([[v >> (32 * r) & 0xFFFFFFFF for v in lanes] for r in range(count)], np.uint32)


def place_output(matrix: Array, shape: Shape) -> Array:
    """C[block, i, j] to items [num_outputs, 64]: the formulas of 7.1.4.2."""
    h = shape.group
    b_i = -(-64 // (shape.n * shape.m // h))
    m_i = 64 // b_i // shape.n
    g = shape.m // (h * m_i)
    items = np.zeros((shape.num_outputs, 64), matrix.dtype)
    for b in range(shape.blocks):
        for i in range(shape.m):
            for j in range(shape.n):
                item = i % h + h * (i // (h * m_i) + g * (b // b_i))
                items[item, j + shape.n * ((i // h) % m_i + m_i * (b % b_i))] = matrix[b, i, j]
    return items


def random_codes(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """(raw codes, exact values as float64): finite, small enough that float64 sums are exact."""
    if name in ("f32", "f64"):
        values = rng.integers(-(2**12), 2**12, shape) / 2.0**6
        dtype, bits = (np.float32, np.uint32) if name == "f32" else (np.float64, np.uint64)
        return values.astype(dtype).view(bits), values
    if name == "i8":
        values = rng.integers(-128, 128, shape)
        return values.astype(np.int8).view(np.uint8), values.astype(np.float64)
    if name in ("bf16", "f16"):
        values = rng.integers(-255, 256, shape) / 2.0**4
        raw = values.astype(DTYPES[name])
        return raw.view(np.uint16), raw.astype(np.float64)
    bits = {"fp8": 8, "bf8": 8, "fp6": 6, "bf6": 6, "fp4": 4}[name]
    codes = rng.integers(0, 1 << bits, shape).astype(np.uint8)
    values = codes.view(DTYPES[name]).astype(np.float64)
    bad = ~np.isfinite(values) | (np.abs(values) > 64) | ((values != 0) & (np.abs(values) < 2.0**-6))
    codes[bad] = 0
    return codes, codes.view(DTYPES[name]).astype(np.float64)


def parse(text: str, group: int = 4) -> Shape:
    m, n, k, *blocks = (int(v) for v in text.split("x"))
    return Shape(m, n, k, blocks[0] if blocks else 1, group)


@pytest.mark.parametrize(("name", "text"), DENSE, ids=[f"{t}-{s}" for t, s in DENSE])
def test_dense(rng: np.random.Generator, name: str, text: str) -> None:
    item: mfma.ItemType = getattr(mfma, name.upper())
    shape = parse(text, 1 if name == "f64" else 4)
    waves = []
    for _ in range(2):
        a_codes, a = random_codes(rng, name, (shape.blocks, shape.m, shape.k))
        b_codes, b = random_codes(rng, name, (shape.blocks, shape.n, shape.k))
        c = rng.integers(-1000, 1000, (shape.blocks, shape.m, shape.n)).astype(
            {"i8": np.int32, "f64": np.float64}.get(name, np.float32)
        )
        exact = c.astype(np.float64) + np.einsum("bik,bjk->bij", a, b)
        waves.append([place_operand(a_codes, item, False), place_operand(b_codes, item, False),
                      place_output(c, shape), place_output(exact.astype(c.dtype), shape)])  # fmt: skip
    a_regs, b_regs, c_items, want = (np.stack(v, axis=1) for v in zip(*waves, strict=True))
    got = mfma.mfma(a_regs, b_regs, c_items, shape, types=(item, item))
    np.testing.assert_array_equal(got, want)


FORMATS = ("fp8", "bf8", "fp6", "bf6", "fp4")


@pytest.mark.parametrize("text", ["16x16x128", "32x32x64"])
@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_f8f6f4_in_every_format_pair(rng: np.random.Generator, text: str, first: str, second: str) -> None:
    shape = parse(text)
    registers, values, scaled, scales = [], [], [], []
    for name, rows in ((first, shape.m), (second, shape.n)):
        codes, value = random_codes(rng, name, (1, rows, shape.k))
        item: mfma.ItemType = getattr(mfma, name.upper())
        registers.append(place_operand(codes, item, item.bits == 8)[:, None])
        exponents = rng.permutation(rows * shape.k // 32).reshape(rows, shape.k // 32) % 9 + 123
        lanes = np.array([[exponents[lane % rows, lane // rows] for lane in range(64)]], np.uint8)
        scales.append(lanes)
        values.append(value[0])
        scaled.append(value[0] * np.repeat(2.0 ** (exponents - 127.0), 32, axis=1))
    c = rng.integers(-50, 50, (1, shape.m, shape.n)).astype(np.float32)
    items = place_output(c, shape)[:, None]
    formats = (FORMATS.index(first), FORMATS.index(second))
    plain = mfma.mfma_f8f6f4(*registers, items, shape, formats=formats)
    np.testing.assert_array_equal(
        plain[:, 0], place_output((c + values[0] @ values[1].T).astype(np.float32), shape)
    )
    got = mfma.mfma_f8f6f4(*registers, items, shape, formats=formats, scales=(scales[0], scales[1]))
    np.testing.assert_array_equal(
        got[:, 0], place_output((c + scaled[0] @ scaled[1].T).astype(np.float32), shape)
    )


def test_nan_scale_reaches_its_rows_only(rng: np.random.Generator) -> None:
    shape = parse("16x16x128")
    a, b = (
        place_operand(random_codes(rng, "fp4", (1, 16, 128))[0], mfma.FP4, False)[:, None] for _ in range(2)
    )
    scale_a, scale_b = np.full((1, 64), 127, np.uint8), np.full((1, 64), 127, np.uint8)
    scale_a[0, 16 * 2 + 5] = 255  # row 5, K block 2
    c = np.zeros((4, 1, 64), np.float32)
    got = mfma.mfma_f8f6f4(a, b, c, shape, formats=(4, 4), scales=(scale_a, scale_b))
    want = place_output(np.where(np.arange(16)[None, :, None] == 5, np.nan, np.ones((1, 16, 16))), shape)
    np.testing.assert_array_equal(np.isnan(got[:, 0]), np.isnan(want))


def f32_pair(a_items: list[float], c_item: float, **controls: bool) -> np.float32:
    """D[0, 0] of a 32x32x2 f32 MFMA with A[0, :] = B[:, 0] = `a_items` and C[0, 0] = `c_item`."""
    shape = parse("32x32x2")
    a = np.zeros((1, 1, 64), np.float32)
    a[0, 0, 0], a[0, 0, 32] = a_items
    c = np.zeros((16, 1, 64), np.float32)
    c[0, 0, 0] = c_item
    got = mfma.mfma(a.view(np.uint32), a.view(np.uint32), c, shape, types=(mfma.F32, mfma.F32), **controls)
    return np.float32(got[0, 0, 0])


def test_sums_are_not_rounded_to_float32_on_the_way() -> None:
    """The documented choice: float64 sums, C last, one rounding to float32.

    1 + 2**-24 + 2**-40 is just above a tie of float32. It rounds up only when no partial sum was rounded to
    float32: a chain of float32 fused multiply-adds (C first, then K ascending) gives 1 twice.
    """
    assert f32_pair([2.0**-12, 2.0**-20], 1.0) == np.float32(1 + 2.0**-23)
    chain = np.float32(np.float32(1 + 2.0**-24) + 2.0**-40)
    assert chain == 1.0


def test_sums_are_as_wide_as_float64_and_no_wider() -> None:
    """The other edge of that choice: 2**-60 beside 1 is beyond float64, so the tie goes to even."""
    assert f32_pair([2.0**-12, 2.0**-30], 1.0) == 1.0


def test_overflow_and_denormals() -> None:
    shape = parse("32x32x2")
    c = np.zeros((16, 1, 64), np.float32)
    big = np.full((1, 1, 64), 2.0**100, np.float32).view(np.uint32)
    assert mfma.mfma(big, big, c, shape, types=(mfma.F32, mfma.F32))[0, 0, 0] == np.inf
    saturated = mfma.mfma(big, big, c, shape, types=(mfma.F32, mfma.F32), saturate=True)
    assert saturated[0, 0, 0] == np.finfo(np.float32).max
    tiny = np.full((1, 1, 64), 2.0**-130, np.float32).view(np.uint32)
    one = np.full((1, 1, 64), 1.0, np.float32).view(np.uint32)
    kept = mfma.mfma(tiny, one, c, shape, types=(mfma.F32, mfma.F32))
    assert kept[0, 0, 0] == np.float32(2.0**-129)
    flushed = mfma.mfma(tiny, one, c, shape, types=(mfma.F32, mfma.F32), flush_inputs=True)
    assert flushed[0, 0, 0] == 0


def test_broadcast_controls_read_the_named_lanes(rng: np.random.Generator) -> None:
    shape = parse("16x16x1x4")
    a, b = (rng.integers(-9, 9, (1, 1, 64)).astype(np.float32) for _ in range(2))
    c = np.zeros((16, 1, 64), np.float32)

    def run(first: Array, second: Array, **controls: int) -> Array:
        return mfma.mfma(
            first.view(np.uint32), second.view(np.uint32), c, shape, types=(mfma.F32, mfma.F32), **controls
        )

    lane = np.arange(64)
    for cbsz in (1, 2, 3, 4):
        size = 64 >> cbsz
        for abid in range(1 << cbsz):
            picked = np.ascontiguousarray(a[..., lane % size + size * abid])
            np.testing.assert_array_equal(run(a, b, cbsz=cbsz, abid=abid), run(picked, b))
    sources = [lane, lane % 32, lane % 32 + 32, (lane + 16) % 64] + [lane % 16 + 16 * q for q in range(4)]
    for blgp, source in enumerate(sources):
        np.testing.assert_array_equal(run(a, b, blgp=blgp), run(a, np.ascontiguousarray(b[..., source])))


SPARSE = [
    *((t, s) for t in ("f16", "bf16") for s in ("16x16x32", "32x32x16", "16x16x64", "32x32x32")),
    *((t, s) for t in ("i8", "fp8", "bf8") for s in ("16x16x64", "32x32x32", "16x16x128", "32x32x64")),
]


@pytest.mark.parametrize(("name", "text"), SPARSE, ids=[f"{t}-{s}" for t, s in SPARSE])
def test_sparse(rng: np.random.Generator, name: str, text: str) -> None:
    item: mfma.ItemType = getattr(mfma, name.upper())
    shape = parse(text)
    a_codes, a = random_codes(rng, name, (1, shape.m, shape.k))
    b_codes, b = random_codes(rng, name, (1, shape.n, shape.k))
    keep = np.stack([np.sort(rng.permutation(4)[:2]) for _ in range(shape.m * shape.k // 4)])
    keep = keep.reshape(shape.m, shape.k // 4, 2)
    mask = np.zeros((shape.m, shape.k // 4, 4), np.bool_)
    np.put_along_axis(mask, keep, True, axis=-1)
    mask = mask.reshape(shape.m, shape.k)
    packed = a_codes[0][mask].reshape(1, shape.m, shape.k // 2)
    split = item.pieces(shape, shape.n) == 2
    stored = place_operand(packed, item, False)  # only the dense operand comes in two pieces
    index_bits = shape.k // 2 * shape.m // 64 * 2  # per lane
    if index_bits >= 32:
        codes = keep.reshape(1, shape.m, shape.k // 2).astype(np.uint8)
        places = place_operand(codes, mfma.ItemType("2b", 2, item.decode), False)
    else:
        places = _small_index(keep, shape)
    sets = 32 // index_bits
    c = rng.integers(-100, 100, (1, shape.m, shape.n)).astype(np.int32 if name == "i8" else np.float32)
    want = place_output((c + (a[0] * mask) @ b[0].T).astype(c.dtype), shape)
    for abid in range(sets):
        index = (places[0] << np.uint32(abid * (32 // sets))).astype(np.uint32)[None]
        got = mfma.smfmac(
            stored[:, None],
            place_operand(b_codes, item, split)[:, None],
            place_output(c, shape)[:, None],
            index,
            shape,
            types=(item, item),
            abid=abid,
        )
        np.testing.assert_array_equal(got[:, 0], want)


def _small_index(keep: Array, shape: Shape) -> Array:
    """Index registers where a lane has fewer than 32 bits of indices."""
    per_lane = shape.k // 2 * shape.m // 64
    lanes = np.zeros((1, 64), np.uint32)
    for row in range(shape.m):
        for position, place in enumerate(keep.reshape(shape.m, -1)[row].tolist()):
            group, item = divmod(position, per_lane)
            lanes[0, row + shape.m * group] |= np.uint32(place << (2 * item))
    return lanes


def test_f64_negation_by_blgp() -> None:
    shape = parse("16x16x4", group=1)
    one = struct.unpack("2I", struct.pack("d", 3.0))
    a = np.array([np.full((1, 64), w) for w in one], np.uint32)
    c = np.full((4, 1, 64), 1.0)
    for blgp in range(8):
        sign_a, sign_b, sign_c = (-1 if blgp >> bit & 1 else 1 for bit in range(3))
        got = mfma.mfma(a, a, c, shape, types=(mfma.F64, mfma.F64), blgp=blgp)
        assert np.all(got == 4 * 9 * sign_a * sign_b + sign_c)
