# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic of the emulator against Python integers, worked out lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernellib.emulator.arith import dot, integer
from kernellib.emulator.arith.transpose import transpose_tile

Array = np.ndarray[Any, Any]
SEED, M32, M64 = 20261203, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def words(rng: np.random.Generator, count: int = 400) -> Array:
    """uint32: uniform, small, and patterns at the edges."""
    edges = np.uint32(
        [0, 1, 2, 31, 32, 0x7FFFFFFF, 0x80000000, 0x80000001, M32, 0xFFFFFF, 0x800000, 0x00FF00FF]
    )
    uniform = rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)
    return np.concatenate([uniform, uniform & np.uint32(0x3F), rng.choice(edges, count)])


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def field(value: int, offset: int, width: int, bits: int) -> int:
    return (value >> offset) & ((1 << width) - 1)


BINARY: dict[str, tuple[Callable[[Array, Array], Array], Callable[[int, int], int]]] = {
    "mul_u24": (integer.mul_u24, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    "mul_i24": (integer.mul_i24, lambda a, b: signed(a, 24) * signed(b, 24)),
    "mul_hi_u24": (integer.mul_hi_u24, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32),
    "mul_hi_i24": (integer.mul_hi_i24, lambda a, b: signed(a, 24) * signed(b, 24) >> 32),
    "mul_hi_u32": (integer.mul_hi_u32, lambda a, b: a * b >> 32),
    "mul_hi_i32": (
        lambda a, b: integer.mul_hi_i32(a.view(np.int32), b.view(np.int32)),
        lambda a, b: signed(a, 32) * signed(b, 32) >> 32,
    ),
    "bfm": (integer.bfm_b32, lambda w, o: ((1 << (w & 31)) - 1) << (o & 31)),
    "bcnt": (integer.bcnt, lambda a, b: bin(a).count("1") + b),
    "absdiff": (integer.absdiff_u, lambda a, b: abs(a - b)),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary(rng: np.random.Generator, name: str) -> None:
    function, reference = BINARY[name]
    a, b = words(rng), rng.permutation(words(rng))
    got = function(a, b).view(np.uint32).tolist()
    assert got == [reference(x, y) & M32 for x, y in zip(a.tolist(), b.tolist(), strict=True)]


def perm(high: int, low: int, selector: int) -> int:
    data = (high << 32 | low).to_bytes(8, "little")
    result = []
    for sel in selector.to_bytes(4, "little"):
        if sel >= 13:
            result.append(0xFF)
        elif sel == 12:
            result.append(0)
        elif sel >= 8:
            result.append(0xFF if data[2 * (sel - 8) + 1] & 0x80 else 0)
        else:
            result.append(data[sel])
    return int.from_bytes(bytes(result), "little")


TERNARY: dict[str, tuple[Callable[..., Array], Callable[[int, int, int], int]]] = {
    "bfe_u32": (integer.bfe_u32, lambda a, o, w: field(a, o & 31, w & 31, 32)),
    "bfe_i32": (
        lambda a, o, w: integer.bfe_i32(a.view(np.int32), o, w),
        lambda a, o, w: signed(field(signed(a, 32), o & 31, w & 31, 32), w & 31) if w & 31 else 0,
    ),
    "bfi": (integer.bfi_b32, lambda m, a, b: (m & a) | (~m & b)),
    "perm": (integer.perm_b32, perm),
    "alignbit": (integer.alignbit, lambda a, b, s: (a << 32 | b) >> (s & 31)),
    "alignbyte": (integer.alignbyte, lambda a, b, s: (a << 32 | b) >> 8 * (s & 3)),
    "sad_u8": (
        integer.sad_u8,
        lambda a, b, c: (
            c + sum(abs(x - y) for x, y in zip(a.to_bytes(4, "big"), b.to_bytes(4, "big"), strict=True))
        ),
    ),
    "msad_u8": (
        lambda a, b, c: integer.sad_u8(a, b, c, masked=True),
        lambda a, b, c: c
        + sum(abs(x - y) for x, y in zip(a.to_bytes(4, "big"), b.to_bytes(4, "big"), strict=True) if y),
    ),
    "sad_u16": (
        integer.sad_u16, lambda a, b, c: c + abs((a >> 16) - (b >> 16)) + abs((a & 0xFFFF) - (b & 0xFFFF))
    ),
    "lerp_u8": (
        integer.lerp_u8,
        lambda a, b, c: sum(
            ((field(a, s, 8, 32) + field(b, s, 8, 32) + field(c, s, 1, 32)) >> 1) << s for s in (0, 8, 16, 24)
        ),
    ),
    "median3": (integer.median3, lambda a, b, c: sorted((a, b, c))[1]),
}  # fmt: skip


@pytest.mark.parametrize("name", TERNARY)
def test_ternary(rng: np.random.Generator, name: str) -> None:
    function, reference = TERNARY[name]
    a, b, c = words(rng), rng.permutation(words(rng)), rng.permutation(words(rng))
    if name == "perm":
        c = rng.integers(0, 16, (len(a), 4)).astype(np.uint8).view(np.uint32)[:, 0]
    got = function(a, b, c).view(np.uint32).tolist()
    assert got == [reference(*v) & M32 for v in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]


def test_bitop3_is_a_truth_table(rng: np.random.Generator) -> None:
    a, b, c = (rng.integers(0, 2**32, 3, dtype=np.uint64).astype(np.uint32) for _ in range(3))
    for table in range(256):
        got = integer.bitop3(a, b, c, table)
        for lane in range(3):
            bits = [
                table >> (4 * (int(a[lane]) >> i & 1) + 2 * (int(b[lane]) >> i & 1) + (int(c[lane]) >> i & 1))
                & 1
                for i in range(32)
            ]
            assert int(got[lane]) == sum(bit << i for i, bit in enumerate(bits))


def test_wide_multiply_add_and_its_carry(rng: np.random.Generator) -> None:
    a, b = words(rng), rng.permutation(words(rng))
    c = (rng.permutation(words(rng)).astype(np.uint64) << np.uint64(32)) | rng.permutation(words(rng))
    total, carry = integer.mad_u64_u32(a, b, c)
    exact = [x * y + z for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert total.tolist() == [v & M64 for v in exact]
    assert carry.tolist() == [v >> 64 == 1 for v in exact]
    total, top = integer.mad_i64_i32(a.view(np.int32), b.view(np.int32), c.view(np.int64))
    exact = [
        signed(x, 32) * signed(y, 32) + signed(z, 64)
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    assert total.view(np.uint64).tolist() == [v & M64 for v in exact]
    assert top.tolist() == [bool(v >> 64 & 1) for v in exact]


def test_bit_search_and_reversal(rng: np.random.Generator) -> None:
    a = words(rng)
    binary = [f"{v:032b}" for v in a.tolist()]
    assert integer.find_first_high_u32(a).tolist() == [t.find("1") & M32 for t in binary]
    assert integer.find_first_low(a).tolist() == [t[::-1].find("1") & M32 for t in binary]
    leading = [next((i for i in range(1, 32) if t[i] != t[0]), -1) & M32 for t in binary]
    assert integer.find_first_high_i32(a.view(np.int32)).tolist() == leading
    assert integer.reverse_bits(a).tolist() == [int(t[::-1], 2) for t in binary]
    wide = a.astype(np.uint64) << np.uint64(7)
    assert integer.reverse_bits(wide).tolist() == [int(f"{v:064b}"[::-1], 2) for v in wide.tolist()]
    assert integer.find_first_low(wide).tolist() == [f"{v:064b}"[::-1].find("1") & M32 for v in wide.tolist()]


def test_mbcnt_gives_the_lane_number() -> None:
    ones, zero = np.full((1, 1), M32, np.uint32), np.zeros((1, 1), np.uint32)
    low = integer.mbcnt(ones, zero, high=False)
    assert integer.mbcnt(ones, low, high=True)[0].tolist() == list(range(64))
    assert integer.mbcnt(np.uint32([[0x80000001]]), zero, high=True)[0].tolist() == [0] * 33 + [1] * 31


@pytest.mark.parametrize(
    ("bits", "signed_elements"), [(16, True), (16, False), (8, True), (8, False), (4, True), (4, False)]
)
def test_integer_dot(rng: np.random.Generator, bits: int, signed_elements: bool) -> None:
    a, b, c = words(rng), rng.permutation(words(rng)), rng.permutation(words(rng))

    def exact(x: int, y: int, z: int) -> int:
        pick = (
            (lambda v, s: signed(v >> s, bits)) if signed_elements else (lambda v, s: field(v, s, bits, 32))
        )
        return (signed(z, 32) if signed_elements else z) + sum(
            pick(x, s) * pick(y, s) for s in range(0, 32, bits)
        )

    low, high = (-(2**31), 2**31 - 1) if signed_elements else (0, M32)
    lanes = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    wrapped = dot.integer_dot(a, b, c, bits=bits, signed=signed_elements)
    assert wrapped.tolist() == [exact(*v) & M32 for v in lanes]
    clamped = dot.integer_dot(a, b, c, bits=bits, signed=signed_elements, clamp=True)
    assert clamped.tolist() == [min(max(exact(*v), low), high) & M32 for v in lanes]


def test_dot2_flushes_denormals_and_adds_in_order() -> None:
    a, b = np.float32([[2.0**24], [1.0]]), np.float32([[1.0], [1.0]])
    c = np.float32([-(2.0**24)])
    assert dot.dot2_f32(a, b, c)[0] == 0.0  # (2**24 + 1) rounds to 2**24 first
    assert dot.dot2c_f32(a, b, c)[0] == 1.0  # -2**24 + 2**24 first
    tiny = np.float32(2.0**-130)
    assert dot.dot2_f32(np.full((2, 1), tiny), b, np.zeros(1, np.float32))[0] == 0.0


@pytest.mark.parametrize(("bits", "registers"), [(16, 2), (8, 2), (4, 2), (6, 3)])
def test_transposing_read_gives_each_lane_a_column(
    rng: np.random.Generator, bits: int, registers: int
) -> None:
    count = 32 * registers // bits
    tiles = rng.integers(0, 1 << bits, (4, count, 16))  # per 16 lanes: rows of K, 16 columns
    lanes_per_row = 16 // count
    words_in = np.zeros((registers, 1, 64), np.uint32)
    for lane in range(64):
        group, within = divmod(lane, 16)
        row, part = divmod(within, lanes_per_row)
        elements = tiles[group, row, part * count : (part + 1) * count]
        value = sum(int(e) << (bits * i) for i, e in enumerate(elements))
        words_in[:, 0, lane] = [value >> (32 * r) & M32 for r in range(registers)]
    words_out = transpose_tile(words_in, bits)
    for lane in range(64):
        value = sum(int(words_out[r, 0, lane]) << (32 * r) for r in range(registers))
        group, column = divmod(lane, 16)
        assert [field(value, bits * i, bits, 96) for i in range(count)] == tiles[group, :, column].tolist()
