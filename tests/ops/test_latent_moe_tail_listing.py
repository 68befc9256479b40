# SPDX-License-Identifier: Apache-2.0
"""The compiled kernel is what the design says: no LDS, no scratch, requests in order, waits no stricter
than the data asked for."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from kernellib.emulator import kernel_resources, parse
from kernellib.ops.latent_moe_tail.config import (
    DEFAULT_CONFIG,
    LOADS_PER_ROW,
    TailConfig,
    config_space,
)

NUM_NORM_LOADS = 2 * LOADS_PER_ROW
CONFIGS = {
    "default": DEFAULT_CONFIG,
    "seven rows, four in flight": TailConfig(7, 4, 4, "normal", "preload"),
    "one row": TailConfig(1, 14, 1, "bypass", "load"),
}
Listing = Callable[[TailConfig], str]


def body(listing: str) -> list[str]:
    """Instructions of the kernel proper; the prologue for firmware without preloading is left out."""
    code = [
        line.strip() for line in listing.splitlines() if line.startswith("\t") and not line.startswith("\t.")
    ]
    code = code[: code.index("s_endpgm") + 1]
    branch = next((index for index, text in enumerate(code) if text.startswith("s_branch")), None)
    return code if branch is None else code[branch + 1 :]


def is_weight_load(text: str, config: TailConfig) -> bool:
    """Weight loads are those with a scalar row offset that is not the norm inputs' constant."""
    suffix = {"stream": " nt", "normal": "", "bypass": " nt sc1"}[config.weight_cache]
    pattern = rf"buffer_load_dwordx4 v\[\d+:\d+\], v\d+, s\[\d+:\d+\], s\d+ offen( offset:\d+)?{suffix}"
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_resources(tail_listing: Listing, config: TailConfig) -> None:
    resources = kernel_resources(parse(tail_listing(config)), config.kernel_name)
    print(resources)
    assert (resources.lds_bytes, resources.scratch_bytes) == (0, 0)
    assert (resources.vgpr_spills, resources.sgpr_spills, resources.agprs) == (0, 0, 0)
    assert resources.vgprs <= config.register_budget
    assert resources.max_workgroup_size == config.threads_per_workgroup
    assert resources.kernarg_bytes == 5 * 8 + 4
    assert resources.workgroups_per_cu(config.threads_per_workgroup) >= 1


def test_the_default_leaves_no_room_for_a_second_workgroup(tail_listing: Listing) -> None:
    """Then 256 workgroups cannot but spread over 256 compute units."""
    resources = kernel_resources(parse(tail_listing(DEFAULT_CONFIG)))
    assert resources.workgroups_per_cu(DEFAULT_CONFIG.threads_per_workgroup) == 1


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_no_lds_barrier_atomic_or_branch_in_the_body(tail_listing: Listing, config: TailConfig) -> None:
    for text in body(tail_listing(config)):
        assert not text.startswith(
            ("ds_", "s_barrier", "scratch_", "s_cbranch", "s_branch", "global_", "flat_")
        )
        assert "atomic" not in text


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_weight_load_has_the_cache_policy(tail_listing: Listing, config: TailConfig) -> None:
    code = body(tail_listing(config))
    loads = [text for text in code if "load_dwordx4" in text]
    assert len(loads) == NUM_NORM_LOADS + config.rows_per_wave * LOADS_PER_ROW
    for text in loads[:NUM_NORM_LOADS]:  # read by every wave: these belong in the caches
        assert not text.endswith((" nt", "sc1", "sc0"))
    for text in loads[NUM_NORM_LOADS:]:
        assert is_weight_load(text, config), text


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_all_rows_in_flight_are_requested_before_the_first_wait(
    tail_listing: Listing, config: TailConfig
) -> None:
    code = body(tail_listing(config))
    first_wait = next(index for index, text in enumerate(code) if "vmcnt" in text)
    requested = sum("load_dwordx4" in text for text in code[:first_wait])
    assert requested == NUM_NORM_LOADS + config.rows_in_flight * LOADS_PER_ROW


