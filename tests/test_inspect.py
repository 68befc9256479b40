# SPDX-License-Identifier: Apache-2.0
"""Inspection: resources, listing, and a linked object whose descriptor and metadata agree with it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kernellib.emulator.assembly import Program, parse
from kernellib.inspect.__main__ import app
from kernellib.inspect.codeobject import CodeObject, CodeObjectError, unpack_message
from kernellib.inspect.linking import LINKER, LinkerNotFoundError, link_operator, rocm_path
from kernellib.inspect.listing import InspectedKernel, classes_of, inspect_operator, instruction_class
from kernellib.inspect.registry import UnknownOperatorError, inspection_of, operator_names
from kernellib.ops.latent_moe_tail.config import DEFAULT_CONFIG, TailConfig, load_tuned

OPERATOR = "latent_moe_tail"
# Loads its arguments instead of having them preloaded: another shape of descriptor.
OTHER = TailConfig(1, 4, 1, "normal", "load")
CONFIG_NAMES = (DEFAULT_CONFIG.name, OTHER.name)
needs_linker = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="ziglang, which carries an lld, is not installed"
)


@pytest.fixture(scope="module", params=CONFIG_NAMES)
def linked(request: pytest.FixtureRequest) -> tuple[InspectedKernel, Program, CodeObject]:
    """One kernel, its parsed listing and its linked object."""
    [kernel] = inspect_operator(OPERATOR, request.param)
    [(name, image)] = link_operator(OPERATOR, request.param).items()
    assert name == kernel.name
    return kernel, parse(kernel.assembly), CodeObject(image)


def listing_metadata(assembly: str) -> dict[str, Any]:
    start = assembly.index(".amdgpu_metadata") + len(".amdgpu_metadata")
    text = assembly[start : assembly.index(".end_amdgpu_metadata")].strip().removesuffix("...")
    return dict(yaml.safe_load(text))


@needs_linker
def test_descriptor_agrees_with_the_listing(linked: tuple[InspectedKernel, Program, CodeObject]) -> None:
    kernel, program, code_object = linked
    written = program.kernels[kernel.name].descriptor
    descriptor = code_object.descriptor(kernel.name)
    granule = 8
    assert descriptor.vector_registers == -(-written["next_free_vgpr"] // granule) * granule
    assert descriptor.vector_registers >= kernel.resources.vgprs + kernel.resources.agprs
    assert descriptor.accum_offset == written["accum_offset"]
    assert descriptor.lds_bytes == written["group_segment_fixed_size"] == kernel.resources.lds_bytes
    assert descriptor.scratch_bytes == written["private_segment_fixed_size"] == kernel.resources.scratch_bytes
    assert descriptor.uses_scratch == bool(written["enable_private_segment"])
    assert descriptor.kernarg_bytes == written["kernarg_size"] == 44
    assert descriptor.user_sgprs == written["user_sgpr_count"]
    assert descriptor.preloaded_dwords == written["user_sgpr_kernarg_preload_length"]
    assert descriptor.round_mode_32 == written["float_round_mode_32"]
    assert descriptor.denorm_mode_32 == written["float_denorm_mode_32"] == 3
    assert descriptor.denorm_mode_16_64 == written["float_denorm_mode_16_64"] == 3


@needs_linker
def test_metadata_agrees_with_the_listing(linked: tuple[InspectedKernel, Program, CodeObject]) -> None:
    kernel, _, code_object = linked
    metadata = code_object.metadata()
    assert metadata == listing_metadata(kernel.assembly)
    [entry] = metadata["amdhsa.kernels"]
    threads = TailConfig.from_name(kernel.name.removeprefix("latent_moe_tail_")).threads_per_workgroup
    assert entry[".vgpr_count"] == kernel.resources.vgprs
    assert entry[".sgpr_count"] == kernel.resources.sgprs
    assert entry[".reqd_workgroup_size"] == [threads, 1, 1]
    assert entry[".max_flat_workgroup_size"] == threads == kernel.resources.max_workgroup_size
    assert entry[".group_segment_fixed_size"] == kernel.resources.lds_bytes
    assert entry[".private_segment_fixed_size"] == kernel.resources.scratch_bytes
    assert entry[".kernarg_segment_size"] == kernel.resources.kernarg_bytes
    assert [argument[".offset"] for argument in entry[".args"]] == [0, 8, 16, 24, 32, 40]
    assert entry[".wavefront_size"] == 64


@needs_linker
def test_entry_point_is_the_kernels_code(linked: tuple[InspectedKernel, Program, CodeObject]) -> None:
    kernel, _, code_object = linked
    symbols = code_object.symbols()
    descriptor_at, _ = symbols[f"{kernel.name}.kd"]
    code_at, code_size = symbols[kernel.name]
    assert descriptor_at + code_object.descriptor(kernel.name).entry_offset == code_at
    assert code_at % 256 == 0
    # Every instruction has 4 or 8 bytes (12 with a literal); padding for preloading adds up to 256.
    num_instructions = sum(kernel.resources.instruction_mix.values())
    assert 4 * num_instructions <= code_size <= 12 * num_instructions + 256
    assert len(code_object.at(code_at, code_size)) == code_size


@needs_linker
def test_the_object_knows_no_other_kernel(linked: tuple[InspectedKernel, Program, CodeObject]) -> None:
    with pytest.raises(CodeObjectError, match="kernel got 'other'"):
        linked[2].descriptor("other")


@pytest.mark.parametrize("image", [b"", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(100), bytes(200)])
def test_other_bytes_are_no_code_object(image: bytes) -> None:
    with pytest.raises(CodeObjectError):
        CodeObject(image)


def test_the_interpreter_is_no_code_object() -> None:
    image = Path(sys.executable).resolve().read_bytes()[:4096]
    if image[:6] == b"\x7fELF\x02\x01":
        with pytest.raises(CodeObjectError, match="machine"):
            CodeObject(image)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x07", 7),
        (b"\xff", -1),
        (b"\xcc\xc8", 200),
        (b"\xcd\x01\xc0", 448),
        (b"\xce\x03\x10\x00\x00", 51_380_224),
        (b"\xd1\xff\x00", -256),
        (b"\xc2", False),
        (b"\xc3", True),
        (b"\xc0", None),
        (b"\xa3abc", "abc"),
        (b"\xd9\x02hi", "hi"),
        (b"\x93\x01\x02\xa1x", [1, 2, "x"]),
        (b"\x82\xa1a\x01\xa1b\x90", {"a": 1, "b": []}),
        (b"\xde\x00\x01\x01\xdc\x00\x01\x02", {1: [2]}),
    ],
)
def test_message_values(data: bytes, value: object) -> None:
    assert unpack_message(data, 0) == (value, len(data))


@pytest.mark.parametrize(
    "data", [b"", b"\xcd\x01", b"\xa3ab", b"\x92\x01", b"\x81\xa1a", b"\xc1", b"\xcb" + bytes(8)]
)
def test_broken_messages(data: bytes) -> None:
    with pytest.raises(CodeObjectError):
        unpack_message(data, 0)


def test_operators_register_by_having_an_inspection_module() -> None:
    assert OPERATOR in operator_names()
    for name in operator_names():
        assert inspection_of(name).config_names()
    with pytest.raises(UnknownOperatorError, match=OPERATOR):
        inspection_of("no_such_operator")
    with pytest.raises(UnknownOperatorError):
        inspection_of("contract")  # a module beside the operators, not one of them


@pytest.mark.parametrize(
    ("mnemonic", "name"),
    [
        ("v_mfma_f32_16x16x32_bf16", "matrix"),
        ("v_add_f32_dpp", "cross-lane"),
        ("v_permlane32_swap_b32_e32", "cross-lane"),
        ("ds_read_b128", "LDS"),
        ("buffer_load_dwordx4", "vector memory"),
        ("global_load_lds_dwordx4", "vector memory"),
        ("scratch_store_dword", "scratch"),
        ("s_load_dwordx8", "scalar memory"),
        ("s_waitcnt", "wait"),
        ("s_barrier", "barrier"),
        ("s_endpgm", "branch"),
        ("v_cvt_f64_f32_e32", "conversion"),
        ("v_add_f64", "vector float64"),
        ("v_pk_fma_f32", "vector packed"),
        ("v_and_b32_e32", "vector"),
        ("s_add_i32", "scalar"),
        ("exp", "other"),
    ],
)
def test_instruction_classes(mnemonic: str, name: str) -> None:
    assert instruction_class(mnemonic) == name


def test_classes_add_up() -> None:
    [kernel] = inspect_operator(OPERATOR, OTHER.name)
    classes = classes_of(kernel.resources.instruction_mix)
    assert sum(classes.values()) == sum(kernel.resources.instruction_mix.values())
    assert classes["vector memory"] == 3 * 7 + 1 + 1  # one row, the norm inputs, shared, the store
    assert "other" not in classes


def test_the_table(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    result = CliRunner().invoke(app, [OPERATOR, "--config", OTHER.name, "--out", str(path)])
    assert result.exit_code == 0, result.output
    text = path.read_text(encoding="utf-8")
    for word in ("VGPRs", "AGPRs", "SGPRs", "LDS", "scratch", "occupancy", "spilled", OTHER.kernel_name):
        assert word in text
    assert "buffer_load_dwordx4 21" in text


def test_the_listing(tmp_path: Path) -> None:
    path = tmp_path / "kernel.s"
    result = CliRunner().invoke(app, [OPERATOR, "--emit", "asm", "--out", str(path)])
    assert result.exit_code == 0, result.output
    assert list(parse(path.read_text(encoding="utf-8")).kernels) == [load_tuned("mi355x").kernel_name]


@needs_linker
def test_the_object(tmp_path: Path) -> None:
    path = tmp_path / "kernel.hsaco"
    result = CliRunner().invoke(
        app, [OPERATOR, "--config", OTHER.name, "--emit", "object", "--out", str(path)]
    )
    assert result.exit_code == 0, result.output
    assert CodeObject(path.read_bytes()).descriptor(OTHER.kernel_name).kernarg_bytes == 44


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no_such_operator"], "UnknownOperatorError"),
        ([OPERATOR, "--config", "r3_w7_f3_stream_preload"], "TailConfigError"),
        ([OPERATOR, "--config", "fast", "--emit", "object", "--out", "unused.hsaco"], "TailConfigError"),
    ],
)
def test_wrong_names_exit_with_the_reason(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert says in result.output


def test_an_object_is_not_written_where_nobody_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [OPERATOR, "--config", OTHER.name, "--emit", "object"])
    assert result.exit_code == 2
    assert f"--out {OPERATOR}.hsaco" in result.output
    assert list(tmp_path.iterdir()) == []


def test_it_starts_as_a_module() -> None:
    command = [sys.executable, "-m", "kernellib.inspect", "list"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert OPERATOR in result.stdout


def test_without_any_linker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCM_PATH", "/nonexistent")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LinkerNotFoundError, match="pip install ziglang"), rocm_path():
        pass


def test_a_rocm_installation_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / LINKER).parent.mkdir(parents=True)
    (tmp_path / LINKER).touch()
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    with rocm_path() as path:
        assert path == tmp_path
