# SPDX-License-Identifier: Apache-2.0
"""The kernel argument segment: explicit arguments at their metadata offsets, hidden ones filled in.

Layout facts: LLVM AMDGPU usage guide, "Kernel argument metadata" (code object v5 hidden arguments).
"""

from __future__ import annotations

import numbers
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernellib.emulator.assembly import Kernel
from kernellib.emulator.errors import LaunchArgumentError
from kernellib.emulator.metadata import MAX_SEGMENT_BYTES

Dim3 = tuple[int, int, int]


def explicit_arguments(kernel: Kernel) -> list[dict[str, Any]]:
    """Metadata entries of the arguments that the caller gives, in order."""
    args = kernel.metadata.get(".args") or []
    return [a for a in args if not str(a.get(".value_kind", "")).startswith("hidden_")]


def check_arguments(args: Any) -> None:
    """Raise LaunchArgumentError unless `args` is a sequence of values."""
    if not isinstance(args, (Sequence, np.ndarray)) or isinstance(args, (str, bytes, bytearray)):
        raise LaunchArgumentError(
            f"args: got {type(args).__name__}, wants a sequence with one value per kernel argument"
        )


def _address(tensor: Any, position: int) -> int:
    """Where a tensor's elements lie; only dense ones on the CPU have a place that kernels can reach."""
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    layout = str(getattr(tensor, "layout", "torch.strided"))
    if device != "cpu" or layout != "torch.strided" or getattr(tensor, "is_nested", False):
        raise LaunchArgumentError(
            f"argument {position}: a tensor on {device} of layout {layout.removeprefix('torch.')} has no "
            "memory that the emulator can reach: give a dense CPU tensor"
        )
    return int(tensor.data_ptr())


def pack_value(value: Any, size: int, position: int, is_pointer: bool = False) -> bytes:
    """One argument as bytes: raw bytes, a tensor or array (its address), a Python or numpy number.

    `is_pointer`: the metadata say that the kernel wants an address (`global_buffer`).  Where they only say
    eight bytes `by_value`, which may be an address too, a double is given as numpy.float64.
    """
    if is_pointer and isinstance(value, (float, np.inexact)):
        raise LaunchArgumentError(
            f"argument {position}: got {type(value).__name__} {value!r}, the kernel wants a pointer: "
            "give a tensor or an array"
        )
    if isinstance(value, (bytes, bytearray)):
        raw = bytes(value)
    elif hasattr(value, "data_ptr"):
        raw = struct.pack("<Q", _address(value, position))
    elif isinstance(value, np.ndarray) and value.ndim:
        raw = struct.pack("<Q", value.ctypes.data)
    elif isinstance(value, np.generic):
        raw = value.tobytes()
    elif isinstance(value, numbers.Integral):
        if not -(1 << (8 * size - 1)) <= int(value) < 1 << (8 * size):
            raise LaunchArgumentError(f"argument {position}: {value} does not fit {size} bytes")
        raw = (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    elif isinstance(value, float):
        if size != 4:
            raise LaunchArgumentError(
                f"argument {position}: got the Python float {value!r} for {size} bytes, which may be "
                "a pointer; give a tensor, an array, a numpy number or raw bytes"
            )
        raw = struct.pack("<f", value)
    else:
        raise LaunchArgumentError(
            f"argument {position}: got {type(value).__name__}, wants a tensor, an array, a number or bytes"
        )
    if len(raw) != size:
        raise LaunchArgumentError(f"argument {position}: got {len(raw)} bytes, the kernel wants {size}")
    return raw


def build_kernarg(
    kernel: Kernel, args: Sequence[Any], grid: Dim3, block: Dim3, dynamic_lds_bytes: int = 0
) -> bytearray:
    """The whole segment.  Raises LaunchArgumentError on a wrong count, size or an unknown hidden argument."""
    wanted = explicit_arguments(kernel)
    check_arguments(args)
    if not isinstance(dynamic_lds_bytes, numbers.Integral) or dynamic_lds_bytes < 0:
        raise LaunchArgumentError(
            f"dynamic_lds_bytes {dynamic_lds_bytes!r}: wants a number of bytes, 0 or more"
        )
    size = int(kernel.descriptor.get("kernarg_size", kernel.metadata.get(".kernarg_segment_size", 0)))
    if len(args) != len(wanted):
        raise LaunchArgumentError(f"kernel {kernel.name} wants {len(wanted)} arguments, got {len(args)}")
    if size > MAX_SEGMENT_BYTES:
        raise LaunchArgumentError(f"kernel {kernel.name} asks for {size} bytes of arguments")
    size = max(size, 16)
    # The segment is 16-byte aligned, so LLVM may widen the load of its last three dwords to four: there is
    # memory up to the next multiple of 16, with whatever it holds.
    segment = bytearray([0xA5]) * (-(-size // 16) * 16)
    segment[:size] = bytes(size)
    for position, (entry, value) in enumerate(zip(wanted, args, strict=True)):
        offset, length = int(entry[".offset"]), int(entry[".size"])
        if offset < 0 or length <= 0 or offset + length > size:
            raise LaunchArgumentError(f"argument {position} of {kernel.name} lies outside its segment")
        is_pointer = entry.get(".value_kind") == "global_buffer"
        segment[offset : offset + length] = pack_value(value, length, position, is_pointer)
    for entry in kernel.metadata.get(".args") or []:
        kind = str(entry.get(".value_kind", ""))
        if kind.startswith("hidden_"):
            value = hidden_value(kind, grid, block, dynamic_lds_bytes)
            offset, length = int(entry[".offset"]), int(entry[".size"])
            if offset + length > size:
                raise LaunchArgumentError(f"{kind} of {kernel.name} lies outside its segment")
            segment[offset : offset + length] = (value & ((1 << 8 * length) - 1)).to_bytes(length, "little")
    return segment


def hidden_value(kind: str, grid: Dim3, block: Dim3, dynamic_lds_bytes: int) -> int:  # noqa: PLR0911
    """Value of a hidden argument.  Grids are whole workgroups, so remainders are zero.

    Services that do not exist here (printf, hostcall, heap, queues) are null pointers: a kernel that uses one
    is stopped by the bounds check.
    """
    axes = {"x": 0, "y": 1, "z": 2}
    name = kind.removeprefix("hidden_")
    axis = axes.get(name[-1], -1)
    if name.startswith("block_count_") and axis >= 0:
        return grid[axis]
    if name.startswith("group_size_") and axis >= 0:
        return block[axis]
    if name.startswith(("remainder_", "global_offset_")) and axis >= 0:
        return 0
    if name == "grid_dims":
        return 3 if grid[2] * block[2] > 1 else 2 if grid[1] * block[1] > 1 else 1
    if name == "dynamic_lds_size":
        return dynamic_lds_bytes
    if name in ("shared_base", "private_base"):
        return {"shared_base": SHARED_APERTURE, "private_base": PRIVATE_APERTURE}[name] >> 32
    if name in (
        "none", "printf_buffer", "hostcall_buffer", "multigrid_sync_arg", "heap_v1", "default_queue",
        "completion_action", "queue_ptr", "assert_buffer",
    ):  # fmt: skip
        return 0
    raise LaunchArgumentError(f"hidden argument {kind} is not known")


SHARED_APERTURE = 0x0001_0000_0000_0000
PRIVATE_APERTURE = 0x0002_0000_0000_0000
