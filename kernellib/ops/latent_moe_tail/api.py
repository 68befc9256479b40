# SPDX-License-Identifier: Apache-2.0
"""``latent_moe_tail``: the public function, its contract, and its custom op in torch.

n = rms_norm(routed, norm_weight, eps)       fp32 statistics, one rounding to bf16
p = n @ up_weight.T                          fp32 accumulation, rounded to bf16
y = p + shared                               rounded to bf16
"""

from __future__ import annotations

from functools import cache

import torch

from kernellib import targets
from kernellib.ops.contract import (
    ContractError,
    SupportReport,
    TensorSpec,
    Violation,
    check_positive_float,
    check_target,
    check_tensors,
)

from .config import LATENT_DIM, MODEL_DIM, TailConfig, TailConfigError, load_tuned
from .reference import TailInputs, production_chain

OPERATOR = "latent_moe_tail"
SPECS = (
    TensorSpec("routed", (1, LATENT_DIM), torch.bfloat16),
    TensorSpec("norm_weight", (LATENT_DIM,), torch.bfloat16),
    TensorSpec("up_weight", (MODEL_DIM, LATENT_DIM), torch.bfloat16),
    TensorSpec("shared", (1, MODEL_DIM), torch.bfloat16),
)
OUT_SPEC = TensorSpec("out", (1, MODEL_DIM), torch.bfloat16, written=True)
GFX950_TARGETS = ("mi355x", "emulator")  # those that run the FlyDSL kernel, which a TailConfig shapes


def supports_latent_moe_tail(
    routed: object,
    norm_weight: object,
    up_weight: object,
    shared: object,
    *,
    eps: object = 1e-6,
    out: object = None,
    target: object = "auto",
    config: object = None,
) -> SupportReport:
    """Whether ``latent_moe_tail`` accepts these arguments, and every reason why not.

    Takes anything at all, reads no tensor's elements, writes nothing, raises nothing.

    Returns:
        A ``SupportReport``: truthy when supported; otherwise ``.violations`` lists each clause that
        fails with argument, got, wanted and remedy, and ``str()`` renders them as a table.

    Example:
        >>> import torch
        >>> bad = torch.zeros(1, 3584)
        >>> report = supports_latent_moe_tail(bad, None, bad, bad, target="reference")
        >>> bool(report), report.violations[0].argument, report.violations[0].clause
        (False, 'norm_weight', 'type')
    """
    info, violations = check_target(target)
    arguments = list(zip(SPECS, (routed, norm_weight, up_weight, shared), strict=True))
    if out is not None:
        arguments.append((OUT_SPEC, out))
    violations.extend(check_tensors(arguments, _device_type(info, arguments[0][1])))
    violations.extend(check_positive_float("eps", eps))
    violations.extend(_check_config(config, info))
    return SupportReport(OPERATOR, tuple(violations), info)


def latent_moe_tail(
    routed: torch.Tensor,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    shared: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    target: str = "auto",
    config: TailConfig | None = None,
) -> torch.Tensor:
    """y = bf16(bf16(rms_norm(routed, norm_weight, eps) @ up_weight.T) + shared), in one launch.

    Args:
        routed: bf16 [1, 3584], the routed experts' latent row.
        norm_weight: bf16 [3584].
        up_weight: bf16 [7168, 3584].
        shared: bf16 [1, 7168], the shared experts' row.
        eps: float added to the mean of squares; finite and above zero, in fp32 too.
        out: bf16 [1, 7168] to write the result to; shares no byte with another argument.
        target: where to run: "auto", "mi355x", "cuda", "emulator" or "reference".
        config: how the gfx950 kernel divides the work; None takes the tuned configuration. Only for the
            targets that run that kernel, "mi355x" and "emulator".

        All tensors contiguous, 16-byte aligned, on one device, without gradient.

    Returns:
        bf16 [1, 7168]: ``out`` when given, otherwise a new tensor.

    Raises:
        ContractError: any argument is not exactly as above; nothing was written. ``.report`` lists
            every clause that fails.

    Under ``torch.compile`` the call becomes the custom op ``kernellib::latent_moe_tail`` (or
    ``latent_moe_tail_out``), which checks the same contract when it runs, on the tensors that the compiler
    hands it. What the compiler changes before is checked while it traces: the types of eps and config, and
    that ``out`` is not one of the inputs. A view of an input as ``out`` is not found where the compiler
    gives the op a copy instead; the op then writes no input, and the compiler copies back.

    Example:
        >>> from kernellib.ops.latent_moe_tail.reference import make_inputs
        >>> latent_moe_tail(*make_inputs(0), target="reference").shape
        torch.Size([1, 7168])
    """
    if not torch.compiler.is_compiling():
        report = supports_latent_moe_tail(
            routed, norm_weight, up_weight, shared, eps=eps, out=out, target=target, config=config
        )
        if not report:
            raise ContractError(report)
    else:
        _check_while_tracing((routed, norm_weight, up_weight, shared), eps, out, config)
    config_name = "" if config is None else config.name
    if out is None:
        result: torch.Tensor = torch.ops.kernellib.latent_moe_tail(
            routed, norm_weight, up_weight, shared, eps=eps, target=target, config=config_name
        )
        return result
    torch.ops.kernellib.latent_moe_tail_out(
        routed, norm_weight, up_weight, shared, out, eps=eps, target=target, config=config_name
    )
    return out


