# SPDX-License-Identifier: Apache-2.0
"""Harness of the conformance tests: operand types with their test values, cases, and the comparison.

A test module has a table `CASES`; a row names one mnemonic, the assembly lines to run, and a reference
function on plain integers (register bits in, register bits out).  All lines of a case run in one snippet over
many waves, with holes in the exec mask and poisoned destinations, so every case also checks that inactive
lanes keep their registers. `all_cases` collects the tables; the coverage test demands a case for every
mnemonic of the instruction table and writes `docs/emulator_conformance.md` from them.
"""

from __future__ import annotations

import functools
import importlib
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import conformance_reference as ref
import numpy as np

from kernellib.emulator.instructions import REGISTRY
from kernellib.emulator.instructions.registry import split_mnemonic
from kernellib.emulator.memory import MemoryMap
from kernellib.emulator.snippet import run_snippet

SEED = 20250
LANES = 64
FULL_EXEC = (1 << LANES) - 1
# Lanes that are off in every vector case: both ends of rows and halves, and one in a middle.
HOLES = (1, 5, 31, 32, 62)
EXEC_WITH_HOLES = FULL_EXEC & ~sum(1 << lane for lane in HOLES)
ISA = "CDNA4 ISA"


@dataclass(frozen=True)
class Within:
    """An expected value that the instruction may miss by `ulps` units in the last place of its format."""

    value: Fraction
    ulps: Fraction
    absolute: Fraction = Fraction(0)

    def accepts(self, fmt: ref.Format, got: int) -> bool:
        """Whether an encoding is close enough."""
        number = ref.decode(fmt, got)
        if number.kind != "num":
            return number.kind == "inf" and abs(self.value) >= ref.decode(fmt, fmt.max_bits).fraction
        step = Fraction(2) ** ref.ulp_exponent(fmt, self.value) if self.value else Fraction(0)
        return abs(number.fraction - self.value) <= self.ulps * step + self.absolute


@dataclass(frozen=True)
class OneOf:
    """Several encodings that are all allowed."""

    values: tuple[int, ...]


@dataclass(frozen=True)
class Halves:
    """Two results of a float format side by side (any quiet NaN matches a NaN)."""

    fmt: ref.Format
    low: int | OneOf
    high: int | OneOf


Expected = int | Within | OneOf | Halves


