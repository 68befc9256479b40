# SPDX-License-Identifier: Apache-2.0
"""Which captures a trial times, and in which order. Balanced by construction; tests count it out.

Where a captured call's buffers happen to lie moves its time by a few tenths of a percent on some GPUs, and
keeps doing so until it is captured again: no number of trials averages that out. So every arm is captured
``NUM_CAPTURES`` times, each with buffers of its own, and trials go through the captures:

    trial       0    1    2    3    4    5   ...  14   15   16 ...
    block       0    0    1    1    2    2         7    7    8
    order       AB   BA   AB   BA   AB   BA        AB   BA   AB
    captures    0/0  0/0  1/1  1/1  2/2  2/2       7/7  7/7  0/0     (reference / tested) of a comparison
    control     0/1  1/0  1/2  2/1  2/3  3/2       7/0  0/7  0/1     the baseline against itself

- A block is two trials, AB then BA, on the same captures: in the geometric mean of its two ratios, what the
  place in a trial does to a time divides out, and a steady drift as well.
- A comparison's block ``b`` times capture ``b % NUM_CAPTURES`` of both arms, so that its blocks are as many
  repetitions of the experiment, buffers included, as there are captures.
- The control times two different captures of the baseline and swaps their roles within a block: where
  they lie divides out of each block exactly, and everything else that could set equal arms apart stays in it
  (a bias in one order, a clock that favours a role, a schedule that is not balanced).
- Input versions change with every trial. With a number of versions that is odd, every capture meets every
  version in either order, all equally often over ``2 * NUM_CAPTURES * versions`` trials.

Eight captures, because the interval is a bootstrap over them: with 8 it covers the truth in more than 90 % of
simulated runs, with 2 in half of them (tests/bench/test_bench_placement.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NUM_CAPTURES = 8
TRIALS_IN_BLOCK = 2
# Every capture takes part in at least one block.
MIN_TRIALS = TRIALS_IN_BLOCK * NUM_CAPTURES

Order = Literal["AB", "BA"]


@dataclass(frozen=True)
class Turn:
    """One trial of a pair of arms: "AB" times the reference arm first; which capture of either."""

    order: Order
    reference: int
    tested: int


def turn_of(trial: int, *, control: bool = False) -> Turn:
    """The turn of a comparison, or of the control, in a trial.

    Example:
        >>> turn_of(3)
        Turn(order='BA', reference=1, tested=1)
        >>> turn_of(3, control=True)
        Turn(order='BA', reference=2, tested=1)
    """
    block, place = divmod(trial, TRIALS_IN_BLOCK)
    capture = block % NUM_CAPTURES
    order: Order = "BA" if place else "AB"
    if not control:
        return Turn(order, capture, capture)
    other = (capture + 1) % NUM_CAPTURES
    return Turn(order, other, capture) if place else Turn(order, capture, other)


def whole_blocks(trials: int) -> int:
    """``trials``, rounded up to whole blocks."""
    return trials + trials % TRIALS_IN_BLOCK
