# SPDX-License-Identifier: Apache-2.0
"""The artifact of a notebook: a JSON file with its parameters, its claims and its data.

Every notebook ends with::

    assert_claims(write_artifact(artifact_dir, "01_correctness", parameters=..., claims=..., data=...))

The order is forced by the types: claims are asserted *from the written file*, so a failing claim
always leaves its evidence behind. ``kernellib.workbook run`` demands the file, checks it against
``artifact.schema.json`` and fails the notebook when any claim in it fails.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import fastjsonschema
import numpy as np

from .errors import ArtifactError, ClaimFailedError

SCHEMA_NAME = "kernellib.workbook.artifact/1"

Verdict = Literal["pass", "fail"]
Source = Literal["measured", "counted", "modelled", "checked"]


@dataclasses.dataclass(frozen=True)
class Claim:
    """One statement that a notebook makes and stands for.

    Attributes:
        name: the statement, in a few words, unique within its notebook.
        verdict: "pass" or "fail".
        detail: the numbers behind the verdict, with units and the threshold.
        source: where the numbers come from: "measured" on a device, "counted" by the emulator or
            a driver, "modelled" from a stated model, or "checked" (values compared).
    """

    name: str
    verdict: Verdict
    detail: str
    source: Source

    @classmethod
    def check(cls, name: str, holds: bool | np.bool_, detail: str, source: Source) -> Claim:
        """The claim ``name``, passing exactly when ``holds`` is true.

        Example:
            >>> Claim.check("one launch", 1 == 1, "1 launch, wanted 1", "counted").verdict
            'pass'
        """
        return cls(name, "pass" if bool(holds) else "fail", detail, source)


def artifact_schema() -> dict[str, Any]:
    """The JSON schema of an artifact, as shipped in ``artifact.schema.json``."""
    schema: dict[str, Any] = json.loads(
        Path(__file__).with_name("artifact.schema.json").read_text(encoding="utf-8")
    )
    return schema


@lru_cache(maxsize=1)
def _validator() -> Callable[[Any], Any]:
    # jsonschema would do, but with JupyterLab's extras installed its import takes three seconds in
    # every kernel; nbformat brings this compiler along for the same reason.
    compiled: Callable[[Any], Any] = fastjsonschema.compile(artifact_schema())
    return compiled


def to_plain(value: Any) -> Any:
    """Turns ``value`` into what JSON has: numpy scalars and arrays, paths, tuples, dataclasses included.

    Raises:
        ArtifactError: a value has no JSON form, or a number is not finite (JSON has no NaN; store
            such a value as text, so that its meaning is explicit).
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        raise ArtifactError(
            f"artifact data got {value}, wanted a finite number; store it as text, str(value)"
        )
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence | set | frozenset):
        return [to_plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    raise ArtifactError(
        f"artifact data got a {type(value).__name__}, wanted a JSON value; make it numbers, text or lists"
    )


def validate_artifact(artifact: Any, where: str = "artifact") -> dict[str, Any]:
    """Checks ``artifact`` against the schema, and that claim names are unique.

    Returns:
        the artifact itself.

    Raises:
        ArtifactError: naming ``where`` and the offending field.
    """
    try:
        _validator()(artifact)
    except fastjsonschema.JsonSchemaException as error:
        raise ArtifactError(f"{where} does not follow {SCHEMA_NAME}: {error}") from error
    names = [claim["name"] for claim in artifact["claims"]]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ArtifactError(f"{where}: claim names repeat: {', '.join(repeated)}; give each its own name")
    checked: dict[str, Any] = artifact
    return checked


def artifact_path(artifact_dir: str | os.PathLike[str], notebook: str) -> Path:
    """Where the artifact of ``notebook`` (a stem) lies: ``<artifact_dir>/<notebook>.json``."""
    return Path(artifact_dir) / f"{notebook}.json"


def write_artifact(
    artifact_dir: str | os.PathLike[str],
    notebook: str,
    *,
    parameters: Mapping[str, Any],
    claims: Sequence[Claim],
    data: Mapping[str, Any],
) -> Path:
    """Writes ``<artifact_dir>/<notebook>.json``, whole or not at all.

    Args:
        artifact_dir: folder, made when missing.
        notebook: stem of the notebook's file name.
        parameters: the values the notebook ran with, by parameter name.
        claims: at least one; an artifact without claims proves nothing.
        data: anything else worth keeping, JSON values and numpy values.

    Returns:
        the path written, to hand to ``assert_claims``.

    Raises:
        ArtifactError: the content does not follow the schema or has no JSON form.
    """
    content = validate_artifact(
        {
            "schema": SCHEMA_NAME,
            "notebook": notebook,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "parameters": to_plain(parameters),
            "claims": [to_plain(claim) for claim in claims],
            "data": to_plain(data),
        },
        where=f"artifact of {notebook}",
    )
    path = artifact_path(artifact_dir, notebook)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)  # a reader never sees half a file
    return path


def load_artifact(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads and validates an artifact.

    Raises:
        ArtifactError: the file is missing, is no JSON, or does not follow the schema.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError(
            f"no artifact {path.name}: the notebook did not reach write_artifact, or wrote it elsewhere; "
            "its last cell must write it to artifact_dir"
        ) from error
    except (OSError, ValueError) as error:
        raise ArtifactError(f"artifact {path.name} cannot be read: {error}") from error
    return validate_artifact(content, where=f"artifact {path.name}")


def assert_claims(path: str | os.PathLike[str]) -> None:
    """Asserts every claim of a *written* artifact; prints one line when all hold.

    Args:
        path: what ``write_artifact`` returned.

    Raises:
        ArtifactError: the file is missing or invalid.
        ClaimFailedError: naming every failing claim with its detail.
    """
    claims = load_artifact(path)["claims"]
    failing = [claim for claim in claims if claim["verdict"] != "pass"]
    if failing:
        lines = [f"  - {claim['name']}: {claim['detail']} [{claim['source']}]" for claim in failing]
        raise ClaimFailedError(f"{len(failing)} of {len(claims)} claims fail:\n" + "\n".join(lines))
    print(f"all {len(claims)} claims hold; evidence in {Path(path).name}")
