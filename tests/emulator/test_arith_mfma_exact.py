# SPDX-License-Identifier: Apache-2.0
"""Scaled products added in any order where that cannot matter: same bits as block by block, same values as
exact integers, and never used where it could matter.  Operands kept decoded follow their registers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kernellib.emulator.arith import mfma, mfma_exact
from kernellib.emulator.arith import mfma_layout as layout
from kernellib.emulator.arith.mfma_layout import Shape

Array = np.ndarray[Any, Any]
SHAPES = {"16x16x128": Shape(16, 16, 128), "32x32x64": Shape(32, 32, 64)}
FORMATS = {"fp8": 0, "bf8": 1, "fp4": 4}
REGISTERS = {"fp8": 8, "bf8": 8, "fp4": 4}
# of the formats, from their definitions: every value a multiple of 2**low and below 2**high
LOW, HIGH = {"fp8": -9, "bf8": -16, "fp4": -1}, {"fp8": 9, "bf8": 16, "fp4": 3}
# bits whose absence makes random codes finite, and codes that are not
FINITE = {"fp8": 0xF7F7F7F7, "bf8": 0xFBFBFBFB, "fp4": 0xFFFFFFFF}
SPECIAL = {"fp8": 0x7F, "bf8": 0x7C, "fp4": 0x7}
NUM_WAVES = 37  # more than two slices, and a rest


def _case(seed: int, names: tuple[str, str], spread: int, special: bool = True) -> tuple[Any, ...]:
    """Random registers, C and scales whose exponents differ by at most `spread`; `special`: one NaN (fp8) or
    infinity (bf8) in each operand, in waves of their own."""
    rng = np.random.default_rng(seed)
    operands = []
    for place, name in enumerate(names):
        registers = rng.integers(0, 1 << 32, (REGISTERS[name], NUM_WAVES, 64), dtype=np.uint32)
        registers &= np.uint32(FINITE[name])
        if special:
            registers[1, 5 + place, 40] = SPECIAL[name]
        operands.append(registers)
    c = rng.standard_normal((16, NUM_WAVES, 64)).astype(np.float32)
    scales = tuple((120 + rng.integers(0, spread + 1, (NUM_WAVES, 64))).astype(np.uint8) for _ in range(2))
    for scale in scales:
        scale[0, 0], scale[0, 1] = 120, 120 + spread
    return *operands, c, scales


def _run(case: tuple[Any, ...], shape: Shape, names: tuple[str, str], **options: Any) -> Array:
    a, b, c, scales = case
    return mfma.mfma_f8f6f4(
        a, b, c[: shape.num_outputs], shape, formats=(FORMATS[names[0]], FORMATS[names[1]]),
        scales=options.pop("scales", scales), **options,
    )  # fmt: skip


def _assert_same(got: Array, wanted: Array) -> None:
    """Same bits, but for what a NaN carries."""
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("right", FORMATS)
@pytest.mark.parametrize("left", FORMATS)
@pytest.mark.parametrize("scaled", [True, False])
def test_same_bits_as_block_by_block(
    monkeypatch: pytest.MonkeyPatch, left: str, right: str, shape: str, scaled: bool
) -> None:
    """All codes, NaN and infinity included, at scales near each other."""
    names = left, right
    case = _case(11, names, 3)
    options = {} if scaled else {"scales": None}
    taken: list[bool] = []
    real = mfma_exact.exact

    def noting(*args: Any) -> bool:
        taken.append(real(*args))
        return taken[-1]

    monkeypatch.setattr(mfma_exact, "exact", noting)
    got = _run(case, SHAPES[shape], names, **options)
    monkeypatch.setattr(mfma_exact, "exact", lambda *args: False)
    _assert_same(got, _run(case, SHAPES[shape], names, **options))
    bits = sum(HIGH[name] - LOW[name] for name in names) + (SHAPES[shape].k.bit_length() - 1)
    assert taken == [bits + (6 if scaled else 0) <= 53]


@pytest.mark.parametrize("spread", range(18, 32))
def test_no_shorter_way_where_order_could_matter(monkeypatch: pytest.MonkeyPatch, spread: int) -> None:
    """Whatever the spread of the scales: the bits of block by block; from some spread on, that way itself."""
    names, shape = ("fp8", "fp4"), SHAPES["16x16x128"]
    case = _case(spread, names, spread)
    a, b, _, scales = case
    sides = [
        mfma_exact.prepare(registers, name, 16, scale, False)
        for registers, name, scale in zip((a, b), names, scales, strict=True)
    ]
    assert sides[0] is not None
    assert sides[1] is not None
    # 2**-9 and 2**-1 are the least units, 2**9 and 2**3 above the values, 2**7 products
    wanted = 9 + 3 + 7 + 9 + 1 + 2 * spread <= 53
    assert mfma_exact.exact(sides[0], sides[1], shape) is wanted
    got = _run(case, shape, names)
    monkeypatch.setattr(mfma_exact, "exact", lambda *args: False)
    _assert_same(got, _run(case, shape, names))


def test_sums_are_the_exact_integers() -> None:
    """fp8 times fp4 in units of 2**-10 of the least scales, added by Python's integers."""
    names, shape, spread = ("fp8", "fp4"), SHAPES["16x16x128"], 12
    a, b, c, scales = _case(5, names, spread, special=False)
    c[...] = 0
    got = _run((a, b, c, scales), shape, names)
    wave = 3
    rows = []
    for registers, item, scale in ((a, mfma.FP8, scales[0]), (b, mfma.FP4, scales[1])):
        assert item.decode is not None
        values = item.decode(layout.operand_to_rows(registers, 16, 1, item.pieces(shape, 16)))[wave, 0]
        exponents = scale[wave].reshape(4, 16).T.repeat(32, 1).astype(int) - 120
        unit = 512 if item is mfma.FP8 else 2
        rows.append([
            [int(v * unit) << int(e) for v, e in zip(line, powers, strict=True)]
            for line, powers in zip(values, exponents, strict=True)
        ])  # fmt: skip
    sums = np.array(
        [[sum(x * y for x, y in zip(r, s, strict=True)) for s in rows[1]] for r in rows[0]], object
    )
    wanted = (sums.astype(np.float64) * 2.0 ** (-10 - 14)).astype(np.float32)
    np.testing.assert_array_equal(layout.output_to_matrix(got, shape)[wave, 0], wanted)


