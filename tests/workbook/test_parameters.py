# SPDX-License-Identifier: Apache-2.0
"""Values from the command line: literals, types checked against defaults, unknown names refused."""

from __future__ import annotations

from typing import Any

import pytest

from kernellib.workbook.cli import join_parameter_pairs, parse_overrides
from kernellib.workbook.errors import ParameterTypeError, UnknownParameterError, UsageError
from kernellib.workbook.parameters import ParameterSpec, check_known, convert, select

SPECS = {
    "trials": ParameterSpec("trials", 3),
    "target": ParameterSpec("target", "auto"),
    "seed": ParameterSpec("seed", 0),
}


@pytest.mark.parametrize(
    ("default", "text", "value"),
    [
        (3, "5", 5),
        (3, "-5", -5),
        (1.0, "2", 2.0),
        (1.0, "1e-6", 1e-6),
        (True, "False", False),
        (True, "false", False),
        ("auto", "emulator", "emulator"),
        ("auto", "'quoted'", "quoted"),
        ("auto", "5", "5"),
        ("auto", "", ""),
        ([1, 2], "[3]", [3]),
        ([1, 2], "(3, 4)", [3, 4]),
        ([], '["a", 1]', ["a", 1]),
        (["a"], '["b"]', ["b"]),
        ({"a": 1}, '{"b": null}', {"b": None}),
        (None, "7", 7),
        (None, "null", None),
        (None, "text", "text"),
    ],
)
def test_a_value_that_fits_is_converted(default: Any, text: str, value: Any) -> None:
    got = convert(ParameterSpec("x", default), text)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("default", "text"),
    [
        (3, "2.5"),
        (3, "many"),
        (3, "True"),
        (True, "1"),
        (1.0, "True"),
        (1.0, "fast"),
        ([1], "3"),
        ([1], "['a']"),
    ],
)
def test_a_value_that_does_not_fit_names_both_types(default: Any, text: str) -> None:
    with pytest.raises(ParameterTypeError, match=rf"parameter x: got .*wanted {type(default).__name__}"):
        convert(ParameterSpec("x", default), text)


def test_common_values_go_only_where_they_are_declared_and_overrides_win() -> None:
    common = {"target": "emulator", "profile": "quick", "seed": None}
    assert select(SPECS, common, {}) == {"target": "emulator"}
    assert select(SPECS, common, {"target": "cuda", "trials": "9", "elsewhere": "1"}) == {
        "target": "cuda",
        "trials": 9,
    }


def test_an_unknown_name_lists_the_known_ones() -> None:
    check_known(["trials"], [{}, SPECS])
    with pytest.raises(UnknownParameterError, match=r"'trails'.*seed, target, trials"):
        check_known(["trials", "trails"], [SPECS])


def test_pairs_are_joined_for_typer_and_parsed_back() -> None:
    joined = join_parameter_pairs(
        ["run", "a", "-p", "seed", "-1", "--parameter", "x=2", "--out", "o", "-p", "y", "a=b"]
    )
    assert joined == ["run", "a", "-p", "seed=-1", "--parameter", "x=2", "--out", "o", "-p", "y=a=b"]
    assert parse_overrides(["seed=-1", "y=a=b"]) == {"seed": "-1", "y": "a=b"}


@pytest.mark.parametrize("pairs", [["seed"], ["=3"], ["a=1", "a=2"]])
def test_a_malformed_pair_is_refused(pairs: list[str]) -> None:
    with pytest.raises(UsageError):
        parse_overrides(pairs)
