# SPDX-License-Identifier: Apache-2.0
"""The tail's contract: every clause, alone and in random company, is refused by name and nothing is written.

A random call starts from valid arguments and breaks up to three of them. Each break says which clauses it
must be refused for; the report must name those and accuse no argument that was left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernellib import ContractError, latent_moe_tail, supports_latent_moe_tail, targets
from kernellib.ops.contract import TensorSpec
from kernellib.ops.latent_moe_tail.api import OUT_SPEC, SPECS
from kernellib.ops.latent_moe_tail.config import DEFAULT_CONFIG

TENSOR_SPECS = {spec.argument: spec for spec in (*SPECS, OUT_SPEC)}
TENSOR_ARGUMENTS = tuple(TENSOR_SPECS)
# Consequences of one break that other arguments may show: the device of the first tensor is the norm for
# the others, and an `out` that shares memory with an argument is itself what is reported.
DERIVED = "same_device"
NUM_RANDOM_CALLS = 1000


def poisoned(spec: TensorSpec, offset: int = 0) -> torch.Tensor:
    """A valid tensor for ``spec`` over a recognisable pattern, ``offset`` elements past alignment."""
    numel = int(np.prod(spec.shape))
    base = torch.full((numel + 64,), 0x4142, dtype=torch.int16)
    shift = (-base.data_ptr() // 2) % 8 + offset
    return base[shift : shift + numel].view(torch.bfloat16).view(spec.shape)


VALID = {name: poisoned(spec) for name, spec in TENSOR_SPECS.items()}

# The valid weight is compared with one copy made here, not copied for each call.
WEIGHT = VALID["up_weight"]
WEIGHT_WORDS = WEIGHT.view(torch.int64)
PRISTINE_WORDS = WEIGHT_WORDS.clone()
LARGE_BYTES = 1 << 20
SAMPLED_SPAN = 64 * 4096


class Subclass(torch.Tensor):
    """A tensor subclass, which may mean anything."""


@dataclass
class Call:
    """Arguments of one call and the (argument, clause) pairs it must be refused for."""

    arguments: dict[str, Any] = field(default_factory=lambda: {**VALID, "eps": 1e-6, "target": "reference"})
    expected: set[tuple[str, str]] = field(default_factory=set)


Break = Callable[[TensorSpec, int], tuple[Any, tuple[str, ...]]]


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def garbage(spec: TensorSpec, pick: int) -> tuple[Any, tuple[str, ...]]:
    things: list[Any] = ["text", 3, 2.5, [1.0], {}, object(), np.zeros(4), torch.bfloat16, b"", type, ...]
    if spec is not OUT_SPEC:
        things.append(None)
    return things[pick % len(things)], ("type",)


def subclass(spec: TensorSpec, _: int) -> tuple[Any, tuple[str, ...]]:
    return VALID[spec.argument].as_subclass(Subclass), ("type",)


def wrong_dtype(spec: TensorSpec, pick: int) -> tuple[Any, tuple[str, ...]]:
    dtypes = [
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int16,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
    ]
    return torch.empty(spec.shape, dtype=dtypes[pick % len(dtypes)]), ("dtype",)


def wrong_shape(spec: TensorSpec, pick: int) -> tuple[Any, tuple[str, ...]]:
    last = spec.shape[-1]
    shapes = [(), (0,), (last + 1,), (1, 1, last), (2, last), (*spec.shape, 1), (last, 1), (1,), (last // 2,)]
    return torch.empty(shapes[pick % len(shapes)], dtype=spec.dtype), ("shape",)


def on_meta(spec: TensorSpec, _: int) -> tuple[Any, tuple[str, ...]]:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta"), ("device", "storage")


def strided(spec: TensorSpec, pick: int) -> tuple[Any, tuple[str, ...]]:
    step = 2 + pick % 3
    return torch.empty((*spec.shape[:-1], spec.shape[-1] * step), dtype=spec.dtype)[..., ::step], ("strides",)


def expanded(spec: TensorSpec, _: int) -> tuple[Any, tuple[str, ...]]:
    return torch.zeros((1,) * len(spec.shape), dtype=spec.dtype).expand(spec.shape), ("strides",)


def misaligned(spec: TensorSpec, pick: int) -> tuple[Any, tuple[str, ...]]:
    return poisoned(spec, 1 + pick % 7), ("alignment",)


def needs_grad(spec: TensorSpec, _: int) -> tuple[Any, tuple[str, ...]]:
    return VALID[spec.argument].detach().requires_grad_(), ("requires_grad",)


def negated(spec: TensorSpec, _: int) -> tuple[Any, tuple[str, ...]]:
    return torch._neg_view(VALID[spec.argument]), ("view",)


def sparse(spec: TensorSpec, _: int) -> tuple[Any, tuple[str, ...]]:
    return torch.sparse_coo_tensor(size=spec.shape, dtype=spec.dtype, check_invariants=True), ("layout",)


def quantized(spec: TensorSpec, _: int) -> tuple[Any, tuple[str, ...]]:
    with quiet():  # torch wants to be rid of them, and so do we
        tensor = torch._empty_affine_quantized(spec.shape, scale=1.0, zero_point=0, dtype=torch.quint8)
    return tensor, ("layout", "dtype")


def nested(spec: TensorSpec, _: int) -> tuple[Any, tuple[str, ...]]:
    with quiet():  # nested tensors are a prototype
        return torch.nested.nested_tensor([torch.zeros(4), torch.zeros(2)], dtype=spec.dtype), ("layout",)


def freed(spec: TensorSpec, _: int) -> tuple[Any, tuple[str, ...]]:
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    tensor.untyped_storage().resize_(0)
    return tensor, ("storage",)


def short(spec: TensorSpec, _: int) -> tuple[Any, tuple[str, ...]]:
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    tensor.untyped_storage().resize_(spec.num_bytes - 2)
    return tensor, ("storage",)


def without_memory(spec: TensorSpec, _: int) -> tuple[Any, tuple[str, ...]]:
    return torch._efficientzerotensor(spec.shape, dtype=spec.dtype), ("storage",)


TENSOR_BREAKS: tuple[Break, ...] = (
    garbage,
    subclass,
    wrong_dtype,
    wrong_shape,
    on_meta,
    strided,
    expanded,
    misaligned,
    needs_grad,
    negated,
    sparse,
    quantized,
    nested,
    freed,
    short,
    without_memory,
)
BAD_EPS: tuple[Any, ...] = (
    True,
    1,
    0,
    "1e-6",
    None,
    1e-6j,
    np.float32(1e-6),
    torch.tensor(1e-6),
    float("nan"),
    float("inf"),
    -float("inf"),
    0.0,
    -0.0,
    -1e-6,
    1e-46,
    5e-324,
    3.5e38,
    1e300,
)
BAD_TARGETS: tuple[Any, ...] = (None, 3, "", "tpu", "Reference", ["reference"], b"reference")
BAD_CONFIGS: tuple[Any, ...] = ("r4_w7", 4, {}, DEFAULT_CONFIG.to_dict(), DEFAULT_CONFIG)


def break_alias(call: Call, pick: int) -> None:
    """Puts `out` over another argument: all of it, or its first or last bytes only."""
    other = ("routed", "norm_weight", "up_weight", "shared")[pick % 4]
    overlap = (8, 8 * (1 + pick % 400), TENSOR_SPECS[other].num_bytes // 2)[pick % 3]
    length, numel = 7168, TENSOR_SPECS[other].num_bytes // 2
    base = torch.full((length + numel + 64,), 0x4142, dtype=torch.int16)
    shift = (-base.data_ptr() // 2) % 8
    start = length - min(overlap // 8 * 8, length)
    flat = base[shift:].view(torch.bfloat16)
    call.arguments["out"] = flat[:length].view(1, length)
    call.arguments[other] = flat[start : start + numel].view(TENSOR_SPECS[other].shape)
    call.expected.add(("out", "alias"))


@st.composite
def broken_calls(draw: st.DrawFn) -> Call:
    call = Call()
    kinds = draw(
        st.lists(
            st.sampled_from(("tensor", "tensor", "eps", "target", "config", "alias")), min_size=1, max_size=3
        )
    )
    left = list(TENSOR_ARGUMENTS)
    if "alias" in kinds:
        break_alias(call, draw(st.integers(0, 11)))
        left = [name for name in left if call.arguments[name] is VALID[name]]
    for kind in kinds:
        pick = draw(st.integers(0, 999))
        if kind == "tensor" and left:
            spec = TENSOR_SPECS[left.pop(draw(st.integers(0, len(left) - 1)))]
            value, clauses = draw(st.sampled_from(TENSOR_BREAKS))(spec, pick)
            call.arguments[spec.argument] = value
            call.expected.update((spec.argument, clause) for clause in clauses)
        elif kind == "eps":
            call.arguments["eps"] = BAD_EPS[pick % len(BAD_EPS)]
            call.expected.add(("eps", "value"))
        elif kind == "target":
            call.arguments["target"] = BAD_TARGETS[pick % len(BAD_TARGETS)]
            call.expected.add(("target", "target"))
        elif kind == "config":
            call.arguments["config"] = BAD_CONFIGS[pick % len(BAD_CONFIGS)]
            call.expected.add(("config", "config"))
    target = call.arguments["target"]
    if target not in ("reference",):
        # Which device is wanted, and whether a TailConfig has a kernel to shape, depends on the target.
        call.expected -= {(name, "device") for name in TENSOR_ARGUMENTS}
        if call.arguments.get("config") is DEFAULT_CONFIG:
            call.expected.discard(("config", "config"))
    return call


def memory_of(arguments: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every plain tensor of a call that has memory, as the bytes of its storage."""
    for name, value in arguments.items():
        if type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu":
            try:
                storage = value.untyped_storage()
                has_memory = storage.nbytes() > 0 and storage.data_ptr() != 0
            except (RuntimeError, NotImplementedError):
                continue
            if has_memory:
                yield name, torch.empty(0, dtype=torch.uint8).set_(storage)


