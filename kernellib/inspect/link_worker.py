# SPDX-License-Identifier: Apache-2.0
"""The process behind ``linking.link_operator``: OPERATOR CONFIG FOLDER -> one .hsaco file for each kernel.

Runs with ARCH, FLYDSL_GPU_ARCH, COMPILE_ONLY and ROCM_PATH set, and FlyDSL's own backend.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .registry import inspection_of


def gpu_binary(lowered: str) -> bytes:
    """The object that a lowered MLIR module embeds."""
    from flydsl._mlir import ir  # noqa: PLC0415
    from flydsl._mlir.dialects import gpu  # noqa: PLC0415
    from flydsl.compiler.jit_function import _create_mlir_context  # noqa: PLC0415

    found: list[bytes] = []

    def visit(operation: Any) -> Any:
        if operation.name == "gpu.binary":
            image = gpu.ObjectAttr(ir.ArrayAttr(operation.attributes["objects"])[0]).object
            found.append(image.encode("latin-1") if isinstance(image, str) else bytes(image))
        return ir.WalkResult.ADVANCE

    with _create_mlir_context():
        ir.Module.parse(lowered).operation.walk(visit)
    if len(found) != 1:
        raise RuntimeError(f"module got {len(found)} GPU binaries, wanted one")
    return found[0]


def main(operator: str, config_name: str, folder: str) -> None:
    for name, (launcher, arguments) in inspection_of(operator).kernels(config_name or None).items():
        launcher(*arguments)
        artifact = launcher._last_compiled[1]  # type: ignore[attr-defined]  # FlyDSL offers no other way
        (Path(folder) / f"{name}.hsaco").write_bytes(gpu_binary(artifact.ir))


if __name__ == "__main__":
    main(*sys.argv[1:])
