# SPDX-License-Identifier: Apache-2.0
"""Wait counters: what a wait covers, merged histories, and that many of them collapse without losing any."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kernellib.emulator import MissingWaitError, run_snippet
from kernellib.emulator.assembly import Instruction, parse
from kernellib.emulator.memory import MemoryMap
from kernellib.emulator.waits import MAX_HISTORIES, Outstanding, PendingKind, WaitState, unique

INSTRUCTION: Instruction = parse("k:\n\tglobal_load_dword v0, v[2:3], off\n").instructions[0]
LANES = np.arange(64)


def operation(register: int, kind: PendingKind = "vmem") -> Outstanding:
    return Outstanding(1 << register, INSTRUCTION, kind)


def issue(state: WaitState, *operations: Outstanding) -> WaitState:
    for one in operations:
        state.issue(one)
    return state


def registers(state: WaitState) -> set[int]:
    mask = state.pending()
    return {bit for bit in range(mask.bit_length()) if mask >> bit & 1}


def test_a_wait_keeps_the_newest() -> None:
    state = issue(WaitState(), *(operation(i) for i in range(5)))
    assert registers(state) == {0, 1, 2, 3, 4}
    state.wait(2, None)
    assert registers(state) == {3, 4}
    state.wait(None, 0)
    assert registers(state) == {3, 4}
    state.wait(0, None)
    assert registers(state) == set()


def test_scalar_loads_need_a_wait_for_zero() -> None:
    state = issue(WaitState(), operation(0, "smem"), operation(1, "smem"), operation(2, "lds"))
    state.wait(None, 1)
    assert registers(state) == {0, 1, 2}
    state.wait(None, 0)
    assert registers(state) == set()


def test_flat_counts_in_both_and_only_zero_covers_it() -> None:
    state = issue(WaitState(), operation(0, "flat"), operation(1, "vmem"))
    state.wait(1, None)
    assert registers(state) == {0, 1}
    state.wait(0, None)
    assert registers(state) == {0}
    state.wait(None, 0)
    assert registers(state) == set()


@pytest.mark.parametrize("seed", range(20))
def test_merged_histories_keep_what_either_keeps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = [operation(i, "lds" if i % 3 == 0 else "vmem") for i in range(12)]
    parts = [issue(WaitState(), *(pool[i] for i in rng.permutation(12)[:5])) for _ in range(2)]
    together = WaitState.merged(*(part.copy() for part in parts))
    for newest in (4, 2, 1, 0):
        for state in (*parts, together):
            state.wait(newest, newest)
        assert registers(together) == registers(parts[0]) | registers(parts[1]), seed


@pytest.mark.parametrize("seed", range(20))
def test_collapsed_histories_keep_exactly_the_registers_that_some_history_keeps(seed: int) -> None:
    """For operations that return in order, a wait leaves what it would leave of the histories one by one."""
    rng = np.random.default_rng(seed)
    pool = [operation(i) for i in range(40)]
    histories = [
        [pool[i] for i in rng.permutation(40)[: rng.integers(1, 9)]] for _ in range(MAX_HISTORIES + 5)
    ]
    collapsed = unique([(list(queue), []) for queue in histories])
    assert len(collapsed) == 1
    state = WaitState(collapsed)
    for newest in range(8, -1, -1):
        state.wait(newest, None)
        wanted = set().union(
            *({pool.index(op) for op in queue[max(len(queue) - newest, 0) :]} for queue in histories)
        )
        assert registers(state) == wanted, (seed, newest)


def test_few_histories_stay_apart_and_equal_ones_are_one() -> None:
    pool = [operation(i) for i in range(MAX_HISTORIES)]
    apart = [([one], []) for one in pool]
    assert unique([*apart, *apart]) == apart
    many = unique([*apart, ([operation(60)], [])])
    assert len(many) == 1
    assert registers(WaitState(many)) == {*range(MAX_HISTORIES), 60}


def test_collapsed_direct_loads_keep_every_dword() -> None:
    histories = [([Outstanding(0, INSTRUCTION, "vmem", np.array([i]))], []) for i in range(MAX_HISTORIES + 1)]
    state = WaitState(unique(histories))
    landed: list[np.ndarray] = []
    state.wait(0, None, landed)
    assert sorted(itertools.chain.from_iterable(landed)) == list(range(MAX_HISTORIES + 1))


LOOP = """
    s_mov_b32 s3, 0
.Lloop:
    s_bitcmp1_b32 s0, s3
    s_cbranch_scc0 .Lskip
    global_load_dword v4, v[2:3], off
.Lskip:
    s_add_u32 s3, s3, 1
    s_cmp_lt_u32 s3, 12
    s_cbranch_scc1 .Lloop
    {wait}
    v_add_u32_e32 v5, 1, v4
"""


@pytest.mark.parametrize("wait", ["s_waitcnt vmcnt(0)", "s_nop 0"])
def test_a_loop_whose_body_only_some_waves_enter(wait: str) -> None:
    """Each pass would double the number of histories; the wait is still told from its absence."""
    data = np.full(1, 41, np.uint32)
    memory = MemoryMap()
    memory.register_array(data)
    address = data.ctypes.data
    setup = {
        "vgprs": {2: address & 0xFFFFFFFF, 3: address >> 32, 4: 0},
        "sgprs": {0: np.arange(16) * 273 | 1},
        "num_waves": 16,
        "memory": memory,
    }
    if "nop" in wait:
        with pytest.raises(MissingWaitError, match="v4"):
            run_snippet(LOOP.format(wait=wait), **setup)
    else:
        assert (run_snippet(LOOP.format(wait=wait), **setup).vgpr(5) == 42).all()
