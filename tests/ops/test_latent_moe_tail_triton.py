# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels: on the emulator (gfx950), as compiled for sm_90, and on a GPU where there is one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from kernellib.emulator import Tuning, run_assembly
from kernellib.ops.latent_moe_tail.config import LATENT_DIM, WEIGHT_BYTES
from kernellib.ops.latent_moe_tail.reference import (
    InputKind,
    TailInputs,
    against_oracle,
    make_inputs,
    oracle_f64,
)

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from kernellib.ops.latent_moe_tail import kernel_sm90, kernel_triton  # noqa: E402
from kernellib.ops.latent_moe_tail.kernel_sm90 import HopperConfig  # noqa: E402
from kernellib.ops.latent_moe_tail.kernel_triton import (  # noqa: E402
    Gfx950Listing,
    PortableConfig,
    TritonConfigError,
    compile_gfx950,
    launch_triton,
)

EPS = 1e-6
POISON = -3.3895313892515355e38  # the largest negative finite bf16: no correct result keeps it
H200_UNITS, H200_SHARED_BYTES = 132, 233_472
OTHER_PORTABLE = PortableConfig(
    num_warps=4, programs_per_unit=3, num_stages=2
)  # tiles do not divide the rows


def poisoned(device: str = "cpu") -> torch.Tensor:
    return torch.full((1, 7168), POISON, dtype=torch.bfloat16, device=device)


def assert_right(inputs: TailInputs, out: torch.Tensor, eps: float = EPS) -> None:
    cpu = TailInputs(*(tensor.cpu() for tensor in inputs))
    p, y = oracle_f64(*cpu, eps)
    report = against_oracle(out.cpu(), p, y, cpu.shared)
    print(report)
    assert report.nonfinite_match
    assert report.judged_ulp_error <= 1.0
    assert report.bit_equal_fraction >= 0.995
    assert report.relative_rmse <= 5e-4


@cache
def listing(config: PortableConfig) -> Gfx950Listing:
    return compile_gfx950(config)


def run_emulated(
    inputs: TailInputs, config: PortableConfig = kernel_triton.ROCM_CONFIG, eps: float = EPS, **options: Any
) -> tuple[torch.Tensor, Any]:
    code, out = listing(config), poisoned()
    before = [tensor.clone() for tensor in inputs]
    arguments = [*inputs, out, eps, 0, 0]
    report = run_assembly(
        code.assembly,
        code.kernel,
        code.num_programs,
        code.threads,
        arguments,
        dynamic_lds_bytes=code.lds_bytes,
        **options,
    )
    for kept, tensor in zip(before, inputs, strict=True):
        assert torch.equal(kept.view(torch.int16), tensor.view(torch.int16))
    return out, report


@pytest.mark.parametrize("kind", ["normal", "tiny", "subnormal", "large", "one_inf"])
def test_gfx950_against_the_oracle(kind: InputKind) -> None:
    seed = 20
    print(f"seed {seed}")
    inputs = make_inputs(seed, kind)
    out, _ = run_emulated(inputs)
    assert_right(inputs, out)


@pytest.mark.parametrize("seed", [1, 2])
def test_one_nan_reaches_what_it_should(seed: int) -> None:
    print(f"seed {seed}")
    inputs = make_inputs(seed, "one_nan")
    out, _ = run_emulated(inputs)
    assert_right(inputs, out)


def test_squares_that_overflow_give_a_norm_of_zero() -> None:
    inputs = make_inputs(3)
    inputs.routed.mul_(2.0**100)
    out, _ = run_emulated(inputs)
    assert torch.equal(out, inputs.shared)


def test_another_configuration_with_rows_left_over() -> None:
    inputs = make_inputs(4)
    out, _ = run_emulated(inputs, OTHER_PORTABLE)
    assert_right(inputs, out)


def test_every_weight_byte_is_requested_once_in_wide_loads() -> None:
    inputs = make_inputs(5)
    out, report = run_emulated(inputs, track=[inputs.up_weight])
    assert_right(inputs, out)
    traffic = report.bytes_of(inputs.up_weight)
    assert traffic["load"] == WEIGHT_BYTES
    assert (traffic["load_min"], traffic["load_max"]) == (1, 1)
    wide = 16 * report.requests["global_load_dwordx4", 16]
    assert wide == WEIGHT_BYTES + report.num_waves * 2 * 2 * LATENT_DIM
    assert report.resources.scratch_bytes == 0


