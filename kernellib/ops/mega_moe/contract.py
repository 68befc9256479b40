# SPDX-License-Identifier: Apache-2.0
"""MegaMoE's contract: what a layer and a call must be, clause by clause, and one verdict for all ranks.

Checks read metadata only, with one exception: expert ids that lie in host memory are read, because that
costs no wait for a device. Nothing here raises, whatever it is given, but ``raise_alike``.

Clauses besides those of tensors (``kernellib.ops.contract``):

===========  ==========================================================================================
type         an argument of the wrong kind, or one that cannot be looked at
rank         the rank the heap has
experts      divide evenly over the ranks
capacity     a power of two; ranks * capacity at most 2^24; tokens at most the capacity
config       "tuned", "generic" or a MegaMoEConfig that fits the shape and the device, LDS included
choice       one of the names that exist
weights      packed for this shape, in the kernels' own layout, on the device
experts_id   -1 or an expert's id, where the host can see them
token_class  at least every rank's token count, at most the capacity
order        stage 2 follows its own stage 1; layer and heap are open
agreement    the same on every rank
===========  ==========================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch

from kernellib.ops.contract import (
    PLAIN_TENSOR_TYPES,
    ContractError,
    SupportReport,
    TensorSpec,
    Violation,
    check_target,
    check_tensors,
)
from kernellib.symmetric import SymmetricHeap
from kernellib.targets import TargetInfo

from .config import (
    ACTIVATIONS,
    BUCKETS,
    LDS_BYTES,
    WIRES,
    MegaMoEConfig,
    MegaMoEConfigError,
    MegaMoEShape,
    resolve_wire,
    select_config,
)
from .layout import SOURCE_INDEX_BITS, LayoutError, LdsLayout, ScaleOrder
from .weights import PackedWeights

OPERATOR = "mega_moe"
BOUNDS_CHECK_VARIABLE = "KERNELLIB_MEGA_MOE_BOUNDS_CHECK"
TABLES = ("tuned", "generic")
INPUT_FORMATS = ("e4m3",)  # of quantised activations; e2m1 (A4W4) is to come
OUTPUT_DTYPES = (torch.bfloat16,)
TARGETS = ("mi355x", "emulator")


@dataclass(frozen=True)
class LayerRequest:
    """What a rank asks for when it constructs the layer; any field may be of any type until checked.

    Attributes:
        shape, max_tokens_per_rank, config, activation, wire, bounds_check, input_format, output_dtype,
            weights: as ``MegaMoE`` takes them.
        num_ranks: of the heap.
    """

    shape: Any
    num_ranks: Any
    max_tokens_per_rank: Any
    config: Any = "tuned"
    activation: Any = "situv2"
    wire: Any = "auto"
    bounds_check: Any = False
    input_format: Any = "e4m3"
    output_dtype: Any = torch.bfloat16
    weights: Any = None


# ------------------------------------------------------------------------------ whatever it is given


def text_of(value: object) -> str:
    """``repr``, also of an object whose own raises."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__} without a repr"


def inspected(check: Callable[[], Iterable[Violation]], argument: str = "arguments") -> list[Violation]:
    """The violations that ``check`` finds. Should it raise, that is one: a rank that raised by itself would
    leave the others waiting."""
    try:
        return list(check())
    except Exception as error:
        got = f"{type(error).__name__} when looked at: {text_of(error)}"
        return [Violation("type", argument, got, "values that can be inspected", "pass plain values")]


# ---------------------------------------------------------------------------------------- the layer


def check_layer(request: LayerRequest, num_cu: int | None = None) -> list[Violation]:
    """Every clause that a layer breaks by itself.

    Args:
        request: the layer.
        num_cu: compute units of the device; None when it is not known.
    """
    return [
        *_check_shape(request),
        *_check_capacity(request),
        *_check_config(request, num_cu),
        *_check_lds(request),
        *_check_choice("activation", request.activation, ACTIVATIONS),
        *_check_choice("wire", request.wire, (*WIRES, "auto")),
        *_check_choice("input_format", request.input_format, INPUT_FORMATS),
        *_check_choice("output_dtype", request.output_dtype, OUTPUT_DTYPES),
        *_check_bounds_check(request.bounds_check),
    ]


