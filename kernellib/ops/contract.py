# SPDX-License-Identifier: Apache-2.0
"""Contracts of operators: exact, fail closed, and every clause that fails reported at once.

An operator lists what it accepts as ``TensorSpec``s. ``check_tensors`` returns one ``Violation`` for each
clause that a call breaks, for each argument, and raises nothing whatever it is given: what it
cannot inspect it refuses. Checking reads metadata only, never a tensor's elements, and writes nothing.

Clauses of a tensor argument, in the order they are reported:

=============  ====================================================================================
type           torch.Tensor or torch.nn.Parameter itself; no subclass, no functorch wrapper
layout         strided, dense: not sparse, quantized, nested or mkldnn
device         of the type the target runs on
same_device    the device of the first tensor argument
dtype          as specified
shape          as specified
strides        contiguous, row-major
view           no pending conjugation or negation
requires_grad  false, and no forward-mode tangent: the operators have no derivative
inference      a written argument made in inference mode is written in inference mode only
storage        the memory exists and holds every element
alignment      the first element's address is a multiple of the specified bytes
alias          a written argument shares no byte with another argument
=============  ====================================================================================
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

import torch
from torch.autograd import forward_ad

from kernellib import targets

PLAIN_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Violation:
    """One clause of a contract that a call breaks.

    Attributes:
        clause: the clause's name, such as "dtype".
        argument: the argument that breaks it.
        got: what it is.
        wanted: what the contract asks for.
        remedy: what to do about it.
    """

    clause: str
    argument: str
    got: str
    wanted: str
    remedy: str


@dataclass(frozen=True)
class SupportReport:
    """The verdict on a call: truthy when the contract holds, otherwise falsy with every violation.

    Attributes:
        operator: the operator's name.
        violations: one for each clause of each argument that fails.
        target: the target that would run, once "auto" is decided; None when there is none.
    """

    operator: str
    violations: tuple[Violation, ...] = ()
    target: targets.TargetInfo | None = None

    def __bool__(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        if not self.violations:
            where = f" on {self.target.name}" if self.target is not None else ""
            return f"{self.operator}: supported{where}"
        head = ("argument", "clause", "got", "wanted", "remedy")
        rows = [head, *((v.argument, v.clause, v.got, v.wanted, v.remedy) for v in self.violations)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
        lines = [
            "  "
            + "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]))
            for row in rows
        ]
        count = len(self.violations)
        return "\n".join([f"{self.operator}: refused, {count} clause{'s' * (count > 1)} broken", *lines])


class ContractError(ValueError):
    """A call outside an operator's contract; nothing was computed and nothing was written.

    Attributes:
        report: the ``SupportReport`` with every violation.
    """

    def __init__(self, report: SupportReport) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor argument must be. All are contiguous and need no gradient.

    Attributes:
        argument: the argument's name.
        shape: its exact shape.
        dtype: its exact dtype.
        alignment: bytes that the address of its first element must be a multiple of.
        written: whether the operator writes it; then it may not share a byte with another argument.
    """

    argument: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    alignment: int = 16
    written: bool = False

    @cached_property
    def strides(self) -> tuple[int, ...]:
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= size
        return tuple(reversed(strides))

    @cached_property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def check_tensors(
    arguments: Sequence[tuple[TensorSpec, Any]], device_type: str | None = None
) -> list[Violation]:
    """Every clause that the tensor arguments of a call break; raises nothing.

    Args:
        arguments: each specification with the object given for it, of any type at all.
        device_type: the device type the target runs on ("cpu", "cuda"); None when it is not known,
            then only agreement among the arguments is checked.
    """
    if _all_satisfied(arguments, device_type):
        return []
    violations: list[Violation] = []
    plain: list[tuple[TensorSpec, torch.Tensor]] = []
    for spec, value in arguments:
        if not _is_plain_tensor(value):
            violations.append(_type_violation(spec.argument, value))
            continue
        plain.append((spec, value))
    first_device = plain[0][1].device if plain else None
    for spec, tensor in plain:
        violations.extend(_tensor_violations(spec, tensor, device_type, first_device, plain[0][0].argument))
    violations.extend(_alias_violations(plain))
    return violations


