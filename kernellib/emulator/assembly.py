# SPDX-License-Identifier: Apache-2.0
"""Parser of gfx9 assembly listings as LLVM prints them (FlyDSL's `format=isa`, Triton's `amdgcn` stage,
`llc`).

`parse(text)` gives a `Program`: the instructions with their line numbers and source locations, the labels,
each kernel's `.amdhsa_` descriptor and its entry of the `.amdgpu_metadata` YAML.  Whatever it does not know
is an `AssemblySyntaxError` that names the line: nothing is skipped because it looks unimportant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from kernellib.emulator.descriptor import check_directive, check_target, first_beyond
from kernellib.emulator.errors import AssemblySyntaxError
from kernellib.emulator.metadata import check_kernel_metadata
from kernellib.emulator.operands import ModifierValue, Operand, parse_int, parse_operands, split_top_level

MAX_LINES = 2_000_000
_LABEL = re.compile(r"([A-Za-z_.$][\w.$]*):(?!:)\s*")
_MNEMONIC = re.compile(r"[a-z][a-z0-9_]*$")
_COMMENT = re.compile(r"\s*(;|//|#ASM).*$")
# Directives that carry nothing an execution needs (alignment, symbol attributes, unwind and linker hints).
_IGNORED = frozenset(
    {".amdhsa_code_object_version", ".globl", ".global", ".p2align", ".p2alignl", ".p2alignw", ".balign"}
    | {".align", ".size", ".fill", ".weak", ".protected", ".hidden", ".internal", ".local", ".ident"}
    | {".addrsig", ".addrsig_sym", ".cfi_sections", ".cfi_startproc", ".cfi_endproc", ".cfi_escape"}
    | {".cfi_undefined", ".cfi_def_cfa", ".cfi_offset", ".cfi_def_cfa_offset", ".end"}
)
_DATA = {".byte": 1, ".short": 2, ".2byte": 2, ".value": 2, ".long": 4, ".4byte": 4, ".int": 4, ".quad": 8,
         ".8byte": 8}  # fmt: skip
_DATA_OTHER = frozenset({".ascii", ".asciz", ".string", ".zero", ".skip", ".space", ".uleb128", ".sleb128"})


@dataclass(frozen=True)
class SourceLine:
    """Where the compiler says an instruction comes from (`.loc`)."""

    file: str
    line: int
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Instruction:
    """One instruction.  `index` is its position in `Program.instructions`, `line_no` its line (from 1)."""

    index: int
    mnemonic: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, ModifierValue] = field(hash=False)
    line_no: int
    text: str
    source: SourceLine | None = None


@dataclass
class Kernel:
    """One `.amdhsa_kernel`: descriptor fields without their `.amdhsa_` prefix, and its metadata entry."""

    name: str
    entry: int
    descriptor: dict[str, int]
    metadata: dict[str, Any]


@dataclass
class Program:
    """A parsed listing."""

    text: str
    target: str
    instructions: list[Instruction]
    labels: dict[str, int]
    symbols: dict[str, int]
    kernels: dict[str, Kernel]
    metadata: dict[str, Any]


class _Parser:
    """State while reading one listing, line by line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.target = ""
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.symbols: dict[str, int] = {}
        self.descriptors: dict[str, dict[str, int]] = {}
        self.functions: set[str] = set()
        self.files: dict[int, str] = {}
        self.metadata: dict[str, Any] = {}
        self.source: SourceLine | None = None
        self.section = ".text"
        self.section_stack: list[str] = []
        self.kernel: str | None = None
        self.line_no = 0
        self.line = ""

    def error(self, message: str) -> AssemblySyntaxError:
        return AssemblySyntaxError(message, self.line_no, self.line[:200])

    def run(self) -> Program:
        lines = self.text.splitlines()
        if len(lines) > MAX_LINES:
            raise AssemblySyntaxError(f"listing has {len(lines)} lines, at most {MAX_LINES} are read")
        position = 0
        while position < len(lines):
            self.line_no, self.line = position + 1, lines[position]
            position += 1
            stripped = _strip_comment(self.line)
            if not stripped:
                continue
            if stripped == ".amdgpu_metadata":
                position = self.read_metadata(lines, position)
            else:
                self.statement(stripped)
        if self.kernel is not None:
            raise self.error(f".amdhsa_kernel {self.kernel} has no .end_amdhsa_kernel")
        return self.finish()

    def read_metadata(self, lines: list[str], position: int) -> int:
        for end in range(position, len(lines)):
            if lines[end].strip() == ".end_amdgpu_metadata":
                break
        else:
            raise self.error(".amdgpu_metadata has no .end_amdgpu_metadata")
        try:
            loaded = yaml.load("\n".join(lines[position:end]), Loader=_YAML_LOADER)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise self.error(f"metadata is not YAML: {str(error).splitlines()[0]}") from None
        kernels = loaded.get("amdhsa.kernels", []) if isinstance(loaded, dict) else None
        if not isinstance(kernels, list) or not all(isinstance(k, dict) for k in kernels):
            raise self.error("metadata has no list `amdhsa.kernels`")
        for kernel in kernels:
            problem = check_kernel_metadata(kernel)
            if problem is not None:
                raise self.error(f"metadata: {problem}")
        self.metadata = loaded
        return end + 1

    def statement(self, text: str) -> None:
        while match := _LABEL.match(text):
            self.define_label(match.group(1))
            text = text[match.end() :]
        if not text:
            return
        head, _, rest = (
            text.partition("\t") if "\t" in text and " " not in text.split("\t")[0] else text.partition(" ")
        )
        rest = rest.strip()
        if self.kernel is not None:
            self.descriptor_line(head, rest)
        elif head.startswith("."):
            self.directive(head, rest)
        else:
            self.instruction(head, rest)

    def define_label(self, name: str) -> None:
        if name in self.labels:
            raise self.error(f"label {name} is defined twice")
        # Labels of data and debug sections are recorded as well, so that duplicates are noticed; only
        # those of .text can be branched to.
        self.labels[name] = len(self.instructions) if self.is_code() else -1

    def is_code(self) -> bool:
        return self.section == ".text" or self.section.startswith(".text.")

    def descriptor_line(self, head: str, rest: str) -> None:
        assert self.kernel is not None
        if head == ".end_amdhsa_kernel":
            self.kernel = None
            return
        if not head.startswith(".amdhsa_"):
            raise self.error(f"{head} inside .amdhsa_kernel {self.kernel}")
        value = self.expression(rest)
        if not 0 <= value < 1 << 31:
            raise self.error(f"{head} {value}: wants a count")
        name, descriptor = head[len(".amdhsa_") :], self.descriptors[self.kernel]
        if name in descriptor:
            raise self.error(f"{head} is given twice for kernel {self.kernel}")
        problem = check_directive(name, value)
        if problem is not None:
            raise self.error(problem)
        descriptor[name] = value

    def expression(self, text: str) -> int:
        """Integer or a symbol set earlier."""
        number = parse_int(text)
        if number is None:
            number = self.symbols.get(text)
        if number is None:
            raise self.error(f"{text!r} is neither an integer nor a symbol defined above")
        return number

    def directive(self, head: str, rest: str) -> None:
        if head in _IGNORED:
            return
        handler = getattr(self, "d_" + head[1:], None)
        if handler is not None:
            handler(rest)
        elif head in _DATA or head in _DATA_OTHER:
            if self.is_code():
                raise self.error(f"data ({head}) between the instructions")
            if not self.section.startswith((".debug", ".AMDGPU", ".note")) and self.section != ".rodata":
                raise self.error(f"data in section {self.section} is not supported")
        else:
            raise self.error(f"directive {head} is not known")

    def d_amdgcn_target(self, rest: str) -> None:
        self.target = rest.strip('"')
        problem = check_target(self.target)
        if problem is not None:
            raise self.error(problem)

    def d_type(self, rest: str) -> None:
        name, _, kind = rest.partition(",")
        if kind.strip() == "@function":
            self.functions.add(name.strip())

    def d_text(self, rest: str) -> None:
        self.section = ".text"

    def d_data(self, rest: str) -> None:
        self.section = ".data"

    def d_section(self, rest: str) -> None:
        self.section = rest.partition(",")[0].strip().strip('"')

    def d_pushsection(self, rest: str) -> None:
        self.section_stack.append(self.section)
        self.d_section(rest)

    def d_popsection(self, rest: str) -> None:
        if not self.section_stack:
            raise self.error(".popsection without .pushsection")
        self.section = self.section_stack.pop()

    def d_set(self, rest: str) -> None:
        name, comma, value = rest.partition(",")
        if not comma:
            raise self.error(".set wants NAME, VALUE")
        number = parse_int(value.strip())
        if number is None:
            number = self.symbols.get(value.strip())
        if number is not None:  # expressions over other functions' resources are not needed to execute
            self.symbols[name.strip()] = number
        elif not re.fullmatch(r"[\w.$()+\-*,/ @<>&|]+", value.strip()):
            raise self.error(f"expression {value.strip()!r} is not understood")

    def d_file(self, rest: str) -> None:
        match = re.match(r'(\d+)?\s*"([^"]*)"(?:\s+"([^"]*)")?', rest)
        if not match:
            raise self.error('.file wants [NUMBER] "DIRECTORY" "NAME"')
        number, first, second = match.groups()
        if number is not None:
            name = second if second is not None else first
            self.files[int(number)] = name if second is None or name.startswith("/") else f"{first}/{name}"

    def d_loc(self, rest: str) -> None:
        numbers = rest.split()
        if len(numbers) < 2 or not all(n.isdigit() for n in numbers[:2]):
            raise self.error(".loc wants FILE LINE [COLUMN]")
        file, line = int(numbers[0][:9]), int(numbers[1][:9])
        column = int(numbers[2][:9]) if len(numbers) > 2 and numbers[2].isdigit() else 0
        # Line 0 means "no source line": keep the previous one out, as debuggers do.
        self.source = SourceLine(self.files.get(file, f"file{file}"), line, column) if line else None

    def d_amdhsa_kernel(self, rest: str) -> None:
        if not rest:
            raise self.error(".amdhsa_kernel wants a name")
        if rest in self.descriptors:
            raise self.error(f"kernel {rest} is described twice")
        self.kernel = rest
        self.descriptors[rest] = {}

    def d_amdgpu_lds(self, rest: str) -> None:
        raise self.error("LDS variables placed by the linker (.amdgpu_lds) are not supported")

    def instruction(self, head: str, rest: str) -> None:
        if not self.is_code():
            raise self.error(f"instruction outside .text (in {self.section})")
        if not _MNEMONIC.match(head):
            raise self.error(f"{head[:80]!r} is neither a directive, a label nor an instruction")
        if head.startswith(("s_waitcnt", "s_delay_alu")):
            operands: tuple[Operand, ...] = (Operand("text", rest),)
            modifiers: dict[str, ModifierValue] = {}
        else:
            operands, modifiers = parse_operands(rest, self.line_no, self.line)
        text = f"{head} {rest}".strip()
        index = len(self.instructions)
        self.instructions.append(
            Instruction(index, head, operands, modifiers, self.line_no, text, self.source)
        )

    def finish(self) -> Program:
        by_name = {str(k.get(".name")): k for k in self.metadata.get("amdhsa.kernels", [])}
        kernels = {}
        for name, descriptor in self.descriptors.items():
            entry = self.labels.get(name, -1)
            if not 0 <= entry < len(self.instructions):
                raise AssemblySyntaxError(f"kernel {name} has a descriptor but no code")
            kernels[name] = Kernel(name, entry, descriptor, by_name.get(name, {}))
        self.check_registers(kernels)
        return Program(
            self.text, self.target, self.instructions, self.labels, self.symbols, kernels, self.metadata
        )

    def check_registers(self, kernels: dict[str, Kernel]) -> None:
        """Refuse code that uses registers its kernel's descriptor does not give it."""
        starts = {self.labels.get(name, -1) for name in (*self.functions, *kernels)}
        for kernel in kernels.values():
            later = (start for start in starts if start > kernel.entry)
            code = self.instructions[kernel.entry : min(later, default=len(self.instructions))]
            found = first_beyond(kernel.descriptor, code)
            if found is not None:
                inst, problem = found
                raise AssemblySyntaxError(f"kernel {kernel.name}: {problem}", inst.line_no, inst.text)


