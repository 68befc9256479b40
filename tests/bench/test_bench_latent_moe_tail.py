# SPDX-License-Identifier: Apache-2.0
"""The tail's workload and arms on the CPU, and its counted record from the emulator."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernellib.bench.cases.latent_moe_tail import (
    FUSED_BYTES,
    UNFUSED_TRAFFIC,
    TailWorkload,
    after_producer,
    compare_tail,
    tail_arms,
    tail_comparisons,
)
from kernellib.bench.errors import BenchError
from kernellib.bench.gates import Checker
from kernellib.bench.record import Record
from kernellib.bench.workload import EXACT_ROUNDING, check_rotation, check_values, fingerprints
from kernellib.numerics import bf16_ulp
from kernellib.ops.latent_moe_tail.config import WEIGHT_BYTES

SEED = 5
MI355X_LLC_BYTES = 256 * 2**20


@pytest.fixture(scope="module", params=[False, True], ids=["direct", "after_producer"])
def workload(request: pytest.FixtureRequest) -> TailWorkload:
    print(f"seed {SEED}")
    return TailWorkload(2, SEED, "cpu", after_producer=request.param)


def test_versions_change_in_place_and_the_fresh_one_changes_the_weights(workload: TailWorkload) -> None:
    workload.set_version(0)
    addresses = [tensor.data_ptr() for slot in workload.slots for tensor in slot.values()]
    first = fingerprints(workload)
    workload.set_version(1)
    second = fingerprints(workload)
    workload.set_version(workload.num_versions)
    fresh = fingerprints(workload)
    check_values(workload)
    workload.set_version(0)
    assert fingerprints(workload) == first
    assert [tensor.data_ptr() for slot in workload.slots for tensor in slot.values()] == addresses
    for name in ("routed", "norm_weight", "shared"):
        assert len({prints[0][name] for prints in (first, second, fresh)}) == 3
    assert first[0]["up_weight"] == second[0]["up_weight"] == fresh[1]["up_weight"]
    assert first[1]["up_weight"] == fresh[0]["up_weight"]


def test_eager_and_the_operator_pass_the_gate_on_every_slot(workload: TailWorkload) -> None:
    checker = Checker(workload)
    checker.learn(1)
    for arm in tail_arms("reference", names=("eager", "fused")):
        launch = arm.prepare(workload)
        outputs = [launch(slot_idx) for slot_idx in range(2)]
        result = checker.full(outputs, 1, arm.tolerance)
        assert result.reason is None
        assert result.min_bit_equal_fraction >= 0.995
        assert checker.num_wrong(outputs, 1, arm.tolerance) == 0
        swapped = outputs[::-1]  # each slot has its own answer
        assert not checker.full(swapped, 1, arm.tolerance).passed
        assert checker.num_wrong(swapped, 1, arm.tolerance) > 5000


def test_a_producer_writes_the_activations_of_its_version_before_each_call() -> None:
    print(f"seed {SEED}")
    workload = TailWorkload(2, SEED, "cpu", after_producer=True)
    assert workload.operator != TailWorkload.operator, "records of the two must not compare"
    checker = Checker(workload)
    for version in (1, 2):
        checker.learn(version)
        arm = after_producer(tail_arms("reference", names=("eager",))[0])
        launch = arm.prepare(workload)
        before = fingerprints(workload)
        for slot in workload.slots:
            for name in ("routed", "shared"):
                slot[name].fill_(math.nan)
        outputs = [launch(slot_idx) for slot_idx in range(2)]
        assert checker.full(outputs, version, arm.tolerance).reason is None
        assert fingerprints(workload) == before


def test_a_producer_wants_a_clock() -> None:
    with pytest.raises(BenchError, match="no clock"):
        compare_tail("emulator", with_producer=True)


def test_the_exact_gate_takes_a_tie_of_the_sum_and_no_other_two_units(workload: TailWorkload) -> None:
    checker = Checker(workload)
    checker.learn(1)
    expected = [workload.oracle(slot_idx) for slot_idx in range(2)]
    outputs = [torch.from_numpy(each.value).to(torch.bfloat16) for each in expected]
    assert checker.full(outputs, 1, EXACT_ROUNDING).min_bit_equal_fraction == 1.0
    (p,), y = expected[1].magnitudes, expected[1].value
    unit = bf16_ulp(np.fmax(np.abs(p), np.abs(y)))
    (below, above) = expected[1].alternatives
    index = int(np.flatnonzero((np.abs(above - y) == 2 * unit) & (2 * y - above != below))[0])
    outputs[1][index] = float(above[index])
    tie = checker.full(outputs, 1, EXACT_ROUNDING)
    assert (tie.reason, tie.max_ulp_error, tie.num_alternatives) == (None, 2.0, 1)
    assert checker.num_wrong(outputs, 1, EXACT_ROUNDING) == 0
    outputs[1][index] = float(2 * y[index] - above[index])  # as far off, on the other side
    wrong = checker.full(outputs, 1, EXACT_ROUNDING)
    assert wrong.reason == "slot 1: error of 2 ulp, wanted at most 1"
    assert checker.num_wrong(outputs, 1, EXACT_ROUNDING) == 1


def test_the_loose_gate_still_sees_a_missing_norm(workload: TailWorkload) -> None:
    checker = Checker(workload)
    checker.learn(0)
    (arm,) = tail_arms("reference", names=("eager",))
    unnormed = [
        torch.nn.functional.linear(each.routed * each.norm_weight, each.up_weight) + each.shared
        for each in workload.inputs
    ]
    assert not checker.full(unnormed, 0, arm.tolerance).passed


def test_eight_weights_are_more_than_the_last_level_cache(workload: TailWorkload) -> None:
    assert workload.slot_bytes == WEIGHT_BYTES == 51_380_224

    class Eight(TailWorkload):
        def __init__(self) -> None:
            self.slots = [workload.slots[0]] * 8

    assert check_rotation(Eight(), MI355X_LLC_BYTES) == pytest.approx(1.34, abs=0.01)


def test_which_arms_are_compared() -> None:
    names = ("eager", "compile", "max_autotune", "fused")
    assert [arm.name for arm in tail_arms("cuda", names=names)] == list(names)
    assert ("max_autotune", "fused") in tail_comparisons(names)
    assert tail_comparisons(("eager", "fused")) == [("eager", "fused")]
    with pytest.raises(BenchError, match="eager"):
        tail_arms("cuda", names=("fused",))
    with pytest.raises(BenchError, match="typo"):
        tail_arms("cuda", names=("eager", "typo"))


def test_the_emulator_counts_and_times_nothing() -> None:
    lines: list[str] = []
    record = compare_tail("emulator", seed=SEED, progress=lines.append)
    assert lines == ["gate: eager", "gate: fused"]
    assert record.valid
    assert not record.timed
    fused, eager = record.arm("fused"), record.arm("eager")
    assert fused["status"] == eager["status"] == "passed"
    assert fused["launches"] == {"source": "counted", "value": 1}
    assert fused["traffic"]["source"] == "counted"
    assert fused["traffic"]["read_bytes"] >= FUSED_BYTES - 14_336  # all but the result
    assert eager["launches"] == {"source": "modelled", "value": len(UNFUSED_TRAFFIC)}
    assert eager["traffic"]["read_bytes"] == WEIGHT_BYTES + 3 * 7168 + 2 * 14_336
    assert fused["times"] is eager["times"] is record.data["control"] is None
    assert Record.of(dict(record.data)) == record
