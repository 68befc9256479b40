# SPDX-License-Identifier: Apache-2.0
"""The latent MoE tail measured: the unfused chain, its compiled forms and the fused launch.

Fairness, in short:

- All arms read the same tensors at the same addresses; the weight of each slot is its own 51.4 MB, so a
  replay over eight slots streams 411 MB.
- ``routed``, ``norm_weight`` and ``shared`` change before each trial, in place. The weights stay through
  the trials, as they do in serving, and change for the check after timing.
- Every arm is captured in graphs of one call for each slot, so no arm pays Python or launch queues; each
  capture has outputs and intermediate results of its own.
- ``after_producer`` puts a kernel in front of every call that writes ``routed`` and ``shared``, as the layers
  before do in serving, and charges its time to every arm alike. Without it calls follow each other directly:
  a launch that may overlap with its predecessor then overlaps with the same operator's last call, which no
  decoder does, and every input comes from where the arm's last pass over the slots left it.
- The compiled and eager arms return their result where their allocator puts it; nothing is copied.
  The fused arm writes to ``out``, as serving code would.
- The fused arm must have the oracle's rounding points: one ulp, or bf16(p' + shared) for a bf16 neighbour p'
  of the oracle's p. The others may keep fp32 where the chain rounds (a compiler may fuse roundings away), and
  are held to a looser bound, taken at the result's root mean square.

Without a GPU nothing is timed: ``compare_tail`` then counts the fused launch on the emulator and states
the unfused chain's launches and bytes from its shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from kernellib.numerics.bf16 import to_float64
from kernellib.numerics.errors import neighbour_sums
from kernellib.ops.latent_moe_tail.api import latent_moe_tail
from kernellib.ops.latent_moe_tail.config import (
    LATENT_DIM,
    MODEL_DIM,
    RESULT_BYTES,
    ROW_BYTES,
    WEIGHT_BYTES,
    TailConfig,
    load_tuned,
)
from kernellib.ops.latent_moe_tail.reference import TailInputs, make_inputs, oracle_f64, production_chain
from kernellib.targets import TargetInfo, resolve

from ..assemble import arm_entry, counted_record, timed_record
from ..device import Device, GpuDevice
from ..errors import BenchError
from ..gates import Checker
from ..method import Method, Progress, run_paired, silent
from ..record import Record
from ..workload import EXACT_ROUNDING, FREE_ROUNDING, Arm, Expected, Launch, Workload

OPERATOR = "latent_moe_tail"
# Another operator, so that records of the two never compare.
AFTER_PRODUCER = "latent_moe_tail_after_producer"
DEFAULT_ROTATION = 8
NUM_VERSIONS = 3  # for trials; one more is kept for the check after timing
EPS = 1e-6
VARYING = ("routed", "norm_weight", "shared")
# Root mean square of ``routed`` in each version, the fresh one last. Away from 1: at 1 the norm changes next
# to nothing, and an arm that left it out would pass a loose gate.
ROUTED_RMS = (2.0, 0.25, 6.0, 0.5)
ARM_NAMES = ("eager", "compile", "max_autotune", "fused")
# Kernels of the unfused chain and what each must move at the least: (read, written) bytes.
UNFUSED_TRAFFIC = {
    "rms_norm": (2 * ROW_BYTES, ROW_BYTES),
    "linear": (WEIGHT_BYTES + ROW_BYTES, RESULT_BYTES),
    "add": (2 * RESULT_BYTES, RESULT_BYTES),
}
# What the fused arm is to reach on an H200: ratios over other arms, and a share of the copy bandwidth
# measured in the same run. Other GPUs have other ratios of launch time to bandwidth, so no goal is set there.
H200 = "H200"
H200_GOALS = {"eager": 1.75, "max_autotune": 1.12, "copy": 0.90}
FUSED_BYTES = WEIGHT_BYTES + 2 * ROW_BYTES + 2 * RESULT_BYTES


class TailWorkload(Workload):
    """``rotation`` slots of the tail's inputs, ``make_inputs`` of kind "normal", each from its own seed."""

    operator = OPERATOR
    num_versions = NUM_VERSIONS
    bytes_per_call = FUSED_BYTES
    flops_per_call = 2 * MODEL_DIM * LATENT_DIM
    rotating = ("up_weight",)

    def __init__(
        self, rotation: int, seed: int, device: str | torch.device, *, after_producer: bool = False
    ) -> None:
        """Makes the inputs.

        Args:
            rotation: slots, each with its own weight.
            seed: of the first slot; the others follow.
            device: where the tensors lie.
            after_producer: whether ``produce`` is to be called before each call.
        """
        self.inputs = [make_inputs(seed + slot_idx, "normal", device) for slot_idx in range(rotation)]
        self.after_producer = after_producer
        if after_producer:
            self.operator = AFTER_PRODUCER
            # Side by side, so that one kernel writes both; either part is 16-byte aligned.
            size = LATENT_DIM + MODEL_DIM
            self._activations = [torch.empty(size, dtype=torch.bfloat16, device=device) for _ in self.inputs]
            self._sources = [torch.empty_like(flat) for flat in self._activations]
            self.inputs = [
                inputs._replace(routed=flat[:LATENT_DIM].view(1, -1), shared=flat[LATENT_DIM:].view(1, -1))
                for inputs, flat in zip(self.inputs, self._activations, strict=True)
            ]
        self.slots = [inputs._asdict() for inputs in self.inputs]
        generator = torch.Generator().manual_seed(seed + 1_000_003)
        self._values = [self._draw(generator, rms, device) for rms in ROUTED_RMS]
        self._rolled = False
        self.set_version(0)

    def _draw(
        self, generator: torch.Generator, rms: float, device: str | torch.device
    ) -> list[dict[str, torch.Tensor]]:
        drawn = []
        for _ in self.slots:
            routed = rms * torch.randn(1, LATENT_DIM, generator=generator)
            norm_weight = 1.0 + 0.1 * torch.randn(LATENT_DIM, generator=generator)
            shared = torch.randn(1, MODEL_DIM, generator=generator)
            values = dict(zip(VARYING, (routed, norm_weight, shared), strict=True))
            drawn.append({name: value.to(device, torch.bfloat16) for name, value in values.items()})
        return drawn

    def set_version(self, version: int) -> None:
        """See ``Workload``; the fresh version also moves weights one slot on (negates a single one)."""
        for slot, values in zip(self.slots, self._values[version], strict=True):
            for name, value in values.items():
                slot[name].copy_(value)
        if self.after_producer:
            for source, activations in zip(self._sources, self._activations, strict=True):
                source.copy_(activations)
        if (version == self.num_versions) != self._rolled:
            self._roll(-1 if self._rolled else 1)
            self._rolled = not self._rolled

    def produce(self, slot_idx: int) -> None:
        """Writes ``routed`` and ``shared`` of a slot, their present values, in one kernel."""
        torch.mul(self._sources[slot_idx], 1.0, out=self._activations[slot_idx])

    def _roll(self, step: int) -> None:
        weights = [slot["up_weight"] for slot in self.slots][::step]
        if len(weights) == 1:
            weights[0].neg_()
            return
        first = weights[0].clone()
        for here, following in pairwise(weights):
            here.copy_(following)
        weights[-1].copy_(first)

    def oracle(self, slot_idx: int) -> Expected:
        """See ``Workload``."""
        inputs = TailInputs(*(tensor.cpu() for tensor in self.inputs[slot_idx]))
        p, y = oracle_f64(*inputs, EPS)
        return Expected(y, (p,), neighbour_sums(p, to_float64(inputs.shared).reshape(-1)))


