# SPDX-License-Identifier: Apache-2.0
"""What is costly to make and used again: arrays of a step's size, bound listings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recycled(dict[K, V]):
    """Values by key, made on first use; all go when one more than `limit` are there and another is wanted.

    Not locked: keep one for each thread, or hold a lock.

    >>> squares = Recycled(lambda n: n * n, limit=1)
    >>> squares[3], squares[4], sorted(squares), squares[5], sorted(squares)
    (9, 16, [3, 4], 25, [5])
    """

    def __init__(self, make: Callable[[K], V], limit: int) -> None:
        super().__init__()
        self._make, self._limit = make, limit

    def __missing__(self, key: K) -> V:
        if len(self) > self._limit:
            self.clear()
        value = self[key] = self._make(key)
        return value
