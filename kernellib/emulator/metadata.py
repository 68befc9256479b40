# SPDX-License-Identifier: Apache-2.0
"""Checks the `.amdgpu_metadata` of a listing, so that later code may rely on the types of its fields."""

from __future__ import annotations

from typing import Any

MAX_SEGMENT_BYTES = 1 << 20
_NUMBERS = (
    ".agpr_count", ".vgpr_count", ".sgpr_count", ".vgpr_spill_count", ".sgpr_spill_count",
    ".kernarg_segment_size", ".kernarg_segment_align",
    ".group_segment_fixed_size", ".private_segment_fixed_size",
    ".max_flat_workgroup_size", ".wavefront_size",
)  # fmt: skip


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def check_kernel_metadata(entry: dict[Any, Any]) -> str | None:  # noqa: PLR0911 (one per rule)
    """What is wrong with one element of `amdhsa.kernels`, or None."""
    name = entry.get(".name")
    if not isinstance(name, str):
        return f".name {name!r} is not a string"
    for key in _NUMBERS:
        if key in entry and not _is_count(entry[key]):
            return f"{key} of {name} is {entry[key]!r}, wants a count"
    if entry.get(".wavefront_size", 64) != 64:
        return f"{name} is compiled for waves of {entry['.wavefront_size']}, gfx950 has 64"
    wanted = entry.get(".reqd_workgroup_size")
    if wanted is not None and not (
        isinstance(wanted, list) and len(wanted) == 3 and all(map(_is_count, wanted))
    ):
        return f".reqd_workgroup_size of {name} is {wanted!r}, wants three counts"
    args = entry.get(".args")
    if args is None:
        return None
    if not isinstance(args, list):
        return f".args of {name} is not a list"
    for position, arg in enumerate(args):
        if not isinstance(arg, dict):
            return f"argument {position} of {name} is not a mapping"
        offset, size = arg.get(".offset"), arg.get(".size")
        if not _is_count(offset) or not _is_count(size) or size == 0:
            return f"argument {position} of {name} has no valid .offset and .size"
        if int(offset) + int(size) > MAX_SEGMENT_BYTES:  # type: ignore[arg-type]
            return f"argument {position} of {name} lies past {MAX_SEGMENT_BYTES} bytes"
        if not isinstance(arg.get(".value_kind"), str):
            return f"argument {position} of {name} has no .value_kind"
    return None
