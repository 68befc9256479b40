# SPDX-License-Identifier: Apache-2.0
"""Listings of an operator's kernels, and their instructions counted by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kernellib.emulator import compile_to_assembly
from kernellib.emulator.assembly import parse
from kernellib.emulator.resources import KernelResources, kernel_resources

from .registry import inspection_of

# First match decides: (class, beginnings of the mnemonic, parts anywhere in it).
INSTRUCTION_CLASSES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("matrix", ("v_mfma", "v_smfmac"), ()),
    ("cross-lane", ("v_permlane", "v_readlane", "v_readfirstlane", "v_writelane"), ("_dpp",)),
    ("LDS", ("ds_",), ()),
    ("vector memory", ("buffer_", "global_", "flat_"), ()),
    ("scratch", ("scratch_",), ()),
    ("scalar memory", ("s_load", "s_store", "s_buffer", "s_dcache", "s_atomic", "s_mem"), ()),
    ("wait", ("s_waitcnt", "s_nop", "s_sleep"), ()),
    ("barrier", ("s_barrier",), ()),
    ("branch", ("s_branch", "s_cbranch", "s_endpgm", "s_setpc", "s_swappc", "s_call"), ()),
    ("conversion", ("v_cvt",), ()),
    ("vector float64", ("v_",), ("_f64",)),
    ("vector packed", ("v_pk_",), ()),
    ("vector", ("v_",), ()),
    ("scalar", ("s_",), ()),
)


@dataclass(frozen=True)
class InspectedKernel:
    """One compiled kernel of an operator.

    Attributes:
        name: the kernel's symbol.
        assembly: its gfx950 listing.
        resources: registers, LDS, scratch, occupancy, spills, instructions.
    """

    name: str
    assembly: str
    resources: KernelResources


def instruction_class(mnemonic: str) -> str:
    """The class of a gfx950 mnemonic, such as "vector memory"; "other" when no class knows it."""
    for name, beginnings, parts in INSTRUCTION_CLASSES:
        begins = mnemonic.startswith(beginnings)
        # A class with both wants both, except cross-lane: there either is enough.
        matches = begins or any(part in mnemonic for part in parts)
        if name == "vector float64":
            matches = begins and any(part in mnemonic for part in parts)
        if matches:
            return name
    return "other"


def classes_of(mix: Mapping[str, int]) -> Counter[str]:
    """Instructions in the listing by class, from counts by mnemonic."""
    counts: Counter[str] = Counter()
    for mnemonic, count in mix.items():
        counts[instruction_class(mnemonic)] += count
    return counts


def inspect_operator(operator: str, config_name: str | None = None) -> list[InspectedKernel]:
    """Compiles every kernel that a call of ``operator`` launches, for gfx950, without running it.

    Args:
        operator: one of ``registry.operator_names()``.
        config_name: one of its configurations; None for the one an MI355X would run.

    Raises:
        UnknownOperatorError: no such operator.
        ValueError: no such configuration (the operator's own subclass).
        kernellib.emulator.errors.CompilerBackendError: the compiler failed, loudly or in silence.
    """
    inspected = []
    for name, (launcher, arguments) in inspection_of(operator).kernels(config_name).items():
        text = compile_to_assembly(launcher, *arguments)
        inspected.append(InspectedKernel(name, text, kernel_resources(parse(text), name)))
    return inspected
