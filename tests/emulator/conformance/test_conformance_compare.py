# SPDX-License-Identifier: Apache-2.0
"""Vector compares: the lane mask they write, in vcc or an SGPR pair, and the exec mask that v_cmpx writes
too.

Source: AMD "CDNA4 Instruction Set Architecture Reference Guide", chapter 12 (V_CMP_*, V_CMP_CLASS_*), section
6.2.2 ("all V_CMPX instructions write the result to both an SGPR (or VCC) and the EXEC mask"), section 4.3
(inactive lanes of a compare give 0).

The inputs contain NaN on either side, both zeros, and signed values that order differently as unsigned, so
that `neq` taken for `lg` (they differ for NaN), `nlt` taken for `ge`, or signed taken for unsigned fail.
"""

from __future__ import annotations

from collections.abc import Callable

import conformance_functions as fn
import conformance_reference as ref
import numpy as np
import pytest
from conformance_forms import check_vector_case
from conformance_harness import (
    EXEC_WITH_HOLES,
    LANES,
    Case,
    Report,
    case_id,
    implemented,
    rng_for,
    run,
    test_values,
    to_registers,
)
from conformance_vector import VectorCase, row

FORMATS = {"f16": ref.F16, "f32": ref.F32, "f64": ref.F64}


def ordering(fmt: ref.Format, a: int, b: int) -> str:
    """ "lt", "eq", "gt" or "un" (unordered)."""
    if ref.is_nan(fmt, a) or ref.is_nan(fmt, b):
        return "un"
    x, y = ref.order(fmt, a), ref.order(fmt, b)
    return "eq" if x == y else "lt" if x < y else "gt"


FLOAT_TRUE = {
    "f": (), "lt": ("lt",), "eq": ("eq",), "le": ("lt", "eq"), "gt": ("gt",), "lg": ("lt", "gt"),
    "ge": ("gt", "eq"), "o": ("lt", "eq", "gt"), "u": ("un",), "nge": ("lt", "un"), "nlg": ("eq", "un"),
    "ngt": ("lt", "eq", "un"), "nle": ("gt", "un"), "neq": ("lt", "gt", "un"), "nlt": ("gt", "eq", "un"),
    "tru": ("lt", "eq", "gt", "un"),
}  # fmt: skip
INT_TRUE: dict[str, Callable[[int, int], bool]] = {
    "f": lambda a, b: False, "lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ne": lambda a, b: a != b, "ge": lambda a, b: a >= b, "t": lambda a, b: True,
}  # fmt: skip


def float_compare(fmt: ref.Format, true: tuple[str, ...]) -> Callable[[int, int], int]:
    """A float compare as a function of bits."""
    return lambda a, b: int(ordering(fmt, a, b) in true)


def int_compare(kind: str, f: Callable[[int, int], bool]) -> Callable[[int, int], int]:
    """An integer compare as a function of bits."""
    bits = int(kind[1:])
    if kind[0] == "i":
        return lambda a, b: int(f(ref.sx(a, bits), ref.sx(b, bits)))
    return lambda a, b: int(f(a, b))


def encodings(bits: int) -> str:
    """64-bit compares have no SDWA form."""
    return "e32 e64" if bits == 64 else "e32 e64 sdwa"


def table(prefix: str) -> list[VectorCase]:
    """Every compare of a family ("v_cmp" or "v_cmpx")."""
    rows = []
    for kind, fmt in FORMATS.items():
        for name, true in FLOAT_TRUE.items():
            rows.append(
                row(
                    f"{prefix}_{name}_{kind}",
                    f"{kind} {kind} -> mask",
                    float_compare(fmt, true),
                    encodings(fmt.bits),
                    "NaN, signed zeros, inactive lanes 0",
                )
            )
        rows.append(
            row(
                f"{prefix}_class_{kind}",
                f"{kind} u32 -> mask",
                fn.class_test(fmt),
                encodings(fmt.bits),
                "all ten classes",
                scalar=False,
            )
        )
    for kind in ("i16", "u16", "i32", "u32", "i64", "u64"):
        for name, f in INT_TRUE.items():
            rows.append(
                row(
                    f"{prefix}_{name}_{kind}",
                    f"{kind} {kind} -> mask",
                    int_compare(kind, f),
                    encodings(int(kind[1:])),
                    "signedness, inactive lanes 0",
                )
            )
    return rows


CMP, CMPX = table("v_cmp"), table("v_cmpx")
CASES: list[Case] = [*CMP, *CMPX]


@pytest.mark.parametrize("case", implemented(CMP), ids=case_id)
def test_compare(case: VectorCase) -> None:
    check_vector_case(case)


@pytest.mark.parametrize("case", implemented(CMPX), ids=case_id)
def test_compare_and_write_exec(case: VectorCase) -> None:
    """v_cmpx: mask and exec get the compare ANDed with the old exec."""
    kinds, rng, waves = case.sources, rng_for(case.mnemonic), 4
    columns = test_values(kinds, rng, waves * LANES)
    vgprs, names, first = {}, [], 2
    for kind, column in zip(kinds, columns, strict=True):
        width = 2 if kind.endswith("64") else 1
        for i, array in enumerate(to_registers(column, width, waves)):
            vgprs[first + i] = array
        names.append(f"v{first}" if width == 1 else f"v[{first}:{first + 1}]")
        first += width
    wanted = [0] * waves
    for i, values in enumerate(zip(*columns, strict=True)):
        wanted[i // LANES] |= case.reference(*values) << (i % LANES)
    sdwa = " ".join(f"src{i}_sel:{'WORD_0' if k.endswith('16') else 'DWORD'}" for i, k in enumerate(kinds))
    forms = [("e32", "vcc", ""), ("e64", "s[20:21]", ""), ("sdwa", "vcc", sdwa), ("sdwa", "s[20:21]", sdwa)]
    for form, mask, suffix in forms if "sdwa" in case.encodings else forms[:2]:
        text = f"{case.mnemonic}_{form} {mask}, {', '.join(names)} {suffix}\ns_nop 4\n"
        text += f"s_mov_b64 s[30:31], {mask}\ns_mov_b64 s[32:33], exec"
        result = run(text, vgprs=vgprs, exec_mask=EXEC_WITH_HOLES, num_waves=waves)
        report = Report(f"{case.mnemonic}_{form}")
        for what, index in (("mask", 30), ("exec", 32)):
            low, high = (
                np.broadcast_to(np.asarray(result.sgpr(index + i)).reshape(-1), (waves,)) for i in (0, 1)
            )
            for wave in range(waves):
                got, want = int(low[wave]) | int(high[wave]) << 32, wanted[wave] & EXEC_WITH_HOLES
                report.check(got == want, lambda w=what, g=got, e=want: f"{w} is {g:#018x}, want {e:#018x}")
        report.finish()
