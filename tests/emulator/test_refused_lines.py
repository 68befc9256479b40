# SPDX-License-Identifier: Apache-2.0
"""Lines that do not exist on gfx950 are refused; LLVM's assembler is the witness, where it looks at the rule.

`REFUSED` holds, per rule, lines that LLVM's assembler for gfx950 refuses; `NEIGHBOURS` lines as near as can
be that it takes.  The emulator must agree on each.  `UNCHECKED` are values that do not fit their field
although the assembler drops the excess bits without a word.
"""

from __future__ import annotations

import pytest

from kernellib.emulator import UnsupportedOperandError, parse
from kernellib.emulator.binding.program import bind_program
from tests.emulator.conformance import conformance_assembler

REFUSED = """
# VGPR indexing
s_set_gpr_idx_on s2, gpr_idx(FOO)
s_set_gpr_idx_on s2, 16
s_set_gpr_idx_on v2, 1
# vector registers in groups begin at an even number
v_pk_fma_f32 v[1:2], v[2:3], v[4:5], v[6:7]
v_pk_fma_f32 v[0:1], v[3:4], v[4:5], v[6:7]
v_add_f64 v[1:2], v[2:3], v[4:5]
v_fma_f64 v[0:1], v[2:3], v[4:5], v[7:8]
v_lshlrev_b64 v[0:1], s2, v[3:4]
v_mfma_f32_16x16x16_bf16 a[1:4], v[0:1], v[2:3], 0
v_mfma_f32_16x16x16_bf16 a[0:3], v[1:2], v[2:3], 0
ds_read_b64 v[1:2], v0
ds_read_b96 v[1:3], v0
ds_read_b128 v[1:4], v0
ds_write_b64 v0, v[1:2]
ds_read_b64_tr_b16 v[1:2], v0
global_load_dword v0, v[1:2], off
global_load_dwordx2 a[1:2], v[2:3], off
global_load_dwordx3 v[1:3], v[2:3], off
global_store_dwordx4 v[2:3], v[5:8], off
scratch_load_dwordx2 v[1:2], off, s0
buffer_load_dwordx3 v[1:3], v4, s[0:3], 0 offen
# scalar registers in groups
s_load_dwordx2 s[1:2], s[0:1], 0x0
s_load_dwordx4 s[2:5], s[0:1], 0
v_pk_mul_f32 v[0:1], s[1:2], v[4:5]
# the 32-bit encodings: source 1 is a VGPR, no modifiers, masks in vcc
v_add_f32_e32 v1, v1, s2
v_sub_u32_e32 v0, v1, 5
v_fmac_f32_e32 v0, v1, s2
v_cmp_lt_f32_e32 vcc, v1, s2
v_cmp_lt_f32_e32 s[0:1], s2, v1
v_add_f32_e32 v0, -v1, v2
v_add_f32_e32 v0, |v1|, v2
v_exp_f32_e32 v0, -v1
v_add_f32_e32 v0, v1, v2 clamp
v_max_f32_e32 v0, v1, v2 mul:2
v_fma_f32_e32 v0, v1, v2, v3
v_add_f64_e32 v[0:1], v[2:3], v[4:5]
# literals
v_fma_f32 v0, 1.0, 0x3f800001, v2
v_add_f32_e64 v0, 0x12345678, v1
v_add_f32 v0, s1, 0x12345678
v_sub_u32 v0, v1, 0x12345
v_mul_f32_e64 v0, 0.3, v1
v_mul_f32_e64 v0, 8.0, v1
v_add_u32_e64 v0, 65, v1
v_add_u32_e64 v0, -17, v1
v_add_f64 v[0:1], 0x123456789, v[2:3]
v_add_f64 v[0:1], 0.1, v[2:3]
v_add_f64 v[0:1], 0x3f800000, v[2:3]
v_perm_b32 v0, v1, v2, 0x3020100
v_mad_u64_u32 v[0:1], s[2:3], v4, 0x12345, v[6:7]
v_pk_add_f16 v0, v1, 0x12345678
v_dot2_f32_bf16 v0, v1, v2, 0x12345
v_cmp_lt_f32_e64 s[0:1], 0x12345678, v3
v_max_f32 v0, 0x12345, v2 clamp
v_add_u32_sdwa v0, 0x1234, v2 dst_sel:DWORD src0_sel:DWORD src1_sel:DWORD
v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], 0x12345678
v_accvgpr_write_b32 a0, 300
v_writelane_b32 v0, 300, 1
s_add_u32 s0, 0x12345678, 0x12345679
s_cmp_eq_u32 0x12345, 0x23456
s_mov_b64 s[0:1], 0x123456789
buffer_load_dword v0, v1, s[0:3], 200 offen
# the constant bus brings one value
v_fma_f32 v0, s1, s2, v2
v_add_f32_e64 v0, s1, s2
v_add_f32 v0, 0x12345678, s1
v_pk_mul_f32 v[0:1], s[2:3], s[4:5]
v_fma_f64 v[0:1], v[2:3], s[4:5], s[6:7]
v_cndmask_b32_e32 v0, s1, v2, vcc
v_cndmask_b32_e32 v0, 0x12345, v2, vcc
v_cndmask_b32_e64 v0, s1, v2, s[2:3]
v_addc_co_u32_e32 v0, vcc, s1, v2, vcc
v_div_fmas_f32 v0, s1, v2, v3
v_fmamk_f32 v0, s1, 0x12345678, v2
v_fmaak_f32 v0, s1, v2, 0x12345678
v_writelane_b32 v0, s1, s2
v_add_u32_e64 v0, m0, s1
v_fma_mix_f32 v0, s1, s2, v3
v_add_u32_sdwa v0, s1, s2 dst_sel:DWORD src0_sel:DWORD src1_sel:DWORD
# register files
v_add_f32 v0, a1, v2
v_mov_b32_e32 a0, v1
v_accvgpr_read_b32 v0, v1
v_accvgpr_write_b32 v0, v1
v_accvgpr_mov_b32 a0, v1
v_readfirstlane_b32 s0, s1
v_readlane_b32 s0, s1, 2
v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], s[0:3]
v_mfma_f32_16x16x16_bf16 v[0:3], a[0:1], v[2:3], a[0:3]
v_smfmac_f32_16x16x32_bf16 v[0:3], v[4:5], v[6:9], s1
# DPP
v_mov_b32_dpp v0, s1 row_shl:1 row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v0, 5 row_shl:1 row_mask:0xf bank_mask:0xf
v_add_u32_dpp v0, v1, s2 row_shl:1 row_mask:0xf bank_mask:0xf
v_add_f64_dpp v[0:1], v[2:3], v[4:5] row_shl:1
v_mov_b64_dpp v[0:1], v[2:3] row_shl:1 row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v0, v1 row_shl:0 row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v0, v1 row_shr:16 row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v0, v1 quad_perm:[0,1,2,4] row_mask:0xf bank_mask:0xf
# modifiers and offsets that do not fit
v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7] mul:2
v_pk_add_f16 v0, v1, v2 mul:2
v_cvt_pk_f32_fp8 v[0:1], v2 op_sel:[1,1,1,1]
v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], 0 cbsz:9
v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], 0 abid:16
v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], 0 blgp:8
global_load_dword v0, v[2:3], off offset:4096
global_load_dword v0, v[2:3], off offset:-4097
global_store_short v1, v0, s[0:1] offset:-5000
flat_load_dword v0, v[0:1] offset:4096
flat_load_dword v0, v[0:1] offset:-1
scratch_load_dword v0, off, s0 offset:4096
ds_read_b32 v0, v1 offset:65536
ds_bpermute_b32 v0, v1, v2 offset:70000
buffer_load_dword v0, v1, s[4:7], 0x12345 offen
"""