def _eager(workload: TailWorkload) -> Launch:
    return lambda slot_idx: production_chain(*workload.inputs[slot_idx], EPS)


def _compiled(mode: str | None, workload: TailWorkload) -> Launch:
    def chain(
        routed: torch.Tensor, norm_weight: torch.Tensor, up_weight: torch.Tensor, shared: torch.Tensor
    ) -> torch.Tensor:
        return production_chain(routed, norm_weight, up_weight, shared, EPS)

    compiled = torch.compile(chain, mode=mode, dynamic=False, fullgraph=True)
    return lambda slot_idx: compiled(*workload.inputs[slot_idx])


def _fused(target: str, config: TailConfig | None, workload: TailWorkload) -> Launch:
    outputs = [torch.full_like(inputs.shared, math.nan) for inputs in workload.inputs]

    def launch(slot_idx: int) -> torch.Tensor:
        return latent_moe_tail(
            *workload.inputs[slot_idx], eps=EPS, out=outputs[slot_idx], target=target, config=config
        )

    return launch


def _after_producer(prepare: Callable[[TailWorkload], Launch], workload: TailWorkload) -> Launch:
    launch = prepare(workload)

    def both(slot_idx: int) -> torch.Tensor:
        workload.produce(slot_idx)
        return launch(slot_idx)

    return both