def unchanging(memory: torch.Tensor) -> torch.Tensor:
    """What must not change of a storage: every byte, or of a large broken tensor one page in 64."""
    if memory.numel() <= LARGE_BYTES:
        return memory.clone()
    return memory[: memory.numel() // SAMPLED_SPAN * SAMPLED_SPAN].view(-1, SAMPLED_SPAN)[:, :4096].clone()


def refuse(call: Call) -> ContractError:
    """Makes the call; it must raise ContractError, agree with the query and leave every byte alone."""
    tensors = {
        name: memory for name, memory in memory_of(call.arguments) if call.arguments[name] is not WEIGHT
    }
    before = {name: unchanging(memory) for name, memory in tensors.items()}
    versions = {name: call.arguments[name]._version for name in tensors}
    with pytest.raises(ContractError) as caught:
        latent_moe_tail(**call.arguments)
    for name, memory in memory_of(call.arguments):
        if name in tensors:
            assert torch.equal(unchanging(memory), before[name]), f"{name} was written"
            assert call.arguments[name]._version == versions[name], f"{name} was written"
        else:
            assert torch.equal(WEIGHT_WORDS, PRISTINE_WORDS), f"{name} was written"
    report = supports_latent_moe_tail(**call.arguments)
    assert not report
    assert report.violations == caught.value.report.violations
    return caught.value


def test_valid_arguments_are_accepted() -> None:
    report = supports_latent_moe_tail(**Call().arguments)
    assert report, str(report)
    assert report.target is not None
    assert report.target.name == "reference"
    assert "supported on reference" in str(report)


def test_a_thousand_random_violations() -> None:
    seen: list[Call] = []

    @settings(
        max_examples=NUM_RANDOM_CALLS,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(broken_calls())
    def one(call: Call) -> None:
        error = refuse(call)
        got = {(violation.argument, violation.clause) for violation in error.report.violations}
        assert call.expected <= got, f"missing {call.expected - got} in\n{error}"
        accused = {argument for argument, clause in got if clause != DERIVED}
        assert accused <= {argument for argument, _ in call.expected}, str(error)
        for violation in error.report.violations:
            assert violation.got
            assert violation.wanted
            assert violation.remedy
            assert violation.argument in str(error)
        seen.append(call)

    one()
    assert len(seen) >= NUM_RANDOM_CALLS
    clauses = {clause for call in seen for _, clause in call.expected}
    assert clauses == {
        "type", "layout", "device", "dtype", "shape", "strides", "view", "requires_grad", "storage",
        "alignment", "alias", "value", "target", "config",
    }  # fmt: skip


@pytest.mark.parametrize("name", TENSOR_ARGUMENTS)
@pytest.mark.parametrize("how", TENSOR_BREAKS)
def test_each_clause_of_each_tensor_alone(name: str, how: Break) -> None:
    call = Call()
    value, clauses = how(TENSOR_SPECS[name], 0)
    call.arguments[name] = value
    got = {(v.argument, v.clause) for v in refuse(call).report.violations}
    assert {(name, clause) for clause in clauses} <= got
    assert {argument for argument, clause in got if clause != DERIVED} == {name}


@pytest.mark.parametrize("eps", BAD_EPS)
def test_each_bad_eps(eps: object) -> None:
    call = Call()
    call.arguments["eps"] = eps
    assert [(v.argument, v.clause) for v in refuse(call).report.violations] == [("eps", "value")]


@pytest.mark.parametrize("eps", [1e-6, 1e-45, 3.4e38, np.float64(1e-5)])
def test_each_good_eps(eps: float) -> None:
    assert supports_latent_moe_tail(**{**Call().arguments, "eps": eps})


@pytest.mark.parametrize("pick", range(12))
def test_out_over_an_input(pick: int) -> None:
    call = Call()
    break_alias(call, pick)
    assert [(v.argument, v.clause) for v in refuse(call).report.violations] == [("out", "alias")]


def test_out_beside_an_input_is_no_overlap() -> None:
    flat = poisoned(TensorSpec("both", (2 * 7168,), torch.bfloat16))
    arguments = {**Call().arguments, "shared": flat[:7168].view(1, 7168), "out": flat[7168:].view(1, 7168)}
    assert supports_latent_moe_tail(**arguments)


def test_inputs_may_share_memory() -> None:
    arguments = Call().arguments
    arguments["routed"] = arguments["norm_weight"].view(1, 3584)
    assert supports_latent_moe_tail(**arguments)


def test_parameters_without_gradient_are_accepted() -> None:
    arguments = Call().arguments
    arguments["up_weight"] = torch.nn.Parameter(arguments["up_weight"], requires_grad=False)
    assert supports_latent_moe_tail(**arguments)
    arguments["up_weight"] = torch.nn.Parameter(VALID["up_weight"])
    assert [v.clause for v in supports_latent_moe_tail(**arguments).violations] == ["requires_grad"]


def test_functorch_wrappers_are_refused() -> None:
    reports = []

    def probe(x: torch.Tensor) -> torch.Tensor:
        reports.append(supports_latent_moe_tail(**{**Call().arguments, "routed": x}))
        return x

    torch.vmap(probe)(VALID["routed"])
    assert [(v.argument, v.clause) for v in reports[0].violations] == [("routed", "type")]


def test_targets_that_are_not_here_are_refused_with_their_reason() -> None:
    for name, info in targets.detect().items():
        if not info.available:
            report = supports_latent_moe_tail(**{**Call().arguments, "target": name})
            assert [v.clause for v in report.violations] == ["target"]
            assert info.why_not is not None
            assert info.why_not in report.violations[0].remedy


def test_everything_wrong_at_once_is_all_listed() -> None:
    report = supports_latent_moe_tail(None, "x", 3, [], eps=True, out={}, target="tpu", config=1)
    assert [(v.argument, v.clause) for v in report.violations] == [
        ("target", "target"), ("routed", "type"), ("norm_weight", "type"), ("up_weight", "type"),
        ("shared", "type"), ("out", "type"), ("eps", "value"), ("config", "config"),
    ]  # fmt: skip
    assert str(report).count("\n") == 9


def test_the_op_itself_refuses_too() -> None:
    arguments = [VALID[spec.argument] for spec in SPECS]
    arguments[1] = poisoned(SPECS[1], 1)
    with pytest.raises(ContractError, match="alignment"):
        torch.ops.kernellib.latent_moe_tail(*arguments, target="reference")
    with pytest.raises(ContractError, match="config"):
        torch.ops.kernellib.latent_moe_tail(*arguments, target="reference", config="r9")
    with pytest.raises(ContractError, match="alias"):
        torch.ops.kernellib.latent_moe_tail_out(*arguments, arguments[3], target="reference")
