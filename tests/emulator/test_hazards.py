# SPDX-License-Identifier: Apache-2.0
"""Missing wait states: each rule caught one state short of what it needs, silent with enough."""

from __future__ import annotations

import re

import pytest

from kernellib.emulator import MissingNopError, compile_to_assembly, parse, run_snippet
from kernellib.emulator.binding.program import leaders
from kernellib.emulator.hazards import find_hazards
from tests.emulator import flydsl_kernels as kernels

DPP = "quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf"
# (earlier instruction, later instruction, wait states that the rule asks for)
RULES = {
    "dpp": ("v_mov_b32_e32 v1, 0", f"v_mov_b32_dpp v2, v1 {DPP}", 2),
    "dpp after exec": ("v_cmpx_eq_u32_e32 vcc, v8, v8", f"v_mov_b32_dpp v2, v1 {DPP}", 5),
    "permlane": ("v_mov_b32_e32 v1, 0", "v_permlane32_swap_b32_e32 v1, v2", 2),
    "transcendental": ("v_rcp_f32_e32 v1, v0", "v_add_f32_e32 v2, v1, v1", 1),
    "sdwa": ("v_mov_b32_sdwa v1, v0 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_0",
             "v_add_u32_e32 v2, v1, v1", 1),
    "mask": ("v_cmp_eq_u32_e32 vcc, v0, v1", "v_cndmask_b32_e32 v2, v0, v1, vcc", 2),
    "sgpr": ("v_readfirstlane_b32 s2, v0", "v_add_u32_e32 v2, s2, v1", 2),
    "div_fmas": ("v_div_scale_f32 v1, vcc, v2, v3, v2", "v_div_fmas_f32 v4, v5, v6, v7", 4),
    "memory sgpr": ("v_readfirstlane_b32 s2, v0", "global_load_dword v2, v1, s[2:3]", 5),
    "lane select": ("v_readfirstlane_b32 s2, v0", "v_readlane_b32 s4, v1, s2", 4),
    "readlane": ("v_mov_b32_e32 v1, 0", "v_readlane_b32 s4, v1, 3", 1),
    "wide store": ("global_store_dwordx4 v[0:1], v[4:7], off", "v_mov_b32_e32 v6, 0", 2),
    "matrix source": ("v_mov_b32_e32 v8, 0", "v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], v[0:3]", 2),
    "matrix result": ("v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], v[0:3]", "v_mov_b32_e32 v9, v2", 8),
    "fp8 matrix result": ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:15], v[0:3] blgp:4",
                          "v_mov_b32_e32 v9, v2", 12),
    "dot": ("v_dot2c_f32_bf16_e32 v0, v1, v2", "v_mov_b32_e32 v3, v0", 3),
}  # fmt: skip


def hazards_of(text: str) -> dict[int, str]:
    program = parse(text + "\ns_endpgm\n")
    return find_hazards(program, leaders(program))


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    earlier, later, needed = RULES[name]
    for states in range(needed + 2):
        padding = f"s_nop {states - 1}" if states else ""
        found = hazards_of(f"{earlier}\n{padding}\n{later}")
        assert bool(found) == (states < needed), (states, found)
        # other instructions count as states, too
        found = hazards_of(f"{earlier}\n" + "s_mov_b32 s20, 0\n" * states + later)
        assert bool(found) == (states < needed), (states, found)


def test_hazard_over_a_branch_and_a_loop() -> None:
    over_branch = "v_mov_b32_e32 v1, 0\ns_cbranch_scc1 .Lnext\ns_nop 3\n.Lnext:\n" + RULES["dpp"][1]
    assert list(hazards_of(over_branch)) == [3]
    assert not hazards_of(over_branch.replace(".Lnext:\n", ".Lnext:\ns_nop 0\n"))
    loop = f".Lloop:\nv_mov_b32_dpp v2, v1 {DPP}\nv_mov_b32_e32 v1, v2\ns_cbranch_scc1 .Lloop"
    assert list(hazards_of(loop)) == [0]


def test_finding_is_raised_when_executed_only() -> None:
    bad = f"v_mov_b32_e32 v1, 0\nv_mov_b32_dpp v2, v1 {DPP}"
    with pytest.raises(
        MissingNopError, match=r"read through DPP \(v1\): 2 wait states are needed, there are 0"
    ):
        run_snippet(bad, check_hazards=True)
    skipped = f"s_branch .Lend\n{bad}\n.Lend:\n"
    assert run_snippet(skipped, check_hazards=True).scc == 0


@pytest.mark.parametrize(
    "name", ["axpy", "block_sum", "two_kernels", "relay", "histogram", "diverge", "buffer_copy"]
)
def test_compiled_kernels_raise_no_alarm_and_lose_none_of_their_padding(name: str) -> None:
    import inspect  # noqa: PLC0415

    import torch  # noqa: PLC0415

    run = getattr(kernels, name)()
    annotations = inspect.signature(run.func).parameters.values()
    args = [
        torch.zeros(64) if "Tensor" in str(p.annotation) else 1 for p in annotations if p.name != "stream"
    ]
    listing = compile_to_assembly(run, *args)
    program = parse(listing)
    assert find_hazards(program, leaders(program)) == {}
    lines = listing.split("\n")
    caught = padding = 0
    for number, line in enumerate(lines):
        if re.match(r"\ts_nop \d", line):
            padding += 1
            without = parse("\n".join(lines[:number] + lines[number + 1 :]))
            caught += bool(find_hazards(without, leaders(without)))
    # the compiler also pads for effects that are no hazard of this target's plain mode
    assert caught * 2 >= padding