def _check_shape(request: LayerRequest) -> Iterator[Violation]:
    shape, ranks = request.shape, request.num_ranks
    if type(shape) is not MegaMoEShape:
        yield Violation(
            "type", "shape", type(shape).__name__, "MegaMoEShape", "pass KIMI_K3 or another shape"
        )
    if type(ranks) is not int or ranks < 1:
        yield Violation("type", "num_ranks", text_of(ranks), "a positive int", "pass the group's size")
    elif type(shape) is MegaMoEShape and shape.num_experts % ranks:
        got, wanted = f"{shape.num_experts} over {ranks} ranks", "experts that divide evenly"
        yield Violation("experts", "shape", got, wanted, "use a group whose size divides the experts")


def _check_capacity(request: LayerRequest) -> Iterator[Violation]:
    value, ranks = request.max_tokens_per_rank, request.num_ranks
    if type(value) is not int or value < 1:
        wanted = "a positive int"
        yield Violation("capacity", "max_tokens_per_rank", text_of(value), wanted, "pass a power of two")
        return
    if value & (value - 1):
        remedy = f"round up to {1 << value.bit_length()}"
        yield Violation("capacity", "max_tokens_per_rank", str(value), "a power of two", remedy)
    limit = 1 << SOURCE_INDEX_BITS
    if type(ranks) is int and ranks >= 1 and ranks * value > limit:
        got, wanted = f"{ranks} ranks * {value}", f"at most {limit}, a row's source has 24 bits"
        yield Violation("capacity", "max_tokens_per_rank", got, wanted, "lower it, or use fewer ranks")


def _check_config(request: LayerRequest, num_cu: int | None) -> Iterator[Violation]:
    config = request.config
    if type(config) is str and config in TABLES:
        return
    if type(config) is not MegaMoEConfig:
        wanted = "'tuned', 'generic' or a MegaMoEConfig"
        yield Violation("config", "config", text_of(config), wanted, "pass one of these")
        return
    if num_cu is not None and max(config.num_cu, config.persist_cu) > num_cu:
        got = f"num_cu {config.num_cu}, persist_cu {config.persist_cu}"
        remedy = f"use config.scaled(shape, {num_cu}): persistent workgroups must all be resident"
        yield Violation("config", "config", got, f"at most the device's {num_cu}", remedy)
    if type(request.shape) is MegaMoEShape:
        try:
            config.check_shape(request.shape)
        except MegaMoEConfigError as error:
            remedy = "use config.scaled(shape, config.num_cu)"
            yield Violation("config", "config", config.name, f"tiles that divide the shape: {error}", remedy)


def _check_lds(request: LayerRequest) -> Iterator[Violation]:
    """Workgroups of either stage fit the LDS, with every configuration that a call can select."""
    shape, ranks, capacity, config = (
        request.shape,
        request.num_ranks,
        request.max_tokens_per_rank,
        request.config,
    )
    if type(shape) is not MegaMoEShape or type(ranks) is not int or ranks < 1 or shape.num_experts % ranks:
        return
    if type(capacity) is not int or type(request.wire) is not str or request.wire not in (*WIRES, "auto"):
        return
    if type(config) is MegaMoEConfig:
        configs = [config]
    elif type(config) is str and config in TABLES:
        configs = [select_config(shape, ranks, bucket, cast(Any, config)) for bucket in BUCKETS]
    else:
        return
    wire = resolve_wire(cast(Any, request.wire), capacity)
    for stage, remedy in (
        ("stage1", "lower tile_m or gemm1_tile_n, or use a shape of fewer experts"),
        ("stage2", "lower tile_m or gemm2_tile_n"),
    ):
        most = max(getattr(LdsLayout(shape, each, wire, ranks), f"{stage}_bytes") for each in configs)
        if most > LDS_BYTES:
            got, wanted = f"{most} bytes of LDS in {stage}", f"at most {LDS_BYTES}"
            yield Violation("config", "config", got, wanted, remedy)


