# SPDX-License-Identifier: Apache-2.0
"""Shape of the latent MoE tail, and ``TailConfig``: how its gfx950 kernel divides the work.

The problem has one shape (batch one, Kimi-K3): a [7168, 3584] bf16 weight, 51,380,224 bytes, read
once. A row of the weight is 7168 bytes: seven loads of 16 bytes for each of the 64 lanes of a wave.
A wave owns ``rows_per_wave`` consecutive rows and keeps ``rows_in_flight`` of them requested ahead
of the one it multiplies.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

# The operator's shape.
LATENT_DIM = 3584  # elements of `routed` and `norm_weight`, and of a weight row
MODEL_DIM = 7168  # rows of `up_weight`, elements of `shared` and of the result
ELEMENT_BYTES = 2  # bfloat16
ROW_BYTES = LATENT_DIM * ELEMENT_BYTES
RESULT_BYTES = MODEL_DIM * ELEMENT_BYTES
WEIGHT_BYTES = MODEL_DIM * ROW_BYTES  # 51,380,224

# The machine's shape (AMD CDNA 4: 256 compute units of 4 SIMDs, 64 lanes in a wave).
NUM_COMPUTE_UNITS = 256
SIMDS_PER_UNIT = 4
WAVE_LANES = 64
LOAD_BYTES = 16  # a lane's share of one load
WAVE_LOAD_BYTES = WAVE_LANES * LOAD_BYTES
LOADS_PER_ROW = ROW_BYTES // WAVE_LOAD_BYTES  # 7
MAX_WAVES_PER_WORKGROUP = 16
# 512 vector registers for each lane of a SIMD, divided among its resident waves in steps of 8; an
# instruction can name 256 of them. [LLVM, "User Guide for AMDGPU Backend", gfx90a and later]
REGISTERS_PER_LANE = 512
ADDRESSABLE_REGISTERS = 256
REGISTER_GRANULE = 8
# Registers the compiled kernel needs: a fixed part (the normalised vector in fp32 takes 56 of it)
# plus 4 for each outstanding load. tests/ops/test_latent_moe_tail_config_space.py compiles every
# configuration and fails if one spills.
BASE_REGISTERS = 98
REGISTERS_PER_ROW = LOADS_PER_ROW * LOAD_BYTES // 4  # 28

# How the weight's loads treat the caches: name -> cache bits of the instruction
# (1 = sc0, 2 = nt, 16 = sc1, [LLVM, "Memory Model gfx942"]).
WEIGHT_CACHE_BITS = {
    "normal": 0,  # may stay in L1, L2 and the last-level cache like any other data
    "stream": 2,  # nt: first to be evicted, since no byte is read twice
    "bypass": 2 | 16,  # nt sc1: as stream, and agent scope, so that L1 is not searched either
}
# How a wave gets the kernel's six arguments: written into scalar registers by the dispatcher before the
# wave starts, or loaded by its first instruction. [LLVM, "User Guide for AMDGPU Backend", Preloaded
# Kernel Arguments: the compiler adds a prologue that loads them where the firmware does not preload]
ARGUMENT_MODES = ("preload", "load")

_NAME = re.compile(r"r(\d+)_w(\d+)_f(\d+)_([a-z]+)_([a-z]+)")
TUNED_SCHEMA = "kernellib.latent_moe_tail.tuned/1"


class TailConfigError(ValueError):
    """A kernel configuration that cannot run; says which field, what it got, what was wanted."""


@dataclass(frozen=True)
class TailConfig:
    """How the gfx950 kernel divides the work. Validated, hashable, part of the kernel's name.

    Attributes:
        rows_per_wave: consecutive rows of the weight, and elements of the result, that one wave owns.
        waves_per_workgroup: waves in a workgroup; they share nothing but the compute unit.
        rows_in_flight: rows whose loads are outstanding before the first of them is consumed (7 loads
            of 1 KiB each). It buys bytes in flight with 28 registers a row. This is the unrolling too: the
            code is straight-line, and a wave with more rows than this is persistent over them.
        weight_cache: "stream" (nt), "normal" or "bypass" (nt sc1).
        arguments: "preload", kernel arguments in scalar registers when the wave starts, or "load", by a
            scalar load that the first weight request has to wait for.

    Raises:
        TailConfigError: a value of the wrong type or range, rows that do not tile 7168 exactly, or
            more registers than the workgroup's waves can have.

    Example:
        >>> TailConfig(rows_per_wave=4, waves_per_workgroup=7).num_workgroups
        256
    """

    rows_per_wave: int = 4
    waves_per_workgroup: int = 7
    rows_in_flight: int = 4
    weight_cache: str = "stream"
    arguments: str = "preload"

    def __post_init__(self) -> None:
        for field in ("rows_per_wave", "waves_per_workgroup", "rows_in_flight"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise TailConfigError(f"{field} got {value!r}, wanted a positive int")
        for field, allowed in (("weight_cache", tuple(WEIGHT_CACHE_BITS)), ("arguments", ARGUMENT_MODES)):
            value = getattr(self, field)
            if not isinstance(value, str) or value not in allowed:
                raise TailConfigError(f"{field} got {value!r}, wanted one of {', '.join(allowed)}")
        if self.waves_per_workgroup > MAX_WAVES_PER_WORKGROUP:
            raise TailConfigError(
                f"waves_per_workgroup got {self.waves_per_workgroup}, wanted at most "
                f"{MAX_WAVES_PER_WORKGROUP} (a workgroup holds at most 1024 lanes)"
            )
        if MODEL_DIM % self.rows_per_workgroup:
            raise TailConfigError(
                f"rows_per_wave * waves_per_workgroup got {self.rows_per_workgroup}, wanted a divisor of "
                f"{MODEL_DIM}, so that every row belongs to exactly one wave"
            )
        if self.rows_in_flight > self.rows_per_wave:
            raise TailConfigError(
                f"rows_in_flight got {self.rows_in_flight}, wanted at most "
                f"rows_per_wave, {self.rows_per_wave}"
            )
        if self.estimated_registers > self.register_budget:
            raise TailConfigError(
                f"rows_in_flight got {self.rows_in_flight}, which takes about {self.estimated_registers} "
                f"registers; wanted at most {self.register_budget} with {self.waves_per_workgroup} waves "
                f"in a workgroup: lower rows_in_flight or waves_per_workgroup"
            )

    @property
    def name(self) -> str:
        """Every field, readable and reversible: ``TailConfig.from_name(c.name) == c``."""
        return (
            f"r{self.rows_per_wave}_w{self.waves_per_workgroup}_f{self.rows_in_flight}"
            f"_{self.weight_cache}_{self.arguments}"
        )

    @property
    def kernel_name(self) -> str:
        """The kernel's symbol: distinct for distinct configurations, so that none share a cache entry."""
        return f"latent_moe_tail_{self.name}"

    @property
    def rows_per_workgroup(self) -> int:
        return self.rows_per_wave * self.waves_per_workgroup

    @property
    def num_workgroups(self) -> int:
        return MODEL_DIM // self.rows_per_workgroup

    @property
    def threads_per_workgroup(self) -> int:
        return self.waves_per_workgroup * WAVE_LANES

    @property
    def balanced(self) -> bool:
        """Whether every compute unit gets the same number of rows when all of them take part."""
        return self.num_workgroups % NUM_COMPUTE_UNITS == 0

    @property
    def estimated_registers(self) -> int:
        return BASE_REGISTERS + REGISTERS_PER_ROW * self.rows_in_flight

    @property
    def register_budget(self) -> int:
        """Most vector registers a wave may have if its whole workgroup is to fit on a compute unit."""
        waves_per_simd = math.ceil(self.waves_per_workgroup / SIMDS_PER_UNIT)
        share = REGISTERS_PER_LANE // waves_per_simd // REGISTER_GRANULE * REGISTER_GRANULE
        return min(share, ADDRESSABLE_REGISTERS)

    @property
    def weight_bytes_in_flight(self) -> int:
        """Weight bytes that one workgroup has outstanding at the start, to set against Little's law."""
        return self.waves_per_workgroup * self.rows_in_flight * ROW_BYTES

    @classmethod
    def from_name(cls, name: str) -> TailConfig:
        """The configuration that ``name`` spells, as in "r4_w7_f4_stream_preload".

        Raises:
            TailConfigError: ``name`` has another form, or spells an invalid configuration.
        """
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise TailConfigError(f"name got {name!r}, wanted the form {DEFAULT_CONFIG.name!r}")
        rows, waves, in_flight, weight_cache, arguments = match.groups()
        config = cls(int(rows), int(waves), int(in_flight), weight_cache, arguments)
        if config.name != name:  # "r04" is not the name of anything
            raise TailConfigError(f"name got {name!r}, wanted {config.name!r}")
        return config

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TailConfig:
        """The configuration with these fields, all of them given and no others."""
        wanted = {field.name for field in fields(cls)}
        if set(values) != wanted:
            raise TailConfigError(f"fields got {sorted(values)}, wanted {sorted(wanted)}")
        return cls(**values)

    def to_dict(self) -> dict[str, int | str]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