def test_nan_scale_takes_the_general_way() -> None:
    """One scale of 255 makes its row NaN, and no other."""
    names, shape = ("fp4", "fp4"), SHAPES["16x16x128"]
    a, b, c, scales = _case(8, names, 2)
    scales[0][4, 17] = 255  # row 1, second block
    got = layout.output_to_matrix(_run((a, b, c, scales), shape, names), shape)
    wanted = np.zeros(got.shape, bool)
    wanted[4, 0, 1] = True
    np.testing.assert_array_equal(np.isnan(got), wanted)


def test_kept_operands_follow_registers_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers and scales are changed in place, at places that the key of the store does not see."""
    names, shape = ("fp8", "fp4"), SHAPES["16x16x128"]
    case = _case(21, names, 3)
    a, b, _, scales = case
    changes: list[tuple[Array, tuple[int, ...], int]] = [
        (a, (0, 0, 0), 0),
        (a, (7, NUM_WAVES - 1, 63), 0x01000000),
        (b, (3, 9, 0), 1),
        (scales[0], (30, 5), 1),
        (scales[1], (0, 63), 1),
    ]
    results = []
    for array, place, bits in changes:
        array[place] ^= array.dtype.type(bits)
        results.append(_run(case, shape, names, reused=(True, True)))
        with monkeypatch.context() as patch:
            patch.setattr(mfma_exact, "exact", lambda *args: False)
            _assert_same(results[-1], _run(case, shape, names))
    for before, after in itertools.pairwise(results):
        assert (before != after)[~np.isnan(before)].any()


def test_result_may_take_the_place_of_c() -> None:
    """`out` may be C itself, for every way of adding up."""
    shape = SHAPES["16x16x128"]
    for names in (("fp8", "fp4"), ("bf8", "bf8")):
        a, b, c, scales = _case(2, names, 1)
        wanted = _run((a, b, c, scales), shape, names)
        out = c[: shape.num_outputs]
        assert _run((a, b, c, scales), shape, names, out=out) is out
        _assert_same(out, wanted)