def _all_satisfied(arguments: Sequence[tuple[TensorSpec, Any]], device_type: str | None) -> bool:
    """The verdict without the reasons, in a fifth of the time: this is what an accepted call pays.

    Anything that cannot be asked here counts as not satisfied, and the full check says why.
    """
    spans: list[tuple[int, int]] = []
    device: torch.device | None = None
    for spec, value in arguments:
        if not _is_plain_tensor(value):
            return False
        if device is None:
            device = value.device
            if device_type is not None and device.type != device_type:
                return False
        try:
            address = value.data_ptr()
            if not (
                value.dtype is spec.dtype
                and value.shape == spec.shape
                and value.layout is torch.strided
                and value.is_contiguous()
                and not (value.requires_grad or value.is_quantized or value.is_nested)
                and not (value.is_conj() or value.is_neg())
                and not _has_tangent(value)
                and not (spec.written and _is_frozen(value))
                and value.device == device
                and address
                and address % spec.alignment == 0
                and value.storage_offset() * spec.dtype.itemsize + spec.num_bytes
                <= value.untyped_storage().nbytes()
            ):
                return False
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return False
        spans.append((address, address + spec.num_bytes))
    for index, (spec, _) in enumerate(arguments):
        if spec.written:
            start, end = spans[index]
            others = (span for other, span in enumerate(spans) if other != index)
            if any(start < other_end and other_start < end for other_start, other_end in others):
                return False
    return True


def _is_plain_tensor(value: object) -> bool:
    if type(value) not in PLAIN_TENSOR_TYPES:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(cast(torch.Tensor, value))


def _type_violation(argument: str, value: object) -> Violation:
    got = type(value).__name__
    if type(value) in PLAIN_TENSOR_TYPES:
        got = "a functorch wrapper (vmap, grad or functionalize)"
    return Violation(
        "type", argument, got, "torch.Tensor or torch.nn.Parameter", "pass a plain tensor (no subclass)"
    )


def _tensor_violations(
    spec: TensorSpec,
    tensor: torch.Tensor,
    device_type: str | None,
    first_device: torch.device | None,
    first_argument: str,
) -> Iterator[Violation]:
    """The clauses that concern one tensor by itself."""
    name = spec.argument
    layout = _odd_layout(tensor)
    if layout is not None:
        yield Violation("layout", name, layout, "strided, dense", "convert with .to_dense() or .dequantize()")
    device = tensor.device
    if device_type is not None and device.type != device_type:
        yield Violation("device", name, str(device), device_type, f"move it with .to({device_type!r})")
    if device != first_device:
        wanted = f"{first_device}, as {first_argument}"
        yield Violation("same_device", name, str(device), wanted, f"move it with .to({str(first_device)!r})")
    if tensor.dtype != spec.dtype:
        yield Violation("dtype", name, str(tensor.dtype), str(spec.dtype), f"convert with .to({spec.dtype})")
    if layout is None:
        yield from _geometry_violations(spec, tensor)
    if tensor.is_conj() or tensor.is_neg():
        got = "conjugate view" if tensor.is_conj() else "negative view"
        yield Violation(
            "view", name, got, "no pending conjugation or negation", "resolve with .resolve_neg()"
        )
    if tensor.requires_grad:
        yield Violation("requires_grad", name, "True", "False", "detach it: the operator has no backward")
    elif _has_tangent(tensor):
        remedy = "unpack the dual tensor: the operator has no derivative"
        yield Violation("requires_grad", name, "a forward-mode tangent", "False", remedy)
    if spec.written and _is_frozen(tensor):
        got, wanted = "an inference tensor, outside inference mode", "a tensor that may be written here"
        yield Violation("inference", name, got, wanted, "call under torch.inference_mode(), or clone it")
    if layout is None:
        yield from _memory_violations(spec, tensor)


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode differentiation follows the tensor; its tangent would be lost without a word."""
    if forward_ad._current_level < 0:
        return False
    try:
        return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError):
        return False


def _is_frozen(tensor: torch.Tensor) -> bool:
    """Whether torch refuses to write the tensor here; it would notice only after the write."""
    return tensor.is_inference() and not torch.is_inference_mode_enabled()


def _odd_layout(tensor: torch.Tensor) -> str | None:
    """What keeps a tensor from being plain strided memory; None when nothing does."""
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    if tensor.is_quantized:
        return "quantized"
    return "nested" if tensor.is_nested else None


def _geometry_violations(spec: TensorSpec, tensor: torch.Tensor) -> Iterator[Violation]:
    shape = tuple(tensor.shape)
    if shape != spec.shape:
        got, wanted = str(list(shape)), str(list(spec.shape))
        yield Violation("shape", spec.argument, got, wanted, "pass a tensor of exactly this shape")
        if not tensor.is_contiguous():
            yield _strides_violation(spec.argument, tensor, "those of a contiguous tensor")
    # A dimension of size 1 is never stepped along: its stride is free, as in torch's own is_contiguous; so
    # are all of a tensor's without elements.
    elif tensor.numel() and any(
        size > 1 and got != wanted
        for size, got, wanted in zip(shape, tensor.stride(), spec.strides, strict=True)
    ):
        yield _strides_violation(spec.argument, tensor, str(list(spec.strides)))


def _strides_violation(argument: str, tensor: torch.Tensor, wanted: str) -> Violation:
    return Violation("strides", argument, str(list(tensor.stride())), wanted, "make it .contiguous()")


def _memory_violations(spec: TensorSpec, tensor: torch.Tensor) -> Iterator[Violation]:
    span = _byte_span(tensor)
    if span is None:
        wanted = "memory for every element"
        remedy = "materialise it: its storage is missing, freed or too small"
        yield Violation("storage", spec.argument, _storage_size(tensor), wanted, remedy)
    elif span[0] % spec.alignment:
        got = f"address {span[0] % spec.alignment} past a multiple of {spec.alignment}"
        wanted = f"a multiple of {spec.alignment} bytes"
        yield Violation(
            "alignment", spec.argument, got, wanted, "copy it with .clone(), or move the view's offset"
        )


def _byte_span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First and one-past-last address of a strided tensor's elements; None when memory is missing."""
    try:
        if tensor.numel() == 0:
            return 0, 0
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        elements = 1 + sum((size - 1) * stride for size, stride in steps)
        num_bytes = elements * tensor.element_size()
        offset = tensor.storage_offset() * tensor.element_size()
        address = tensor.data_ptr()
        if address == 0 or tensor.untyped_storage().nbytes() < offset + num_bytes:
            return None
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # meta, zero tensors, wrappers
        return None
    return address, address + num_bytes


