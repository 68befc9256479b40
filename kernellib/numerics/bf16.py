# SPDX-License-Identifier: Apache-2.0
"""bfloat16 on numpy: one rounding from float64, units in the last place, bit patterns.

bfloat16 is the upper half of an IEEE 754 binary32: 8 exponent bits, 8 significant bits (one implicit),
subnormals down to 2^-133. Values are held as float64 here, which represents each of them exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

SIGNIFICANT_BITS = 8
MIN_EXPONENT = -133  # of the last place of a subnormal
BF16_MIN_SUBNORMAL = 2.0**MIN_EXPONENT
BF16_MAX = float((2 - 2.0**-7) * 2.0**127)

F64 = npt.NDArray[np.float64]


def _quantum_exponent(values: F64) -> npt.NDArray[np.int64]:
    """Exponent of the last place of the binade that holds each finite value."""
    _, exponents = np.frexp(values)  # value = m * 2^e with m in [0.5, 1)
    exponents = np.where(values == 0.0, MIN_EXPONENT, exponents.astype(np.int64) - SIGNIFICANT_BITS)
    return np.maximum(exponents, MIN_EXPONENT)


def round_to_bf16(values: npt.ArrayLike) -> F64:
    """Rounds to the nearest bfloat16, ties to even, in one step.

    A float64 rounded first to float32 and then to bfloat16 is rounded twice, and wrong where the first
    step lands on a tie; library casts from float64 do that, an oracle must not.

    Args:
        values: any real numbers; computed in float64.

    Returns:
        float64 array of the same shape. NaN stays NaN, values past the largest finite bfloat16 by half
        a unit or more become infinite, the sign of zero is kept.

    Example:
        >>> float(round_to_bf16(1 + 2.0**-8)), float(round_to_bf16(1 + 3 * 2.0**-8))
        (1.0, 1.015625)
    """
    x = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(x)
    safe = np.where(finite, x, 0.0)
    exponents = _quantum_exponent(safe)
    rounded = np.ldexp(np.rint(np.ldexp(safe, -exponents)), exponents)
    rounded = np.where(np.abs(rounded) > BF16_MAX, np.copysign(np.inf, safe), rounded)
    return np.asarray(np.where(finite, np.copysign(rounded, x), x), dtype=np.float64)


def bf16_ulp(values: npt.ArrayLike) -> F64:
    """The unit in the last place of bfloat16 at each value: the spacing of its binade.

    Returns:
        float64 array; 2^-133 at zero and for subnormals, NaN where the value is not finite.
    """
    x = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(x)
    ulp = np.ldexp(1.0, _quantum_exponent(np.where(finite, x, 0.0)))
    return np.asarray(np.where(finite, ulp, np.nan), dtype=np.float64)


def bf16_neighbours(values: npt.ArrayLike) -> tuple[F64, F64]:
    """The next smaller and the next larger bfloat16 of each value.

    Args:
        values: numbers that bfloat16 represents exactly; the two zeros are one value.

    Returns:
        (below, above): float64 arrays of the same shape; infinite past the largest finite value, NaN where
        the value is not finite.

    Example:
        >>> [float(side) for side in bf16_neighbours(1.0)]
        [0.99609375, 1.0078125]
    """
    x = np.asarray(values, dtype=np.float64)
    magnitude = np.abs(x)
    finite = np.isfinite(x)
    safe = np.where(finite, magnitude, 0.0)
    outward = safe + bf16_ulp(safe)
    outward = np.where(outward > BF16_MAX, np.inf, outward)
    # Towards zero a power of two borders on the finer binade below it.
    inward = safe - bf16_ulp(safe - bf16_ulp(safe) / 2)
    smallest = np.where(safe == 0.0, -BF16_MIN_SUBNORMAL, inward)
    below = np.where(np.signbit(x) & (safe > 0.0), -outward, smallest)
    above = np.where(np.signbit(x) & (safe > 0.0), -inward, outward)
    return np.where(finite, below, np.nan), np.where(finite, above, np.nan)


def bits_from_bf16(values: Any) -> npt.NDArray[np.uint16]:
    """The 16-bit patterns of bfloat16 values.

    Args:
        values: a torch.bfloat16 tensor, a numpy array of ml_dtypes.bfloat16, or float32/float64 values
            that bfloat16 represents exactly.

    Raises:
        ValueError: a value that bfloat16 does not represent.
    """
    array = _to_numpy(values)
    if array.dtype.itemsize == 2 and array.dtype.name == "bfloat16":
        return array.view(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        single = array.astype(np.float32)
    bits = single.view(np.uint32)
    same = (single.astype(np.float64) == array) | np.isnan(array)
    exact = same & (((bits & 0xFFFF) == 0) | np.isnan(single))
    if not bool(np.all(exact)):
        raise ValueError(
            f"values got {array[~exact].flat[0]!r}, wanted numbers that bfloat16 represents exactly"
        )
    # A NaN whose payload sits in the low half must not turn into an infinity.
    return np.where(np.isnan(single), 0x7FC0 | (bits >> 16 & 0x8000), bits >> 16).astype(np.uint16)


def bf16_from_bits(bits: npt.ArrayLike) -> F64:
    """The values of 16-bit bfloat16 patterns, as float64."""
    wide = np.asarray(bits, dtype=np.uint16).astype(np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return wide.view(np.float32).astype(np.float64)


def to_float64(values: Any) -> F64:
    """A torch tensor or array-like as float64; exact for bfloat16, float16, float32 and float64."""
    array = _to_numpy(values)
    if array.dtype.name == "bfloat16":
        return bf16_from_bits(array.view(np.uint16))
    return array.astype(np.float64)


def _to_numpy(values: Any) -> npt.NDArray[Any]:
    """numpy array of a tensor or array-like; a bfloat16 tensor keeps its bits (as ml_dtypes.bfloat16)."""
    if hasattr(values, "detach"):  # a torch tensor, without importing torch here
        tensor = values.detach().cpu().contiguous()
        if str(tensor.dtype) == "torch.bfloat16":
            import ml_dtypes  # noqa: PLC0415
            import torch  # noqa: PLC0415

            return np.asarray(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
        return np.asarray(tensor.numpy())
    return np.asarray(values)
