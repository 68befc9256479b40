# SPDX-License-Identifier: Apache-2.0
"""The listing parser: what it reads, and that whatever it does not know is a named error."""

from __future__ import annotations

import random

import pytest

from kernellib.emulator import (
    AssemblySyntaxError,
    EmulatorError,
    UnsupportedOperandError,
    parse,
    run_assembly,
)
from kernellib.emulator.launch import Tuning
from kernellib.emulator.operands import parse_operand
from kernellib.emulator.resources import kernel_resources

LISTING = """
	.amdgcn_target "amdgcn-amd-amdhsa-unknown-gfx950"
	.amdhsa_code_object_version 6
	.text
	.globl	scale
	.p2align	8
	.type	scale,@function
scale:
	.file	1 "/src" "kernel.py"
	.loc	1 12 3
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	v_lshlrev_b32_e32 v1, 2, v0        ; a comment
	s_waitcnt lgkmcnt(0)
	global_load_dword v2, v1, s[4:5] offset:-0 nt
	s_waitcnt vmcnt(0)
	.loc	1 13 3
	v_mul_f32_e32 v2, 2.0, v2
.LBB0_1:  // a label
	global_store_dword v1, v2, s[4:5]
	s_endpgm
.Lfunc_end0:
	.size	scale, .Lfunc_end0-scale
	.section	.rodata,"a",@progbits
	.p2align	6, 0x0
	.amdhsa_kernel scale
		.amdhsa_group_segment_fixed_size 0
		.amdhsa_private_segment_fixed_size 0
		.amdhsa_kernarg_size 8
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_next_free_vgpr 3
		.amdhsa_next_free_sgpr 6
		.amdhsa_accum_offset 4
	.end_amdhsa_kernel
	.text
	.set .Lscale.num_vgpr, 3
	.set .Lscale.num_agpr, 0
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .offset:         0
        .size:           8
        .value_kind:     by_value
    .group_segment_fixed_size: 0
    .kernarg_segment_align: 8
    .kernarg_segment_size: 8
    .max_flat_workgroup_size: 64
    .name:           scale
    .private_segment_fixed_size: 0
    .sgpr_count:     12
    .sgpr_spill_count: 0
    .symbol:         scale.kd
    .vgpr_count:     3
    .vgpr_spill_count: 0
    .wavefront_size: 64
amdhsa.target:   amdgcn-amd-amdhsa-unknown-gfx950
amdhsa.version:
  - 1
  - 2
...
	.end_amdgpu_metadata
"""


def test_program_structure() -> None:
    program = parse(LISTING)
    assert program.target == "amdgcn-amd-amdhsa-unknown-gfx950"
    assert [i.mnemonic for i in program.instructions][:2] == ["s_load_dwordx2", "v_lshlrev_b32_e32"]
    assert program.labels["scale"] == 0
    assert program.labels[".LBB0_1"] == 6
    kernel = program.kernels["scale"]
    assert kernel.descriptor["accum_offset"] == 4
    assert kernel.metadata[".kernarg_segment_size"] == 8
    load = program.instructions[3]
    assert load.modifiers == {"offset": 0, "nt": True}
    assert LISTING.splitlines()[load.line_no - 1].split()[0] == "global_load_dword"
    assert str(load.source) == "/src/kernel.py:12"
    assert str(program.instructions[5].source) == "/src/kernel.py:13"
    resources = kernel_resources(program)
    assert (resources.vgprs, resources.agprs, resources.scratch_bytes) == (3, 0, 0)
    assert resources.occupancy_waves_per_simd == 8


@pytest.mark.parametrize(
    ("registers", "waves"),
    [(3, 8), (64, 8), (65, 7), (72, 7), (128, 4), (129, 3), (206, 2), (256, 2), (512, 1)],
)
def test_occupancy_by_vector_registers(registers: int, waves: int) -> None:
    # 512 registers per SIMD lane in granules of 8, at most 8 waves
    program = parse(LISTING.replace("next_free_vgpr 3", f"next_free_vgpr {registers}"))
    assert kernel_resources(program).occupancy_waves_per_simd == waves


@pytest.mark.parametrize(
    ("text", "kind", "index", "count"),
    [
        ("v7", "vgpr", 7, 1),
        ("v[4:7]", "vgpr", 4, 4),
        ("a[0:3]", "agpr", 0, 4),
        ("s[2:3]", "sgpr", 2, 2),
        ("vcc", "sgpr", 106, 2),
        ("exec_hi", "sgpr", 127, 1),
        ("[v2, v3]", "vgpr", 2, 2),
        ("m0", "sgpr", 124, 1),
    ],
)
def test_register_operands(text: str, kind: str, index: int, count: int) -> None:
    operand = parse_operand(text)
    assert (operand.kind, operand.index, operand.count) == (kind, index, count)


