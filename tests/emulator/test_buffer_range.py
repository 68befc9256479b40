# SPDX-License-Identifier: Apache-2.0
"""Buffers' range check: what is counted, and which of the disputed readings the emulator has.

The conformance tests accept every published reading of the range check; these tests pin the one that
`binding/buffer.py` documents, and that lanes out of range are not counted as bytes moved, in both modes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernellib.emulator import emulated
from kernellib.emulator.memory import MemoryMap
from kernellib.emulator.snippet import run_snippet

WAIT = "\ns_waitcnt vmcnt(0)"
VALID_BYTES = 14_336
LISTING = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
	.text
store_rows:
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	s_load_dword s6, s[0:1], 0x8
	v_lshlrev_b32_e32 v1, 4, v0
	s_lshl_b32 s8, s2, 12
	v_add_u32_e32 v1, s8, v1
	s_mov_b32 s7, 0x27000
	v_mov_b32_e32 v4, 1
	v_mov_b32_e32 v5, 2
	v_mov_b32_e32 v6, 3
	v_mov_b32_e32 v7, 4
	s_waitcnt lgkmcnt(0)
	s_and_b32 s5, s5, 0xffff
	s_nop 4
	buffer_load_dwordx4 v[8:11], v1, s[4:7], 0 offen
	s_waitcnt vmcnt(0)
	buffer_store_dwordx4 v[4:7], v1, s[4:7], 0 offen
	s_endpgm
	.section .rodata,"a",@progbits
	.p2align 6
	.amdhsa_kernel store_rows
		.amdhsa_kernarg_size 16
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_next_free_vgpr 12
		.amdhsa_next_free_sgpr 16
		.amdhsa_accum_offset 12
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.kernels:
  - .name: store_rows
    .symbol: store_rows.kd
    .kernarg_segment_size: 16
    .kernarg_segment_align: 8
    .group_segment_fixed_size: 0
    .private_segment_fixed_size: 0
    .max_flat_workgroup_size: 256
    .wavefront_size: 64
    .sgpr_count: 16
    .vgpr_count: 12
    .args:
      - {.offset: 0, .size: 8, .value_kind: global_buffer, .address_space: global}
      - {.offset: 8, .size: 4, .value_kind: by_value}
...
	.end_amdgpu_metadata
"""


@pytest.mark.parametrize("mode", ["simple", "relaxed"])
@pytest.mark.parametrize("valid", [VALID_BYTES, VALID_BYTES - 8, 16_384])
def test_lanes_out_of_range_move_no_bytes(mode: Any, valid: int) -> None:
    """4 workgroups of 256 threads reach for 16,384 bytes; the descriptor says how many exist."""
    memory = torch.zeros(16_384, dtype=torch.uint8)
    with emulated(mode=mode) as session:
        session.run_assembly(LISTING, "store_rows", (4, 1, 1), (256, 1, 1), [memory, valid])
        report = session.launches[-1]
    moved = report.bytes_by_space["global"]
    assert (moved["load"], moved["store"]) == (valid, valid)
    assert int(np.count_nonzero(memory.numpy()[::4])) == valid // 4
    whole, rest = divmod(valid, 16)
    requests = {key: n for key, n in report.requests.items() if key[0].startswith("buffer")}
    names = ("buffer_load_dwordx4", "buffer_store_dwordx4")
    want = {(name, 16): whole for name in names} | {(name, rest): 1 for name in names if rest}
    assert requests == want


def descriptor(tensor: torch.Tensor, num_records: int, stride: int = 0) -> dict[int, int]:
    """A buffer resource in s[4:7]."""
    pointer = tensor.data_ptr()
    return {4: pointer & 0xFFFFFFFF, 5: pointer >> 32 & 0xFFFF | stride << 16, 6: num_records, 7: 0x27000}


def load(tensor: torch.Tensor, operands: str, registers: dict[int, Any], sgprs: dict[int, int]) -> list[int]:
    """One dword per lane."""
    memory = MemoryMap()
    memory.register_tensor(tensor)
    text = f"buffer_load_dword v8, {operands}{WAIT}"
    result = run_snippet(text, vgprs=registers | {8: np.full(64, 7)}, sgprs=sgprs, memory=memory)
    return [int(v) for v in result.vgpr(8)]


def test_soffset_counts_in_the_range_check() -> None:
    """128 records, soffset 64: the last 16 dwords that the VGPR offset alone would allow are turned away."""
    words = torch.arange(1, 129, dtype=torch.int32)
    got = load(words, "v2, s[4:7], s8 offen", {2: np.arange(64) * 4}, descriptor(words, 128) | {8: 64})
    assert got == [17 + n if 4 * n + 64 + 4 <= 128 else 0 for n in range(64)]


def test_offset_past_the_stride_is_out_of_range() -> None:
    """Records of 16 bytes: offset 12 is the last dword of one, offset 16 none."""
    words = torch.arange(1, 257, dtype=torch.int32)
    index = {2: np.arange(64)}
    inside = load(words, "v2, s[4:7], 0 idxen offset:12", index, descriptor(words, 40, 16))
    assert inside == [4 * n + 4 if n < 40 else 0 for n in range(64)]
    assert load(words, "v2, s[4:7], 0 idxen offset:16", index, descriptor(words, 40, 16)) == [0] * 64


@pytest.mark.parametrize("cache_swizzle", [0, 1 << 14])
def test_without_idxen_the_stride_does_not_count(cache_swizzle: int) -> None:
    """As MLIR's fat_raw_buffer_cast with cacheSwizzleStride makes them: num_records are bytes."""
    words = torch.arange(1, 129, dtype=torch.int32)
    got = load(
        words,
        "v2, s[4:7], 0 offen offset:4",
        {2: np.arange(64) * 8},
        descriptor(words, 200, 64 | cache_swizzle),
    )
    assert got == [2 * n + 2 if 8 * n + 8 <= 200 else 0 for n in range(64)]


def test_waves_with_different_descriptors_are_checked_apart() -> None:
    """Wave 0 has records of 16 bytes, wave 1 a raw buffer of 12 bytes, whose index does not count."""
    words = torch.arange(1, 257, dtype=torch.int32)
    memory = MemoryMap()
    memory.register_tensor(words)
    fields = [descriptor(words, 10, 16), descriptor(words, 12)]
    result = run_snippet(
        f"buffer_load_dword v8, v[2:3], s[4:7], 0 idxen offen{WAIT}",
        vgprs={2: np.arange(64) % 12, 3: np.arange(64) // 16 * 4, 8: np.full(64, 7)},
        sgprs={index: np.array([f[index] for f in fields]) for index in range(4, 8)},
        memory=memory, num_waves=2,
    )  # fmt: skip
    structured, raw = result.vgpr(8).tolist()
    assert structured == [n % 12 * 4 + n // 16 + 1 if n % 12 < 10 else 0 for n in range(64)]
    assert raw == [n // 16 + 1 if n < 48 else 0 for n in range(64)]