def vector_registers(operands: str) -> set[int]:
    """Numbers of the vector registers that an operand list names."""
    found: set[int] = set()
    for first, last, single in re.findall(r"\bv\[(\d+):(\d+)\]|\bv(\d+)\b", operands):
        found.update(range(int(first), int(last) + 1) if first else [int(single)])
    return found


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_waits_are_no_stricter_than_the_data_needs(tail_listing: Listing, config: TailConfig) -> None:
    """Loads return in order: what a wait lets through last is read before the next wait."""
    loads: list[set[int]] = []  # destination registers, in order of issue
    needed: set[int] = set()  # of the newest load that the last wait let through, until it is read
    for text in body(tail_listing(config)):
        mnemonic, _, operands = text.partition(" ")
        if mnemonic.startswith("buffer_load"):
            loads.append(vector_registers(operands.split(", ")[0]))
        elif (match := re.search(r"vmcnt\((\d+)\)", text)) is not None:
            assert not needed, f"waited for registers {needed} before they were read"
            needed = loads[len(loads) - 1 - int(match.group(1))]
        elif needed & vector_registers(operands.partition(", ")[2]):
            needed = set()
    assert not needed


def test_the_norm_is_computed_with_every_requested_row_outstanding(tail_listing: Listing) -> None:
    """No wait between the requests and the last rounding of n lets go of a weight load."""
    code = body(tail_listing(DEFAULT_CONFIG))
    last_rounding = max(index for index, text in enumerate(code) if text.startswith("v_pk_mul_f32"))
    waits = [int(m.group(1)) for text in code[:last_rounding] if (m := re.search(r"vmcnt\((\d+)\)", text))]
    assert min(waits) >= DEFAULT_CONFIG.rows_in_flight * LOADS_PER_ROW


def test_each_row_waits_for_itself_alone(tail_listing: Listing) -> None:
    """The waits count down by one through the rows: 27, 26, ... 0 for four rows of seven loads."""
    code = body(tail_listing(DEFAULT_CONFIG))
    num_loads = DEFAULT_CONFIG.rows_in_flight * LOADS_PER_ROW
    waits = [int(m.group(1)) for text in code if (m := re.search(r"vmcnt\((\d+)\)", text))]
    assert [wait for wait in waits if wait < num_loads] == list(range(num_loads - 1, -1, -1))


def test_arguments_are_preloaded_or_loaded(tail_listing: Listing) -> None:
    preload = parse(tail_listing(DEFAULT_CONFIG)).kernels[DEFAULT_CONFIG.kernel_name]
    assert preload.descriptor["user_sgpr_kernarg_preload_length"] == (5 * 8 + 4) // 4
    assert not any(text.startswith("s_load") for text in body(tail_listing(DEFAULT_CONFIG)))
    config = CONFIGS["one row"]
    loaded = parse(tail_listing(config)).kernels[config.kernel_name]
    assert loaded.descriptor["user_sgpr_kernarg_preload_length"] == 0


def test_subnormals_are_kept_and_rounding_is_to_nearest_even(tail_listing: Listing) -> None:
    descriptor = parse(tail_listing(DEFAULT_CONFIG)).kernels[DEFAULT_CONFIG.kernel_name].descriptor
    assert descriptor["float_denorm_mode_32"] == 3
    assert descriptor["float_denorm_mode_16_64"] == 3
    assert descriptor["float_round_mode_32"] == 0


def test_two_configurations_have_two_kernels(tail_listing: Listing) -> None:
    listings = [tail_listing(config) for config in CONFIGS.values()]
    assert len(set(listings)) == len(listings)
    for config, text in zip(CONFIGS.values(), listings, strict=True):
        assert list(parse(text).kernels) == [config.kernel_name]


@pytest.mark.slow
@pytest.mark.parametrize("config", list(config_space()), ids=lambda config: config.name)
def test_no_configuration_spills(tail_listing: Listing, config: TailConfig) -> None:
    resources = kernel_resources(parse(tail_listing(config)), config.kernel_name)
    assert (resources.scratch_bytes, resources.vgpr_spills, resources.agprs) == (0, 0, 0)
    assert resources.vgprs <= config.register_budget
    assert resources.workgroups_per_cu(config.threads_per_workgroup) >= 1
    assert resources.lds_bytes == 0
