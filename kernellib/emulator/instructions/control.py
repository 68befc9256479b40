# SPDX-License-Identifier: Apache-2.0
"""Program control: branches, waits, barriers, hints, mode register (SOPP, and parts of SOP1 and SOPK)."""

from __future__ import annotations

from kernellib.emulator.instructions.registry import define_control

define_control("s_endpgm", "endpgm")
define_control("s_branch", "branch")
for _name, _on, _sense in (
    ("scc0", "scc", 0),
    ("scc1", "scc", 1),
    ("vccz", "vcc", 0),
    ("vccnz", "vcc", 1),
    ("execz", "exec", 0),
    ("execnz", "exec", 1),
):
    define_control(f"s_cbranch_{_name}", "cbranch", on=_on, sense=_sense)
define_control("s_waitcnt", "waitcnt")
define_control("s_barrier", "barrier")
define_control("s_sleep", "sleep")
define_control("s_trap", "trap")
define_control("s_memtime", "time")
define_control("s_memrealtime", "time")
define_control("s_getreg_b32", "getreg")
define_control("s_setreg_b32", "setreg")
define_control("s_setreg_imm32_b32", "setreg")
define_control("s_set_gpr_idx_on", "index_on")
define_control("s_set_gpr_idx_off", "index_off")
for _name in ("s_getpc_b64", "s_setpc_b64", "s_swappc_b64", "s_call_b64"):
    define_control(_name, "getpc")
for _name in ("s_nop", "s_setprio", "s_incperflevel", "s_decperflevel"):
    define_control(_name, "nop")
define_control("s_icache_inv", "nop", operands=0)
define_control("s_ttracedata", "nop", operands=0)
for _name in (
    "buffer_wbl2",
    "buffer_inv",
    "s_dcache_inv",
    "s_dcache_wb",
    "s_dcache_inv_vol",
    "s_dcache_wb_vol",
):
    define_control(_name, "cache")
