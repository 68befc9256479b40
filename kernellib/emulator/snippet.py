# SPDX-License-Identifier: Apache-2.0
"""Runs a few instructions on given registers: the way conformance tests look at one instruction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernellib.emulator.assembly import Kernel, parse
from kernellib.emulator.binding.program import bind_program
from kernellib.emulator.dispatcher import Dispatcher, run_until_one_ends
from kernellib.emulator.launch import CompiledListing, Launch, Tuning
from kernellib.emulator.memory import MemoryMap
from kernellib.emulator.operands import EXEC, M0, VCC
from kernellib.emulator.scheduler import Cohort
from kernellib.emulator.state import FloatMode

Array = np.ndarray[Any, Any]
_HEADER = '.amdgcn_target "amdgcn-amd-amdhsa-unknown-gfx950"\nsnippet:\n'


@dataclass
class SnippetResult:
    """Registers after a snippet.  Arrays are [64] for one wave, [num_waves, 64] for several."""

    _vector: Array
    _scalar: Array
    _scc: Array
    _num_vgprs: int
    lds: Array

    def _squeeze(self, array: Array) -> Any:
        return array[0] if len(array) == 1 else array

    def vgpr(self, index: int) -> Any:
        """uint32 lanes of VGPR `index`."""
        return self._squeeze(self._vector[index])

    def agpr(self, index: int) -> Any:
        """uint32 lanes of AGPR `index`."""
        return self._squeeze(self._vector[self._num_vgprs + index])

    def sgpr(self, index: int) -> Any:
        """SGPR `index` (an operand encoding) as int, or uint32 per wave."""
        column = self._scalar[:, index]
        return int(column[0]) if len(column) == 1 else column

    def _pair(self, index: int) -> Any:
        column = self._scalar.view(np.uint64)[:, index // 2]
        return int(column[0]) if len(column) == 1 else column

    @property
    def vcc(self) -> Any:
        """VCC as a 64-bit int (or uint64 per wave)."""
        return self._pair(VCC)

    @property
    def exec_mask(self) -> Any:
        """EXEC as a 64-bit int (or uint64 per wave)."""
        return self._pair(EXEC)

    @property
    def scc(self) -> Any:
        """SCC as int (or bool per wave)."""
        return int(self._scc[0]) if len(self._scc) == 1 else self._scc


class _SnippetLaunch(Launch):
    """A launch whose initial registers are given."""

    values: dict[str, Any]
    kept: Cohort | None = None

    def initialise(self, cohort: Cohort) -> None:
        values, scalar, vector = self.values, cohort.regs.scalar, cohort.regs.vector
        wide = scalar.view(np.uint64)
        wide[:, EXEC // 2] = np.asarray(values["exec_mask"], dtype=np.uint64)
        wide[:, VCC // 2] = np.asarray(values["vcc"], dtype=np.uint64)
        scalar[:, M0] = np.asarray(values["m0"], dtype=np.uint32)
        cohort.regs.scc[...] = bool(values["scc"])
        for index, value in (values["sgprs"] or {}).items():
            scalar[:, index] = np.asarray(np.asarray(value) & 0xFFFFFFFF, dtype=np.uint32)
        for first, given in ((0, values["vgprs"]), (self.bound.num_vgprs, values["agprs"])):
            for index, value in (given or {}).items():
                vector[first + index] = _as_lanes(value)
        lds = values["lds"]
        if lds is not None:
            raw = np.ascontiguousarray(lds).view(np.uint8).reshape(-1)
            cohort.lds.bytes[: len(raw)] = raw

    def finish(self, cohort: Cohort) -> None:
        super().finish(cohort)
        self.kept = cohort


def _as_lanes(value: Any) -> Array:
    array = np.asarray(value)
    if array.dtype.itemsize == 4 and array.dtype != np.uint32:
        return np.ascontiguousarray(array).view(np.uint32)
    if array.dtype.kind in "iu":
        return (array.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
    if array.dtype == np.uint32:
        return array
    raise TypeError(f"registers take 32-bit arrays or integers, got {array.dtype}")


def run_snippet(
    text: str,
    *,
    vgprs: Mapping[int, Any] | None = None,
    agprs: Mapping[int, Any] | None = None,
    sgprs: Mapping[int, Any] | None = None,
    exec_mask: Any = 2**64 - 1,
    vcc: Any = 0,
    scc: int = 0,
    m0: int = 0,
    lds: Any = None,
    mode: FloatMode | None = None,
    num_waves: int = 1,
    memory: MemoryMap | None = None,
    lds_bytes: int | None = None,
    ulp_bias: int = 0,
    scratch_bytes: int = 0,
    instruction_limit: int = 100_000,
    check_hazards: bool = False,
) -> SnippetResult:
    """Run instructions on given registers and return the registers afterwards.

    Args:
        text: instructions (and labels); `s_endpgm` is appended.
        vgprs, agprs: index -> uint32/int32/float32 array [64] or [num_waves, 64], or one value for all lanes.
        sgprs: index -> 32-bit int, or an array [num_waves].
        exec_mask, vcc: 64-bit lane masks, one for all waves or an array [num_waves].
        lds: initial LDS content (any array; its bytes), also sets the LDS size unless `lds_bytes` is given.
        mode: floating-point mode; nearest even with denormals kept by default.
        num_waves: waves of the one workgroup.
        check_hazards: refuse instructions that follow too closely (off: conformance tests need no padding).
        memory: allocations for global accesses; None: whatever CPU tensors and arrays exist.

    >>> result = run_snippet("v_add_u32_e32 v1, 1, v0", vgprs={0: range(64)})
    >>> int(result.vgpr(1)[5])
    6
    """
    program = parse(_HEADER + text + "\n\ts_endpgm\n")
    needed_v = 1 + max((int(i) for i in (vgprs or {})), default=-1)
    needed_a = 1 + max((int(i) for i in (agprs or {})), default=-1)
    mode = mode or FloatMode()
    size = lds_bytes if lds_bytes is not None else 0 if lds is None else np.asarray(lds).nbytes
    descriptor = {
        "group_segment_fixed_size": size, "private_segment_fixed_size": scratch_bytes, "next_free_vgpr": 64,
        "float_round_mode_32": mode.round32, "float_round_mode_16_64": mode.round64_16,
        "float_denorm_mode_32": mode.denorm32, "float_denorm_mode_16_64": mode.denorm64_16,
        "dx10_clamp": int(mode.dx10_clamp), "ieee_mode": int(mode.ieee),
        "fp16_overflow": int(mode.fp16_overflow),
    }  # fmt: skip
    kernel = Kernel("snippet", 0, descriptor, {".name": "snippet"})
    program.kernels["snippet"] = kernel
    listing = CompiledListing.from_program(
        program, bind_program(program, ulp_bias, needed_v, needed_a, check_hazards)
    )
    tuning = Tuning(instruction_limit=instruction_limit)
    launch = _SnippetLaunch(
        listing, kernel, (1, 1, 1), (64 * num_waves, 1, 1), bytearray(16), memory or MemoryMap(), 0, tuning
    )
    launch.values = {
        "vgprs": vgprs, "agprs": agprs, "sgprs": sgprs, "exec_mask": exec_mask, "vcc": vcc, "scc": scc,
        "m0": m0, "lds": lds,
    }  # fmt: skip
    with np.errstate(all="ignore"):
        run_until_one_ends([Dispatcher(launch, 1, 1, tuning.quantum)])
    cohort = launch.kept
    assert cohort is not None
    content = cohort.lds.bytes[:size].copy()
    return SnippetResult(
        cohort.regs.vector, cohort.regs.scalar, cohort.regs.scc, listing.bound.num_vgprs, content
    )