def _storage_size(tensor: torch.Tensor) -> str:
    try:
        return f"{tensor.untyped_storage().nbytes()} bytes at address {tensor.data_ptr():#x}"
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return f"no addressable memory on {tensor.device}"


def _alias_violations(arguments: Sequence[tuple[TensorSpec, torch.Tensor]]) -> Iterator[Violation]:
    """A written argument that shares a byte with any other argument, partial overlap included."""
    if not any(spec.written for spec, _ in arguments):
        return
    spans = [
        (spec, tensor.device, _byte_span(tensor) if _odd_layout(tensor) is None else None)
        for spec, tensor in arguments
    ]
    for written, device, span in spans:
        if not written.written or span is None:
            continue
        for other, other_device, other_span in spans:
            if other is written or other_span is None or other_device != device:
                continue
            shared = min(span[1], other_span[1]) - max(span[0], other_span[0])
            if shared > 0:
                got = f"{shared} bytes shared with {other.argument}"
                yield Violation("alias", written.argument, got, "memory of its own", "pass another tensor")


def check_positive_float(argument: str, value: object) -> list[Violation]:
    """Clause "value": a Python float, finite and above zero, also after rounding to fp32.

    bool, int, strings and tensors are refused: a tensor would have to be read, which waits for a device.
    A subclass of float (numpy.float64) is one.
    """
    if not issubclass(type(value), float):  # not isinstance, which asks the object itself
        return [Violation("value", argument, type(value).__name__, "a float", f"pass {argument} as a float")]
    number = float.__float__(cast(float, value))  # what torch reads, whatever a subclass says
    if not math.isfinite(number) or number <= 0.0:
        return [
            Violation("value", argument, repr(number), "finite and above 0", "pass a small positive number")
        ]
    try:
        single = float(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        single = math.inf
    if not math.isfinite(single) or single == 0.0:
        got = f"{number!r}, which is {single!r} in fp32"
        return [
            Violation("value", argument, got, "finite and above 0 in fp32", "pass a number fp32 can hold")
        ]
    return []


@cache
def resolve_target(name: str) -> targets.TargetInfo:
    """``kernellib.targets.resolve``, remembered: probing the machine at every call would cost more
    than the call. A target that is not available is looked for again."""
    return targets.resolve(name)


def check_target(value: object) -> tuple[targets.TargetInfo | None, list[Violation]]:
    """Clause "target": a known target's name, or "auto", that can run here."""
    if type(value) is not str:
        wanted = "a target's name: auto, " + ", ".join(targets.TARGETS)
        return None, [Violation("target", "target", type(value).__name__, wanted, "pass a string")]
    try:
        return resolve_target(value), []
    except targets.TargetUnavailableError as error:
        wanted = "an available target: auto, " + ", ".join(targets.TARGETS)
        return None, [Violation("target", "target", repr(value), wanted, str(error))]
