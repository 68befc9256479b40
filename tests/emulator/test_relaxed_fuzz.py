# SPDX-License-Identifier: Apache-2.0
"""Injured listings under relaxed mode and every sanitizer: named errors or an end, no crash and no hang."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kernellib import emulator
from tests.emulator.flag_protocol import one_kernel
from tests.emulator.listings import listing
from tests.emulator.test_assembly import mutate
from tests.emulator.test_sanitizer_lds import EXCHANGE, WHOLE

LISTINGS = {
    "flags": (one_kernel("agent"), 3, 2, 64),
    "lds": (listing(EXCHANGE.format(**WHOLE), 1, lds_bytes=512), 1, 1, 128),
}


def swap(text: str, rng: random.Random) -> str:
    """Two instructions of the code trade places, one is dropped or doubled: most of these still assemble."""
    lines = text.splitlines()
    end = next(i for i, line in enumerate(lines) if ".section" in line)
    code = [i for i in range(end) if lines[i].startswith("\t") and not lines[i].startswith("\t.")]
    first, second = rng.choice(code), rng.choice(code)
    kind = rng.randrange(3)
    if kind == 0:
        lines[first], lines[second] = lines[second], lines[first]
    elif kind == 1:
        del lines[first]
    else:
        lines.insert(second, lines[first])
    return "\n".join(lines)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 20))])
@pytest.mark.parametrize("name", LISTINGS)
@pytest.mark.parametrize("mode", ["simple", "relaxed"])
def test_injured_listings_give_named_errors_only(mode: str, name: str, seed: int) -> None:
    text, num_arrays, grid, block = LISTINGS[name]
    rng = random.Random(seed)
    outcomes = {"ran": 0, "refused": 0, "found": 0}
    for number in range(40):
        injured = swap(text, rng) if number % 4 else mutate(text, rng)
        arrays = [np.zeros(256, np.uint32) for _ in range(num_arrays)]
        where = f"seed {seed}, mutation {number}, schedule_seed {seed}"
        try:
            with emulator.emulated(
                mode=mode, schedule_seed=seed, sanitize="all", instruction_limit=3000, quantum=500
            ) as session:
                session.run_assembly(injured, None, grid, block, arrays)
            outcomes["ran"] += 1
        except emulator.Finding as finding:
            outcomes["found"] += 1
            assert mode == "simple" or finding.schedule_seed == seed, where  # noqa: PT017 (which one is open)
        except emulator.EmulatorError as error:
            assert "internal error" not in str(error), f"{where}: {error}\n{injured}"  # noqa: PT017
            outcomes["refused"] += 1
        except BaseException as error:
            pytest.fail(f"{where}: {type(error).__name__}: {error}\n{injured}")
    assert min(outcomes["refused"], outcomes["found"]) > 3, outcomes


@pytest.mark.parametrize("mode", ["simple", "relaxed"])
def test_absurd_launches_are_refused(mode: str) -> None:
    text = LISTINGS["flags"][0]
    arrays = [np.zeros(64, np.uint32) for _ in range(3)]
    with emulator.emulated(mode=mode, sanitize="all") as session:
        for grid, block, arguments in (
            (0, 64, arrays), (1, 2048, arrays), (1 << 31, 64, arrays), (1, 64, arrays[:2]),
            (1, 64, [*arrays, 1]), ((1, 1, 1, 1), 64, arrays),
        ):  # fmt: skip
            with pytest.raises(emulator.LaunchArgumentError):
                session.run_assembly(text, None, grid, block, arguments)
        with pytest.raises(emulator.LaunchArgumentError, match="nonsense"):
            session.run_assembly(text, "nonsense", 2, 64, arrays)
        session.run_assembly(text, None, 2, 64, arrays)  # the session is none the worse
