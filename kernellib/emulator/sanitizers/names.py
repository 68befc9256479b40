# SPDX-License-Identifier: Apache-2.0
"""Names of the sanitizers and what `emulated(sanitize=...)` makes of them."""

from __future__ import annotations

from collections.abc import Collection

from kernellib.emulator.errors import SessionError

# what each one finds; the error it raises is in errors.py
SANITIZERS = {
    "out_of_bounds": "accesses outside every live allocation, in freed ones, past the LDS or the scratch",
    "missing_waits": "registers and LDS bytes touched before an s_waitcnt covers what writes them",
    "misaligned": "addresses that an instruction's alignment rule forbids or whose low bits it ignores",
    "missing_nops": "too few wait states between instructions that the hardware does not interlock",
    "barrier_divergence": "waves of a workgroup at different barriers, lanes switched off at one",
    "uninitialised_registers": "registers read that the wave has not written",
    "uninitialised_lds": "LDS bytes read that the workgroup has not written",
    "poisoned_memory": "bytes read of memory that the session was told is uninitialised",
    "lds_races": "LDS accesses of two waves that no barrier orders, one of them a write",
    "global_races": "global accesses of two waves or ranks that nothing orders, one of them a write",
}
ALWAYS = frozenset({"out_of_bounds", "missing_waits"})
DEFAULT = ALWAYS | {"misaligned", "missing_nops"}
ALL = frozenset(SANITIZERS)


def parse_sanitizers(value: str | Collection[str]) -> frozenset[str]:
    """The sanitizers that `value` asks for: "default", "none", "all", one name or several.

    "out_of_bounds" and "missing_waits" are always on.  Raises SessionError for a name that does not exist.
    """
    if isinstance(value, str):
        named = {"default": DEFAULT, "none": ALWAYS, "all": ALL}.get(value)
        if named is not None:
            return named
        value = (value,)
    if not isinstance(value, Collection) or not all(isinstance(name, str) for name in value):
        raise SessionError(f"sanitize={value!r}: wants a name or a collection of names")
    unknown = sorted(set(value) - ALL)
    if unknown:
        raise SessionError(
            f"sanitize={value!r}: {', '.join(map(repr, unknown))} is not among 'default', 'none', 'all', "
            + ", ".join(map(repr, SANITIZERS))
        )
    return ALWAYS | frozenset(value)