_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _strip_comment(line: str) -> str:
    """The statement of a line, without comment and surrounding blanks."""
    if ";" not in line and "/" not in line and "#" not in line:
        return line.strip()
    quoted = False
    for position, char in enumerate(line):
        if char == '"':
            quoted = not quoted
        elif not quoted and (char == ";" or line.startswith("//", position)):
            line = line[:position]
            break
    stripped = line.strip()
    return "" if stripped.startswith("#") else stripped


def parse(text: str) -> Program:
    """Parse a listing.

    Raises AssemblySyntaxError (or its subclass UnsupportedOperandError) naming the line.  Mnemonics are not
    looked up here: a listing can be inspected although the emulator cannot run all of it.

    >>> program = parse("k:\\n\\tv_mov_b32_e32 v0, 1.0\\n\\ts_endpgm\\n")
    >>> [i.mnemonic for i in program.instructions]
    ['v_mov_b32_e32', 's_endpgm']
    """
    if not isinstance(text, str):
        raise AssemblySyntaxError(f"a listing is text, got {type(text).__name__}")
    if "\0" in text:
        raise AssemblySyntaxError(
            "the listing contains NUL bytes: this looks like a binary, not assembly text"
        )
    return _Parser(text).run()


__all__ = ["Instruction", "Kernel", "Program", "SourceLine", "parse", "split_top_level"]
