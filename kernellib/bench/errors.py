# SPDX-License-Identifier: Apache-2.0
"""Errors of the measuring code. Each says what it got, what it wanted and what to do."""

from __future__ import annotations


class BenchError(RuntimeError):
    """A measurement that cannot be made here."""


class MethodError(ValueError):
    """A parameter of the method that makes no sense."""


class TimedInputsError(ValueError):
    """Inputs that must not be timed: constant, mostly zero, not finite, equal in two slots, unchanged
    between versions."""


class RotationError(ValueError):
    """A rotation that the last-level cache could hold, so that timed calls would not read memory."""


class RecordError(ValueError):
    """A record that is missing, is no JSON, or does not follow its schema."""


class ReadmeError(ValueError):
    """A README without the two markers between which measured figures go."""
