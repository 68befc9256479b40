# SPDX-License-Identifier: Apache-2.0
"""What a listing may say about its target and its kernels' resources, and whether the code keeps to it.

Facts: LLVM AMDGPU usage guide, "AMDHSA kernel assembler directives" (names, defaults, which targets have
them), "Kernel descriptor" (fields and their widths) and "Target ID".  gfx950 is a gfx9 with architected flat
scratch: it has none of the flat scratch and private segment buffer directives, nor those of gfx10 and later.
A lane's vector registers are one file: AGPRs begin `accum_offset` registers after v0, and
`next_free_vgpr` counts both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from kernellib.emulator.operands import Operand

TARGET = "gfx950"
MAX_USER_SGPRS = 16
NUM_NUMBERED_SGPRS = 102
# Largest value per directive; None: a size or count that other checks bound.
_LIMITS: dict[str, int | None] = (
    dict.fromkeys(("group_segment_fixed_size", "private_segment_fixed_size", "kernarg_size"))
    | dict.fromkeys(("user_sgpr_kernarg_preload_length", "user_sgpr_kernarg_preload_offset"))
    | {"user_sgpr_count": MAX_USER_SGPRS, "next_free_vgpr": 512, "next_free_sgpr": NUM_NUMBERED_SGPRS}
    | {"accum_offset": 256, "system_vgpr_workitem_id": 2}
    | dict.fromkeys((f"float_{kind}_mode_32" for kind in ("round", "denorm")), 3)
    | dict.fromkeys((f"float_{kind}_mode_16_64" for kind in ("round", "denorm")), 3)
    | dict.fromkeys((f"system_sgpr_workgroup_id_{axis}" for axis in "xyz"), 1)
    | dict.fromkeys(
        (f"user_sgpr_{name}" for name in (
            "dispatch_ptr", "queue_ptr", "kernarg_segment_ptr", "dispatch_id", "private_segment_size",
        )), 1)
    | dict.fromkeys(
        ("uses_dynamic_stack", "enable_private_segment", "system_sgpr_workgroup_info", "reserve_vcc",
         "reserve_xnack_mask", "dx10_clamp", "ieee_mode", "fp16_overflow"), 1)
)  # fmt: skip
# Known, but what they switch on is not emulated: only 0 is taken.
_ONLY_OFF = {
    "tg_split": "threadgroup split mode",
    "exception_fp_ieee_invalid_op": "floating-point exceptions",
    "exception_fp_denorm_src": "floating-point exceptions",
    "exception_fp_ieee_div_zero": "floating-point exceptions",
    "exception_fp_ieee_overflow": "floating-point exceptions",
    "exception_fp_ieee_underflow": "floating-point exceptions",
    "exception_fp_ieee_inexact": "floating-point exceptions",
    "exception_int_div_zero": "integer exceptions",
}
# Directives of other targets, to say so instead of "unknown".
_ELSEWHERE = {
    "wavefront_size32": f"of gfx10 and later: a wave of {TARGET} has 64 lanes",
    "workgroup_processor_mode": "of gfx10 and later",
    "memory_ordered": "of gfx10 and later",
    "forward_progress": "of gfx10 and later",
    "shared_vgpr_count": "of gfx10 and gfx11",
    "inst_pref_size": "of gfx11 and later",
    "round_robin_scheduling": "of gfx12 and later",
    "named_barrier_count": "of gfx1250",
    "user_sgpr_private_segment_buffer": "of targets without architected flat scratch",
    "user_sgpr_flat_scratch_init": "of targets without architected flat scratch",
    "system_sgpr_private_segment_wavefront_offset": "of targets without architected flat scratch",
    "reserve_flat_scratch": "of targets without architected flat scratch",
}


class _HasOperands(Protocol):
    """What `first_beyond` needs of an instruction."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Its operands."""


_Inst = TypeVar("_Inst", bound=_HasOperands)


def check_target(target: str) -> str | None:
    """What is wrong with the text of `.amdgcn_target`, or None.

    A target is `amdgcn-amd-amdhsa--gfx950`, in newer listings `amdgcn-amd-amdhsa-unknown-gfx950`, with
    optional features (`:sramecc+:xnack-`).  A listing without the directive is taken for gfx950.
    """
    name = target.partition(":")[0]
    if not name.startswith("amdgcn-amd-amdhsa-") or name.rpartition("-")[2] != TARGET:
        return f"the listing is for target {target!r}: this emulator runs amdgcn-amd-amdhsa--{TARGET} only"
    return None


def check_directive(name: str, value: int) -> str | None:
    """What is wrong with `.amdhsa_<name> <value>`, or None."""
    if name in _ELSEWHERE:
        return f".amdhsa_{name} is a directive {_ELSEWHERE[name]}"
    if name in _ONLY_OFF:
        return f".amdhsa_{name} {value}: {_ONLY_OFF[name]} are not emulated, wants 0" if value else None
    if name not in _LIMITS:
        known = ", ".join(sorted(_LIMITS | _ONLY_OFF))
        return f".amdhsa_{name} is not a directive of {TARGET}, which has {known}"
    limit = _LIMITS[name]
    if limit is not None and value > limit:
        return f".amdhsa_{name} {value}: {TARGET} has at most {limit}"
    if name == "accum_offset" and (value < 4 or value % 4):
        return f".amdhsa_accum_offset {value}: wants a multiple of 4 from 4 to 256"
    return None


def first_beyond(descriptor: dict[str, int], code: Iterable[_Inst]) -> tuple[_Inst, str] | None:
    """The first instruction of a kernel that names a register it has not been given, and what is wrong.

    `next_free_vgpr` and `next_free_sgpr` are one more than the largest number that the code names; what
    the descriptor does not give is not checked.
    """
    total, scalars = (
        descriptor.get("next_free_vgpr", 512),
        descriptor.get("next_free_sgpr", NUM_NUMBERED_SGPRS),
    )
    first_agpr = descriptor.get("accum_offset")
    vectors = min(total, first_agpr if first_agpr is not None else 256)
    limits = {
        "vgpr": (vectors, f"next_free_vgpr {total}, accum_offset {first_agpr}"),
        "agpr": (max(total - (first_agpr or 0), 0), f"next_free_vgpr {total}, accum_offset {first_agpr}"),
        "sgpr": (scalars, f"next_free_sgpr {scalars}"),
    }
    for inst in code:
        for operand in inst.operands:
            if operand.kind not in limits:
                continue
            if operand.kind == "sgpr" and operand.index >= NUM_NUMBERED_SGPRS:
                continue  # vcc, m0, exec, ...: not counted there
            limit, said = limits[operand.kind]
            if operand.index + operand.count > limit:
                return inst, f"{operand.text} lies beyond the kernel's registers ({said})"
    return None
