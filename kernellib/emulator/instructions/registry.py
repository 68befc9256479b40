# SPDX-License-Identifier: Apache-2.0
"""The instruction table: what each mnemonic computes, declared without any knowledge of registers.

A definition is a plain numpy function plus a signature string.  Encodings (`_e32`, `_e64`, `_sdwa`,
`_dpp`), source modifiers (`neg`, `abs`, `sext`), `op_sel`, `clamp`, `omod`, constants, the exec mask,
denormal flushing, waits and counters are handled once, by the binders (`kernellib/emulator/binding/`).
A mnemonic is registered WITHOUT its encoding suffix.

Vector ALU (VOP1, VOP2, VOP3, VOPC, VOP3P)
------------------------------------------
::

    @vector("v_add_f32", "f32, f32 -> f32")
    def v_add_f32(a, b):
        return a + b

    define_vector("v_add_f32", "f32, f32 -> f32", np.add)   # the same; a ufunc writes in place (fastest)

The signature lists the sources in assembly order, `->`, then the results in assembly order.  Types:

==================  ==================================================================================
b16 u16 i16 f16     low half of a register (or the half that op_sel / SDWA picks) as uint16 / int16 /
                    float16 [n, 64]
bf16                the same, as raw uint16 bits (numpy has no bf16); neg/abs act on its sign bit
b32 u32 i32 f32     one register as uint32/int32/float32 [n, 64]
b64 u64 i64 f64     two registers as uint64/int64/float64 [n, 64]
f32x4, b32xN        N consecutive registers, as [N, n, 64]; `b32x*`: as many as the text says
pk_f16 pk_bf16      VOP3P, two 16-bit elements.  The function is written for ONE element and is called
pk_u16 pk_i16       on arrays [2, n, 64] (index 0 = low half) after op_sel, op_sel_hi, neg_lo and
                    neg_hi have been applied
pk_f32 pk_b32       VOP3P on register pairs, [2, n, 64], likewise
mix                 v_fma_mix* source: f32, or a half of a register (f16) widened to float32
mask                lane mask (vcc or an SGPR pair), bool [n, 64].  A result mask is ANDed with exec
scale               E8M0 scales of v_mfma_scale, four bytes per lane as uint32; an SGPR or a constant gives
                    its bits 30:23 in every byte
vcc                 like `mask`, but implicit: not written in the text (v_div_fmas_f32)
s.u32, s.b64 ...    wave-uniform operand, shape [n, 1] (SGPR or constant), or a result to an SGPR
uimm, simm          an immediate in the text, given to the function as a Python int
old, old1           not in the text: the previous value of result 0 (1), typed like that result
exec                result only, not in the text: the new exec mask, bool [n, 64] (v_cmpx)
==================  ==================================================================================

* fp8/fp6/fp4 types do not exist: take `b32` (or `b32xN`) and decode in the function.
* Sources may be broadcastable ([n, 1] for an SGPR, [] for a constant): write broadcasting numpy code,
  never assume the shape [n, 64], never write into a source.  `cross_lane=True` gets full [..., n, 64]
  arrays instead; the last axis is the lane, and `exec_mask` is available.
* Several results: return a tuple.  A result may be any shape that broadcasts to [n, 64]; its dtype must
  have the declared width (it is reinterpreted, never converted: float32 for `f32`, bool for `mask`).
* A function that has a parameter `out` may be given the destination array (or None): it may write its
  result there after it has read every source (sources may alias it) and must return the result.
* KEYWORD-ONLY parameters ask for more than operands, by name:
  `exec_mask` (bool [n, 64]); `mode` (`state.FloatMode`); `ulp_bias` (int, session option for
  transcendental functions); `clamp` (bool; asking for it takes over the clamping, otherwise float results
  are clamped to [0, 1] and integer results with `clamp` are refused); `op_sel`, `op_sel_hi`, `neg_lo`,
  `neg_hi` (tuples of ints as in the text, () when absent; asking for `op_sel` takes over the selection
  of source and result halves); `m0` ([n, 1]); and each text modifier: `cbsz`, `abid`, `blgp`, `byte_sel`,
  `bitop3`, ... (int, 0 when absent).
  A modifier in the text that neither the binder nor the function knows is an UnsupportedOperandError.
* Options: `high16="zero"` (default, what gfx9 does with the upper half of a 16-bit result) or
  `"preserve"`; `ignores_exec=True` (v_readlane, v_readfirstlane, v_writelane, MFMA); `cross_lane=True`;
  `transcendental=True` (v_rcp, v_exp, ...: hazards); `kind="mfma"` (hazards and counters) with `flops`
  per wave.

Scalar ALU (SOP1, SOP2, SOPK, SOPC)
-----------------------------------
::

    @scalar("s_addc_u32", "u32, u32, scc -> u32, scc")
    def s_addc_u32(a, b, scc):
        total = a.astype(np.uint64) + b + scc
        return total.astype(np.uint32), total > 0xFFFFFFFF

Arrays are [n] (one value per wave), `scc` is bool [n], `exec` is uint64 [n]; both are implicit operands
on either side, given and returned in signature order.  `simm16`/`uimm16` give the immediate as a numpy
int32/uint32 scalar (so arithmetic keeps its width).  `old` as above.  Constants arrive as [1] arrays.
What the function does not list as a result is not changed (s_cmp has the result `scc` only; s_mov has
no scc).

Memory
------
`define_memory(mnemonic, space, action, data, ...)`: see `MemoryDef`.  Address forms, bounds checks, waits
and counters live in `binding/memory.py`.  Atomics give `function(old, data[, compare]) -> new` on arrays
[k] of the data type; where lanes collide they are applied one after the other in ascending lane order.

Control flow, waits, messages: `define_control(mnemonic, handler)`; handlers live in `binding/control.py`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

_BASE_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "b8": np.uint8, "u8": np.uint8, "i8": np.int8,
        "b16": np.uint16, "u16": np.uint16, "i16": np.int16, "f16": np.float16, "bf16": np.uint16,
        "b32": np.uint32, "u32": np.uint32, "i32": np.int32, "f32": np.float32,
        "b64": np.uint64, "u64": np.uint64, "i64": np.int64, "f64": np.float64,
    }.items()
}  # fmt: skip
_SPECIAL_BASES = {"mask": "b64", "vcc": "b64", "exec": "b64", "scc": "b8", "mix": "f32", "scale": "b32"}
FLOAT_BASES = frozenset({"f16", "bf16", "f32", "f64"})

TypeForm = Literal[
    "lane",
    "multi",
    "packed16",
    "packed32",
    "mix",
    "mask",
    "vcc",
    "scalar",
    "imm",
    "old",
    "exec",
    "scc",
    "scale",
]


@dataclass(frozen=True)
class OperandType:
    """One entry of a signature.

    `form` says how the operand is fetched, `base` its element type ("f32", ...), `count` the number of
    registers of a `multi` operand (0: as many as the text has) or the result index of an `old`.
    """

    text: str
    form: TypeForm
    base: str = ""
    count: int = 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """numpy dtype of one element."""
        return _BASE_DTYPES[self.base]

    @property
    def is_float(self) -> bool:
        """Whether neg/abs/omod/clamp and denormal flushing apply."""
        return self.base in FLOAT_BASES

    @property
    def in_text(self) -> bool:
        """Whether the operand is written in the assembly text."""
        return self.form not in ("vcc", "old", "exec", "scc")


class DefinitionError(ValueError):
    """An instruction definition that contradicts itself (raised at import, never by a listing)."""


def parse_type(text: str, scalar: bool = False) -> OperandType:  # noqa: PLR0911
    """Parse one type of a signature.  Raises DefinitionError for an unknown one."""
    if text in _SPECIAL_BASES:
        return OperandType(text, cast("TypeForm", text), _SPECIAL_BASES[text])
    if match := re.fullmatch(r"old(\d?)", text):
        return OperandType(text, "old", "", int(match.group(1) or 0))
    if text in ("uimm", "simm", "uimm16", "simm16"):
        return OperandType(text, "imm", "i32" if text.startswith("s") else "u32")
    if match := re.fullmatch(r"pk_(\w+)", text):
        base = match.group(1)
        if base in ("f16", "bf16", "u16", "i16", "b16"):
            return OperandType(text, "packed16", base)
        if base in ("f32", "b32", "u32", "i32"):
            return OperandType(text, "packed32", base)
    if match := re.fullmatch(r"s\.(\w+)", text):
        if match.group(1) in _BASE_DTYPES:
            return OperandType(text, "scalar", match.group(1))
    elif match := re.fullmatch(r"([bui]32|f32|f64|b64)x(\d+|\*)", text):
        return OperandType(text, "multi", match.group(1), 0 if match.group(2) == "*" else int(match.group(2)))
    elif text in _BASE_DTYPES:
        return OperandType(text, "scalar" if scalar else "lane", text)
    raise DefinitionError(f"unknown operand type {text!r} in a signature")


@dataclass(frozen=True)
class Signature:
    """Sources and results of an instruction, in assembly order."""

    sources: tuple[OperandType, ...]
    results: tuple[OperandType, ...]

    @classmethod
    def parse(cls, text: str, scalar: bool = False) -> Signature:
        """`"f32, f32 -> f32"` to a Signature."""
        left, arrow, right = text.partition("->")
        if not arrow:
            raise DefinitionError(f"signature {text!r} has no '->'")
        return cls(
            *(tuple(parse_type(p.strip(), scalar) for p in s.split(",") if p.strip()) for s in (left, right))
        )

    @property
    def num_text_operands(self) -> int:
        """How many operands the assembly text shows."""
        return sum(t.in_text for t in self.sources) + sum(t.in_text for t in self.results)


@dataclass(frozen=True)
class InstructionDef:
    """What every kind of definition has: the mnemonic (no encoding suffix) and where it was defined."""

    mnemonic: str


@dataclass(frozen=True)
class AluDef(InstructionDef):
    """A vector or scalar ALU instruction; built by `vector` / `scalar`."""

    signature: Signature
    function: Callable[..., Any]
    is_scalar: bool = False
    wants: frozenset[str] = frozenset()
    has_out: bool = False
    is_ufunc: bool = False
    high16: Literal["zero", "preserve"] = "zero"
    ignores_exec: bool = False
    cross_lane: bool = False
    transcendental: bool = False
    kind: Literal["valu", "mfma", "salu"] = "valu"
    flops: int = 0
    unclamped: np.ufunc | None = None  # the whole function where the text has no clamp


Space = Literal["global", "flat", "scratch", "buffer", "lds", "scalar", "scalar_buffer"]
Action = Literal["load", "store", "atomic", "load_to_lds", "cache"]


@dataclass(frozen=True)
class MemoryDef(InstructionDef):
    """A memory instruction.

    `data` is the type of one lane's datum: u8 i8 u16 i16 (zero-/sign-extended loads; b8 b16 for stores),
    b32, b32x2, b32x3, b32x4 (b32x8, b32x16 for scalar loads).  `half`: for d16 forms, which half of the
    register is written or read ("lo", "hi"), the other half being kept.  An atomic's `function(old, data)`
    (`function(old, data, compare)` when `compares`) gives the new value.  `pairs`/`stride64` describe the
    LDS read2/write2 forms, `transpose` the element bits of the ds_read_b64_tr forms.
    """

    space: Space
    action: Action
    data: OperandType
    half: Literal["", "lo", "hi"] = ""
    function: Callable[..., Any] | None = None
    compares: bool = False
    always_returns: bool = False
    pairs: bool = False
    stride64: bool = False
    transpose: int = 0

    @property
    def bytes_per_lane(self) -> int:
        """Bytes that one lane asks for (both elements of a read2/write2)."""
        one = self.data.dtype.itemsize * max(self.data.count, 1)
        return one * (2 if self.pairs else 1)


@dataclass(frozen=True)
class ControlDef(InstructionDef):
    """Branches, waits, barriers, sleeps, messages: `handler` names a function of `binding/control.py`."""

    handler: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)


REGISTRY: dict[str, InstructionDef] = {}
ENCODING_SUFFIXES = ("_e32", "_e64", "_sdwa", "_dpp")
# Names in a function's keyword-only parameters that the binder fills itself; all others are text modifiers.
BINDER_KEYWORDS = frozenset(
    {"exec_mask", "mode", "ulp_bias", "clamp", "op_sel", "op_sel_hi", "neg_lo", "neg_hi", "m0", "reused"}
)


def split_mnemonic(mnemonic: str) -> tuple[str, str]:
    """`"v_add_f32_e64"` -> `("v_add_f32", "e64")`; without a suffix the encoding is `""`."""
    for suffix in ENCODING_SUFFIXES:
        if mnemonic.endswith(suffix):
            return mnemonic[: -len(suffix)], suffix[1:]
    return mnemonic, ""


def lookup(mnemonic: str) -> InstructionDef | None:
    """The definition of a mnemonic as printed in a listing (with or without suffix), or None."""
    exact = REGISTRY.get(mnemonic)
    return exact if exact is not None else REGISTRY.get(split_mnemonic(mnemonic)[0])


def _register(definition: InstructionDef) -> None:
    if definition.mnemonic in REGISTRY:
        raise DefinitionError(f"{definition.mnemonic} is defined twice")
    REGISTRY[definition.mnemonic] = definition


def _keywords(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Keyword-only parameter names of a semantics function, and whether it accepts `out`."""
    if isinstance(function, np.ufunc):
        return frozenset(), True
    parameters = inspect.signature(function).parameters.values()
    wants = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "out"}
    return frozenset(wants), any(p.name == "out" for p in parameters)


