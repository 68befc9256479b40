# SPDX-License-Identifier: Apache-2.0
"""MegaMoE's shape, how its kernels divide the work, and which configuration a token count gets.

Selection is a pure function of (table, token class): the token class is the largest token count of any
rank, agreed before the launch, so that ranks with few tokens or none choose what the others choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

BUCKETS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

Activation = Literal["situv2", "silu"]
Wire = Literal["fp8_blockwise_1x32", "bf16"]
TileOrder = Literal["expert", "ready"]
ACTIVATIONS = ("situv2", "silu")
WIRES = ("fp8_blockwise_1x32", "bf16")
TILE_ORDERS = ("expert", "ready")

# The machine's shape (AMD CDNA 4).
NUM_COMPUTE_UNITS = 256
WAVE_LANES = 64
LDS_BYTES = 160 * 1024

SCALE_BLOCK = 32  # elements that share an e8m0 scale
MFMA_M = MFMA_N = 16  # v_mfma_scale_f32_16x16x128_f8f6f4
MFMA_K = 128
AUTO_BF16_TOKENS = 128  # up to this capacity wire "auto" is bf16: few rows, so that bytes matter less
WAVE_COLUMNS = 64  # weight rows a wave multiplies in a tile: 32 gate + 32 up (GEMM1), or 64 (GEMM2)
MAX_QUEUE_SHARDS = 64
MAX_K_CHUNK = 512  # bytes of an activation row staged at once; one dword of scales covers it


# Waves of either stage that a SIMD can hold, by tile_m: what registers leave room for at Kimi-K3's shape.
# One is enough for the persistent workgroups, of which a compute unit has one with a wave on each SIMD.
WAVES_PER_SIMD = {16: 3, 32: 2, 64: 1}


class MegaMoEConfigError(ValueError):
    """A shape or configuration that cannot run: says which field, what it got, what was wanted."""


def _require_positive_ints(owner: object, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int or value < 1:
            raise MegaMoEConfigError(f"{name} got {value!r}, wanted a positive int")


@dataclass(frozen=True)
class MegaMoEShape:
    """What the layer computes, whatever runs it.

    Attributes:
        num_experts: over all ranks.
        model_dim: elements of a token. 128, 256, 384, or a multiple of 512 (the GEMM's K chunk).
        inter_dim: elements of an expert's hidden row; gate and up have this many each. As model_dim.
        top_k: experts a token is routed to, at most 256 (the route's slot has 8 bits).
        situ_beta, situ_linear_beta: b and lb of SiTUv2,
            h = [b tanh(g/b) sigmoid(g)] * [lb tanh(u/lb)].
    """

    num_experts: int
    model_dim: int
    inter_dim: int
    top_k: int
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0

    def __post_init__(self) -> None:
        _require_positive_ints(self, ("num_experts", "model_dim", "inter_dim", "top_k"))
        for name in ("model_dim", "inter_dim"):
            value = getattr(self, name)
            if value % MAX_K_CHUNK and not (value < MAX_K_CHUNK and value % MFMA_K == 0):
                raise MegaMoEConfigError(
                    f"{name} got {value}, wanted 128, 256, 384 or a multiple of {MAX_K_CHUNK}"
                )
        if self.top_k > min(self.num_experts, 256):
            raise MegaMoEConfigError(
                f"top_k got {self.top_k}, wanted at most num_experts ({self.num_experts}) and 256"
            )
        for name in ("situ_beta", "situ_linear_beta"):
            value = getattr(self, name)
            # The kernels hold it and its reciprocal as fp32, normal numbers both.
            if not isinstance(value, float) or not 2.0**-126 <= value <= 2.0**126:
                raise MegaMoEConfigError(f"{name} got {value!r}, wanted a float from 2^-126 to 2^126")

    @property
    def name(self) -> str:
        return f"e{self.num_experts}h{self.model_dim}i{self.inter_dim}k{self.top_k}"

    def experts_per_rank(self, num_ranks: int) -> int:
        """Experts each rank owns: rank r has r * n .. (r + 1) * n - 1.

        Raises:
            MegaMoEConfigError: the experts do not divide evenly.
        """
        if num_ranks < 1 or self.num_experts % num_ranks:
            raise MegaMoEConfigError(
                f"num_ranks got {num_ranks}, wanted a divisor of {self.num_experts} experts"
            )
        return self.num_experts // num_ranks


KIMI_K3 = MegaMoEShape(896, 3584, 3072, 16, 4.0, 25.0)


@dataclass(frozen=True)
class MegaMoEConfig:
    """How the two stages divide the work. Validated, hashable, part of every kernel's name.

    Attributes:
        tile_m: rows of one expert in a tile, both GEMMs: 16, 32, 64 or 128.
        gemm1_tile_n: weight rows of a GEMM1 tile, gate and up together; a multiple of 64, 64 to each wave.
        gemm2_tile_n: weight rows of a GEMM2 tile; a multiple of 64, 64 to each wave.
        num_dispatch_cu: workgroups of stage 1 that dispatch before they join the GEMM.
        tile_order: "expert", tiles in the planner's order, or "ready", in the order in which they fill.
        num_queue_shards: counters from which GEMM1 workgroups draw tiles.
        b2stage: whether GEMM2 holds two K chunks of weights, one arriving while the other is used.
        persist_cu: workgroups of stage 2 that loop over tiles; 0 launches one for each tile there may be.
        persist_strided: persistent workgroups take every persist_cu-th tile, and draw from no counter.
        num_cu: workgroups of stage 1, all resident together: at most one for each compute unit.

    Raises:
        MegaMoEConfigError: a value of the wrong type or range, or values that exclude each other.
    """

    tile_m: int = 32
    gemm1_tile_n: int = 256
    gemm2_tile_n: int = 256
    num_dispatch_cu: int = 32
    tile_order: TileOrder = "expert"
    num_queue_shards: int = 8
    b2stage: bool = False
    persist_cu: int = 0
    persist_strided: bool = False
    num_cu: int = NUM_COMPUTE_UNITS

    def __post_init__(self) -> None:
        _require_positive_ints(
            self, ("tile_m", "gemm1_tile_n", "gemm2_tile_n", "num_dispatch_cu", "num_queue_shards", "num_cu")
        )
        if self.tile_m not in (16, 32, 64, 128):
            raise MegaMoEConfigError(f"tile_m got {self.tile_m}, wanted 16, 32, 64 or 128")
        for name in ("gemm1_tile_n", "gemm2_tile_n"):
            value = getattr(self, name)
            if value % WAVE_COLUMNS or value > 16 * WAVE_COLUMNS:
                raise MegaMoEConfigError(f"{name} got {value}, wanted a multiple of 64 up to 1024")
        if self.num_queue_shards > MAX_QUEUE_SHARDS:
            raise MegaMoEConfigError(
                f"num_queue_shards got {self.num_queue_shards}, wanted at most {MAX_QUEUE_SHARDS}"
            )
        if self.tile_order not in TILE_ORDERS:
            raise MegaMoEConfigError(f"tile_order got {self.tile_order!r}, wanted one of {TILE_ORDERS}")
        for name in ("b2stage", "persist_strided"):
            if type(getattr(self, name)) is not bool:
                raise MegaMoEConfigError(f"{name} got {getattr(self, name)!r}, wanted a bool")
        if type(self.persist_cu) is not int or self.persist_cu < 0:
            raise MegaMoEConfigError(f"persist_cu got {self.persist_cu!r}, wanted an int, 0 or more")
        if self.persist_strided and not self.persist_cu:
            raise MegaMoEConfigError("persist_strided got True, wanted False while persist_cu is 0")
        if self.num_dispatch_cu > self.num_cu:
            raise MegaMoEConfigError(
                f"num_dispatch_cu got {self.num_dispatch_cu}, wanted at most num_cu ({self.num_cu})"
            )
        if max(self.num_cu, self.persist_cu) > NUM_COMPUTE_UNITS:
            raise MegaMoEConfigError(
                f"num_cu, persist_cu got {self.num_cu}, {self.persist_cu}, wanted at most "
                f"{NUM_COMPUTE_UNITS}: persistent workgroups wait for each other and must all be resident"
            )

    @property
    def name(self) -> str:
        """Every field, readable: distinct for distinct configurations."""
        flags = "b2" * self.b2stage + ("s" if self.persist_strided else "")
        return (
            f"m{self.tile_m}n{self.gemm1_tile_n}x{self.gemm2_tile_n}_d{self.num_dispatch_cu}of{self.num_cu}"
            f"_{self.tile_order}{self.num_queue_shards}_p{self.persist_cu}{flags}"
        )

    @property
    def gemm1_waves(self) -> int:
        return self.gemm1_tile_n // WAVE_COLUMNS

    @property
    def gemm2_waves(self) -> int:
        return self.gemm2_tile_n // WAVE_COLUMNS

    def scaled(self, shape: MegaMoEShape, num_cu: int) -> MegaMoEConfig:
        """The same tiles, order and flags on fewer workgroups, for shapes and machines (an emulator) that
        are small: tile_n is lowered until it divides the dimensions, workgroup counts in proportion."""
        cus = min(num_cu, self.num_cu)

        def portion(count: int) -> int:
            return max(1, count * cus // self.num_cu)

        return replace(
            self,
            gemm1_tile_n=_fitting_tile(self.gemm1_tile_n, 2 * shape.inter_dim),
            gemm2_tile_n=_fitting_tile(self.gemm2_tile_n, shape.model_dim),
            num_dispatch_cu=portion(self.num_dispatch_cu),
            num_queue_shards=min(self.num_queue_shards, cus),
            persist_cu=portion(self.persist_cu) if self.persist_cu else 0,
            num_cu=cus,
        )

    def check_shape(self, shape: MegaMoEShape) -> None:
        """Raises MegaMoEConfigError when tiles of this configuration do not divide ``shape`` exactly."""
        for name, columns in (("gemm1_tile_n", 2 * shape.inter_dim), ("gemm2_tile_n", shape.model_dim)):
            if columns % getattr(self, name):
                raise MegaMoEConfigError(
                    f"{name} got {getattr(self, name)}, wanted a divisor of {columns} for {shape.name}"
                )

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _fitting_tile(tile: int, columns: int) -> int:
    while columns % tile:
        tile -= WAVE_COLUMNS
    return tile


def nearest_bucket(num_tokens: int) -> int:
    """The bucket nearest to a token count; of two equally near the larger; 1 for no tokens.

    Raises:
        MegaMoEConfigError: not an int, or negative.

    Example:
        >>> [nearest_bucket(n) for n in (0, 1, 2, 6, 11, 100000)]
        [1, 1, 1, 8, 8, 32768]
    """
    if type(num_tokens) is not int or num_tokens < 0:
        raise MegaMoEConfigError(f"num_tokens got {num_tokens!r}, wanted an int, 0 or more")
    return min(BUCKETS, key=lambda bucket: (abs(bucket - num_tokens), -bucket))


def resolve_wire(wire: Wire | Literal["auto"], capacity: int) -> Wire:
    """The wire's format, "auto" decided by the capacity."""
    if wire != "auto":
        return wire
    return "bf16" if capacity <= AUTO_BF16_TOKENS else "fp8_blockwise_1x32"


def token_class(tokens_per_rank: Sequence[int]) -> int:
    """What all ranks select by: the largest token count of any rank."""
    if not tokens_per_rank:
        raise MegaMoEConfigError("tokens_per_rank got nothing, wanted the token count of every rank")
    return max(tokens_per_rank)


def generic_config(shape: MegaMoEShape, num_ranks: int, bucket: int) -> MegaMoEConfig:
    """The untuned configuration of a bucket, for any shape: 32 dispatch CUs, no b2stage.

    The M tile follows the rows an expert gets under uniform routing, so that a narrow MoE (many experts,
    few rows each) does not multiply padding.
    """
    rows = num_ranks * bucket * shape.top_k / shape.num_experts
    tile_m = 16 if rows <= 16 else 32 if rows <= 256 else 64
    base = MegaMoEConfig(tile_m=tile_m, num_dispatch_cu=32)
    return base.scaled(shape, base.num_cu)


# Kimi-K3 on eight MI355X. Values as the originating change reports them where it does (dispatch CUs 96
# or 160, b2stage with M 64 x N 256 from 256 tokens, N 256 throughout, persistence in the large
# buckets); none was measured by this project yet. notebooks/mega_moe/02_tuning rewrites them.
_DECODE = MegaMoEConfig(tile_m=16, num_dispatch_cu=96)
_MIDDLE = MegaMoEConfig(tile_m=64, num_dispatch_cu=96, b2stage=True)
_LARGE = MegaMoEConfig(
    tile_m=64, num_dispatch_cu=160, b2stage=True, persist_cu=256, persist_strided=True, tile_order="ready"
)
KIMI_K3_TABLE: dict[int, MegaMoEConfig] = {
    **{bucket: _DECODE for bucket in (1, 4, 8, 16)},
    **{bucket: replace(_DECODE, num_dispatch_cu=160) for bucket in (32, 64)},
    128: replace(_DECODE, tile_m=32, num_dispatch_cu=160),
    **{bucket: _MIDDLE for bucket in (256, 512)},
    1024: replace(_MIDDLE, persist_cu=256),
    2048: replace(_MIDDLE, persist_cu=256, num_dispatch_cu=160),
    **{bucket: _LARGE for bucket in (4096, 8192, 16384, 32768)},
}


def select_config(
    shape: MegaMoEShape, num_ranks: int, tokens: int, table: Literal["tuned", "generic"] = "tuned"
) -> MegaMoEConfig:
    """The configuration for an agreed token class.

    Args:
        shape: the layer's shape; only KIMI_K3 on 8 ranks has a tuned table, others get the generic one.
        num_ranks: ranks of the expert-parallel group.
        tokens: the agreed token class (``token_class``), the same number on every rank.
        table: "tuned" or "generic".

    Raises:
        MegaMoEConfigError: an unknown table, or a token count that is no count.
    """
    if table not in ("tuned", "generic"):
        raise MegaMoEConfigError(f"table got {table!r}, wanted 'tuned' or 'generic'")
    bucket = nearest_bucket(tokens)
    if table == "tuned" and shape == KIMI_K3 and num_ranks == 8:
        return KIMI_K3_TABLE[bucket]
    return generic_config(shape, num_ranks, bucket)


def kernel_name(stage: str, config: MegaMoEConfig, **choices: object) -> str:
    """A kernel's symbol: the stage, the configuration and every other compile-time choice by name.

    Two kernels that differ in anything known at compile time differ in name.
    """
    parts = [f"{key}-{value}" for key, value in sorted(choices.items())]
    text = "_".join(["mega_moe", stage, config.name, *parts])
    return "".join(c if c.isalnum() else "_" for c in text.replace(".", "p"))
