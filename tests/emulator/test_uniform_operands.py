# SPDX-License-Identifier: Apache-2.0
"""Vector instructions whose sources are all uniform: one scalar register, or constants only.

A compiler emits them for float arithmetic on a kernel's arguments, since the scalar unit has no float
instructions. Each must give in every lane what it gives with the same values in vector registers.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kernellib.emulator.snippet import run_snippet

# Without v_div_fmas: it reads vcc over the constant bus, which brings one value (test_constants has it).
TERNARY = (
    "v_fma_f32", "v_div_fixup_f32", "v_med3_f32", "v_max3_f32", "v_min3_f32", "v_fma_f16",
    "v_pk_fma_f16", "v_dot2_f32_bf16", "v_fma_mix_f32", "v_mad_u32_u24", "v_perm_b32", "v_bfe_u32",
    "v_lshl_add_u32", "v_alignbit_b32", "v_sad_u8",
)  # fmt: skip
TERNARY_64 = ("v_fma_f64", "v_div_fixup_f64", "v_pk_fma_f32")
BINARY = ("v_add_f32_e64", "v_mul_f32_e64", "v_max_f32_e64", "v_cvt_pk_bf16_f32", "v_mul_hi_u32")


def words(value: float, fmt: str) -> tuple[int, ...]:
    return struct.unpack(f"<{struct.calcsize(fmt) // 4}I", struct.pack(fmt, value))


@pytest.mark.parametrize("value", [1.5, -0.0, 3e38, 1e-45, float("inf"), float("nan")])
@pytest.mark.parametrize("mnemonic", [*TERNARY, *BINARY])
def test_one_scalar_register(mnemonic: str, value: float) -> None:
    count = 3 if mnemonic in TERNARY else 2
    [bits] = words(value, "<f")
    scalar = run_snippet(f"{mnemonic} v0, " + ", ".join(["s1"] * count), sgprs={1: bits})
    vector = run_snippet(f"{mnemonic} v0, " + ", ".join(["v1"] * count), vgprs={1: bits})
    np.testing.assert_array_equal(scalar.vgpr(0), vector.vgpr(0))


@pytest.mark.parametrize("value", [1.5, -0.0, 3e38, 5e-324, float("inf"), float("nan")])
@pytest.mark.parametrize("mnemonic", TERNARY_64)
def test_one_scalar_pair(mnemonic: str, value: float) -> None:
    low, high = words(value, "<d")
    scalar = run_snippet(f"{mnemonic} v[0:1], s[2:3], s[2:3], s[2:3]", sgprs={2: low, 3: high})
    vector = run_snippet(f"{mnemonic} v[0:1], v[2:3], v[2:3], v[2:3]", vgprs={2: low, 3: high})
    for register in (0, 1):
        np.testing.assert_array_equal(scalar.vgpr(register), vector.vgpr(register))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("v_fma_f32 v0, s1, s1, 1.0", 1.5 * 1.5 + 1.0),
        ("v_fma_f32 v0, 2.0, 4.0, 0.5", 8.5),
        ("v_div_fmas_f32 v0, 2.0, 4.0, 0.5", 8.5),
        ("v_mul_f32_e64 v0, 2.0, 4.0", 8.0),
    ],
)
def test_constants(code: str, expected: float) -> None:
    result = run_snippet(code, sgprs={1: words(1.5, "<f")[0]})
    np.testing.assert_array_equal(result.vgpr(0).view(np.float32), np.full(64, expected, np.float32))


def test_lanes_that_are_off_keep_their_value() -> None:
    result = run_snippet("v_fma_f32 v0, 2.0, 4.0, 0.5", vgprs={0: 7}, exec_mask=0b101)
    wanted = np.full(64, 7, np.uint32)
    wanted[[0, 2]] = words(8.5, "<f")[0]
    np.testing.assert_array_equal(result.vgpr(0), wanted)