@torch.library.custom_op("kernellib::latent_moe_tail", mutates_args=())
def _op(
    routed: torch.Tensor,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    shared: torch.Tensor,
    *,
    eps: float = 1e-6,
    target: str = "auto",
    config: str = "",
) -> torch.Tensor:
    return _run(TailInputs(routed, norm_weight, up_weight, shared), None, eps, target, config)


@_op.register_fake
def _op_fake(
    routed: torch.Tensor,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    shared: torch.Tensor,
    *,
    eps: float = 1e-6,
    target: str = "auto",
    config: str = "",
) -> torch.Tensor:
    _check_metadata(routed, norm_weight, up_weight, shared)
    return shared.new_empty((1, MODEL_DIM))


@torch.library.custom_op("kernellib::latent_moe_tail_out", mutates_args=("out",))
def _op_out(
    routed: torch.Tensor,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    shared: torch.Tensor,
    out: torch.Tensor,
    *,
    eps: float = 1e-6,
    target: str = "auto",
    config: str = "",
) -> None:
    _run(TailInputs(routed, norm_weight, up_weight, shared), out, eps, target, config)


@_op_out.register_fake
def _op_out_fake(
    routed: torch.Tensor,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    shared: torch.Tensor,
    out: torch.Tensor,
    *,
    eps: float = 1e-6,
    target: str = "auto",
    config: str = "",
) -> None:
    _check_metadata(routed, norm_weight, up_weight, shared)


def _check_while_tracing(
    inputs: tuple[torch.Tensor, ...], eps: float, out: torch.Tensor | None, config: TailConfig | None
) -> None:
    """What can no longer be told when the op runs: its schema makes floats of ints and a name of a config."""
    violations = []
    if not isinstance(eps, float):
        violations.append(Violation("value", "eps", str(type(eps)), "a float", "pass eps as a float"))
    if config is not None and not isinstance(config, TailConfig):
        remedy = "pass a TailConfig, or None for the tuned one"
        violations.append(Violation("config", "config", str(type(config)), "TailConfig or None", remedy))
    for spec, tensor in zip(SPECS, inputs, strict=True):
        if out is tensor:
            got = f"{spec.argument} itself"
            violations.append(Violation("alias", "out", got, "memory of its own", "pass another tensor"))
    if violations:
        raise ContractError(SupportReport(OPERATOR, tuple(violations)))


def _check_metadata(*tensors: torch.Tensor) -> None:
    """Shapes and dtypes while tracing, where there is no memory to look at; the rest follows at run time."""
    violations = []
    for spec, tensor in zip(SPECS, tensors, strict=True):
        if tensor.dtype != spec.dtype:
            remedy = f"convert with .to({spec.dtype})"
            violations.append(Violation("dtype", spec.argument, str(tensor.dtype), str(spec.dtype), remedy))
        if tuple(tensor.shape) != spec.shape:
            got, wanted = str(list(tensor.shape)), str(list(spec.shape))
            violations.append(Violation("shape", spec.argument, got, wanted, "pass exactly this shape"))
    if violations:
        raise ContractError(SupportReport(OPERATOR, tuple(violations)))


def _run(
    inputs: TailInputs, out: torch.Tensor | None, eps: float, target: str, config_name: str
) -> torch.Tensor:
    """Checks the contract (the op can be reached without the public function) and runs on the target."""
    try:
        config = TailConfig.from_name(config_name) if config_name else None
    except TailConfigError as error:
        violation = Violation("config", "config", repr(config_name), "a TailConfig's name or ''", str(error))
        raise ContractError(SupportReport(OPERATOR, (violation,))) from error
    report = supports_latent_moe_tail(*inputs, eps=eps, out=out, target=target, config=config)
    if not report or report.target is None:
        raise ContractError(report)
    result = torch.empty_like(inputs.shared) if out is None else out
    name = report.target.name
    if name == "reference":
        # bf16 whatever the caller's autocast says: the chain rounds where the formula does.
        with torch.autocast(inputs.routed.device.type, enabled=False):
            return result.copy_(production_chain(*inputs, eps))
    if name == "cuda":
        from .kernel_triton import launch_triton  # noqa: PLC0415  (triton is optional)

        launch_triton(*inputs, eps, result)
        return result
    from .kernel_gfx950 import launch  # noqa: PLC0415  (loads the compiler, which takes seconds)

    with targets.execution_scope(name):
        launch(config or _tuned(name), inputs, eps, result, name)
    return result


@cache
def _tuned(target: str) -> TailConfig:
    return load_tuned(target)


def _device_type(info: targets.TargetInfo | None, routed: object) -> str | None:
    """The device type the tensors must be on; the reference runs wherever they are."""
    if info is None:
        return None
    if info.name == "reference":
        device = routed.device.type if isinstance(routed, torch.Tensor) else info.torch_device
        return device if device in ("cpu", "cuda") else info.torch_device
    return info.torch_device


def _check_config(config: object, info: targets.TargetInfo | None) -> list[Violation]:
    if config is None:
        return []
    if type(config) is not TailConfig:
        got, remedy = type(config).__name__, "pass a TailConfig, or None for the tuned one"
        return [Violation("config", "config", got, "TailConfig or None", remedy)]
    if info is not None and info.name not in GFX950_TARGETS:
        remedy = f"a TailConfig shapes the gfx950 kernel, which {info.name!r} does not run"
        return [Violation("config", "config", config.name, f"None on target {info.name!r}", remedy)]
    return []
