# SPDX-License-Identifier: Apache-2.0
"""Whole listings from a few instructions, for kernels that FlyDSL cannot be made to write."""

from __future__ import annotations

_TEMPLATE = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
	.text
	.globl	{name}
	.p2align	8
	.type	{name},@function
{name}:
{body}
	s_endpgm
	.section	.rodata,"a",@progbits
	.amdhsa_kernel {name}
		.amdhsa_group_segment_fixed_size {lds}
		.amdhsa_private_segment_fixed_size 0
		.amdhsa_kernarg_size {kernarg}
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_next_free_vgpr 32
		.amdhsa_next_free_sgpr 40
		.amdhsa_accum_offset 32
		.amdhsa_float_denorm_mode_32 3
		.amdhsa_float_denorm_mode_16_64 3
	.end_amdhsa_kernel
	.text
	.amdgpu_metadata
---
amdhsa.kernels:
  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: {kernarg}
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: 0
    .kernarg_segment_align: 8
    .wavefront_size: 64
    .sgpr_count: 40
    .vgpr_count: 32
    .max_flat_workgroup_size: 1024
    .args:
{args}
amdhsa.target: amdgcn-amd-amdhsa--gfx950
amdhsa.version: [1, 2]
...
	.end_amdgpu_metadata
"""


def listing(body: str, num_pointers: int, lds_bytes: int = 0, name: str = "test_kernel") -> str:
    """A kernel of the given instructions whose arguments are 64-bit pointers.

    It starts with the kernel arguments' address in s[0:1], the workgroup's number in s2 and the thread's in
    v0; the body gets its pointers by `s_load_dwordx2`.
    """
    args = "\n".join(
        f"      - {{.offset: {8 * i}, .size: 8, .value_kind: by_value}}" for i in range(num_pointers)
    )
    code = "\n".join(
        f"\t{line.strip()}" if not line.strip().endswith(":") else line.strip()
        for line in body.strip().splitlines()
    )
    return _TEMPLATE.format(name=name, body=code, lds=lds_bytes, kernarg=8 * num_pointers, args=args)
