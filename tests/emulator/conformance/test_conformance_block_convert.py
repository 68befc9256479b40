# SPDX-License-Identifier: Apache-2.0
"""Conversions of 32 elements between fp6 or bf6 and f32, f16 or bf16, with one scale per lane.

Sources: AMD "CDNA4 Instruction Set Architecture Reference Guide", sections 7.3 and 12.11 (32 codes of 6 bits
fill six registers, first code in the lowest bits; packing divides by the scale, unpacking multiplies; fp6 and
bf6 saturate); public gfx950 quantisers for 2xpk16 (code 2i comes from S0[i], code 2i + 1 from S1[i]).

All 32 elements of a lane differ, and so do the lanes' scales.  Stochastic forms: a result must be one of the
two neighbours, and exact values stay (see test_conformance_small_floats for why no more is asked).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import conformance_reference as ref
import numpy as np
import pytest
from conformance_harness import (
    EXEC_WITH_HOLES,
    LANES,
    TYPES,
    Case,
    Report,
    case_id,
    compare,
    implemented,
    rng_for,
    run,
    to_registers,
)
from conformance_reference import E2M3, E3M2, Format, decode, encode
from test_conformance_small_floats import WIDE, neighbours

WAVES, COUNT = 2, 32
NUM = WAVES * LANES
NARROW = {"fp6": E2M3, "bf6": E3M2}


@dataclass(frozen=True)
class BlockCase(Case):
    """`kind`: "unpack", "pack", "interleave" (2xpk16) or "stochastic"."""

    kind: str = "pack"
    wide: str = "f32"
    narrow: str = "fp6"


def table() -> list[BlockCase]:
    """Every 32-element conversion."""
    rows = []
    for narrow in NARROW:
        for wide in WIDE:
            names = {
                "unpack": f"pk32_{wide}_{narrow}",
                "stochastic": f"sr_pk32_{narrow}_{wide}",
                "interleave" if wide == "f32" else "pack": (
                    f"2xpk16_{narrow}_f32" if wide == "f32" else f"pk32_{narrow}_{wide}"
                ),
            }
            for kind, name in names.items():
                rows.append(
                    BlockCase(
                        f"v_cvt_scalef32_{name}",
                        ("vgpr", "sgpr scale"),
                        "order, rounding, saturation, exec",
                        kind=kind,
                        wide=wide,
                        narrow=narrow,
                    )
                )
    return rows


CASES: list[Case] = [*table()]


def words(elements: list[int], bits: int) -> int:
    """Elements side by side, first in the lowest bits."""
    return sum(value << (bits * i) for i, value in enumerate(elements))


def element(rng: Any, fmt: Format, near: int) -> int:
    """A finite encoding; wide formats mostly within reach of the narrow ones under a scale of 2**near."""
    if fmt.bits <= 6:
        return int(rng.getrandbits(fmt.bits))
    exponent = ref.saturate(fmt.bias + near + rng.randint(-6, 4), 0, (1 << fmt.ebits) - 2)
    return rng.getrandbits(1) << fmt.bits - 1 | exponent << fmt.mbits | rng.getrandbits(fmt.mbits)


def sources_of(case: BlockCase, rng: Any) -> tuple[list[list[int]], list[int]]:
    """Elements and scale bits per lane."""
    fmt = NARROW[case.narrow] if case.kind == "unpack" else WIDE[case.wide]
    elements, scales = [], []
    for lane in range(NUM):
        near = 0 if lane == 0 else rng.randint(-4, 4)
        scales.append((127 + near) << 23 | rng.getrandbits(23) | rng.getrandbits(1) << 31)
        elements.append([element(rng, fmt, near) for _ in range(COUNT)])
    return elements, scales


def setup(case: BlockCase, elements: list[list[int]], rng: Any) -> tuple[dict[int, Any], str]:
    """Source registers and operand text (without destination and scale)."""
    bits = NARROW[case.narrow].bits if case.kind == "unpack" else TYPES[case.wide].bits
    registers: dict[int, Any] = {}
    if case.kind == "interleave":
        groups = [[row[0::2] for row in elements], [row[1::2] for row in elements]]
    else:
        groups = [elements]
    texts = []
    for number, rows in enumerate(groups):
        count = len(rows[0]) * bits // 32
        base = 64 + 32 * number
        for i, array in enumerate(to_registers([words(row, bits) for row in rows], count, WAVES)):
            registers[base + i] = array
        texts.append(f"v[{base}:{base + count - 1}]")
    if case.kind == "stochastic":
        random = [rng.getrandbits(32) for _ in range(NUM)]
        registers[2] = to_registers(random, 1, WAVES)[0]
        texts.append("v2")
    return registers, ", ".join(texts)


def allowed(case: BlockCase, value: int, scale: int) -> tuple[int, ...]:
    """The results that one element may have."""
    narrow, wide = NARROW[case.narrow], WIDE[case.wide]
    power = (scale >> 23 & 255) - 127
    if case.kind == "unpack":
        return (encode(wide, ref.scale_by(decode(narrow, value), power)),)
    number = ref.scale_by(decode(wide, value), -power)
    return neighbours(narrow, number) if case.kind == "stochastic" else (encode(narrow, number),)


@pytest.mark.parametrize("scale_from", ["vgpr", "sgpr"])
@pytest.mark.parametrize("case", implemented(CASES), ids=case_id)
def test_block_conversion(case: BlockCase, scale_from: str) -> None:
    rng, report = rng_for(case.mnemonic, scale_from), Report(case.mnemonic)
    elements, scales = sources_of(case, rng)
    registers, operands = setup(case, elements, rng)
    bits = TYPES[case.wide].bits if case.kind == "unpack" else 6
    count = COUNT * bits // 32
    poison = np.arange(NUM, dtype=np.uint32).reshape(WAVES, LANES) + np.uint32(0x5EED0000)
    vgprs = registers | {3: to_registers(scales, 1, WAVES)[0]} | {128 + i: poison for i in range(count)}
    if scale_from == "sgpr":
        scales = [scales[0]] * NUM
    scale = "s8" if scale_from == "sgpr" else "v3"
    text = f"{case.mnemonic} v[128:{127 + count}], {operands}, {scale}"
    result = run(
        text, vgprs=vgprs, sgprs={8: scales[0]}, exec_mask=EXEC_WITH_HOLES, num_waves=WAVES
    )  # fmt: skip
    got = [np.asarray(result.vgpr(128 + i)).reshape(-1).tolist() for i in range(count)]
    for lane in range(NUM):
        word = sum(int(g[lane]) << (32 * i) for i, g in enumerate(got))
        if not EXEC_WITH_HOLES >> (lane % LANES) & 1:
            report.check(
                word == words([0x5EED0000 + lane] * count, 32), lambda n=lane: f"lane {n} is off, but changed"
            )
            continue
        for i in range(COUNT):
            have = word >> (bits * i) & (1 << bits) - 1
            want = allowed(case, elements[lane][i], scales[lane])
            fmt = WIDE[case.wide] if case.kind == "unpack" else None
            report.check(
                any(compare(fmt, have, w) for w in want),
                lambda n=lane, k=i, h=have, w=want: (
                    f"`{text}` lane {n} element {k} {elements[n][k]:#x} / {scales[n]:#x}: {h:#x}, want {w}"
                ),
            )
    report.finish()
