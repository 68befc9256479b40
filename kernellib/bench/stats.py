# SPDX-License-Identifier: Apache-2.0
"""Statistics of paired trials: the median ratio, its bootstrap interval, and what may be claimed from it.

A trial times both arms one after the other, so that what drifts slowly (clocks, temperature) divides
out of the trial's ratio. The trials are not independent, though: a capture (see ``schedule``) that lies
badly is slow in each of its trials, so that their ratios have as many modes as there are captures, and
drawing trials would promise a precision that more trials of the same captures cannot give. So, from the
inside out:

1. block      geometric mean of the two ratios of an AB and a BA trial on the same captures
2. capture    median of its blocks: one number for each repetition with buffers of its own
3. result     median over the captures, with a percentile bootstrap interval that draws captures with
              replacement [Efron and Tibshirani, "An Introduction to the Bootstrap", chapters 8 and 13; why
              only the outermost level is drawn: Davison and Hinkley, "Bootstrap Methods and their
              Application", section 3.8]

The percentile method, not BCa: the acceleration that BCa takes from a jackknife is not consistent for a
median [Efron and Tibshirani, chapter 11].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .errors import MethodError
from .schedule import TRIALS_IN_BLOCK

Verdict = Literal["faster", "slower", "no difference"]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A median with its confidence interval, all in the unit of the values."""

    median: float
    low: float
    high: float
    confidence: float

    @property
    def half_width(self) -> float:
        """Half the interval's width, relative to the median."""
        return (self.high - self.low) / 2 / abs(self.median)

    @property
    def contains_one(self) -> bool:
        """Whether a ratio of 1 (no difference) is inside."""
        return self.low <= 1.0 <= self.high

    @property
    def verdict(self) -> Verdict:
        """What an interval of reference time / tested time allows to say about the tested arm."""
        if self.contains_one:
            return "no difference"
        return "faster" if self.low > 1.0 else "slower"


def slowest_rank(seconds: Sequence[float]) -> float:
    """The time of a trial on several ranks: the maximum, since the step ends when the last rank does.

    Raises:
        MethodError: no times, or one that is not positive and finite.
    """
    times = np.asarray(seconds, dtype=np.float64)
    if times.ndim != 1 or times.size == 0 or not bool(np.all(np.isfinite(times) & (times > 0.0))):
        raise MethodError(f"seconds got {list(seconds)}, wanted one positive time a rank; look at the timer")
    return float(times.max())


def bootstrap_median(
    values: Sequence[float], *, confidence: float = 0.95, num_resamples: int = 4999, seed: int = 0
) -> Interval:
    """Median of ``values`` with its percentile bootstrap interval.

    Args:
        values: at least two finite numbers.
        confidence: of the interval, above 0 and below 1.
        num_resamples: of the bootstrap.
        seed: of the resampling, so that a record's interval can be computed again from its samples.

    Raises:
        MethodError: fewer than two values, or one that is not finite.

    Example:
        >>> interval = bootstrap_median([1.0, 1.1, 1.2, 1.3, 1.4])
        >>> interval.median, interval.low <= 1.2 <= interval.high
        (1.2, True)
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size < 2 or not bool(np.all(np.isfinite(array))):
        raise MethodError(f"values got {array.size} values, wanted at least two finite ones; run more trials")
    median = float(np.median(array))
    if float(array.min()) == float(array.max()):  # scipy warns of a degenerate distribution
        return Interval(median, median, median, confidence)
    from scipy.stats import bootstrap  # noqa: PLC0415  (takes a second to import)

    result = bootstrap(
        (array,),
        np.median,
        confidence_level=confidence,
        n_resamples=num_resamples,
        method="percentile",
        random_state=np.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    return Interval(median, float(low), float(high), confidence)


def capture_ratios(ratios: Sequence[float], captures: Sequence[tuple[int, int]]) -> list[float]:
    """Steps 1 and 2 of this module's docstring.

    Args:
        ratios: of all trials, in order; an odd one at the end is left out.
        captures: (reference capture, tested capture) of each trial. Blocks whose first trials agree in it
            belong together.

    Returns:
        one ratio for each such pair of captures, in the order of their first blocks.

    Example:
        >>> capture_ratios([2.0, 8.0, 1.0, 1.0], [(0, 0), (0, 0), (1, 1), (1, 1)])
        [4.0, 1.0]
    """
    if len(captures) != len(ratios):
        raise MethodError(f"captures got {len(captures)} entries, wanted {len(ratios)}, one for each trial")
    blocks: dict[tuple[int, int], list[float]] = {}
    for first in range(0, len(ratios) - 1, TRIALS_IN_BLOCK):
        ratio = math.sqrt(ratios[first] * ratios[first + 1])
        reference, tested = captures[first]  # a list in a record, which is no key
        blocks.setdefault((reference, tested), []).append(ratio)
    return [float(np.median(values)) for values in blocks.values()]


def ratio_interval(
    reference_s: Sequence[float],
    tested_s: Sequence[float],
    captures: Sequence[tuple[int, int]],
    *,
    resolution_s: float = 0.0,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Median of reference / tested over captures, never finer than the timer.

    ratio_i = reference_i / tested_i; above 1 the tested arm is faster. The bootstrap interval is widened
    by resolution / (shorter median) on either side: quantised times can agree to the last bit, and
    a difference below the timer's resolution is no evidence.

    Args:
        reference_s, tested_s: seconds of each trial, equally many, in trial order.
        captures: as ``capture_ratios``.
        resolution_s: the timer's resolution in seconds.
        confidence, seed: as ``bootstrap_median``.
    """
    if len(reference_s) != len(tested_s):
        raise MethodError(
            f"tested_s got {len(tested_s)} samples, wanted {len(reference_s)}, one for each pair"
        )
    reference, tested = np.asarray(reference_s, np.float64), np.asarray(tested_s, np.float64)
    values = capture_ratios((reference / tested).tolist(), captures)
    plain = bootstrap_median(values, confidence=confidence, seed=seed)
    blur = resolution_s / min(float(np.median(reference)), float(np.median(tested)))
    return Interval(plain.median, plain.low * (1 - blur), plain.high * (1 + blur), confidence)


def percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """p10, p50 and p90 (linear interpolation)."""
    p10, p50, p90 = np.percentile(np.asarray(seconds, np.float64), [10, 50, 90])
    return float(p10), float(p50), float(p90)