def _check_choice(argument: str, value: object, choices: Sequence[object]) -> Iterator[Violation]:
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        wanted = " or ".join(repr(choice) for choice in choices)
        yield Violation("choice", argument, text_of(value), wanted, "pass one of these")


def _check_bounds_check(value: object) -> Iterator[Violation]:
    if type(value) is not bool:
        yield Violation("type", "bounds_check", text_of(value), "a bool", "pass True or False")
    if os.environ.get(BOUNDS_CHECK_VARIABLE, "0") not in ("", "0", "1"):
        got = repr(os.environ[BOUNDS_CHECK_VARIABLE])
        yield Violation("choice", BOUNDS_CHECK_VARIABLE, got, "0 or 1", "set the variable to 1, or unset it")


def bounds_check_enabled(requested: bool) -> bool:
    """Whether the kernels check expert ids: on request, or by the environment."""
    return requested or os.environ.get(BOUNDS_CHECK_VARIABLE) == "1"


def check_weights(weights: object, request: LayerRequest, device: torch.device | None) -> list[Violation]:
    """Clause "weights": a ``PackedWeights`` of this rank's experts, in the kernels' layout, on ``device``."""
    if type(weights) is not PackedWeights:
        got, remedy = type(weights).__name__, "pack this rank's experts with pack_experts"
        return [Violation("type", "weights", got, "PackedWeights", remedy)]
    found = []
    shape, ranks = request.shape, request.num_ranks
    if type(shape) is MegaMoEShape and type(ranks) is int and ranks >= 1 and not shape.num_experts % ranks:
        try:
            weights.require(shape, shape.num_experts // ranks)
        except LayoutError as error:
            name = weights.shape.name if type(weights.shape) is MegaMoEShape else text_of(weights.shape)
            got = f"{weights.packing}, {weights.gate_up}, {name}, {weights.num_local_experts}"
            found.append(Violation("weights", "weights", got, "the kernels' layout", str(error)))
    for name in ("w1", "w1_scales", "w2", "w2_scales"):
        tensor = getattr(weights, name)
        if type(tensor) not in PLAIN_TENSOR_TYPES or tensor.layout != torch.strided:
            got = str(tensor.layout) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            wanted, remedy = "a plain, dense tensor", "pack with pack_experts"
            found.append(Violation("type", f"weights.{name}", got, wanted, remedy))
        elif device is not None and tensor.device != device:
            remedy = f"pack with device={str(device)!r}"
            found.append(Violation("device", f"weights.{name}", str(tensor.device), str(device), remedy))
        elif tensor.device.type != "meta" and tensor.numel() and tensor.data_ptr() % 16:
            got = f"address {tensor.data_ptr() % 16} past a multiple of 16"
            wanted = "a multiple of 16 bytes"
            found.append(
                Violation("alignment", f"weights.{name}", got, wanted, "copy the tensor with .clone()")
            )
    return found


def check_heap(heap: object, rank: object) -> list[Violation]:
    """Clauses of the heap: those of these that fail cannot be told to the other ranks."""
    if not isinstance(heap, SymmetricHeap):
        got, remedy = type(heap).__name__, "make one with mori_heap or emulated_heap"
        return [Violation("type", "heap", got, "SymmetricHeap", remedy)]
    if heap.closed:
        return [Violation("order", "heap", "closed", "open", "make a new heap")]
    if type(rank) is not int or rank != heap.rank:
        return [Violation("rank", "rank", text_of(rank), f"{heap.rank}, the heap's", "pass heap.rank")]
    return []


# ----------------------------------------------------------------------------------------- the call


@dataclass(frozen=True)
class CallArguments:
    """The tensors of a call; any field may be of any type until checked.

    Attributes:
        x: bf16 [tokens, model_dim].
        codes, scales: uint8 [tokens, model_dim] and [tokens, scale bytes], in a call on quantised tokens.
        route_weights: fp32 [tokens, top_k].
        expert_ids: int32 [tokens, top_k].
        out: bf16 [tokens, model_dim], or None.
        prequantized: whether the call takes codes and scales instead of x.
    """

    x: Any = None
    codes: Any = None
    scales: Any = None
    route_weights: Any = None
    expert_ids: Any = None
    out: Any = None
    prequantized: bool = False

    @property
    def first(self) -> str:
        """Name of the argument that says how many tokens there are."""
        return "codes" if self.prequantized else "x"

    @property
    def num_tokens(self) -> int | None:
        """Rows of the first argument; when it has none to speak of, of the next that has; otherwise None."""
        for value in (self.codes if self.prequantized else self.x, self.route_weights, self.expert_ids):
            if type(value) in PLAIN_TENSOR_TYPES and value.dim() == 2:
                return int(value.shape[0])
        return None


def call_specs(shape: MegaMoEShape, arguments: CallArguments) -> list[tuple[TensorSpec, Any]]:
    """Each tensor argument with what it must be, for the token count of the first."""
    tokens, dim = arguments.num_tokens or 0, shape.model_dim
    specs: list[tuple[TensorSpec, Any]] = []
    if not arguments.prequantized:
        specs.append((TensorSpec("x", (tokens, dim), torch.bfloat16), arguments.x))
    else:
        scale_bytes = ScaleOrder(dim).row_bytes
        specs.append((TensorSpec("codes", (tokens, dim), torch.uint8), arguments.codes))
        specs.append((TensorSpec("scales", (tokens, scale_bytes), torch.uint8), arguments.scales))
    routes = (tokens, shape.top_k)
    specs.append((TensorSpec("route_weights", routes, torch.float32, 4), arguments.route_weights))
    specs.append((TensorSpec("expert_ids", routes, torch.int32, 4), arguments.expert_ids))
    if arguments.out is not None:
        specs.append((TensorSpec("out", (tokens, dim), torch.bfloat16, written=True), arguments.out))
    return specs


def check_call(
    shape: MegaMoEShape,
    capacity: int | None,
    arguments: CallArguments,
    device_type: str | None,
    bounds_check: bool,
) -> list[Violation]:
    """Every clause that a call's tensors break on this rank.

    Args:
        shape: the layer's.
        capacity: most tokens; None when it is not known.
        arguments: the tensors.
        device_type: where they must be; None when it is not known.
        bounds_check: whether the device reports ids out of range; then the host does not refuse them.
    """
    found = check_tensors(call_specs(shape, arguments), device_type)
    tokens = arguments.num_tokens
    if tokens is not None and capacity is not None and tokens > capacity:
        remedy = "split the call, or construct with a larger max_tokens_per_rank"
        found.append(
            Violation("capacity", arguments.first, f"{tokens} tokens", f"at most {capacity}", remedy)
        )
    if not found and not bounds_check:
        found.extend(_check_ids(shape, arguments.expert_ids))
    return found


def _check_ids(shape: MegaMoEShape, ids: torch.Tensor) -> Iterator[Violation]:
    if ids.device.type != "cpu" or not ids.numel():
        return
    wrong = (ids < -1) | (ids >= shape.num_experts)
    if bool(wrong.any()):
        token, slot = (int(i) for i in wrong.nonzero()[0])
        got = f"{int(ids[token, slot])} at token {token}, slot {slot}; {int(wrong.sum())} such"
        wanted = f"-1 or 0 .. {shape.num_experts - 1}"
        yield Violation("experts_id", "expert_ids", got, wanted, "drop a route with -1")


def check_token_class(value: object, num_tokens: int | None, capacity: int) -> list[Violation]:
    """Clause "token_class" of a class that the caller names."""
    if type(value) is not int or not 0 <= value <= capacity:
        wanted = f"an int from 0 to {capacity}, or None to have the ranks agree"
        return [
            Violation("token_class", "token_class", text_of(value), wanted, "pass the largest token count")
        ]
    if num_tokens is not None and num_tokens > value:
        got = f"{value} with {num_tokens} tokens here"
        wanted = "at least every rank's token count"
        return [Violation("token_class", "token_class", got, wanted, "pass the largest token count")]
    return []


# ---------------------------------------------------------------------------------- all ranks alike


def merge(by_rank: Sequence[Sequence[Violation]]) -> tuple[Violation, ...]:
    """One list of violations for all ranks: each once, with the ranks that have it unless all do."""
    ranks_of: dict[Violation, list[int]] = {}
    for rank, violations in enumerate(by_rank):
        for violation in violations:
            ranks_of.setdefault(violation, []).append(rank)
    merged = []
    for violation, ranks in ranks_of.items():
        if len(ranks) == len(by_rank):
            merged.append(violation)
        else:
            where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            merged.append(replace(violation, argument=f"{violation.argument} ({where})"))
    return tuple(merged)


def disagreements(by_rank: Sequence[Mapping[str, str]]) -> tuple[Violation, ...]:
    """A violation for each field that is not the same on every rank."""
    found = []
    for name in by_rank[0]:
        values = [fields_.get(name, "missing") for fields_ in by_rank]
        if len(set(values)) > 1:
            got = "; ".join(
                f"{value} on rank{'s' * (values.count(value) > 1)} "
                + ", ".join(str(rank) for rank, other in enumerate(values) if other == value)
                for value in dict.fromkeys(values)
            )
            remedy = "construct the layer alike on every rank"
            found.append(Violation("agreement", name, got, "the same on every rank", remedy))
    return tuple(found)


def agreed_fields(request: LayerRequest) -> dict[str, str]:
    """What must be the same on every rank, as text."""
    found = {
        field.name: text_of(getattr(request, field.name))
        for field in fields(request)
        if field.name not in ("weights", "bounds_check")
    }
    enabled = type(request.bounds_check) is bool and bounds_check_enabled(request.bounds_check)
    return {**found, "bounds_check": str(enabled)}


def raise_alike(violations: Sequence[Violation]) -> None:
    """Raises ContractError with these violations, when there are any."""
    if violations:
        raise ContractError(SupportReport(OPERATOR, tuple(violations)))


# --------------------------------------------------------------------------------- the public check


def _check_target(value: object) -> tuple[TargetInfo | None, list[Violation]]:
    """As for every operator, but "auto" and names are those of the targets that run these kernels."""
    for name in TARGETS if value == "auto" else ():
        info, _ = check_target(name)
        if info is not None:
            return info, []
    info, found = check_target(value)
    if info is not None and info.name not in TARGETS:
        wanted = " or ".join(TARGETS)
        found.append(Violation("target", "target", info.name, wanted, "the kernels are for gfx950"))
    return info, found


def supports_mega_moe(
    shape: object,
    num_ranks: object,
    max_tokens_per_rank: object,
    *,
    config: object = "tuned",
    activation: object = "situv2",
    wire: object = "auto",
    bounds_check: object = False,
    input_format: object = "e4m3",
    output_dtype: object = torch.bfloat16,
    weights: object = None,
    x: object = None,
    route_weights: object = None,
    expert_ids: object = None,
    out: object = None,
    target: object = "auto",
) -> SupportReport:
    """Whether ``MegaMoE`` would accept these, on this rank by itself, and every reason why not.

    Takes anything at all, reads no device memory, writes nothing, raises nothing. Weights and the tensors of
    a call are checked when they are given.

    Returns:
        A ``SupportReport``: truthy when supported, otherwise with each clause that fails.

    Example:
        >>> from kernellib.ops.mega_moe.config import KIMI_K3
        >>> report = supports_mega_moe(KIMI_K3, 8, 100, target="emulator")
        >>> bool(report), report.violations[0].clause, report.violations[0].remedy
        (False, 'capacity', 'round up to 128')
    """
    info, found = _check_target(target)
    device_type = None if info is None else info.torch_device
    request = LayerRequest(
        shape,
        num_ranks,
        max_tokens_per_rank,
        config,
        activation,
        wire,
        bounds_check,
        input_format,
        output_dtype,
        weights,
    )
    found.extend(check_layer(request))
    if weights is not None:
        found.extend(check_weights(weights, request, None))
    given = any(value is not None for value in (x, route_weights, expert_ids, out))
    if given and type(shape) is MegaMoEShape:
        capacity = max_tokens_per_rank if type(max_tokens_per_rank) is int else None
        arguments = CallArguments(x=x, route_weights=route_weights, expert_ids=expert_ids, out=out)
        found.extend(check_call(shape, capacity, arguments, device_type, bounds_check is True))
    return SupportReport(OPERATOR, tuple(found), info)
