# SPDX-License-Identifier: Apache-2.0
"""A producer that writes a payload and raises a flag, a consumer that waits: whole, or with a part less.

The sequences are those of the LLVM AMDGPU guide, memory model gfx942 (release: buffer_wbl2, s_waitcnt
vmcnt(0), store; acquire: load, s_waitcnt vmcnt(0), buffer_inv), at agent scope (sc1) or system scope (sc0
sc1).
"""

from __future__ import annotations

from tests.emulator.listings import listing

SCOPES = {"agent": "sc1", "system": "sc0 sc1"}
PARTS = ("release", "release wait", "acquire", "payload wait")

_PRODUCER = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    v_mov_b32_e32 v9, 0
    v_add_u32_e32 v2, 0x3e8, v0
    v_mov_b32_e32 v3, 1
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v2, s[4:5]
    {release}
    {release_wait}
    global_store_dword v9, v3, s[6:7] {scope}
"""
_CONSUMER = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_load_dwordx2 s[8:9], s[0:1], 0x10
    v_lshlrev_b32_e32 v1, 2, v0
    v_mov_b32_e32 v9, 0
    s_waitcnt lgkmcnt(0)
.Lspin{tag}:
    global_load_dword v4, v9, s[6:7] {scope}
    s_waitcnt vmcnt(0)
    v_readfirstlane_b32 s10, v4
    s_cmp_eq_u32 s10, 0
    s_cbranch_scc1 .Lspin{tag}
    {acquire}
    global_load_dword v5, v1, s[4:5]
    {payload_wait}
    global_store_dword v1, v5, s[8:9]
"""


def _parts(scope: str, without: str | None) -> dict[str, str]:
    bits = SCOPES[scope]
    parts = {
        "release": f"buffer_wbl2 {bits}",
        "release wait": "s_waitcnt vmcnt(0)",
        "acquire": f"buffer_inv {bits}",
        "payload wait": "s_waitcnt vmcnt(0)",
    }
    if without is not None:
        parts[without] = "s_nop 0"
    return {name.replace(" ", "_"): text for name, text in parts.items()} | {"scope": bits}


def one_kernel(scope: str, without: str | None = None) -> str:
    """Workgroup 0 produces, workgroup 1 consumes; arguments payload, flag, result."""
    parts = _parts(scope, without)
    body = f"""
    s_cmp_eq_u32 s2, 0
    s_cbranch_scc0 .Lconsumer
    {_PRODUCER.format(**parts)}
    s_endpgm
.Lconsumer:
    {_CONSUMER.format(tag="", **parts)}
    """
    return listing(body, 3)


def producer(scope: str, without: str | None = None) -> str:
    """The producer as a kernel of its own; arguments payload, flag."""
    return listing(_PRODUCER.format(**_parts(scope, without)), 2, name="producer")


def consumer(scope: str, without: str | None = None) -> str:
    """The consumer as a kernel of its own; arguments payload, flag, result."""
    return listing(_CONSUMER.format(tag="", **_parts(scope, without)), 3, name="consumer")
