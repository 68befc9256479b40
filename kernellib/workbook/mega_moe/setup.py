# SPDX-License-Identifier: Apache-2.0
"""What a MegaMoE notebook runs: shape, ranks, buckets, target, from its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from kernellib import targets
from kernellib.ops.mega_moe.config import (
    BUCKETS,
    KIMI_K3,
    KIMI_K3_TABLE,
    MegaMoEConfig,
    MegaMoEShape,
    generic_config,
)
from kernellib.ops.mega_moe.contract import TARGETS
from kernellib.ops.mega_moe.weights import (
    ExpertSource,
    PackedWeights,
    matrix_layouts,
    pack_experts,
    random_experts,
)

SMALL_SHAPE = MegaMoEShape(16, 128, 128, 4)
# Of the tuned table: both kinds of decode (on few compute units the first is the generic configuration); and
# two-stage weights, persistent and strided, in ready order.
QUICK_BUCKETS = (1, 64, 8192)
REPORTED_BUCKETS = tuple(bucket for bucket in BUCKETS if bucket <= 8192 and bucket != 4)
WEIGHT_SEED = 123
EMULATED_TOKENS = 4  # a bucket's configuration runs on the emulator with at most this many tokens a rank
EMULATED_CUS = 4


class SetupError(ValueError):
    """A notebook's parameters do not describe something that can run."""


@dataclass(frozen=True)
class Setup:
    """What all runs of a notebook have in common.

    Attributes:
        shape, num_ranks: of the layer.
        target: "mi355x" or "emulator".
        num_cu: compute units a rank's kernels occupy.
        buckets: token classes whose configurations are looked at.
        token_limit: most tokens a rank gets; a larger bucket's configuration runs with these.
        seed: of tokens and routes.
    """

    shape: MegaMoEShape
    num_ranks: int
    target: str
    num_cu: int
    buckets: tuple[int, ...]
    token_limit: int
    seed: int

    def tokens(self, bucket: int) -> int:
        """Tokens a rank gets for a bucket."""
        return min(bucket, self.token_limit)

    @property
    def capacity(self) -> int:
        """Most tokens of a rank in any run, a power of two: one for all, so that kernels are shared."""
        most = self.token_limit if self.is_emulated else max(map(self.tokens, self.buckets))
        return 1 << (most - 1).bit_length()

    def tuned(self, bucket: int) -> MegaMoEConfig:
        """The tuned table's entry, on this shape and device."""
        return KIMI_K3_TABLE[bucket].scaled(self.shape, self.num_cu)

    def generic(self, bucket: int) -> MegaMoEConfig:
        """The generic table's entry, on this shape and device."""
        return generic_config(self.shape, self.num_ranks, bucket).scaled(self.shape, self.num_cu)

    @property
    def is_emulated(self) -> bool:
        return self.target == "emulator"

    @property
    def title(self) -> str:
        return (
            f"{self.shape.num_experts} experts on {self.num_ranks} ranks, model_dim {self.shape.model_dim}, "
            f"inter_dim {self.shape.inter_dim}, top-{self.shape.top_k}; target {self.target}"
        )


def make_setup(
    target: str, profile: str, shape: Sequence[int], num_ranks: int, buckets: Sequence[int], seed: int
) -> Setup:
    """The setup that a notebook's parameters ask for.

    Args:
        target: "auto", "mi355x" or "emulator"; "auto" and every other target become one that can run these
            kernels.
        profile: "quick" (a small shape) or "full" (Kimi-K3's).
        shape: [num_experts, model_dim, inter_dim, top_k]; empty for the profile's.
        num_ranks: ranks, one GPU each on MI355X.
        buckets: token classes; empty for the profile's. The full profile on the emulator takes bucket 1.
        seed: of tokens and routes.

    Raises:
        SetupError: an unknown profile, a shape that is not four numbers, or an unknown bucket.
    """
    if profile not in ("quick", "full"):
        raise SetupError(f"profile got {profile!r}, wanted 'quick' or 'full'")
    if len(shape) not in (0, 4):
        raise SetupError(
            f"shape got {list(shape)}, wanted [num_experts, model_dim, inter_dim, top_k], or an empty list"
        )
    unknown = [bucket for bucket in buckets if bucket not in BUCKETS]
    if unknown:
        raise SetupError(f"buckets got {unknown}, wanted some of {', '.join(map(str, BUCKETS))}")
    found = targets.detect()
    name = target if target in TARGETS else "mi355x" if found["mi355x"].available else "emulator"
    targets.choose(name, found)
    emulated, quick = name == "emulator", profile == "quick"
    default_shape = SMALL_SHAPE if quick else KIMI_K3
    default_buckets = QUICK_BUCKETS if quick else (1,) if emulated else REPORTED_BUCKETS
    return Setup(
        shape=MegaMoEShape(*shape) if shape else default_shape,
        num_ranks=num_ranks,
        target=name,
        num_cu=EMULATED_CUS if emulated else 256,
        buckets=tuple(buckets) or default_buckets,
        token_limit=EMULATED_TOKENS if emulated else max(BUCKETS),
        seed=seed,
    )


@cache
def experts_of(shape: MegaMoEShape) -> ExpertSource:
    """Every expert's weights, by id; drawn anew at each call, so that few are in memory."""
    return random_experts(shape, WEIGHT_SEED)


def pack_rank(
    setup: Setup, rank: int, device: torch.device, used: frozenset[int] | None = None
) -> PackedWeights:
    """One rank's experts.

    Args:
        setup, rank: whose.
        device: where.
        used: the only experts that will have rows, when known; the memory of others is never touched, so that
            Kimi-K3's shape fits an emulator's host.
    """
    shape, count = setup.shape, setup.shape.experts_per_rank(setup.num_ranks)
    ids = range(rank * count, (rank + 1) * count)
    if used is None:
        return pack_experts(shape, map(experts_of(shape), ids), device)
    first, second = matrix_layouts(shape)
    sizes = (first.element_bytes, first.scale_bytes, second.element_bytes, second.scale_bytes)
    parts = [torch.zeros(count * size, dtype=torch.uint8) for size in sizes]  # pages come when written
    for index, expert in enumerate(ids):
        if expert in used:
            weights = experts_of(shape)(expert)
            packed = (*first.pack(weights.w1, weights.w1_scales), *second.pack(weights.w2, weights.w2_scales))
            for part, size, values in zip(parts, sizes, packed, strict=True):
                part[index * size : (index + 1) * size] = torch.from_numpy(np.ascontiguousarray(values))
    w1, w1_scales, w2, w2_scales = (part.to(device) for part in parts)
    return PackedWeights(shape, count, w1, w1_scales, w2, w2_scales)