def test_constants_and_source_modifiers() -> None:
    assert parse_operand("-1").value == -1
    assert parse_operand("0xffff0000").value == 0xFFFF0000
    assert parse_operand("-4.0").value == -4.0
    assert parse_operand("0.15915494").value == 0.15915494
    operand = parse_operand("-|v3|")
    assert (operand.neg, operand.abs, operand.index) == (True, True, 3)
    assert parse_operand("sext(v1)").sext
    for bad in ("", "v600", "s[3:1]", "v[1", "1.2.3", "[v1, v3]", "s[0:99]", "@", "0x" + "f" * 20):
        with pytest.raises(ValueError, match=r"."):
            parse_operand(bad)


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        ("\ts_endpgm", "\t.wibble 3", AssemblySyntaxError, "directive .wibble is not known"),
        ("v_mul_f32_e32 v2, 2.0, v2", "v_mul_f32_e32 v2, 2.0, v2 shiny", UnsupportedOperandError, "'shiny'"),
        ("v_mul_f32_e32 v2, 2.0, v2", "v_mul_f32_e32 v2, , v2", AssemblySyntaxError, "empty operand"),
        ("\t.end_amdhsa_kernel", "", AssemblySyntaxError, ".amdhsa_kernel"),
        ("\t.end_amdgpu_metadata", "", AssemblySyntaxError, "no .end_amdgpu_metadata"),
        ("amdhsa.kernels:", "amdhsa.kernels: [", AssemblySyntaxError, "not YAML"),
        (".LBB0_1:", "scale:", AssemblySyntaxError, "defined twice"),
        ("amdhsa_kernarg_size 8", "amdhsa_kernarg_size eight", AssemblySyntaxError, "neither an integer"),
        ("offset:-0", "offset:1 offset:2", AssemblySyntaxError, "given twice"),
        ("s_endpgm", "S_ENDPGM!", AssemblySyntaxError, "neither a directive"),
        ("\tv_mul_f32_e32", "\t.long 5\n\tv_mul_f32_e32", AssemblySyntaxError, "between the instructions"),
    ],
)
def test_malformed_lines_are_named(old: str, new: str, error: type[EmulatorError], words: str) -> None:
    assert old in LISTING
    with pytest.raises(error) as caught:
        parse(LISTING.replace(old, new, 1))
    assert words in str(caught.value)
    assert "line " in str(caught.value)


def test_binary_and_empty_input() -> None:
    with pytest.raises(AssemblySyntaxError, match="binary"):
        parse("\x7fELF\0\0")
    with pytest.raises(EmulatorError):
        run_assembly("", None, 1, 64, [])


def mutate(text: str, rng: random.Random) -> str:
    """A listing with one to three random injuries: cut off, lines doubled, dropped, shuffled or altered."""
    for _ in range(rng.randint(1, 3)):
        lines = text.splitlines()
        where = rng.randrange(len(lines))
        kind = rng.randrange(6)
        if kind == 0:
            text = text[: rng.randrange(len(text))]
        elif kind == 1:
            del lines[where]
            text = "\n".join(lines)
        elif kind == 2:
            lines.insert(where, lines[rng.randrange(len(lines))])
            text = "\n".join(lines)
        elif kind == 3:
            position = rng.randrange(len(text))
            text = text[:position] + chr(rng.randrange(32, 127)) + text[position + 1 :]
        elif kind == 4:
            lines[where] = lines[where].replace(
                str(rng.randrange(10)), str(rng.randrange(10 ** rng.randrange(1, 12)))
            )
            text = "\n".join(lines)
        else:
            words = lines[where].split(" ")
            rng.shuffle(words)
            lines[where] = " ".join(words)
            text = "\n".join(lines)
        if not text:
            return "\n"
    return text


@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_listings_give_named_errors_only(seed: int) -> None:
    import numpy as np  # noqa: PLC0415

    rng = random.Random(seed)
    data = np.ones(64, np.float32)
    outcomes = {"ran": 0, "refused": 0}
    for number in range(100):
        text = mutate(LISTING, rng)
        try:
            run_assembly(text, None, 1, 64, [data], tuning=Tuning(instruction_limit=2000))
            outcomes["ran"] += 1
        except EmulatorError:
            outcomes["refused"] += 1
        except BaseException as error:
            pytest.fail(f"seed {seed}, mutation {number}: {type(error).__name__}: {error}\n{text}")
    print(seed, outcomes)
    assert outcomes["refused"] > 10