def test_the_inverse_root_is_rounded_correctly_whatever_the_estimate() -> None:
    """The chip's estimate is only known to one ulp: shifting it must not change a result."""
    values = np.exp2(np.random.default_rng(6).uniform(-40, 40, 4096)).astype(np.float32)
    wanted = np.float32(1) / np.sqrt(values / np.float32(LATENT_DIM) + np.float32(EPS))
    code = _compile_inverse_rms()
    for bias in (-1, 0, 1):
        got = np.zeros_like(values)
        run_assembly(
            code.asm["amdgcn"],
            code.metadata.name,
            len(values) // 256,
            256,
            [values, got, EPS, 0, 0],
            tuning=Tuning(ulp_bias=bias),
        )
        np.testing.assert_array_equal(got, wanted)


@triton.jit
def _inverse_rms_kernel(source, out, eps, DIM: triton.language.constexpr):
    index = triton.language.program_id(0) * 256 + triton.language.arange(0, 256)
    value = kernel_triton._inverse_rms(triton.language.load(source + index), eps, DIM)
    triton.language.store(out + index, value)


def _compile_inverse_rms() -> Any:
    source = ASTSource(
        fn=_inverse_rms_kernel,
        signature={"source": "*fp32", "out": "*fp32", "eps": "fp32", "DIM": "constexpr"},
        constexprs={(3,): LATENT_DIM},
    )
    return triton.compile(source, target=GPUTarget("hip", "gfx950", 64), options={"num_warps": 4})