def after_producer(arm: Arm) -> Arm:
    """The arm with a kernel before each call that writes ``routed`` and ``shared``."""
    prepare = partial(_after_producer, arm.prepare)
    return replace(arm, prepare=prepare, description=f"a producer's kernel, then {arm.description}")


def _shown_config(target: str, config: TailConfig | None) -> dict[str, Any] | None:
    """The configuration that the fused arm really runs with, for the record."""
    if target in ("mi355x", "emulator"):
        return (config or load_tuned(target)).to_dict()
    if target == "cuda" and torch.cuda.is_available():
        from kernellib.ops.latent_moe_tail.kernel_triton import default_config  # noqa: PLC0415

        return {"name": type(default_config()).__name__, **asdict(default_config())}
    return None


def tail_arms(target: str, config: TailConfig | None = None, names: Sequence[str] = ARM_NAMES) -> list[Arm]:
    """The arms by name: "eager" (baseline), "compile", "max_autotune" (peers), "fused" (candidate).

    Args:
        target: where the fused arm runs, "mi355x", "cuda" or "emulator".
        config: of the gfx950 kernel; None takes the tuned one.
        names: which to make, in order.
    """
    mode = "max-autotune-no-cudagraphs"
    every: dict[str, Any] = {
        "eager": Arm("eager", "baseline", "rms_norm, linear, add in bf16", _eager, FREE_ROUNDING),
        "compile": Arm("compile", "peer", "torch.compile of the chain", partial(_compiled, None),
                       FREE_ROUNDING),
        "max_autotune": Arm("max_autotune", "peer", f"torch.compile, {mode}", partial(_compiled, mode),
                            FREE_ROUNDING, {"mode": mode}),
        "fused": Arm("fused", "candidate", f"one launch, target {target}", partial(_fused, target, config),
                     EXACT_ROUNDING, _shown_config(target, config)),
    }  # fmt: skip
    unknown = set(names) - set(every)
    if unknown or "eager" not in names:
        raise BenchError(f"arms got {list(names)}, wanted 'eager' and any of {list(ARM_NAMES[1:])}")
    return [every[name] for name in names]


def tail_comparisons(names: Sequence[str]) -> list[tuple[str, str]]:
    """Every other arm against eager, and fused against the compiled peers."""
    pairs = [("eager", name) for name in names if name != "eager"]
    if "fused" in names:
        pairs += [(name, "fused") for name in names if name in ("compile", "max_autotune")]
    return pairs


