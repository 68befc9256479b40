# SPDX-License-Identifier: Apache-2.0
"""Matrix instructions of one format per operand: layouts, exactness, rounding of a single product, exec,
AGPRs.

Sources: AMD "CDNA4 Instruction Set Architecture Reference Guide", table 28 and the rules below it (subnormals
kept, round to nearest even, exec ignored, C may be an inline constant), sections 7.1.4 and 7.4; AMD's article
"Matrix Core Programming on AMD CDNA3 and CDNA4 Architecture".

Layout tests use small integers, so that every partial sum is exact and the (undocumented) order of
accumulation cannot matter; all rows, columns and K positions differ.  `test_layout_can_fail` shows that
transposed operands, K pieces in another order, or the other result layout would give a different D from the
same registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import conformance_matrix as matrix
import conformance_reference as ref
import numpy as np
import pytest
from conformance_harness import EXEC_WITH_HOLES, Case, Report, case_id, compare, implemented, rng_for, run
from conformance_matrix import LANES, Array, Shape

SHAPES = {
    "f32_{}_f32": ("32x32x1_2b", "16x16x1_4b", "4x4x1_16b", "32x32x2", "16x16x4"),
    "f32_{}_f16": ("32x32x4_2b", "16x16x4_4b", "4x4x4_16b", "32x32x8", "16x16x16", "16x16x32", "32x32x16"),
    "f32_{}_bf16": ("32x32x4_2b", "16x16x4_4b", "4x4x4_16b", "32x32x8", "16x16x16", "16x16x32", "32x32x16"),
    "i32_{}_i8": ("32x32x4_2b", "16x16x4_4b", "4x4x4_16b", "32x32x16", "16x16x32", "16x16x64", "32x32x32"),
    "f64_{}_f64": ("16x16x4", "4x4x4_4b"),
    "f32_{}_fp8_fp8": ("16x16x32", "32x32x16"),
    "f32_{}_fp8_bf8": ("16x16x32", "32x32x16"),
    "f32_{}_bf8_fp8": ("16x16x32", "32x32x16"),
    "f32_{}_bf8_bf8": ("16x16x32", "32x32x16"),
}
NAMES = [f"v_mfma_{types.format(shape)}" for types, shapes in SHAPES.items() for shape in shapes]


@dataclass(frozen=True)
class MatrixCase(Case):
    """A matrix instruction."""


CASES: list[Case] = [
    MatrixCase(
        name,
        ("vgpr", "agpr", "inline C"),
        "layout with all elements different, single products rounded once, exec ignored",
    )
    for name in NAMES
]


def integer_matrix(
    fmt: ref.Format | None, shape: tuple[int, ...], rng: Any, limit: int
) -> tuple[Array, Array]:
    """Random small integers as (encodings, values)."""
    if fmt is not None and fmt.bits == 8:  # halves and quarters too: more different values
        choices = matrix.exact_encodings(fmt, 1, 7, 0.25)
        bits = np.array([rng.choice(choices) for _ in range(int(np.prod(shape)))], dtype=object).reshape(
            shape
        )
        return bits, matrix.values_of(fmt, bits)
    numbers = np.array(
        [rng.choice((-1, 1)) * rng.randint(1, limit) for _ in range(int(np.prod(shape)))]
    ).reshape(shape)
    if fmt is None:
        return (numbers & 0xFF).astype(object), numbers.astype(np.float64)
    encode = np.vectorize(lambda v: ref.encode(fmt, ref.from_int(int(v))), otypes=[object])
    return encode(numbers), numbers.astype(np.float64)


def result_bits(shape: Shape, values: Array) -> Array:
    """Exact results as register bits."""
    if shape.result == "i32":
        return values.astype(np.int64).astype(np.uint32)
    if shape.result == "f64":
        return values.astype(np.float64).view(np.uint64)
    single = values.astype(np.float32)
    assert np.array_equal(single.astype(np.float64), values), "the test data must be exact"
    return single.view(np.uint32)


def bits_of(fmt: ref.Format | None) -> int:
    """Width of an element."""
    return 8 if fmt is None else fmt.bits


def place(registers: dict[int, Any], base: int, packed: Array) -> str:
    """Put packed registers [n, lanes] at `base`; returns the operand text without its letter."""
    if packed.dtype == np.uint64:
        packed = np.stack([packed & np.uint64(ref.M32), packed >> np.uint64(32)], axis=1).reshape(-1, LANES)
    for i in range(packed.shape[0]):
        registers[base + i] = packed[i].astype(np.uint32)
    return str(base) if packed.shape[0] == 1 else f"[{base}:{base + packed.shape[0] - 1}]"


def read(read_register: Callable[[int], Any], shape: Shape, base: int) -> Array:
    """D as [b, m, n] of bits."""
    width = 2 if shape.result == "f64" else 1
    parts = [
        np.asarray(read_register(base + i)).reshape(-1).astype(np.uint64)
        for i in range(shape.result_items * width)
    ]
    words = [
        parts[i] if width == 1 else parts[2 * i] | parts[2 * i + 1] << np.uint64(32)
        for i in range(shape.result_items)
    ]
    return matrix.unpack_result(shape, np.stack(words))


def operands(mnemonic: str, seed: object = 0) -> tuple[Shape, Array, Array, Array, Array, Array, Array]:
    """Shape, A and B encodings, their values, C bits and values."""
    shape, fmt_a, fmt_b = matrix.parse(mnemonic)
    rng = rng_for(mnemonic, seed)
    limit = 100 if bits_of(fmt_a) <= 16 else 500
    a, a_values = integer_matrix(fmt_a, (shape.b, shape.m, shape.k), rng, limit)
    b, b_values = integer_matrix(fmt_b, (shape.b, shape.n, shape.k), rng, limit)
    c_values = np.array(
        [rng.randint(-4000, 4000) for _ in range(shape.b * shape.m * shape.n)], dtype=np.float64
    )
    c_values = c_values.reshape(shape.b, shape.m, shape.n)
    return shape, a, b, a_values, b_values, result_bits(shape, c_values), c_values


@pytest.mark.parametrize("case", implemented(CASES), ids=case_id)
def test_layout(case: MatrixCase) -> None:
    shape, a, b, a_values, b_values, c, c_values = operands(case.mnemonic)
    _, fmt_a, fmt_b = matrix.parse(case.mnemonic)
    vgprs: dict[int, Any] = {}
    a_text = place(vgprs, 0, matrix.pack_source(shape, a, bits_of(fmt_a)))
    b_text = place(vgprs, 16, matrix.pack_source(shape, b, bits_of(fmt_b)))
    c_packed = matrix.pack_result(shape, c)
    c_text = place(vgprs, 32, c_packed)
    agprs: dict[int, Any] = {}
    for base, packed in (
        (0, matrix.pack_source(shape, a, bits_of(fmt_a))),
        (16, matrix.pack_source(shape, b, bits_of(fmt_b))),
        (32, c_packed),
    ):
        place(agprs, base, packed)
    size = shape.result_items * (2 if shape.result == "f64" else 1)
    products = np.einsum("bik,bjk->bij", a_values, b_values)
    constant = {"i32": "3", "f32": "0.5", "f64": "2.0"}[shape.result]
    lines = {  # text, register file and base of D, wanted
        f"{case.mnemonic} v[64:{63 + size}], v{a_text}, v{b_text}, v{c_text}": ("v", 64, products + c_values),
        f"{case.mnemonic} a[64:{63 + size}], a{a_text}, a{b_text}, a{c_text}": ("a", 64, products + c_values),
        f"{case.mnemonic} a[96:{95 + size}], v{a_text}, a{b_text}, 0": ("a", 96, products),
        f"{case.mnemonic} v[96:{95 + size}], a{a_text}, v{b_text}, {constant}": (
            "v",
            96,
            products + float(constant),
        ),
        f"{case.mnemonic} v{c_text}, v{a_text}, v{b_text}, v{c_text}": ("v", 32, products + c_values),
    }
    if size == 1:
        lines = {t.replace("[64:64]", "64").replace("[96:96]", "96"): v for t, v in lines.items()}
    for i in range(64, 64 + 64):  # poison
        vgprs[i] = agprs[i] = np.full(LANES, 0x5EED5EED, dtype=np.uint32)
    result = run(
        "\ns_nop 15\ns_nop 15\n".join(lines) + "\ns_nop 15\ns_nop 15",
        vgprs=vgprs,
        agprs=agprs,
        exec_mask=EXEC_WITH_HOLES,
    )
    report = Report(case.mnemonic)
    for text, (file, base, want) in lines.items():
        got = read(result.vgpr if file == "v" else result.agpr, shape, base)
        for where in np.argwhere(got != result_bits(shape, want).astype(got.dtype)):
            index = tuple(int(x) for x in where)
            report.check(
                False, lambda t=text, n=index, g=got[index], w=want[index]: f"`{t}` D{n} is {g:#x}, want {w}"
            )
    report.finish()


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_layout_can_fail(case: MatrixCase) -> None:
    """The data tells layouts apart: rearranged operands give another product."""
    shape, _, _, a, b, _, _ = operands(case.mnemonic)
    right = np.einsum("bik,bjk->bij", a, b)
    if shape.k > 1:
        assert not np.array_equal(np.einsum("bik,bjk->bij", a[:, :, ::-1], b), right), "K order of A only"
        rolled = np.roll(a.reshape(shape.b, shape.m, -1, max(shape.items // 2, 1)), 1, axis=2).reshape(
            a.shape
        )
        assert not np.array_equal(np.einsum("bik,bjk->bij", rolled, b), right), (
            "K pieces of A in another order"
        )
    assert not np.array_equal(right, np.swapaxes(right, 1, 2)), "D transposed"
    assert not np.array_equal(np.einsum("bik,bjk->bij", a[:, ::-1], b), right), "rows of A in another order"


ROUNDING = [c for c in CASES if "_i32_" not in c.mnemonic and "_f64_" not in c.mnemonic]


@pytest.mark.parametrize("case", implemented(ROUNDING), ids=case_id)
def test_single_products_round_once(case: MatrixCase) -> None:
    """One K position at a time is nonzero: D = RNE(a * b + c), subnormals kept, infinities and NaN as in IEEE
    754.
    """
    shape, fmt_a, fmt_b = matrix.parse(case.mnemonic)
    assert fmt_a is not None
    assert fmt_b is not None
    rng, report = rng_for(case.mnemonic, "rounding"), Report(case.mnemonic)
    waves = 4
    texts: dict[int, list[Array]] = {}
    chosen, sources = [], []
    for wave in range(waves):
        hot = rng.randrange(shape.k)
        a = np.zeros((shape.b, shape.m, shape.k), dtype=object)
        b = np.zeros((shape.b, shape.n, shape.k), dtype=object)
        for block in range(shape.b):
            for i in range(shape.m):
                a[block, i, hot] = source_bits(fmt_a, rng, wave)
                b[block, i, hot] = source_bits(fmt_b, rng, wave)
        c = np.array([addend_bits(rng, wave) for _ in range(shape.b * shape.m * shape.n)], dtype=np.uint32)
        c = c.reshape(shape.b, shape.m, shape.n)
        registers: dict[int, Any] = {}
        names = [
            place(registers, 0, matrix.pack_source(shape, a, fmt_a.bits)),
            place(registers, 16, matrix.pack_source(shape, b, fmt_b.bits)),
            place(registers, 32, matrix.pack_result(shape, c)),
        ]
        for index, array in registers.items():
            texts.setdefault(index, []).append(array)
        chosen.append(hot)
        sources.append((a, b, c))
    vgprs = {index: np.stack(arrays) for index, arrays in texts.items()}
    size = shape.result_items
    result = run(
        f"{case.mnemonic} v[64:{63 + size}], v{names[0]}, v{names[1]}, v{names[2]}\ns_nop 15\ns_nop 15",
        vgprs=vgprs,
        num_waves=waves,
    )
    for wave, (hot, (a, b, c)) in enumerate(zip(chosen, sources, strict=True)):
        got = read(lambda i, w=wave: np.asarray(result.vgpr(i)).reshape(waves, LANES)[w], shape, 64)
        for index in np.ndindex(shape.b, shape.m, shape.n):
            block, i, j = index
            numbers = [
                ref.decode(fmt_a, int(a[block, i, hot])),
                ref.decode(fmt_b, int(b[block, j, hot])),
                ref.decode(ref.F32, int(c[index])),
            ]
            want = ref.encode(ref.F32, ref.fma(*numbers))
            if want == 1 << 31:  # the zeros of the other K positions may turn -0 into +0
                continue
            report.check(
                compare(ref.F32, int(got[index]), want),
                lambda n=numbers, g=int(got[index]), w=want: f"{n} gave {g:#x}, want {w:#x}",
            )
    report.finish()


def source_bits(fmt: ref.Format, rng: Any, wave: int) -> int:
    """Random encodings: ordinary in the first waves, subnormal and special ones later."""
    bits = rng.getrandbits(fmt.bits)
    if wave == 3:
        return bits
    exponent = fmt.bias + (rng.randint(-6, 5) if wave < 2 else rng.randint(-fmt.bias, 0))
    return (
        bits & ~(((1 << fmt.ebits) - 1) << fmt.mbits)
        | ref.saturate(exponent, 0, (1 << fmt.ebits) - 2) << fmt.mbits
    )


def addend_bits(rng: Any, wave: int) -> int:
    """An f32 whose sum with a product rounds."""
    bits = rng.getrandbits(32)
    return bits if wave >= 2 else bits & 0x807FFFFF | (127 + rng.randint(-16, 16)) << 23


@pytest.mark.parametrize("case", implemented([c for c in CASES if "_f64_" in c.mnemonic]), ids=case_id)
def test_f64_operands_negated(case: MatrixCase) -> None:
    """neg:[a,b,c] flips the signs of A, B and C."""
    shape, a, b, a_values, b_values, c, c_values = operands(case.mnemonic)
    vgprs: dict[int, Any] = {}
    a_text = place(vgprs, 0, matrix.pack_source(shape, a, 64))
    b_text = place(vgprs, 16, matrix.pack_source(shape, b, 64))
    c_text = place(vgprs, 32, matrix.pack_result(shape, c))
    products, size = np.einsum("bik,bjk->bij", a_values, b_values), 2 * shape.result_items
    for bits in range(8):
        signs = [bits >> i & 1 for i in range(3)]
        neg = f" neg:[{','.join(map(str, signs))}]" if bits else ""
        text = f"{case.mnemonic} v[64:{63 + size}], v{a_text}, v{b_text}, v{c_text}{neg}\ns_nop 15\ns_nop 15"
        got = read(run(text, vgprs=vgprs).vgpr, shape, 64)
        want = (-1) ** (signs[0] + signs[1]) * products + (-1) ** signs[2] * c_values
        assert np.array_equal(got, result_bits(shape, want)), text


# CDNA4 ISA 7.1.6: CBSZ makes groups of 64 >> CBSZ lanes, all of which read A from group ABID; BLGP picks the
# lanes from which B is read.
B_LANES: tuple[Callable[[int], int], ...] = (
    lambda n: n, lambda n: n % 32, lambda n: 32 + n % 32, lambda n: (n + 16) % 64,
    lambda n: n % 16, lambda n: 16 + n % 16, lambda n: 32 + n % 16, lambda n: 48 + n % 16,
)  # fmt: skip
BROADCASTS = (
    (1, 1, 0),
    (2, 3, 5),
    (4, 9, 0),
    (0, 0, 1),
    (0, 0, 2),
    (0, 0, 3),
    (0, 0, 4),
    (3, 6, 6),
    (0, 0, 7),
)


@pytest.mark.parametrize("case", implemented([c for c in CASES if "_f64_" not in c.mnemonic]), ids=case_id)
def test_broadcasts(case: MatrixCase) -> None:
    """CBSZ, ABID and BLGP: the same as permuting the lanes of the source registers beforehand."""
    shape, a, b, _, _, c, _ = operands(case.mnemonic)
    _, fmt_a, fmt_b = matrix.parse(case.mnemonic)
    sources: dict[int, Any] = {}
    a_text = place(sources, 0, matrix.pack_source(shape, a, bits_of(fmt_a)))
    b_text = place(sources, 16, matrix.pack_source(shape, b, bits_of(fmt_b)))
    c_registers: dict[int, Any] = {}
    c_text = place(c_registers, 32, matrix.pack_result(shape, c))
    size = shape.result_items
    end = f"v{a_text}, v{b_text}, v{c_text}"
    waves = len(BROADCASTS)
    permuted: dict[int, Any] = {}
    lanes = np.arange(LANES)
    for index, values in sources.items():
        rows = []
        for cbsz, abid, blgp in BROADCASTS:
            group = LANES >> cbsz
            a_lanes, b_lanes = abid * group + lanes % group, np.array([B_LANES[blgp](n) for n in lanes])
            rows.append(values[a_lanes if index < 16 else b_lanes])
        permuted[index] = np.stack(rows)
    plain = run(
        f"{case.mnemonic} v[64:{63 + size}], {end}\ns_nop 15\ns_nop 15",
        vgprs=permuted | {i: np.broadcast_to(v, (waves, LANES)).copy() for i, v in c_registers.items()},
        num_waves=waves,
    )
    for wave, (cbsz, abid, blgp) in enumerate(BROADCASTS):
        names = (("cbsz", cbsz), ("abid", abid), ("blgp", blgp))
        suffix = "".join(f" {name}:{value}" for name, value in names if value)
        text = f"{case.mnemonic} v[64:{63 + size}], {end}{suffix}"
        got = read(run(f"{text}\ns_nop 15\ns_nop 15", vgprs=sources | c_registers).vgpr, shape, 64)
        want = read(lambda i, w=wave: np.asarray(plain.vgpr(i)).reshape(waves, LANES)[w], shape, 64)
        assert np.array_equal(got, want), text


@pytest.mark.parametrize("case", implemented([c for c in CASES if "_i8" in c.mnemonic]), ids=case_id)
def test_integer_sums_wrap(case: MatrixCase) -> None:
    """Without clamp the 32-bit sum drops its carry."""
    shape, _, _ = matrix.parse(case.mnemonic)
    a = np.full((shape.b, shape.m, shape.k), 0x80, dtype=object)
    vgprs: dict[int, Any] = {}
    a_text = place(vgprs, 0, matrix.pack_source(shape, a, 8))
    c = np.full((shape.b, shape.m, shape.n), 0x7FFFFF00, dtype=np.uint32)
    c_text = place(vgprs, 32, matrix.pack_result(shape, c))
    size = shape.result_items
    result = run(
        f"{case.mnemonic} v[64:{63 + size}], v{a_text}, v{a_text}, v{c_text}\ns_nop 15\ns_nop 15", vgprs=vgprs
    )
    assert np.all(read(result.vgpr, shape, 64) == (0x7FFFFF00 + 128 * 128 * shape.k & ref.M32))