@cache
def compile_sm90(config: HopperConfig) -> Any:
    kernel = kernel_sm90.hopper_tail
    constants = kernel_sm90.constants(config, H200_UNITS, H200_SHARED_BYTES)
    names = kernel.arg_names
    pointers = dict.fromkeys(names[:5], "*bf16")
    signature = {**pointers, "eps": "fp32", **dict.fromkeys(constants, "constexpr")}
    source = GluonASTSource(
        kernel,
        {name: signature[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(position,): [["tt.divisibility", 16]] for position in range(5)},
    )
    options = {"num_warps": kernel_sm90.NUM_WARPS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def test_hopper_waits_for_the_kernel_before_it_touches_memory() -> None:
    ptx = compile_sm90(HopperConfig()).asm["ptx"]
    accesses = [match.start() for match in re.finditer(r"(ld|st|cp\.async\.cg|cp\.async\.ca)\S*global", ptx)]
    waits = [match.start() for match in re.finditer(r"griddepcontrol\.wait", ptx)]
    assert len(waits) == 1
    assert len(accesses) > 20
    assert waits[0] < min(accesses)
    assert "griddepcontrol" not in compile_sm90(HopperConfig(overlap=False)).asm["ptx"]


def test_hopper_copies_16_bytes_a_lane() -> None:
    ptx = compile_sm90(HopperConfig()).asm["ptx"]
    copies = re.findall(r"cp\.async\.(\w+)\.shared\.global \[[^\]]*\], \[[^\]]*\], (0x[0-9a-f]+|\d+)", ptx)
    # 7 chunks for each of three buffers, and 7 in the loop that refills them
    assert len(copies) == 28
    assert {int(size, 0) for _, size in copies} == {16}


def test_hopper_asks_for_a_row_before_the_wait_and_only_as_a_hint() -> None:
    """What comes before the wait must not depend on memory, nor change it."""
    ptx = compile_sm90(HopperConfig()).asm["ptx"]
    before = ptx[: ptx.index("griddepcontrol.wait")]
    assert re.findall(r"\bprefetch\.global\.L2\b", before) == ["prefetch.global.L2"]
    assert "prefetch" not in ptx[len(before) :]
    assert not re.search(r"\b(ld|st|atom|red|cp)\.(?!param)\S*global", before)
    assert "prefetch" not in compile_sm90(HopperConfig(prefetch_rows=0)).asm["ptx"]


@pytest.mark.parametrize("programs", [4, 6, 7, 8])
def test_padding_leaves_room_for_exactly_the_programs(programs: int) -> None:
    """What fits: a multiprocessor's shared memory over a program's, 1 KiB of the driver's included."""
    config = HopperConfig(programs_per_unit=programs, num_buffers=2)
    used = compile_sm90(config).metadata.shared + 1024
    assert H200_SHARED_BYTES // used == programs
    without = compile_sm90(replace(config, pad=False)).metadata.shared + 1024
    assert H200_SHARED_BYTES // without > programs


def test_programs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TritonConfigError, match="programs_per_unit got 8"):
        HopperConfig(programs_per_unit=8, num_buffers=4).num_pads(H200_SHARED_BYTES)


@pytest.mark.parametrize(
    ("units", "shared_bytes", "hopper", "hip", "kind"),
    [
        (132, H200_SHARED_BYTES, True, None, HopperConfig),
        (148, H200_SHARED_BYTES, True, None, HopperConfig),
        (170, 102_400, True, None, PortableConfig),  # compute capability 12.0
        (82, 102_400, False, None, PortableConfig),
        (132, 0, True, None, PortableConfig),  # a torch that does not tell
        (256, 65_536, False, "7.0", PortableConfig),
    ],
)
def test_the_default_configuration_fits_whatever_gpu_there_is(
    monkeypatch: pytest.MonkeyPatch, units: int, shared_bytes: int, hopper: bool, hip: str | None, kind: type
) -> None:
    monkeypatch.setattr(kernel_triton, "_device", lambda _index: (units, 32, shared_bytes, hopper))
    monkeypatch.setattr(torch.version, "hip", hip)
    config = kernel_triton.default_config()
    assert type(config) is kind
    if isinstance(config, HopperConfig):
        assert kernel_sm90.constants(config, units, shared_bytes)["PROGRAMS"] == 6 * units


@pytest.mark.parametrize(
    "make",
    [
        lambda: PortableConfig(num_warps=3),
        lambda: PortableConfig(num_warps=True),
        lambda: PortableConfig(num_stages=0),
        lambda: PortableConfig(programs_per_unit=33),
        lambda: HopperConfig(programs_per_unit=0),
        lambda: HopperConfig(prefetch_rows=9),
        lambda: HopperConfig(overlap=1),  # type: ignore[arg-type]
    ],
)
def test_configurations_are_validated(make: Callable[[], Any]) -> None:
    with pytest.raises(TritonConfigError, match="got"):
        make()


def test_names_are_distinct() -> None:
    configs = [
        PortableConfig(),
        kernel_triton.ROCM_CONFIG,
        OTHER_PORTABLE,
        HopperConfig(),
        HopperConfig(overlap=False),
        HopperConfig(pad=False),
        HopperConfig(num_buffers=2),
        HopperConfig(prefetch_rows=0),
    ]
    assert len({config.name for config in configs}) == len(configs)


# ------------------------------------------------------------------ on a GPU
def gpu_configs() -> list[Any]:
    if not torch.cuda.is_available():
        return []
    portable: list[Any] = [None, kernel_triton.CUDA_CONFIG, OTHER_PORTABLE]
    hopper = torch.version.hip is None and torch.cuda.get_device_capability()[0] >= 9
    if hopper:
        variants = [
            HopperConfig(overlap=False),
            HopperConfig(pad=False),
            HopperConfig(num_buffers=2, prefetch_rows=0),
        ]
        portable += [*variants, HopperConfig(programs_per_unit=4, num_buffers=1)]
    return portable


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "large", "tiny", "subnormal", "zeros", "one_nan", "one_inf"])
def test_gpu_against_the_oracle(kind: InputKind) -> None:
    for seed, config in enumerate(gpu_configs()):
        print(f"seed {seed}, config {config}")
        inputs = make_inputs(seed, kind, "cuda")
        out = poisoned("cuda")
        launch_triton(*inputs, EPS, out, config)
        assert_right(inputs, out)


@pytest.mark.gpu
def test_gpu_replays_see_changed_inputs_and_the_kernel_before() -> None:
    """Back-to-back launches in a graph: each reads what the one before wrote, weight included."""
    for config in gpu_configs():
        inputs, spare = make_inputs(0, "normal", "cuda"), make_inputs(1, "normal", "cuda")
        out = [poisoned("cuda") for _ in range(3)]
        launch_triton(*inputs, EPS, out[0], config)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch_triton(*inputs, EPS, out[0], config)
            for target, source in zip(inputs, spare, strict=True):
                target.copy_(source)
            launch_triton(*inputs, EPS, out[1], config)
            launch_triton(inputs.routed, inputs.norm_weight, inputs.up_weight, out[1], EPS, out[2], config)
        for seed in (2, 3):
            print(f"seed {seed}, config {config}")
            fresh = make_inputs(seed, "normal", "cuda")
            for target, source in zip(inputs, fresh, strict=True):
                target.copy_(source)
            for tensor in out:
                tensor.fill_(POISON)
            graph.replay()
            assert_right(fresh, out[0])
            assert_right(spare, out[1])
            assert_right(spare._replace(shared=out[1].clone()), out[2])