def compare_tail(
    target: str = "auto",
    trials: int = 21,
    rotation: int = DEFAULT_ROTATION,
    seed: int = 0,
    *,
    max_trials: int | None = None,
    half_width: float = 0.01,
    config: TailConfig | None = None,
    arms: Sequence[str] = ARM_NAMES,
    with_producer: bool = False,
    device: Device | None = None,
    command: str | None = None,
    progress: Progress = silent,
) -> Record:
    """The A/B of the tail: timed on a GPU, counted on the emulator.

    Args:
        target: "auto", "mi355x", "cuda" or "emulator".
        trials: fewest paired trials.
        rotation: slots with their own weight; refused when the last-level cache could hold them.
        seed: of inputs and bootstrap.
        max_trials: most trials; None means ten times ``trials``.
        half_width: relative half-width of every interval at which trials end.
        config: of the gfx950 kernel; None takes the tuned one.
        arms: which arms, "eager" among them.
        with_producer: a kernel before each call writes ``routed`` and ``shared``; timed with the call.
        device: the clock; None takes torch's first GPU.
        command: what to type to do it again; None names this call.
        progress: called with a line for each stage.

    Returns:
        the record: ``.timed`` says whether it holds times, ``.valid`` whether its control held.

    Raises:
        TargetUnavailableError: the target cannot run here.
        BenchError: the target has no fused kernel to measure ("reference"), or no clock; a producer where
            nothing is timed.
        RotationError, MethodError: the parameters make no honest measurement.
    """
    info = resolve(target)
    if info.name == "reference":
        raise BenchError("target 'reference' has no fused kernel to compare; take mi355x, cuda or emulator")
    call = f"compare_tail(target={info.name!r}, trials={trials}, rotation={rotation}, seed={seed})"
    command = command or f"kernellib.bench.{call}"
    if info.times != "measured":
        if with_producer:
            raise BenchError(
                f"with_producer got True on target {info.name!r}, which has no clock; wanted a GPU"
            )
        return count_tail(info, seed=seed, config=config, command=command, progress=progress)
    limit = 10 * trials if max_trials is None else max_trials
    method = Method(trials=trials, max_trials=limit, half_width=half_width, seed=seed)
    clock = device or GpuDevice()
    workload = TailWorkload(rotation, seed, info.torch_device, after_producer=with_producer)
    chosen = tail_arms(info.name, config, arms)
    if with_producer:
        chosen = [after_producer(arm) for arm in chosen]
    result = run_paired(workload, chosen, tail_comparisons(arms), clock, method, progress)
    return timed_record(result, workload, clock, method, target=info.name, command=command)


def count_tail(
    info: TargetInfo,
    *,
    seed: int,
    config: TailConfig | None,
    command: str,
    progress: Progress = silent,
) -> Record:
    """The comparison without a clock: correctness of both arms, the fused launch's counters, no times."""
    from kernellib.emulator import emulated  # noqa: PLC0415  (the compiler it needs may be missing elsewhere)

    workload = TailWorkload(1, seed, "cpu")
    checker = Checker(workload)
    checker.learn(0)
    arms = tail_arms(info.name, config, ("eager", "fused"))
    entries = []
    for arm in arms:
        progress(f"gate: {arm.name}")
        with emulated() as session:
            launch = arm.prepare(workload)
            gate = checker.full([launch(0)], 0, arm.tolerance)
        entry = arm_entry(arm, "passed" if gate.passed else "failed_gate", gate.reason, gate, None)
        if arm.role == "candidate":
            traffic = [report.bytes_by_space["global"] for report in session.launches]
            entry["launches"] = {"source": "counted", "value": len(session.launches)}
            entry["traffic"] = {
                "source": "counted",
                "read_bytes": sum(each["load"] for each in traffic),
                "written_bytes": sum(each["store"] for each in traffic),
            }
        else:
            entry["launches"] = {"source": "modelled", "value": len(UNFUSED_TRAFFIC)}
            read, written = (sum(column) for column in zip(*UNFUSED_TRAFFIC.values(), strict=True))
            entry["traffic"] = {"source": "modelled", "read_bytes": read, "written_bytes": written}
        entries.append(entry)
    device = {"name": info.device_name, "kind": info.name, "num_ranks": 1, "llc_bytes": None}
    return counted_record(workload, entries, target=info.name, command=command, seed=seed, device=device)
