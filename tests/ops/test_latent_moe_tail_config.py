# SPDX-License-Identifier: Apache-2.0
"""TailConfig: what is refused, names that identify, and the tuned-config file."""

import dataclasses
import json
from pathlib import Path

import pytest

from kernellib.ops.latent_moe_tail.config import (
    DEFAULT_CONFIG,
    LOADS_PER_ROW,
    MODEL_DIM,
    NUM_COMPUTE_UNITS,
    WEIGHT_BYTES,
    TailConfig,
    TailConfigError,
    config_space,
    load_tuned,
    save_tuned,
)


def test_shape_constants() -> None:
    assert WEIGHT_BYTES == 51_380_224
    assert LOADS_PER_ROW == 7


def test_default_fills_every_compute_unit_once() -> None:
    assert DEFAULT_CONFIG.num_workgroups == NUM_COMPUTE_UNITS
    assert DEFAULT_CONFIG.balanced
    assert DEFAULT_CONFIG.weight_bytes_in_flight == WEIGHT_BYTES // NUM_COMPUTE_UNITS == 200_704
    # A second workgroup cannot join the first on a compute unit: 7 + 7 waves of more than 128 registers.
    assert 2 * DEFAULT_CONFIG.waves_per_workgroup > 8
    assert DEFAULT_CONFIG.estimated_registers > 168


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rows_per_wave": 0}, "rows_per_wave got 0"),
        ({"rows_per_wave": -4}, "rows_per_wave got -4"),
        ({"rows_per_wave": True}, "rows_per_wave got True"),
        ({"rows_per_wave": 4.0}, "rows_per_wave got 4.0"),
        ({"rows_per_wave": "4"}, "rows_per_wave got '4'"),
        ({"waves_per_workgroup": None}, "waves_per_workgroup got None"),
        ({"rows_per_wave": 3}, "divisor of 7168"),
        ({"rows_per_wave": 5, "rows_in_flight": 1}, "divisor of 7168"),
        ({"waves_per_workgroup": 32}, "at most 16"),
        ({"rows_per_wave": 2}, "at most rows_per_wave, 2"),
        ({"rows_per_wave": 1, "waves_per_workgroup": 16, "rows_in_flight": 0}, "rows_in_flight got 0"),
        ({"rows_per_wave": 2, "waves_per_workgroup": 14, "rows_in_flight": 2}, "registers"),
        ({"rows_per_wave": 7, "waves_per_workgroup": 4, "rows_in_flight": 7}, "registers"),
        ({"weight_cache": "nt"}, "weight_cache got 'nt'"),
        ({"weight_cache": None}, "weight_cache got None"),
        ({"weight_cache": ["stream"]}, "weight_cache got"),
        ({"arguments": "preloaded"}, "arguments got 'preloaded'"),
    ],
)
def test_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(TailConfigError, match=says):
        dataclasses.replace(DEFAULT_CONFIG, **changes)  # type: ignore[arg-type]


def test_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT_CONFIG.rows_per_wave = 2  # type: ignore[misc]
    assert len({DEFAULT_CONFIG, TailConfig(), TailConfig(weight_cache="normal")}) == 2


def test_space_is_valid_balanced_and_named_apart() -> None:
    space = list(config_space())
    assert len(space) > 50
    assert DEFAULT_CONFIG in space
    assert len(set(space)) == len(space)
    assert len({config.kernel_name for config in space}) == len(space)
    for config in space:
        assert config.balanced
        assert config.num_workgroups * config.rows_per_workgroup == MODEL_DIM
        assert config.kernel_name.isidentifier()
        assert TailConfig.from_name(config.name) == config
        assert TailConfig.from_dict(config.to_dict()) == config
    assert list(config_space()) == space


@pytest.mark.parametrize("name", ["", "r4", "r04_w7_f4_stream_preload", "r3_w7_f3_stream_preload", None, 4])
def test_other_names_are_refused(name: object) -> None:
    with pytest.raises(TailConfigError):
        TailConfig.from_name(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"rows": 4}, {"rows_per_wave": "4"}])
def test_dicts_with_other_fields_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(TailConfigError):
        TailConfig.from_dict({**DEFAULT_CONFIG.to_dict(), **change})
    with pytest.raises(TailConfigError):
        TailConfig.from_dict({})


def test_package_file_is_valid_for_every_target() -> None:
    for target in ("mi355x", "emulator"):
        assert load_tuned(target).balanced


def test_tuned_file_round_trip_keeps_other_targets(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tuned.json"
    first, second = TailConfig(weight_cache="normal"), TailConfig(rows_per_wave=7, waves_per_workgroup=4)
    save_tuned(path, first, {"target": "mi355x", "source": "measured", "device": "a"})
    save_tuned(path, second, {"target": "emulator", "source": "modelled"})
    assert load_tuned("mi355x", path) == first
    assert load_tuned("emulator", path) == second
    assert load_tuned("elsewhere", path) == DEFAULT_CONFIG
    assert json.loads(path.read_text())["targets"]["mi355x"]["provenance"]["device"] == "a"
    assert [file.name for file in path.parent.iterdir()] == ["tuned.json"]


@pytest.mark.parametrize("provenance", [{}, {"target": "mi355x"}, {"target": 3, "source": "measured"}])
def test_tuned_file_without_provenance_is_refused(tmp_path: Path, provenance: dict[str, object]) -> None:
    with pytest.raises(TailConfigError, match="provenance"):
        save_tuned(tmp_path / "t.json", DEFAULT_CONFIG, provenance)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": "other"}',
        '{"schema": "kernellib.latent_moe_tail.tuned/1", "targets": []}',
        '{"schema": "kernellib.latent_moe_tail.tuned/1", "targets": {"mi355x": {}}}',
        '{"schema": "kernellib.latent_moe_tail.tuned/1", "targets": {"mi355x": {"config": {"rows": 1}}}}',
    ],
)
def test_other_files_are_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(TailConfigError):
        load_tuned("mi355x", path)
    with pytest.raises(TailConfigError):
        save_tuned(path, DEFAULT_CONFIG, {"target": "mi355x", "source": "measured"})
    assert path.read_text() == text


def test_missing_file() -> None:
    with pytest.raises(FileNotFoundError):
        load_tuned("mi355x", "/nonexistent/tuned.json")
