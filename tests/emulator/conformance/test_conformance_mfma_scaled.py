# SPDX-License-Identifier: Apache-2.0
"""F8F6F4 matrix instructions: every format pair, with and without block scales.

Sources: AMD "CDNA4 Instruction Set Architecture Reference Guide", sections 7.1.5 (formats by cbsz and blgp;
register layouts of FP4, FP6 and FP8 operands) and 7.2 (E8M0 scales, one per row and 32 consecutive K, byte
chosen by {op_sel_hi, op_sel}, applied to the dot product of a block before accumulation, 0xFF is NaN);
composable_kernel's MFMA unit test for gfx950 (tables of the same layouts); AMD's article "Matrix Core
Programming on AMD CDNA3 and CDNA4".

What would hide a wrong layout, and how these tests do not: two operands with the same wrong K order cancel,
so all 25 pairs run and 8-bit operands meet 4- and 6-bit ones; equal scales hide a wrong block, so all 64
scales differ; a large scale hides the other blocks, so each block is also tested alone (the others are zero)
with its exact result. `test_wrong_layouts_differ` computes, from the same registers, what the contiguous
8-bit layout and scales that follow the registers instead of the logical K blocks would give, and shows that
it is something else.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import conformance_matrix as matrix
import conformance_reference as ref
import numpy as np
import pytest
from conformance_harness import EXEC_WITH_HOLES, Case, Report, case_id, implemented, rng_for, run
from conformance_matrix import F8F6F4, LANES, Array, Shape
from test_conformance_mfma import place, read, result_bits

SHAPES = {"16x16x128": Shape(16, 16, 128, 1, "f32"), "32x32x64": Shape(32, 32, 64, 1, "f32")}
PAIRS = [(a, b) for a in range(5) for b in range(5)]
CASES: list[Case] = [
    Case(
        f"v_mfma_{scale}f32_{shape}_f8f6f4",
        ("25 format pairs", "op_sel bytes") if scale else ("25 format pairs",),
        "layouts of both operands" + (", scales by logical K block, NaN scale" if scale else ""),
    )
    for scale in ("", "scale_")
    for shape in SHAPES
]
# Bytes that op_sel picks for A and B in the lines of a scaled test: every byte of each, never the same pair.
SELECTIONS = ((0, 0), (1, 2), (2, 3), (3, 1))


@dataclass
class Data:
    """Operands of several waves: wave 0 is dense, wave 1 + n has only K block n."""

    a: list[Array]
    b: list[Array]
    scales_a: Array  # [byte, rows, blocks] of E8M0
    scales_b: Array


@functools.cache
def make(shape: Shape, cbsz: int, blgp: int) -> Data:
    """Seeded operands with exact products; scales all different, near one for the dense wave's sake in byte
    0.
    """
    rng = rng_for(shape, cbsz, blgp)
    blocks = shape.k // 32
    matrices: list[list[Array]] = [[], []]
    for side, fmt in enumerate((F8F6F4[cbsz], F8F6F4[blgp])):
        choices = matrix.exact_encodings(fmt, 0, 7, 0.125 if fmt.bits == 8 else 0.0625)
        dense = np.array([rng.choice(choices) for _ in range(shape.m * shape.k)], dtype=object).reshape(
            shape.m, shape.k
        )
        matrices[side].append(dense)
        for block in range(blocks):
            one = np.zeros_like(dense)
            one[:, 32 * block : 32 * block + 32] = dense[:, 32 * block : 32 * block + 32]
            matrices[side].append(one)
    scales = []
    for side in (0, 1):
        bytes_of_lane = []
        for byte in range(4):
            order = list(range(64))
            rng.shuffle(order)
            bytes_of_lane.append(np.array(order).reshape(shape.m, blocks) + 95 + 2 * byte + side)
        scales.append(np.stack(bytes_of_lane))
    return Data(matrices[0], matrices[1], scales[0], scales[1])


def expected(
    shape: Shape,
    a: Array,
    b: Array,
    fmts: tuple[ref.Format, ref.Format],
    scale_a: Array | None,
    scale_b: Array | None,
) -> Array:
    """D = sum over blocks of (A_block B_block) * 2^(sa - 127) * 2^(sb - 127), in float64 (exact here)."""
    av, bv = matrix.values_of(fmts[0], a), matrix.values_of(fmts[1], b)
    total = np.zeros((shape.m, shape.n))
    for block in range(shape.k // 32):
        part = av[:, 32 * block : 32 * block + 32] @ bv[:, 32 * block : 32 * block + 32].T
        if scale_a is not None and scale_b is not None:
            part = part * np.exp2(scale_a[:, block, None] + scale_b[None, :, block] - 254.0)
        total += part
    return total[None]


def stack_waves(shape: Shape, fmt: ref.Format, matrices: list[Array]) -> dict[int, Array]:
    """Registers [waves, 64] by index."""
    packed = [matrix.pack_f8f6f4(shape, fmt, m) for m in matrices]
    return {i: np.stack([p[i] for p in packed]) for i in range(packed[0].shape[0])}


def pack_scale_bytes(shape: Shape, scales: Array) -> Array:
    """Four bytes per lane."""
    return sum(
        (matrix.pack_scales(shape, scales[byte]) << np.uint32(8 * byte) for byte in range(4)),
        np.zeros(LANES, np.uint32),
    )


def modifiers(cbsz: int, blgp: int) -> str:
    """Zero is not printed."""
    return (f" cbsz:{cbsz}" if cbsz else "") + (f" blgp:{blgp}" if blgp else "")


def check_exact(report: Report, shape: Shape, got: Array, want: Array, text: str) -> None:
    bits = result_bits(shape, want)
    for where in np.argwhere(got.astype(np.uint32) != bits):
        index = tuple(int(x) for x in where)
        report.check(
            False,
            lambda n=index, g=int(got[index]), w=float(want[index]): (
                f"`{text}` D{n[1:]} is {g:#x}, want {w!r}"
            ),
        )


def setup(shape: Shape, data: Data, cbsz: int, blgp: int) -> tuple[dict[int, Any], int, str, str]:
    """A at v0, B at v8, scales at v16 and v17; returns registers, waves and the operand texts."""
    a, b = stack_waves(shape, F8F6F4[cbsz], data.a), stack_waves(shape, F8F6F4[blgp], data.b)
    vgprs: dict[int, Any] = dict(a) | {8 + i: v for i, v in b.items()}
    vgprs[16] = pack_scale_bytes(shape, data.scales_a)
    vgprs[17] = pack_scale_bytes(shape, data.scales_b)
    waves = len(data.a)
    vgprs = {i: np.broadcast_to(v, (waves, LANES)).copy() for i, v in vgprs.items()}
    return vgprs, waves, f"v[0:{len(a) - 1}]", f"v[8:{7 + len(b)}]"


@pytest.mark.parametrize("case", implemented(CASES[:2]), ids=case_id)
@pytest.mark.parametrize(("cbsz", "blgp"), PAIRS)
def test_unscaled(case: Case, cbsz: int, blgp: int) -> None:
    shape = SHAPES[case.mnemonic.split("_")[3]]
    data = make(shape, cbsz, blgp)
    vgprs, waves, a_text, b_text = setup(shape, data, cbsz, blgp)
    size, rng = shape.result_items, rng_for(case.mnemonic, "c")
    c = np.array([rng.randint(-500, 500) for _ in range(shape.m * shape.n)], dtype=np.float64).reshape(
        1, shape.m, shape.n
    )
    registers: dict[int, Any] = {}
    c_text = place(registers, 32, matrix.pack_result(shape, result_bits(shape, c)))
    vgprs |= {i: np.broadcast_to(v, (waves, LANES)).copy() for i, v in registers.items()}
    text = f"{case.mnemonic} v[64:{63 + size}], {a_text}, {b_text}, v{c_text}{modifiers(cbsz, blgp)}"
    result = run(text + "\ns_nop 15\ns_nop 15", vgprs=vgprs, exec_mask=EXEC_WITH_HOLES, num_waves=waves)
    report = Report(text)
    for wave in range(waves):
        got = read(lambda i, w=wave: np.asarray(result.vgpr(i)).reshape(waves, LANES)[w], shape, 64)
        want = expected(shape, data.a[wave], data.b[wave], (F8F6F4[cbsz], F8F6F4[blgp]), None, None) + c
        check_exact(report, shape, got, want, f"wave {wave}: {text}")
    report.finish()


@pytest.mark.parametrize("case", implemented(CASES[2:]), ids=case_id)
@pytest.mark.parametrize(("cbsz", "blgp"), PAIRS)
def test_scaled(case: Case, cbsz: int, blgp: int) -> None:
    shape = SHAPES[case.mnemonic.split("_")[4]]
    data, fmts = make(shape, cbsz, blgp), (F8F6F4[cbsz], F8F6F4[blgp])
    vgprs, waves, a_text, b_text = setup(shape, data, cbsz, blgp)
    size, lines = shape.result_items, []
    for i, (byte_a, byte_b) in enumerate(SELECTIONS):
        low, high = (f"[{byte_a >> s & 1},{byte_b >> s & 1},0]" for s in (0, 1))
        op_sel = f" op_sel:{low}" if low != "[0,0,0]" else ""
        lines.append(
            f"{case.mnemonic} v[{64 + 16 * i}:{63 + 16 * i + size}], {a_text}, {b_text}, 0, v16, v17"
            f"{op_sel} op_sel_hi:{high}{modifiers(cbsz, blgp)}"
        )
    result = run(
        "\ns_nop 15\ns_nop 15\n".join(lines) + "\ns_nop 15\ns_nop 15",
        vgprs=vgprs,
        exec_mask=EXEC_WITH_HOLES,
        num_waves=waves,
    )
    report = Report(lines[0])
    for i, (byte_a, byte_b) in enumerate(SELECTIONS):
        for wave in range(waves):
            got = read(
                lambda r, w=wave: np.asarray(result.vgpr(r)).reshape(waves, LANES)[w], shape, 64 + 16 * i
            )
            want = expected(
                shape, data.a[wave], data.b[wave], fmts, data.scales_a[byte_a], data.scales_b[byte_b]
            )
            if wave:  # one block alone: exact
                check_exact(report, shape, got, want, f"wave {wave}: {lines[i]}")
                continue
            values = got.astype(np.uint32).view(np.float32).astype(np.float64)
            magnitude = expected(
                shape, *absolute(data, fmts), fmts, data.scales_a[byte_a], data.scales_b[byte_b]
            )
            worst = float(np.max(np.abs(values - want) / magnitude))
            report.check(
                worst < shape.k * 2.0**-24,
                lambda w=worst, t=lines[i]: f"`{t}` dense: error {w:.2e} of the sum of magnitudes",
            )
    report.finish()


def absolute(data: Data, fmts: tuple[ref.Format, ref.Format]) -> tuple[Array, Array]:
    """The dense operands without their signs."""
    return tuple(m[0] & ((1 << (f.bits - 1)) - 1) for m, f in zip((data.a, data.b), fmts, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("cbsz", "blgp"), PAIRS)
def test_wrong_layouts_differ(shape: Shape, cbsz: int, blgp: int) -> None:
    """The tests above can tell: the same registers read with another layout give another D."""
    data, fmts = make(shape, cbsz, blgp), (F8F6F4[cbsz], F8F6F4[blgp])
    right = expected(shape, data.a[0], data.b[0], fmts, data.scales_a[0], data.scales_b[0])
    order = [
        matrix.f8f6f4_k(shape, matrix.E4M3, lane_group, item)
        for lane_group in range(LANES // shape.m)
        for item in range(32)
    ]
    # A read contiguously: position 32 g + i is taken for the K that the two-piece layout put there.
    for side, fmt in enumerate(fmts):
        if fmt.bits != 8:
            continue
        a = data.a[0][:, order] if side == 0 else data.a[0]
        b = data.b[0][:, order] if side == 1 else data.b[0]
        assert not np.array_equal(expected(shape, a, b, fmts, data.scales_a[0], data.scales_b[0]), right)
    if fmts[0].bits == 8 and fmts[1].bits == 8:
        # Both contiguous, no scales: the mistake cancels, so equal formats prove nothing without scales.
        plain = expected(shape, data.a[0], data.b[0], fmts, None, None)
        assert np.array_equal(
            expected(shape, data.a[0][:, order], data.b[0][:, order], fmts, None, None), plain
        )
        both = expected(
            shape, data.a[0][:, order], data.b[0][:, order], fmts, data.scales_a[0], data.scales_b[0]
        )
        assert not np.array_equal(both, right)
    swapped = expected(shape, data.a[0], data.b[0], fmts, data.scales_a[0][:, ::-1], data.scales_b[0])
    assert not np.array_equal(swapped, right), "scales of the blocks in another order"


@pytest.mark.parametrize("case", implemented(CASES[2:]), ids=case_id)
def test_extreme_scales(case: Case) -> None:
    """0xFF makes the row NaN and nothing else; 0 is 2^-127, and subnormal results are kept."""
    shape = SHAPES[case.mnemonic.split("_")[4]]
    blocks = shape.k // 32
    fmt = matrix.E2M1
    a = np.full((shape.m, shape.k), 0b0010, dtype=object)  # 1.0
    registers: dict[int, Any] = {}
    a_text = f"v{place(registers, 0, matrix.pack_f8f6f4(shape, fmt, a))}"
    scales_a, scales_b = np.full((shape.m, blocks), 127), np.full((shape.n, blocks), 127)
    scales_a[3, 1] = 255
    scales_a[5, :] = 0
    scales_b[7, :] = 121
    registers |= {16: matrix.pack_scales(shape, scales_a), 17: matrix.pack_scales(shape, scales_b)}
    text = (
        f"{case.mnemonic} v[64:{63 + shape.result_items}], {a_text}, {a_text}, 0, v16, v17"
        " op_sel_hi:[0,0,0] cbsz:4 blgp:4"
    )
    got = (
        read(run(text + "\ns_nop 15\ns_nop 15", vgprs=registers).vgpr, shape, 64)[0]
        .astype(np.uint32)
        .view(np.float32)
    )
    assert np.all(np.isnan(got[3]))
    want = np.full((shape.m, shape.n), float(shape.k))
    want[5] *= 2.0**-127
    want[:, 7] *= 2.0**-6
    want[3] = 0
    rest = np.where(np.arange(shape.m)[:, None] == 3, 0, got)
    assert np.array_equal(rest.astype(np.float64), want)


@pytest.mark.parametrize("case", implemented(CASES[2:]), ids=case_id)
def test_inline_constant_scale(case: Case) -> None:
    """A constant or SGPR gives its bits 30:23, a float's exponent: 2.0 doubles, whatever byte op_sel says.

    LLVM pull request 158117 ("for all inline/SGPR constants, SP HW use bits [30:23] as the scale") made newer
    assemblers refuse these operands; older compilers emitted them.
    """
    shape = SHAPES[case.mnemonic.split("_")[4]]
    one = np.full((shape.m, shape.k), 0x38, dtype=object)
    registers: dict[int, Any] = {}
    text = f"v{place(registers, 0, matrix.pack_f8f6f4(shape, matrix.E4M3, one))}"
    registers[17] = np.full(LANES, 127, dtype=np.uint32)
    line = f"{case.mnemonic} v[64:{63 + shape.result_items}], {text}, {text}, 0, 2.0, v17 op_sel_hi:[0,0,0]"
    got = (
        read(run(line + "\ns_nop 15\ns_nop 15", vgprs=registers, assembles=False).vgpr, shape, 64)[0]
        .astype(np.uint32)
        .view(np.float32)
    )
    assert np.all(got == 2.0 * shape.k)


def test_format_tables_are_the_published_ones() -> None:
    """Maximum and smallest subnormal of each format (CDNA4 ISA, table 30)."""
    limits = {
        "fp8": (448.0, 2.0**-9),
        "bf8": (57344.0, 2.0**-16),
        "fp6": (7.5, 0.125),
        "bf6": (28.0, 0.0625),
        "fp4": (6.0, 0.5),
    }
    for fmt in F8F6F4:
        largest, smallest = limits[fmt.name.split()[0]]
        assert float(ref.decode(fmt, fmt.max_bits).fraction) == largest
        assert float(ref.decode(fmt, 1).fraction) == smallest