NEIGHBOURS = """
v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]
v_lshlrev_b64 v[0:1], s2, v[4:5]
s_load_dwordx4 s[4:7], s[0:1], 0
v_add_f32_e32 v1, s2, v1
v_add_f32_e32 v1, 0x12345678, v1
v_add_f32 v1, v1, s2
v_sub_u32 v0, v1, 5
v_cmp_lt_f32 s[0:1], s2, v1
v_exp_f32_e64 v0, -v1
v_mul_f32_e64 v0, 0.15915494, v1
v_mul_f32_e64 v0, 0x3e22f983, v1
v_add_f32_e64 v0, 0x3f800000, v1
v_mul_f32_e64 v0, -4.0, v1
v_add_u32_e64 v0, 64, v1
v_add_u32_e64 v0, 0xffffffff, v1
v_add_f64 v[0:1], 0x3ff0000000000000, v[2:3]
v_add_f64 v[0:1], 1.0, v[2:3]
v_fma_f32 v0, s1, s1, 1.0
v_fma_f32 v0, 1.0, 2.0, 0.5
v_add_f32_e64 v0, s1, s1
v_cndmask_b32_e64 v0, v1, v2, s[2:3]
v_cndmask_b32_e64 v0, 1, 2, vcc
v_div_fmas_f32 v0, 1.0, v2, v3
v_fmamk_f32 v0, v1, 0x12345678, v2
v_fmaak_f32 v0, 1.0, v2, 0x12345678
v_writelane_b32 v0, s1, 3
v_writelane_b32 v0, s1, m0
v_add_u32_e64 v0, m0, m0
v_add_u32_sdwa v0, 5, v2 dst_sel:DWORD src0_sel:DWORD src1_sel:DWORD
v_accvgpr_write_b32 a0, 5
v_accvgpr_mov_b32 a0, a1
v_mfma_f32_16x16x16_bf16 a[0:3], a[0:1], v[2:3], a[0:3]
v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], 1.0
v_mov_b64_dpp v[0:1], v[2:3] row_newbcast:1 row_mask:0xf bank_mask:0xf
v_add_f32_dpp v0, -v1, |v2| row_shl:15 row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v0, v1 quad_perm:[0,1,2,3] row_mask:0x0 bank_mask:0xf
v_bitop3_b32 v0, v1, v2, v3 bitop3:0xff
s_add_u32 s0, 0x12345678, 0x12345678
s_mov_b64 s[0:1], 0x12345678
global_load_dword a0, v[2:3], off offset:-4096
global_load_dword v0, v[2:3], off offset:4095
flat_load_dword v0, v[0:1] offset:4095
ds_read_b32 v0, v1 offset:65535
buffer_load_dword v0, v1, s[4:7], 64 offen
"""

