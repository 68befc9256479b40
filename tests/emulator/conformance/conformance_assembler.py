# SPDX-License-Identifier: Apache-2.0
"""Asks LLVM's assembler for gfx950 whether a line exists: testing a form that does not exist proves nothing.

The assembler is the one in the package ziglang, which the project installs to link code objects.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

_COMMAND = ("cc", "-target", "amdgcn-amdhsa-none", "-mcpu=gfx950", "-ferror-limit=0", "-c")
_ERROR = re.compile(r"listing\.s:(\d+):\d+: error: (.*)")


def is_available() -> bool:
    """Whether the assembler is installed."""
    return find_spec("ziglang") is not None


def rejected(lines: Iterable[str]) -> dict[str, str]:
    """The lines that the assembler does not take, with its complaint.  Labels may be undefined."""
    listing = list(dict.fromkeys(line for line in lines if line))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "listing.s"
        source.write_text("\n".join(listing) + "\n")
        command = [
            sys.executable,
            "-m",
            "ziglang",
            *_COMMAND,
            str(source),
            "-o",
            str(Path(folder) / "listing.o"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    found = {listing[int(number) - 1]: text for number, text in _ERROR.findall(done.stderr)}
    if done.returncode and not found:
        raise RuntimeError(f"the assembler failed: {done.stderr[:2000]}")
    return found
