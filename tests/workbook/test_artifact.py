# SPDX-License-Identifier: Apache-2.0
"""Artifacts: the schema takes what notebooks write, refuses everything else; claims come from the file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernellib.workbook.artifact import (
    Claim,
    artifact_schema,
    assert_claims,
    load_artifact,
    to_plain,
    validate_artifact,
    write_artifact,
)
from kernellib.workbook.errors import ArtifactError, ClaimFailedError

GOOD = Claim("one launch", "pass", "1 launch", "counted")
BAD = Claim("fast", "fail", "9 us, wanted 8 us", "measured")
ALSO_BAD = Claim("right", "fail", "3 ulp, wanted 1", "checked")


def valid() -> dict[str, Any]:
    return {
        "schema": "kernellib.workbook.artifact/1",
        "notebook": "01_x",
        "created": "2026-01-01T00:00:00+00:00",
        "parameters": {"seed": 1},
        "claims": [{"name": "a", "verdict": "pass", "detail": "d", "source": "checked"}],
        "data": {},
    }


def test_the_schema_itself_is_valid() -> None:
    jsonschema = pytest.importorskip("jsonschema")  # its import is slow, and only this test needs it
    jsonschema.Draft7Validator.check_schema(artifact_schema())


def test_round_trip_keeps_values_and_numpy_becomes_plain(tmp_path: Path) -> None:
    data = {
        "errors": np.array([1.5, 2.5], dtype=np.float32),
        "count": np.int64(3),
        "path": tmp_path,
        "pair": (1, 2),
    }
    path = write_artifact(tmp_path / "deep" / "er", "01_x", parameters={"seed": 7}, claims=[GOOD], data=data)
    assert path == tmp_path / "deep" / "er" / "01_x.json"
    artifact = load_artifact(path)
    assert artifact["data"] == {"errors": [1.5, 2.5], "count": 3, "path": str(tmp_path), "pair": [1, 2]}
    assert artifact["parameters"] == {"seed": 7}
    assert artifact["claims"] == [
        {"name": "one launch", "verdict": "pass", "detail": "1 launch", "source": "counted"}
    ]
    assert list(path.parent.iterdir()) == [path], "no partial file stays behind"


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("schema", "other/1", "schema"),
        ("notebook", "", "notebook"),
        ("notebook", "a/b", "notebook"),
        ("claims", [], "claims"),
        ("parameters", [], "parameters"),
        ("data", None, "data"),
        ("extra", 1, "extra"),
        (
            "claims",
            [{"name": "a", "verdict": "maybe", "detail": "d", "source": "checked"}],
            "claims[0].verdict",
        ),
        (
            "claims",
            [{"name": "a", "verdict": "pass", "detail": "d", "source": "guessed"}],
            "claims[0].source",
        ),
        ("claims", [{"name": "a", "verdict": "pass", "detail": "", "source": "checked"}], "claims[0].detail"),
        ("claims", [{"name": "a", "verdict": "pass", "source": "checked"}], "claims[0]"),
        ("claims", valid()["claims"] * 2, "repeat"),
    ],
)
def test_a_broken_artifact_is_refused_by_field(field: str, value: Any, complaint: str) -> None:
    validate_artifact(valid())
    with pytest.raises(ArtifactError, match=re.escape(complaint)):
        validate_artifact({**valid(), field: value})


@pytest.mark.parametrize("field", sorted(valid()))
def test_every_field_is_required(field: str) -> None:
    artifact = valid()
    del artifact[field]
    with pytest.raises(ArtifactError, match=rf"must contain .*'{field}'.* properties"):
        validate_artifact(artifact)


def test_nothing_is_written_when_the_content_is_invalid(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="claims"):
        write_artifact(tmp_path, "01_x", parameters={}, claims=[], data={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), np.array([1.0, np.inf])])
def test_numbers_that_json_lacks_are_refused(value: Any) -> None:
    with pytest.raises(ArtifactError, match="finite"):
        to_plain({"x": [value]})


def test_objects_without_a_json_form_are_refused() -> None:
    with pytest.raises(ArtifactError, match="object"):
        to_plain(object())


def test_failing_claims_raise_after_the_file_is_written_and_all_are_named(tmp_path: Path) -> None:
    path = write_artifact(tmp_path, "01_x", parameters={}, claims=[GOOD, BAD, ALSO_BAD], data={})
    with pytest.raises(ClaimFailedError) as raised:
        assert_claims(path)
    text = str(raised.value)
    assert "2 of 3" in text
    assert "fast: 9 us, wanted 8 us" in text
    assert "right: 3 ulp, wanted 1" in text
    assert "one launch" not in text
    assert [claim["verdict"] for claim in load_artifact(path)["claims"]] == ["pass", "fail", "fail"]


def test_holding_claims_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_claims(write_artifact(tmp_path, "01_x", parameters={}, claims=[GOOD], data={}))
    assert "all 1 claims hold" in capsys.readouterr().out


def test_a_missing_or_mangled_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no artifact gone\.json"):
        load_artifact(tmp_path / "gone.json")
    (tmp_path / "half.json").write_text(json.dumps(valid())[:-10])
    with pytest.raises(ArtifactError, match=r"half\.json cannot be read"):
        load_artifact(tmp_path / "half.json")


@pytest.mark.parametrize(("holds", "verdict"), [(True, "pass"), (False, "fail"), (np.bool_(False), "fail")])
def test_check_turns_a_condition_into_a_verdict(holds: bool, verdict: str) -> None:
    assert Claim.check("x", holds, "d", "checked").verdict == verdict
