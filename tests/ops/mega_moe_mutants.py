# SPDX-License-Identifier: Apache-2.0
"""Removes one synchronisation of the MegaMoE kernels at a time and runs what is left on emulated ranks.

A site is a place in the kernels' source, reached through one chain of device functions, where a wait, a
barrier, a release or an acquire is traced into the kernel. Kernels are traced anew without one site: what the
compiler then makes of the rest is what a forgotten line would have made.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import flydsl.expr as fx
import ml_dtypes
import numpy as np
import torch
from flydsl.compiler.jit_function import _build_call_state
from mega_moe_device import gemm1_launcher
from mega_moe_ranks import BF16_POISON, Call, Ranks, make_call

from kernellib.emulator import EmulatorError, emulated
from kernellib.numerics import mx
from kernellib.ops.mega_moe import dispatch_gfx950, gemm1_gfx950, stage1_gfx950, stage2_gfx950
from kernellib.ops.mega_moe.config import MegaMoEConfig, MegaMoEShape, Wire
from kernellib.ops.mega_moe.device_gfx950 import load_relaxed
from kernellib.ops.mega_moe.gemm1_gfx950 import Gemm1
from kernellib.ops.mega_moe.layout import ScaleOrder, SymmetricLayout
from kernellib.ops.mega_moe.reference import activate, relative_l2
from kernellib.ops.mega_moe.routing import Routing
from kernellib.ops.mega_moe.weights import PackedWeights, pack_experts, random_experts

PACKAGE = str(Path(gemm1_gfx950.__file__).parent)
SEED = 3
TOLERANCE = 1e-3
INSTRUCTION_LIMIT = 200_000  # of a wave: a hundred times what one needs
NUM_RANKS = 2
# More experts on a rank than a wave has lanes, and more routes, so that several waves share each of the
# planner's steps; few of the experts get rows. One K chunk.
SHAPE = MegaMoEShape(144, 128, 128, 2)
USED_EXPERTS = (0, 5, 63, 64, 71, 72, 100, 143)
CAPACITY, TOKENS = 64, (34, 2)
BASE = MegaMoEConfig(
    tile_m=16, gemm1_tile_n=128, gemm2_tile_n=128, num_dispatch_cu=2, num_cu=3, num_queue_shards=2
)

ENTRIES = ("stage1_launcher", "stage1_kernel", "stage2_launcher", "stage2_kernel")

# (module, function, kind): what is intercepted beside fx.barrier.
INTERCEPTED: tuple[tuple[ModuleType, str, str], ...] = (
    (dispatch_gfx950, "wait_until_equal", "wait"),
    (dispatch_gfx950, "acquire", "acquire"),
    (dispatch_gfx950, "release", "release"),
    (stage1_gfx950, "wait_until_equal", "wait"),
    (stage1_gfx950, "_wait_for_entry", "wait"),
    (stage1_gfx950, "acquire", "acquire"),
    (stage2_gfx950, "acquire", "acquire"),
    (stage2_gfx950, "release", "release"),
)


@dataclass(frozen=True)
class Setting:
    """A pair of kernels, the wire between them, and the experts that get rows."""

    config: MegaMoEConfig
    wire: Wire
    shape: MegaMoEShape = SHAPE
    used_experts: tuple[int, ...] = USED_EXPERTS


@dataclass
class Interception:
    """What tracing met, and what it leaves out.

    Attributes:
        removed: name of the site to leave out; None leaves all in.
        sites: names of all sites met, in the order of tracing.
    """

    removed: str | None
    sites: list[str]

    def __call__(self, kind: str, original: Callable[..., Any], instead: Callable[..., Any]) -> Any:
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            chain = _chain(sys._getframe(1))
            if not chain:  # not one of ours
                return original(*args, **kwargs)
            functions = [name for name, _ in chain if not name.startswith("__") and name not in ENTRIES]
            name = f"{'/'.join(functions) or 'kernel'}: {kind}"
            places = self._places.setdefault(name, {})
            number = places.setdefault(tuple(line for _, line in chain), len(places) + 1)
            site = f"{name} {number}"
            if site not in self.sites:
                self.sites.append(site)
            return (instead if site == self.removed else original)(*args, **kwargs)

        return intercepted

    def __post_init__(self) -> None:
        self._places: dict[str, dict[tuple[int, ...], int]] = {}


def _chain(frame: Any) -> list[tuple[str, int]]:
    """(device function, line) from the launcher down to ``frame``; what the tracer makes of branches and
    loops has names of its own, which start with two underscores."""
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append((frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


@contextmanager
def tracing_without(removed: str | None) -> Iterator[list[str]]:
    """Kernels traced inside lack the site; yields the list that the sites met are added to."""
    interception = Interception(removed, [])

    def nothing(*_: Any, **__: Any) -> None:
        return None

    with mock.patch.object(fx, "barrier", interception("barrier", fx.barrier, nothing)):
        patches = []
        for module, name, kind in INTERCEPTED:
            instead = load_once if name == "_wait_for_entry" else nothing
            wrapped = interception(kind, getattr(module, name), instead)
            patches.append(mock.patch.object(module, name, wrapped))
        for patch in patches:
            patch.start()
        try:
            yield interception.sites
        finally:
            for patch in patches:
                patch.stop()


def load_once(address: Any) -> Any:
    """A queue entry as it is, filled or not."""
    return load_relaxed(address)


_whole: dict[Any, tuple[list[str], Callable[[tuple[Any, ...]], Any]]] = {}
_lock = threading.Lock()


@dataclass
class Kernels:
    """Both stages' launchers, compiled when they are first called inside ``emulated()``.

    Attributes:
        setting: what they are compiled for.
        removed: "stage site" to leave out.
        sites: of each stage that was compiled here; stages left whole are shared between objects.
    """

    setting: Setting
    removed: str | None

    def __post_init__(self) -> None:
        self.sites: dict[str, list[str]] = {}
        self._calls: dict[str, Callable[[tuple[Any, ...]], Any]] = {}

    def launch(self, stage: str, launcher: Any, arguments: tuple[Any, ...]) -> None:
        with _lock:
            if stage not in self._calls:
                part = self.removed[len(stage) + 1 :] if (self.removed or "").startswith(stage) else None
                if part is None and launcher in _whole:
                    self.sites[stage], self._calls[stage] = _whole[launcher]
                else:
                    self._compile(stage, part, launcher, arguments)
        self._calls[stage](arguments)

    def _compile(self, stage: str, part: str | None, launcher: Any, arguments: tuple[Any, ...]) -> None:
        with tracing_without(part) as sites:
            launcher._compile_only(*arguments)
        assert part is None or part in sites, f"{stage} has no site {part!r}"
        call = _build_call_state(launcher._sig, arguments, launcher._last_compiled[1])
        self.sites[stage], self._calls[stage] = [f"{stage} {site}" for site in sites], call
        if part is None:
            _whole[launcher] = self.sites[stage], call


@dataclass
class MutantRanks(Ranks):
    """Ranks whose stages come from ``kernels``."""

    kernels: Kernels = None  # type: ignore[assignment]

    def launch(self, what: str, launcher: Any, *arguments: int) -> None:
        if what == "quantize":
            super().launch(what, launcher, *arguments)
        else:
            self.kernels.launch(what, launcher, (*arguments, fx.Stream(None)))


@cache
def weights(shape: MegaMoEShape) -> list[PackedWeights]:
    """Of each rank."""
    experts, local = random_experts(shape, SEED), shape.experts_per_rank(NUM_RANKS)
    return [pack_experts(shape, map(experts, range(r * local, (r + 1) * local))) for r in range(NUM_RANKS)]


def make_calls(ranks: Ranks, used_experts: tuple[int, ...]) -> list[Call]:
    """Two calls with inputs and routes of their own."""
    calls = []
    for tokens in TOKENS:
        rng = np.random.default_rng([SEED, tokens])
        drawn = [[rng.permutation(used_experts)[:2] for _ in range(tokens)] for _ in range(NUM_RANKS)]
        ids = tuple(np.array(rank, np.int32) for rank in drawn)
        weights = tuple(rng.uniform(0.1, 1.0, rank.shape).astype(np.float32) for rank in ids)
        calls.append(make_call(ranks.layout, Routing("few experts", ids, weights), SEED + tokens))
    return calls


def run(kernels: Kernels, seed: int, sanitize: str = "default") -> str | None:
    """Two calls back to back in relaxed mode; what shows that something is wrong, or None."""
    setting = kernels.setting
    with emulated(
        mode="relaxed", schedule_seed=seed, sanitize=sanitize, instruction_limit=INSTRUCTION_LIMIT
    ) as session:
        layout = SymmetricLayout(setting.shape, NUM_RANKS, CAPACITY, setting.wire)
        experts, packed = random_experts(setting.shape, SEED), weights(setting.shape)
        ranks = MutantRanks(session, layout, setting.config, experts, packed=packed, kernels=kernels)
        calls = make_calls(ranks, setting.used_experts)
        try:
            ranks.run(*calls)
        except EmulatorError as error:
            return type(error).__name__
        return wrong(ranks, calls)


def wrong(ranks: Ranks, calls: list[Call]) -> str | None:
    """What differs from the oracle."""
    for number, call in enumerate(calls):
        for rank, (out, expected) in enumerate(zip(call.out, ranks.expected(call), strict=True)):
            tokens = len(expected)
            got = out[:tokens].numpy().view(ml_dtypes.bfloat16).astype(np.float32)
            if not relative_l2(got, expected) <= TOLERANCE:
                return f"call {number}, rank {rank}"
            if (out[tokens:] != BF16_POISON).any():
                return f"call {number}, rank {rank}: past the last token"
    return None


def chunked_gemm(removed: str | None, seed: int) -> str | None:
    """One GEMM1 tile of three K chunks on two waves; what shows that something is wrong, or None."""
    shape = MegaMoEShape(4, 1536, 128, 2)
    gemm = Gemm1(shape, MegaMoEConfig(tile_m=16, gemm1_tile_n=128), "situv2")
    rng = np.random.default_rng(SEED)
    x = mx.quantize(rng.standard_normal((16, shape.model_dim)), mx.E4M3)
    expert = random_experts(shape, SEED)(0)
    packed = pack_experts(shape, [expert])
    codes, scales = (
        torch.from_numpy(x.codes),
        torch.from_numpy(ScaleOrder(shape.model_dim).to_device(x.scales)),
    )
    hidden = torch.full((16, shape.inter_dim), 0xA5, dtype=torch.uint8)
    hidden_scales = torch.full((16, gemm.hidden_scales.row_bytes), 0xA5, dtype=torch.uint8)
    tensors = (codes, scales, packed.w1, packed.w1_scales, hidden, hidden_scales)
    with emulated(mode="relaxed", schedule_seed=seed, sanitize="all") as session:
        for tensor in tensors:
            session.register(tensor)
        a, b, w, ws, h, hs = (tensor.data_ptr() for tensor in tensors)
        launcher = gemm1_launcher(gemm, f"gemm1_chunks_{(removed or 'whole')[-1]}")
        try:
            with tracing_without(removed and f"gemm1_tile/{removed}") as sites:
                launcher(a, b, 16, w, ws, 0, h, hs)
        except EmulatorError as error:
            return type(error).__name__
        assert removed is None or f"gemm1_tile/{removed}" in sites
    product = x.dequantize() @ expert.dequantized()[0].T
    expected = mx.quantize(activate("situv2", shape, product[:, :128], product[:, 128:]), mx.E4M3)
    got = mx.dequantize(hidden.numpy(), gemm.hidden_scales.to_logical(hidden_scales.numpy()), mx.E4M3)
    return None if relative_l2(got, expected.dequantize()) <= TOLERANCE else "wrong"