def _define_alu(
    mnemonic: str, signature: str, function: Callable[..., Any], is_scalar: bool, **options: Any
) -> None:
    wants, has_out = _keywords(function)
    parsed = Signature.parse(signature, scalar=is_scalar)
    for source in parsed.sources:
        if source.form == "old" and source.count >= len(parsed.results):
            raise DefinitionError(
                f"{mnemonic}: {source.text} names a result that the signature does not have"
            )
    _register(
        AluDef(
            mnemonic, parsed, function, is_scalar, wants, has_out, isinstance(function, np.ufunc), **options
        )
    )


def define_vector(mnemonic: str, signature: str, function: Callable[..., Any], **options: Any) -> None:
    """Register a vector ALU instruction (see the module docstring for signature and options)."""
    _define_alu(mnemonic, signature, function, False, **options)


def define_scalar(mnemonic: str, signature: str, function: Callable[..., Any], **options: Any) -> None:
    """Register a scalar ALU instruction."""
    _define_alu(mnemonic, signature, function, True, kind="salu", **options)


def vector(
    mnemonic: str, signature: str, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator form of `define_vector`; stack it to give several mnemonics one function."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        define_vector(mnemonic, signature, function, **options)
        return function

    return decorate


def scalar(
    mnemonic: str, signature: str, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator form of `define_scalar`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        define_scalar(mnemonic, signature, function, **options)
        return function

    return decorate


def define_memory(mnemonic: str, space: Space, action: Action, data: str, **options: Any) -> None:
    """Register a memory instruction (see `MemoryDef`)."""
    _register(MemoryDef(mnemonic, space, action, parse_type(data), **options))


def define_control(mnemonic: str, handler: str, **options: Any) -> None:
    """Register a control instruction handled by `binding/control.py:bind_<handler>`."""
    _register(ControlDef(mnemonic, handler, options))
