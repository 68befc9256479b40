# SPDX-License-Identifier: Apache-2.0
"""Sparse matrix instructions: which A element meets which B element, by lane, register and index set.

Sources: AMD "CDNA4 Instruction Set Architecture Reference Guide", section 7.5 (A keeps two of every four K;
an index of two bits per kept element; CBSZ 0 lets ABID choose the set of indices, else set 0); probes on
MI350 by two public projects that agree: one feeds one-hot operands to 16x16x64 f16 and bf16, the other random
matrices to all eight shapes.  Both find that a lane's elements of A are one stretch of K while B of more than
16 bytes comes in two pieces, so that A of lane group 0 meets B of lane groups 0 and 1.

The expected D is made by walking the registers as those probes read them: for each element of A in its lane
and place, the K it stands for, and from K the lane and place of B.  `test_probe_table` holds the walk to
lines of the published one-hot table.  All elements differ and all sums are exact.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import conformance_matrix as matrix
import numpy as np
import pytest
from conformance_harness import EXEC_WITH_HOLES, LANES, Case, Report, case_id, implemented, rng_for, run
from conformance_matrix import ELEMENT, Array, Shape
from test_conformance_mfma import bits_of, integer_matrix, place, read, result_bits

SHAPES = {
    "f32_{}_f16": ("16x16x32", "32x32x16", "16x16x64", "32x32x32"),
    "f32_{}_bf16": ("16x16x32", "32x32x16", "16x16x64", "32x32x32"),
    "i32_{}_i8": ("16x16x64", "32x32x32", "16x16x128", "32x32x64"),
    **{
        f"f32_{{}}_{a}_{b}": ("16x16x64", "32x32x32", "16x16x128", "32x32x64")
        for a in ("fp8", "bf8")
        for b in ("fp8", "bf8")
    },
}
_NAME = re.compile(r"v_smfmac_(f32|i32)_(\d+)x(\d+)x(\d+)_(\w+?)(?:_(\w+))?$")


@dataclass(frozen=True)
class SparseCase(Case):
    """A sparse matrix instruction."""


CASES: list[Case] = [
    SparseCase(
        f"v_smfmac_{types.format(shape)}",
        ("vgpr", "agpr", "every index set"),
        "every element and index different",
        "CDNA4 ISA 7.5; probes on MI350",
    )
    for types, shapes in SHAPES.items()
    for shape in shapes
]


def parse(mnemonic: str) -> tuple[Shape, str, str]:
    """Shape and element types of A and B."""
    match = _NAME.match(mnemonic)
    assert match, mnemonic
    result, m, n, k, a, b = match.groups()
    return Shape(int(m), int(n), int(k), 1, result), a, b or a


def dense_place(shape: Shape, k: int, bits: int) -> tuple[int, int]:
    """(lane group, item) of B's element k: pieces of at most 16 bytes, each piece spread over the groups."""
    groups = LANES // shape.n
    per_piece = min(shape.k // groups, 128 // bits)
    piece, rest = divmod(k, per_piece * groups)
    return rest // per_piece, piece * per_piece + rest % per_piece


def sparse_place(shape: Shape, kept: int) -> tuple[int, int]:
    """(lane group, item) of the kept element `kept` of a row of A: one stretch per lane."""
    per_lane = shape.k // 2 // (LANES // shape.m)
    return kept // per_lane, kept % per_lane


def pack(shape: Shape, elements: Array, bits: int, where: Any) -> Array:
    """Rows of elements [rows, count] in registers [registers, lanes] by a placement."""
    rows, count = elements.shape
    items = np.zeros((LANES, count // (LANES // rows)), dtype=object)
    for row in range(rows):
        for i in range(count):
            group, item = where(i)
            items[row + rows * group, item] = int(elements[row, i])
    return matrix.pack_items(items, bits)


def indices(shape: Shape, rng: Any) -> Array:
    """[rows, k / 2]: places 0..3 of the kept elements, ascending within each group of four."""
    chosen = [sorted(rng.sample(range(4), 2)) for _ in range(shape.m * shape.k // 4)]
    return np.array(chosen).reshape(shape.m, shape.k // 2)


def pack_indices(shape: Shape, places: Array, chosen: int, other: Array) -> Array:
    """[lanes]: the indices in set `chosen`; the other sets hold `other`."""
    per_lane = shape.k // 2 // (LANES // shape.m)
    words = np.zeros(LANES, dtype=np.uint32)
    for lane in range(LANES):
        row, group = lane % shape.m, lane // shape.m
        word = 0
        for number in range(32 // (2 * per_lane)):
            source = places if number == chosen else other
            for item in range(per_lane):
                word |= int(source[row, group * per_lane + item]) << (2 * (number * per_lane + item))
        words[lane] = word
    return words


@pytest.mark.parametrize("case", implemented(CASES), ids=case_id)
def test_sparse(case: SparseCase) -> None:
    shape, a_type, b_type = parse(case.mnemonic)
    rng, report = rng_for(case.mnemonic), Report(case.mnemonic)
    a, a_values = integer_matrix(ELEMENT[a_type], (shape.m, shape.k // 2), rng, 100)
    b, b_values = integer_matrix(ELEMENT[b_type], (shape.n, shape.k), rng, 100)
    places, other = indices(shape, rng), indices(shape, rng)
    c = np.array([rng.randint(-4000, 4000) for _ in range(shape.m * shape.n)], dtype=np.float64)
    c = c.reshape(1, shape.m, shape.n)
    columns = np.arange(shape.k // 2) // 2 * 4 + places  # the K of each kept element
    dense = np.zeros((shape.m, shape.k))
    np.put_along_axis(dense, columns, a_values, axis=1)
    want = c + (dense @ b_values.T)[None]
    bits_a, bits_b = bits_of(ELEMENT[a_type]), bits_of(ELEMENT[b_type])
    a_packed = pack(shape, a, bits_a, lambda i: sparse_place(shape, i))
    b_packed = pack(shape, b, bits_b, lambda k: dense_place(shape, k, bits_b))
    c_packed = matrix.pack_result(shape, result_bits(shape, c))
    num_sets = 32 // (2 * (shape.k // 2 // (LANES // shape.m)))
    lines: list[tuple[str, str, int]] = []
    vgprs: dict[int, Any] = {}
    agprs: dict[int, Any] = {}
    a_text, b_text = place(vgprs, 0, a_packed), place(vgprs, 8, b_packed)
    place(agprs, 0, a_packed)
    size = shape.result_items
    forms = [(chosen, f" abid:{chosen}" if chosen else "", chosen) for chosen in range(num_sets)]
    forms.append((0, " cbsz:1", 0))  # CBSZ not 0: set 0, whatever ABID says
    for number, (chosen, suffix, _) in enumerate(forms):
        base = 64 + 16 * number
        place(vgprs, base, c_packed)
        vgprs[20 + number] = pack_indices(shape, places, chosen, other)
        text = f"{case.mnemonic} v[{base}:{base + size - 1}], v{a_text}, v{b_text}, v{20 + number}{suffix}"
        lines.append((text, "v", base))
    place(agprs, 64, c_packed)
    lines.append((f"{case.mnemonic} a[64:{63 + size}], a{a_text}, v{b_text}, v20", "a", 64))
    joined = "\ns_nop 15\ns_nop 15\n".join(text for text, _, _ in lines) + "\ns_nop 15\ns_nop 15"
    result = run(joined, vgprs=vgprs, agprs=agprs, exec_mask=EXEC_WITH_HOLES)
    bits = result_bits(shape, want)
    for text, file, base in lines:
        got = read(result.vgpr if file == "v" else result.agpr, shape, base).astype(np.uint32)
        wrong = np.argwhere(got != bits)
        report.check(not len(wrong), lambda t=text, w=wrong: f"`{t}`: {len(w)} wrong, first D{tuple(w[0])}")
    report.finish()


def test_placements_differ() -> None:
    """What would be believed without the probes, B like A in one stretch, gives another D."""
    shape = Shape(16, 16, 64, 1, "f32")
    assert [dense_place(shape, k, 16) for k in range(64)] != [(k // 16, k % 16) for k in range(64)]


# Lines of the one-hot probe of v_smfmac_f32_16x16x64_f16, row 0 with indices 0 and 1: (item of A, its lane
# group, item of B, its lane group).
PROBE = (
    (0, 0, 0, 0), (0, 1, 0, 2), (0, 2, 8, 0), (0, 3, 8, 2), (1, 0, 1, 0), (1, 3, 9, 2), (2, 0, 4, 0),
    (2, 1, 4, 2), (3, 2, 13, 0), (4, 0, 0, 1), (4, 1, 0, 3), (4, 2, 8, 1), (5, 3, 9, 3), (6, 1, 4, 3),
    (7, 0, 5, 1), (7, 3, 13, 3),
)  # fmt: skip


@pytest.mark.parametrize("line", PROBE)
def test_probe_table(line: tuple[int, int, int, int]) -> None:
    a_item, a_group, b_item, b_group = line
    shape = Shape(16, 16, 64, 1, "f32")
    kept = next(i for i in range(32) if sparse_place(shape, i) == (a_group, a_item))
    k = kept // 2 * 4 + kept % 2  # indices 0 and 1: the first two of every four
    assert dense_place(shape, k, 16) == (b_group, b_item)
