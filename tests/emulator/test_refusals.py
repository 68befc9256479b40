# SPDX-License-Identifier: Apache-2.0
"""What gfx950 does not have is refused with its line, not ignored: target, descriptor, registers, launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from listings import listing

from kernellib.emulator import (
    AssemblySyntaxError,
    LaunchArgumentError,
    OutOfBoundsError,
    SessionError,
    emulated,
    parse,
    run_assembly,
)

BODY = "\tv_mov_b32_e32 v1, v0\n\ts_mov_b32 s3, 0"
LISTING = listing(BODY, num_pointers=1)


def refused_at(text: str, line: str) -> str:
    """The message with which the listing is refused, which must name the first line that contains `line`."""
    with pytest.raises(AssemblySyntaxError) as caught:
        parse(text)
    lines = text.splitlines()
    assert caught.value.line_no == 1 + next(i for i, t in enumerate(lines) if line in t), str(caught.value)
    return str(caught.value)


def with_directive(line: str) -> str:
    return LISTING.replace("\t\t.amdhsa_kernarg_size", f"\t\t{line}\n\t\t.amdhsa_kernarg_size", 1)


def with_field(name: str, value: object) -> str:
    lines = [
        f"\t\t.amdhsa_{name} {value}" if line.strip().startswith(f".amdhsa_{name} ") else line
        for line in LISTING.splitlines()
    ]
    return "\n".join(lines)


def with_code(line: str) -> str:
    return LISTING.replace("\ts_endpgm", f"\t{line}\n\ts_endpgm", 1)


@pytest.mark.parametrize("chip", ["gfx942", "gfx1250", "gfx90a", "gfx9500", "gfx95", "gfx9-4-generic"])
def test_other_targets(chip: str) -> None:
    message = refused_at(LISTING.replace("--gfx950", f"--{chip}", 1), ".amdgcn_target")
    assert chip in message
    assert "gfx950" in message


@pytest.mark.parametrize(
    "target", ["amdgcn-amd-amdhsa-unknown-gfx950", "amdgcn-amd-amdhsa--gfx950:sramecc+:xnack-"]
)
def test_spellings_of_the_target(target: str) -> None:
    assert parse(LISTING.replace("amdgcn-amd-amdhsa--gfx950", target)).target == target


def test_a_listing_without_target_is_taken_for_gfx950() -> None:
    text = "\n".join(line for line in LISTING.splitlines() if ".amdgcn_target" not in line)
    assert list(parse(text).kernels) == ["test_kernel"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (".amdhsa_foo 1", "is not a directive of gfx950"),
        (".amdhsa_foo 0", "next_free_vgpr"),  # says what there is
        (".amdhsa_wavefront_size32 1", "64 lanes"),
        (".amdhsa_wavefront_size32 0", "gfx10"),
        (".amdhsa_shared_vgpr_count 0", "gfx10"),
        (".amdhsa_named_barrier_count 1", "gfx1250"),
        (".amdhsa_reserve_flat_scratch 1", "architected flat scratch"),
        (".amdhsa_tg_split 1", "not emulated"),
        (".amdhsa_exception_fp_ieee_div_zero 1", "not emulated"),
        (".amdhsa_float_round_mode_32 4", "at most 3"),
        (".amdhsa_system_vgpr_workitem_id 3", "at most 2"),
        (".amdhsa_ieee_mode 2", "at most 1"),
    ],
)
def test_descriptor_directives(line: str, words: str) -> None:
    assert words in refused_at(with_directive(line), line)


@pytest.mark.parametrize("line", [".amdhsa_tg_split 0", ".amdhsa_reserve_vcc 1", ".amdhsa_ieee_mode 1"])
def test_descriptor_directives_that_exist(line: str) -> None:
    name, value = line.removeprefix(".amdhsa_").split()
    assert parse(with_directive(line)).kernels["test_kernel"].descriptor[name] == int(value)


def test_a_directive_given_twice() -> None:
    text = LISTING.replace("\t\t.amdhsa_next_free_sgpr 40", "\t\t.amdhsa_next_free_vgpr 8")
    with pytest.raises(AssemblySyntaxError, match=r"line \d+: '.amdhsa_next_free_vgpr 8': .* given twice"):
        parse(text)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("accum_offset", 6, "multiple of 4"),
        ("accum_offset", 0, "multiple of 4"),
        ("accum_offset", 260, "at most 256"),
        ("next_free_vgpr", 513, "at most 512"),
        ("next_free_sgpr", 103, "at most 102"),
    ],
)
def test_descriptor_values(field: str, value: int, words: str) -> None:
    assert words in refused_at(with_field(field, value), f".amdhsa_{field}")


@pytest.mark.parametrize(
    "line",
    [
        "v_mov_b32_e32 v32, v0",  # next_free_vgpr 32, next_free_sgpr 40, accum_offset 32: no AGPRs
        "v_lshlrev_b64 v[32:33], 1, v[2:3]",
        "v_accvgpr_read_b32 v1, a0",
        "s_mov_b32 s40, 0",
        "s_mov_b64 s[40:41], 0",
        "v_add_u32_e32 v1, s101, v0",
    ],
)
def test_registers_beyond_the_descriptor(line: str) -> None:
    message = refused_at(with_code(line), line)
    assert "beyond the kernel's registers" in message
    assert "test_kernel" in message


@pytest.mark.parametrize(
    "line",
    ["v_mov_b32_e32 v31, v0", "s_mov_b32 s39, 0", "s_mov_b64 vcc, exec", "s_mov_b32 m0, 0"],
)
def test_registers_of_the_descriptor(line: str) -> None:
    assert line in [inst.text for inst in parse(with_code(line)).instructions]


def test_accumulation_registers_follow_the_offset() -> None:
    # 16 AGPRs begin at accum_offset: a15 is the last of the 32, v15 the last VGPR
    inside = with_field("accum_offset", 16)
    assert parse(inside.replace("\ts_endpgm", "\tv_accvgpr_read_b32 v15, a15\n\ts_endpgm", 1)).instructions
    for line in ("v_accvgpr_read_b32 v15, a16", "v_accvgpr_read_b32 v16, a15"):
        assert "beyond" in refused_at(inside.replace("\ts_endpgm", f"\t{line}\n\ts_endpgm", 1), line)


def test_another_functions_registers_are_its_own() -> None:
    text = LISTING + "\t.text\n\t.type\thelper,@function\nhelper:\n\tv_mov_b32_e32 v99, v0\n\ts_endpgm\n"
    assert parse(text).instructions[-2].text == "v_mov_b32_e32 v99, v0"


@pytest.mark.parametrize(
    "line",
    ["v_mov_b32_e32 v256, v0", "v_mov_b32_e32 v0, v300", "v_accvgpr_read_b32 v0, a256", "s_mov_b32 s102, 0",
     "s_mov_b32 ttmp16, 0", "s_mov_b64 s[101:102], 0", "v_lshlrev_b64 v[255:256], 1, v[2:3]"],
)  # fmt: skip
def test_registers_that_do_not_exist(line: str) -> None:
    assert "does not exist" in refused_at(with_code(line), line)


COPY = listing("\ts_load_dwordx2 s[4:5], s[0:1], 0x0\n\ts_waitcnt lgkmcnt(0)", num_pointers=1)


def launch(
    grid: Any = 1, block: Any = 64, args: Any = None, lds: Any = 0, text: str = COPY
) -> tuple[int, ...]:
    values = [np.zeros(64, np.float32)] if args is None else args
    report = run_assembly(text, None, grid, block, values, dynamic_lds_bytes=lds)
    return (*report.grid, *report.block)


@pytest.mark.parametrize("size", [1.5, 1.0, None, "2", b"2", True, (1, 2.0), (), (1, 1, 1, 1), 0, -1, {1: 2}])
@pytest.mark.parametrize("name", ["grid", "block"])
def test_sizes_that_are_none(name: str, size: Any) -> None:
    with pytest.raises(LaunchArgumentError, match=f"^{name} "):
        launch(**{name: size})


@pytest.mark.parametrize("size", [2, np.int64(2), np.uint8(2), (np.int32(2), 1), [2, 1, 1], np.array([2, 1])])
def test_sizes_that_are_integers(size: Any) -> None:
    assert launch(grid=size) == (2, 1, 1, 64, 1, 1)
    assert launch(block=size) == (1, 1, 1, 2, 1, 1)


@pytest.mark.parametrize("lds", [-1, 1.5, None, "16"])
def test_amounts_of_lds_that_are_none(lds: Any) -> None:
    with pytest.raises(LaunchArgumentError, match="dynamic_lds_bytes"):
        launch(lds=lds)


@pytest.mark.parametrize("kind", ["by_value", "global_buffer"])
@pytest.mark.parametrize("value", [1.5, np.float32(1.5), None, "x"])
def test_no_pointer(kind: str, value: Any) -> None:
    with pytest.raises(LaunchArgumentError, match="argument 0: got "):
        launch(args=[value], text=COPY.replace("by_value", kind))


def test_a_double_is_a_value_but_no_pointer() -> None:
    assert launch(args=[np.float64(1.5)]) == (1, 1, 1, 64, 1, 1)
    with pytest.raises(LaunchArgumentError, match=r"argument 0: got float64 .* wants a pointer"):
        launch(args=[np.float64(1.5)], text=COPY.replace("by_value", "global_buffer"))


@pytest.mark.parametrize("args", [5, "x", b"x", {"a": 1}, object()])
def test_arguments_that_are_no_sequence(args: Any) -> None:
    with pytest.raises(LaunchArgumentError, match="args: got"):
        launch(args=args)
    with emulated() as session, pytest.raises(LaunchArgumentError, match="args: got"):
        session.run_assembly(COPY, None, 1, 64, args)


@pytest.mark.parametrize("make", [lambda t: t.to("meta"), lambda t: t.to_sparse()])
def test_tensors_without_memory_here(make: Any) -> None:
    with pytest.raises(LaunchArgumentError, match="argument 0: a tensor on"):
        launch(args=[make(torch.ones(4, 4))])


@pytest.mark.parametrize("name", ["nope", "", 5, b"x", ["a"]])
def test_kernels_that_are_not_there(name: Any) -> None:
    with pytest.raises(LaunchArgumentError, match="is not in the listing"):
        run_assembly(COPY, name, 1, 64, [np.zeros(64, np.float32)])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sanitize", 5), ("sanitize", [5]), ("sanitize", None), ("sanitize", "foo"), ("quantum", "a"),
        ("quantum", 0), ("waves_per_group", 1.5), ("instruction_limit", None), ("track", 5), ("track", [5]),
        ("mode", None), ("schedule_seed", "a"), ("counters", 3),
    ],
)  # fmt: skip
def test_options_of_a_session(name: str, value: Any) -> None:
    options: Any = {name: value}
    with pytest.raises(SessionError, match=f"^{name}"), emulated(**options):
        pass
    with emulated():  # nothing is left of the refused one
        pass


def test_a_kernel_without_end() -> None:
    with pytest.raises(OutOfBoundsError, match="runs past its last instruction"):
        launch(text=COPY.replace("\ts_endpgm", ""))
