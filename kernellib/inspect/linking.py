# SPDX-License-Identifier: Apache-2.0
"""Linked gfx950 code objects by FlyDSL's stock pipeline, with or without ROCm.

The stock pipeline assembles with LLVM inside FlyDSL and links with ``$ROCM_PATH/llvm/bin/ld.lld``. Where
ROCM_PATH has none, a temporary directory stands in for it, whose ld.lld is the one that the PyPI package
ziglang carries. Linking runs in a process of its own: the pipeline reads its settings from the environment,
and the caller may have another backend registered.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LINKER = Path("llvm/bin/ld.lld")
TIMEOUT_S = 300


class LinkerNotFoundError(RuntimeError):
    """Neither ROCm nor ziglang offers an ld.lld."""


class LinkError(RuntimeError):
    """FlyDSL's pipeline produced no code object; the text holds what it said."""


@contextmanager
def rocm_path() -> Iterator[Path]:
    """A ROCM_PATH with an ld.lld: the one that is set, or a temporary one around ziglang's.

    Raises:
        LinkerNotFoundError: there is neither.
    """
    set_path = os.environ.get("ROCM_PATH")
    if set_path and (Path(set_path) / LINKER).is_file():
        yield Path(set_path)
        return
    if importlib.util.find_spec("ziglang") is None:
        raise LinkerNotFoundError(
            f"linker got nothing: ROCM_PATH is {set_path!r} and holds no {LINKER}, and ziglang is "
            "not installed; set ROCM_PATH to a ROCm installation, or pip install ziglang"
        )
    with tempfile.TemporaryDirectory(prefix="kernellib-lld-") as folder:
        linker = Path(folder) / LINKER
        linker.parent.mkdir(parents=True)
        linker.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang ld.lld "$@"\n', encoding="utf-8")
        linker.chmod(0o755)
        yield Path(folder)


def link_operator(operator: str, config_name: str | None = None) -> dict[str, bytes]:
    """The linked code object of every kernel that a call of ``operator`` launches.

    Args: as ``listing.inspect_operator``.

    Returns:
        kernel name -> ELF image, as HIP would load it.

    Raises:
        UnknownOperatorError, ValueError: as ``listing.inspect_operator``.
        LinkerNotFoundError: no ld.lld anywhere.
        LinkError: the pipeline failed.
    """
    from .registry import inspection_of  # noqa: PLC0415

    names = list(inspection_of(operator).kernels(config_name))
    with rocm_path() as path, tempfile.TemporaryDirectory(prefix="kernellib-object-") as folder:
        environment = {
            **os.environ,
            "ROCM_PATH": str(path),
            "ARCH": "gfx950",
            "FLYDSL_GPU_ARCH": "gfx950",
            "COMPILE_ONLY": "1",
            "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
        }
        command = [sys.executable, "-m", "kernellib.inspect.link_worker", operator, config_name or "", folder]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        objects = {name: Path(folder) / f"{name}.hsaco" for name in names}
        missing = [name for name, file in objects.items() if not file.is_file()]
        # LLVM's errors go to stderr without failing the process.
        if result.returncode or missing or "error:" in result.stderr:
            raise LinkError(f"{operator}: no code object for {missing or names}:\n{result.stderr.strip()}")
        return {name: file.read_bytes() for name, file in objects.items()}
