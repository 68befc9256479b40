# SPDX-License-Identifier: Apache-2.0
"""``python -m kernellib.bench``."""

from .cli import app

app(prog_name="python -m kernellib.bench")