UNCHECKED = (
    "v_bitop3_b32 v0, v1, v2, v3 bitop3:300",
    "v_bitop3_b32 v0, v1, v2, v3 bitop3:-1",
    "v_mov_b32_dpp v0, v1 row_shl:1 row_mask:0x1f bank_mask:0xf",
    "v_mov_b32_dpp v0, v1 row_shl:1 row_mask:0x10 bank_mask:0xf",
    "v_mov_b32_dpp v0, v1 row_shl:1 row_mask:0xf bank_mask:-1",
    "v_mov_b32_dpp v0, v1 row_shl:1 row_mask:0xf bank_mask:0x10",
)


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def bind(line: str) -> None:
    program = parse(f'.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\nk:\n\t{line}\n\ts_endpgm\n')
    bind_program(program, check_hazards=False)


@pytest.mark.parametrize("line", [*lines_of(REFUSED), *UNCHECKED])
def test_refused(line: str) -> None:
    with pytest.raises(UnsupportedOperandError) as caught:
        bind(line)
    assert caught.value.line_no == 3
    assert line in str(caught.value)


@pytest.mark.parametrize("line", lines_of(NEIGHBOURS))
def test_neighbours_are_taken(line: str) -> None:
    bind(line)


def test_the_assembler_agrees() -> None:
    if not conformance_assembler.is_available():
        pytest.skip("ziglang is not installed")
    refused, taken = lines_of(REFUSED), lines_of(NEIGHBOURS)
    found = conformance_assembler.rejected([*refused, *taken, *UNCHECKED])
    assert [line for line in refused if line not in found] == []
    assert {line: found[line] for line in (*taken, *UNCHECKED) if line in found} == {}
