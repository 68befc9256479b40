# SPDX-License-Identifier: Apache-2.0
"""Reads a linked AMD code object: kernel descriptors and metadata, to hold them against the listing.

Layouts from LLVM, "User Guide for AMDGPU Backend": ELF Code Object, Code Object V3 Kernel Descriptor,
Code Object V5 Metadata. Metadata is MessagePack; the few of its types that the backend writes are decoded
here, since a dependency would be larger than they are.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

ELF_MAGIC = b"\x7fELF"
MACHINE_AMDGPU = 224
SECTION_SYMTAB, SECTION_NOTE, SECTION_NOBITS, SECTION_DYNSYM = 2, 7, 8, 11
NOTE_AMDGPU_METADATA = 32
DESCRIPTOR_BYTES = 64


class CodeObjectError(ValueError):
    """Bytes that are no linked AMD code object; the text says what is wrong."""


@dataclass(frozen=True)
class KernelDescriptor:
    """The 64 bytes the hardware is set up from; counts in registers, sizes in bytes.

    Attributes:
        vector_registers: VGPRs and AGPRs allocated, in granules of 8.
        accum_offset: the first AGPR's number.
        user_sgprs: scalar registers preset at the start, preloaded arguments included.
        preloaded_dwords: kernel argument dwords among them.
        denorm_mode_32, denorm_mode_16_64: 3 keeps subnormals.
    """

    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    entry_offset: int
    vector_registers: int
    accum_offset: int
    user_sgprs: int
    preloaded_dwords: int
    denorm_mode_32: int
    denorm_mode_16_64: int
    round_mode_32: int
    uses_scratch: bool


@dataclass(frozen=True)
class _Section:
    kind: int
    address: int
    offset: int
    size: int
    link: int
    entry_size: int


class CodeObject:
    """A linked AMD code object.

    Args:
        image: the ELF file's bytes.

    Raises:
        CodeObjectError: not a 64-bit little-endian AMDGPU ELF file.
    """

    def __init__(self, image: bytes) -> None:
        if image[:4] != ELF_MAGIC or len(image) < 64 or image[4:6] != b"\x02\x01":
            raise CodeObjectError(f"image got {image[:6]!r}, wanted a 64-bit little-endian ELF file")
        (machine,) = struct.unpack_from("<H", image, 18)
        if machine != MACHINE_AMDGPU:
            raise CodeObjectError(f"machine got {machine}, wanted {MACHINE_AMDGPU} (AMDGPU)")
        self.image = image
        (table,) = struct.unpack_from("<Q", image, 40)
        entry_size, count = struct.unpack_from("<HH", image, 58)
        self._sections = [self._section(table + index * entry_size) for index in range(count)]

    def _section(self, at: int) -> _Section:
        _, kind, _, address, offset, size, link, _, _, entry = struct.unpack_from(
            "<IIQQQQIIQQ", self.image, at
        )
        return _Section(kind, address, offset, size, link, entry)

    def symbols(self) -> dict[str, tuple[int, int]]:
        """Name -> (address, size) of every symbol."""
        found = {}
        for section in self._sections:
            if section.kind not in (SECTION_SYMTAB, SECTION_DYNSYM):
                continue
            names = self._sections[section.link]
            for at in range(section.offset, section.offset + section.size, section.entry_size):
                name, _, _, _, address, size = struct.unpack_from("<IBBHQQ", self.image, at)
                start = names.offset + name
                found[self.image[start : self.image.index(b"\0", start)].decode()] = (address, size)
        return found

    def at(self, address: int, size: int) -> bytes:
        """``size`` bytes at a virtual address."""
        for section in self._sections:
            inside = section.address <= address and address + size <= section.address + section.size
            if section.address and inside and section.kind != SECTION_NOBITS:
                start = section.offset + address - section.address
                return self.image[start : start + size]
        raise CodeObjectError(f"address got {address:#x}, wanted one inside a section")

    def descriptor(self, kernel: str) -> KernelDescriptor:
        """The kernel descriptor of ``kernel``.

        Raises:
            CodeObjectError: the object has no such kernel.
        """
        symbols = self.symbols()
        if f"{kernel}.kd" not in symbols:
            raise CodeObjectError(f"kernel got {kernel!r}, wanted one of {sorted(symbols)}")
        address, size = symbols[f"{kernel}.kd"]
        if size != DESCRIPTOR_BYTES:
            raise CodeObjectError(f"descriptor of {kernel} got {size} bytes, wanted {DESCRIPTOR_BYTES}")
        return parse_descriptor(self.at(address, size))

    def metadata(self) -> dict[str, Any]:
        """The NT_AMDGPU_METADATA note: "amdhsa.kernels", "amdhsa.target", "amdhsa.version"."""
        for section in self._sections:
            if section.kind != SECTION_NOTE:
                continue
            at, end = section.offset, section.offset + section.size
            while at + 12 <= end:
                name_size, size, kind = struct.unpack_from("<III", self.image, at)
                name_at = at + 12
                data_at = name_at + (name_size + 3 & ~3)
                if kind == NOTE_AMDGPU_METADATA and self.image[name_at : name_at + 6] == b"AMDGPU":
                    value, _ = unpack_message(self.image[data_at : data_at + size], 0)
                    if not isinstance(value, dict):
                        raise CodeObjectError(f"metadata got {type(value).__name__}, wanted a map")
                    return value
                at = data_at + (size + 3 & ~3)
        raise CodeObjectError("notes got no NT_AMDGPU_METADATA, wanted one")


def parse_descriptor(data: bytes) -> KernelDescriptor:
    """The fields of a 64-byte kernel descriptor of gfx90a and later."""
    lds, scratch, kernarg = struct.unpack_from("<III", data, 0)
    (entry,) = struct.unpack_from("<q", data, 16)
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", data, 44)
    (preload,) = struct.unpack_from("<H", data, 58)
    return KernelDescriptor(
        lds_bytes=lds,
        scratch_bytes=scratch,
        kernarg_bytes=kernarg,
        entry_offset=entry,
        vector_registers=((rsrc1 & 0x3F) + 1) * 8,
        accum_offset=((rsrc3 & 0x3F) + 1) * 4,
        user_sgprs=rsrc2 >> 1 & 0x1F,
        preloaded_dwords=preload & 0x7F,
        round_mode_32=rsrc1 >> 12 & 3,
        denorm_mode_32=rsrc1 >> 16 & 3,
        denorm_mode_16_64=rsrc1 >> 18 & 3,
        uses_scratch=bool(rsrc2 & 1),
    )


def unpack_message(data: bytes, at: int) -> tuple[Any, int]:
    """One MessagePack value and the position after it: maps, arrays, strings, integers, booleans, nil.

    Raises:
        CodeObjectError: another type, or data that ends too early.
    """
    if at >= len(data):
        raise CodeObjectError("metadata ends inside a value")
    tag = data[at]
    at += 1
    if tag <= 0x7F or tag >= 0xE0:
        return (tag if tag <= 0x7F else tag - 256), at
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    if 0xCC <= tag <= 0xD3:
        code = "BHIQbhiq"[tag - 0xCC]
        return _number(data, at, code)
    if tag <= 0x8F or tag in (0xDE, 0xDF):
        count, at = (tag & 0x0F, at) if tag <= 0x8F else _number(data, at, "H" if tag == 0xDE else "I")
        return _unpack_map(data, at, count)
    if tag <= 0x9F or tag in (0xDC, 0xDD):
        count, at = (tag & 0x0F, at) if tag <= 0x9F else _number(data, at, "H" if tag == 0xDC else "I")
        items = []
        for _ in range(count):
            item, at = unpack_message(data, at)
            items.append(item)
        return items, at
    if tag <= 0xBF or tag in (0xD9, 0xDA, 0xDB):
        size, at = (tag & 0x1F, at) if tag <= 0xBF else _number(data, at, "BHI"[tag - 0xD9])
        if at + size > len(data):
            raise CodeObjectError("metadata ends inside a string")
        return data[at : at + size].decode(), at + size
    raise CodeObjectError(f"metadata got MessagePack type {tag:#x}, which the AMDGPU backend does not write")


def _unpack_map(data: bytes, at: int, count: int) -> tuple[dict[Any, Any], int]:
    found = {}
    for _ in range(count):
        key, at = unpack_message(data, at)
        found[key], at = unpack_message(data, at)
    return found, at


def _number(data: bytes, at: int, code: str) -> tuple[int, int]:
    size = struct.calcsize(code)
    if at + size > len(data):
        raise CodeObjectError("metadata ends inside a number")
    return int(struct.unpack_from(">" + code, data, at)[0]), at + size