@dataclass(frozen=True)
class Type:
    """An operand type: width in bits, float format if any, and interesting bit patterns."""

    bits: int
    fmt: ref.Format | None = None
    specials: tuple[int, ...] = ()

    @property
    def registers(self) -> int:
        """32-bit registers that one lane's value takes."""
        return max(1, self.bits // 32)


def _float_specials(fmt: ref.Format) -> tuple[int, ...]:
    """+-: zero, subnormals, smallest normal, around 0.5, 1, 2^mbits and 2^(mbits+1), max, inf, quiet and
    signalling NaN.
    """
    one, hidden, half = fmt.bias << fmt.mbits, 1 << fmt.mbits, fmt.mbits
    positive = [
        0,
        1,
        2,
        hidden - 1,
        hidden,
        hidden + 1,
        one - hidden,
        one - 1,
        one,
        one + 1,
        one + hidden // 2 + 1,
    ]
    positive += [
        (fmt.bias + half) << half | 1,
        ((fmt.bias + half - 1) << half) + 1,
        ((fmt.bias + half + 1) << half) + 3,
    ]
    positive += [
        fmt.max_bits - 1,
        fmt.max_bits,
        fmt.inf_bits,
        fmt.nan_bits,
        fmt.nan_bits | 5,
        fmt.inf_bits | 1,
    ]
    return tuple(p | s << (fmt.bits - 1) for p in positive for s in (0, 1))


def _int_specials(bits: int) -> tuple[int, ...]:
    top = 1 << (bits - 1)
    values = [
        0,
        1,
        2,
        3,
        7,
        8,
        15,
        16,
        31,
        32,
        33,
        63,
        64,
        127,
        128,
        255,
        256,
        top - 1,
        top,
        top + 1,
        2 * top - 1,
    ]
    values += [
        2 * top - 2,
        2 * top - 128,
        0x55555555_55555555,
        0xAAAAAAAA_AAAAAAAA,
        0x00010001,
        0x7FFF8000,
        0xFFFF,
        0x10000,
    ]
    values += [0x7FFFFF, 0x800000, 0xFFFFFF, 0x1000000]
    return tuple(dict.fromkeys(v & (2 * top - 1) for v in values))


_FLOATS = {"f16": ref.F16, "bf16": ref.BF16, "f32": ref.F32, "f64": ref.F64}
TYPES: dict[str, Type] = {name: Type(fmt.bits, fmt, _float_specials(fmt)) for name, fmt in _FLOATS.items()}
TYPES |= {f"{k}{b}": Type(b, None, _int_specials(b)) for k in "bui" for b in (16, 32, 64)}
TYPES["pk_f16"] = Type(32)
TYPES["pk_bf16"] = Type(32)
TYPES["mask"] = Type(1)
TYPES |= {f"b32x{n}": Type(32 * n) for n in (3, 4, 6, 8, 16, 32)}


def rng_for(*key: object) -> random.Random:
    """A random generator that depends on the key and on SEED only."""
    return random.Random(zlib.crc32(repr((SEED, key)).encode()))


def _random_value(kind: str, rng: random.Random) -> int:
    t = TYPES[kind]
    if kind in ("pk_f16", "pk_bf16"):
        half = kind[3:]
        return _random_value(half, rng) | _random_value(half, rng) << 16
    if t.fmt is not None:
        style = rng.random()
        if style < 0.35:
            return rng.choice(t.specials)
        if style < 0.75:  # near one, so that sums cancel and products round
            exponent = t.fmt.bias + rng.randint(-t.fmt.mbits - 2, t.fmt.mbits + 2)
            exponent = ref.saturate(exponent, 0, (1 << t.fmt.ebits) - 2)
            return rng.getrandbits(1) << (t.bits - 1) | exponent << t.fmt.mbits | rng.getrandbits(t.fmt.mbits)
        return rng.getrandbits(t.bits)
    if t.specials and rng.random() < 0.4:
        return rng.choice(t.specials)
    value = rng.getrandbits(t.bits)
    return value >> rng.randint(0, t.bits - 1) if rng.random() < 0.3 else value


def test_values(kinds: Sequence[str], rng: random.Random, count: int) -> list[list[int]]:
    """`count` tuples of values, one list per source: all pairs of specials if they fit, then random ones."""
    rows: list[tuple[int, ...]] = []
    if len(kinds) == 1:
        rows = [(v,) for v in TYPES[kinds[0]].specials]
    elif len(kinds) == 2 and all(TYPES[k].specials for k in kinds):
        first, second = (TYPES[k].specials for k in kinds)
        total = len(first) * len(second)
        chosen = rng.sample(range(total), min(total, count * 3 // 4))
        rows = [(first[i // len(second)], second[i % len(second)]) for i in chosen]
    while len(rows) < count:
        rows.append(tuple(_random_value(k, rng) for k in kinds))
    rng.shuffle(rows)
    return [list(column) for column in zip(*rows[:count], strict=True)]


test_values.__test__ = False  # type: ignore[attr-defined]  # not a test


def to_registers(values: Sequence[int], registers: int, waves: int) -> list[np.ndarray[Any, Any]]:
    """Split values into 32-bit registers of shape [waves, 64]."""
    return [
        np.array([v >> (32 * i) & ref.M32 for v in values], dtype=np.uint32).reshape(waves, LANES)
        for i in range(registers)
    ]


def from_registers(columns: Sequence[np.ndarray[Any, Any]], count: int | None = None) -> list[int]:
    """The inverse of `to_registers`, for the first `count` lanes."""
    flat = [np.asarray(c, dtype=np.uint32).reshape(-1)[:count].tolist() for c in columns]
    if len(flat) == 1:
        return flat[0]
    return [sum(int(part) << (32 * i) for i, part in enumerate(parts)) for parts in zip(*flat, strict=True)]


def vname(index: int, registers: int) -> str:
    """`v5` or `v[4:5]`."""
    return f"v{index}" if registers == 1 else f"v[{index}:{index + registers - 1}]"


def sname(index: int, registers: int) -> str:
    """`s5` or `s[4:5]`."""
    return f"s{index}" if registers == 1 else f"s[{index}:{index + registers - 1}]"


@dataclass(frozen=True)
class Case:
    """One row of a conformance table; `forms` and `checks` go into the document."""

    mnemonic: str
    forms: tuple[str, ...] = ("",)
    checks: str = ""
    source: str = ISA

    @property
    def implemented(self) -> bool:
        """Whether the instruction table has this mnemonic."""
        return self.mnemonic in REGISTRY


def implemented(cases: Iterable[Any]) -> list[Any]:
    """The cases whose mnemonic the emulator has (the coverage test reports the others)."""
    return [case for case in cases if case.implemented]


def case_id(case: Case) -> str:
    """Test id of a case."""
    return f"{case.mnemonic}-{'+'.join(f.replace(' ', '_') for f in case.forms if f)}"[:80]


def compare(fmt: ref.Format | None, got: int, want: Expected) -> bool:
    """Whether a result is what was wanted; any quiet NaN matches a NaN."""
    if isinstance(want, Within):
        assert fmt is not None
        return want.accepts(fmt, got)
    if isinstance(want, Halves):
        bits = want.fmt.bits
        return compare(want.fmt, got & ((1 << bits) - 1), want.low) and compare(
            want.fmt, got >> bits, want.high
        )
    if isinstance(want, OneOf):
        return any(compare(fmt, got, v) for v in want.values)
    if fmt is not None and ref.is_nan(fmt, want):
        number = ref.decode(fmt, got)
        return number.is_nan and not number.signalling
    return got == want


def show(bits: int, want: Expected | None = None) -> str:
    """Hexadecimal, or the description of an inexact expectation."""
    if want is None or isinstance(want, int):
        return f"{bits if want is None else want:#x}"
    return f"{float(want.value)!r} within {want.ulps} ulp" if isinstance(want, Within) else repr(want)


@dataclass
class Report:
    """Collects mismatches, so that one failure shows several."""

    title: str
    problems: list[str] = field(default_factory=list)

    def check(self, good: bool, text: Callable[[], str]) -> None:
        """Note a mismatch."""
        if not good:
            self.problems.append(text())

    def finish(self) -> None:
        """Fail with the first mismatches."""
        shown = "\n  ".join(self.problems[:8])
        assert not self.problems, f"{self.title} (seed {SEED}): {len(self.problems)} mismatches\n  {shown}"


@dataclass
class Record:
    """What the tests of this process have executed.

    `lanes`: per mnemonic and encoding, how many lanes (scalar instructions: waves) computed a value in a test
    that is about that mnemonic; `forms`: which operand forms they had (see `forms_of_line`).
    """

    subjects: frozenset[str] = frozenset()
    lines: set[str] = field(default_factory=set)
    unassembled: set[str] = field(default_factory=set)
    lanes: Counter[str] = field(default_factory=Counter)
    encodings: dict[str, set[str]] = field(default_factory=dict)
    forms: dict[str, set[str]] = field(default_factory=dict)

    def add(self, text: str, num_lanes: int, num_waves: int, assembles: bool) -> None:
        """Enter the lines of a snippet."""
        for line in (part.strip() for part in text.split("\n")):
            self.lines.add(line)
            if not assembles:
                self.unassembled.add(line)
            written = line.split(" ")[0]
            mnemonic, encoding = split_mnemonic(written)
            if written in REGISTRY:
                mnemonic, encoding = written, ""
            if mnemonic in self.subjects:
                self.lanes[mnemonic] += num_waves if mnemonic.startswith("s_") else num_lanes
                self.encodings.setdefault(mnemonic, set()).add(encoding or "plain")
                self.forms.setdefault(mnemonic, set()).update(forms_of_line(line))


RECORD = Record()
_MODIFIER_FORMS = re.compile(
    r"(?:^|\s)(op_sel_hi|op_sel|neg_lo|neg_hi|clamp|mul:\d|div:2|sc0|sc1|nt|offen|idxen|lds|offset[01]?:\S+|cbsz"
    r"|blgp|abid|bitop3|quad_perm|row_\w+|wave_\w+|dst_sel|src\d_sel|byte_sel|bound_ctrl:\d|row_mask|bank_mask)\b"
)
_RENAMED = {"mul": "omod", "div": "omod", "dst_sel": "dst_sel", "offset0": "offset", "offset1": "offset"}
_CONSTANT = re.compile(r"-?(?:0x[0-9a-f]+|\d+(?:\.\d+)?)")


@functools.cache
def forms_of_line(line: str) -> set[str]:
    """Names of the operand forms of an instruction line, for the document."""
    found = set()
    operands, _, _ = line.partition(" ;")
    for name in _MODIFIER_FORMS.findall(line):
        stem = name.split(":")[0]
        found.add(_RENAMED.get(stem, "src_sel" if stem.startswith("src") else stem))
    body = operands.split(" ", 1)[1] if " " in operands else ""
    is_memory = line.startswith(("global_", "flat_", "scratch_", "buffer_", "ds_"))
    for operand in (part.strip().split(" ")[0] for part in re.split(r",(?![^\[]*\])", body)):
        bare = operand.removeprefix("-").strip("|")
        if "|" in operand:
            found.add("abs")
        if operand.startswith(("-v", "-s", "-|", "-a")):
            found.add("neg")
        if operand.startswith("sext("):
            found.add("sext")
        if re.match(r"a(\d|\[)", bare):
            found.add("agpr")
        elif re.match(r"s(\d|\[)|vcc|exec|m0", bare):
            found.add("sgpr")
        elif _CONSTANT.fullmatch(bare) and not is_memory:
            number = int(operand, 0) if "." not in operand else 0
            found.add("inline constant" if -16 <= number <= 64 else "literal")
    return found


def run(text: str, *, assembles: bool = True, **state: Any) -> Any:
    """Run a snippet; a separate function so that every test goes through one place.

    `assembles=False`: the assembler at hand refuses the text although the hardware has it (say why there).
    """
    waves = int(state.get("num_waves", 1))
    exec_mask = state.get("exec_mask", FULL_EXEC)
    active = exec_mask.bit_count() if isinstance(exec_mask, int) else LANES
    RECORD.add(text, waves * active, waves, assembles)
    return run_snippet(text, **state)


def run_with_memory(tensor: Any, text: str, **state: Any) -> Any:
    """Run a snippet that may touch one tensor and nothing else in global memory."""
    memory = MemoryMap()
    memory.register_tensor(tensor)
    return run(text, memory=memory, **state)


def all_cases() -> list[Case]:
    """The rows of every `CASES` table beside this file."""
    found: list[Case] = []
    for path in sorted(Path(__file__).parent.glob("test_conformance_*.py")):
        if path.stem != "test_conformance_coverage":
            found += importlib.import_module(path.stem).CASES
    return found