DEFAULT_CONFIG = TailConfig()


def config_space() -> Iterator[TailConfig]:
    """Every configuration worth trying: valid, balanced over 256 compute units, no larger than needed.

    Order: rows per wave, waves, rows in flight, cache policy; loaded arguments last. Deterministic.
    """
    for arguments in ARGUMENT_MODES:
        for rows in (1, 2, 4, 7, 14, 28):
            for waves in (1, 2, 4, 7, 14):
                for in_flight in range(1, rows + 1):
                    for weight_cache in ("stream", "normal", "bypass"):
                        try:
                            config = TailConfig(rows, waves, in_flight, weight_cache, arguments)
                        except TailConfigError:
                            continue
                        if config.balanced:
                            yield config


def save_tuned(path: Path | str, config: TailConfig, provenance: Mapping[str, Any]) -> None:
    """Writes the winner of a tuning run to a tuned-config file, keeping other targets' entries.

    Args:
        path: the JSON file; created when missing.
        config: the winner.
        provenance: where it comes from. Must name "target", the target it was tuned for, and "source",
            "measured" or "modelled"; anything else JSON can hold (device, versions, samples) is kept.

    Raises:
        TailConfigError: the provenance lacks a key, or the existing file is not a tuned-config file.
    """
    target, source = provenance.get("target"), provenance.get("source")
    if not isinstance(target, str) or not target:
        raise TailConfigError(f"provenance['target'] got {target!r}, wanted a target's name")
    if source not in ("measured", "modelled"):
        raise TailConfigError(f"provenance['source'] got {source!r}, wanted 'measured' or 'modelled'")
    file = Path(path)
    entries = _read_entries(file.read_text(encoding="utf-8"), str(file)) if file.exists() else {}
    entries[target] = {"config": config.to_dict(), "provenance": dict(provenance)}
    text = json.dumps({"schema": TUNED_SCHEMA, "targets": entries}, indent=2, sort_keys=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(file)  # a reader sees the old file or the new one, never half of one


def load_tuned(target: str, path: Path | str | None = None) -> TailConfig:
    """The tuned configuration for ``target``: from ``path``, or from the package's tuned.json.

    Args:
        target: a target's name, such as "mi355x".
        path: a tuned-config file as ``save_tuned`` writes it.

    Returns:
        The entry for ``target``, validated; ``DEFAULT_CONFIG`` when the file has none.

    Raises:
        TailConfigError: the file is not a tuned-config file, or its configuration is invalid.
        FileNotFoundError: ``path`` is given and does not exist.
    """
    if path is None:
        text = resources.files(__package__).joinpath("tuned.json").read_text(encoding="utf-8")
    else:
        text = Path(path).read_text(encoding="utf-8")
    entry = _read_entries(text, "tuned.json" if path is None else str(path)).get(target)
    return DEFAULT_CONFIG if entry is None else TailConfig.from_dict(entry["config"])


def _read_entries(text: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise TailConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != TUNED_SCHEMA:
        got = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise TailConfigError(f"{where}: schema got {got!r}, wanted {TUNED_SCHEMA!r}")
    targets = data.get("targets")
    if not isinstance(targets, dict):
        raise TailConfigError(f"{where}: targets got {targets!r}, wanted a table of target to config")
    for target, entry in targets.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict):
            raise TailConfigError(f"{where}: entry {target!r} has no config table")
        TailConfig.from_dict(entry["config"])
    return targets
