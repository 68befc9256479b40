# SPDX-License-Identifier: Apache-2.0
"""Named errors of the workbook. Each says what it got, what was wanted, and the remedy."""

from __future__ import annotations


class WorkbookError(RuntimeError):
    """Base of everything the workbook raises."""


class UsageError(WorkbookError):
    """The command line asked for something that does not exist (exit status 2)."""


class OutputFolderError(UsageError):
    """The folder of ``--out`` cannot be made or written to."""


class UnknownNotebookError(UsageError):
    """A NAME matches no notebook, or more than one."""


class UnknownParameterError(UsageError):
    """A ``-p NAME`` that none of the chosen notebooks declares."""


class ParameterTypeError(UsageError):
    """A ``-p NAME VALUE`` whose value does not fit the notebook's default."""


class NotebookFormatError(WorkbookError):
    """A notebook that the workbook cannot use: unreadable, or with a default that is no plain value."""


class ArtifactError(WorkbookError):
    """An artifact that is missing, stale, unreadable, or does not follow the schema."""


class ClaimFailedError(WorkbookError):
    """At least one claim of a notebook does not hold; the text names every one."""


class CellTimeoutError(WorkbookError):
    """A cell ran past ``--cell-timeout``; its kernel was killed."""


class RunTimeoutError(WorkbookError):
    """A notebook ran past ``--run-timeout``; its kernel was killed."""


class EarlyStopError(WorkbookError):
    """A notebook ended before its last cell without an exception (``sys.exit`` and the like)."""
