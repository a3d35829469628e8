"""Two settings on the same samples: how far apart they are, and whether that many samples can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

import numpy as np
from scipy.stats import binomtest, bootstrap

MARGIN = 0.01
"""A difference of score that matters: one point of a hundred."""
LEVEL = 0.95


@dataclass(frozen=True)
class Paired:
    """A setting against the full model on `samples` questions that both answered.

    Args:
        samples: how many.
        full, pruned: the mean scores, from 0 to 1.
        difference: pruned - full.
        low, high: the ends of its 95 % interval.
        worse, better: samples that the setting scores lower, and higher, than the full model.
        p_value: McNemar's exact test on those two counts: how likely so uneven a split is where neither is better.
        loyalty: the share of answers that are the full model's, word for word.
    """

    samples: int
    full: float
    pruned: float
    difference: float
    low: float
    high: float
    worse: int
    better: int
    p_value: float
    loyalty: float

    @property
    def verdict(self) -> str:
        """What can be said, in words. For a difference both must speak: of few differing samples the bootstrap's
        interval is too narrow, and McNemar's test is exact."""
        interval = f"{100 * self.low:+.1f} to {100 * self.high:+.1f} points"
        sure = self.p_value < 1 - LEVEL
        if self.high < 0 and sure:
            return f"worse: {interval}"
        if self.low > 0 and sure:
            return f"better: {interval}"
        if max(-self.low, self.high) <= MARGIN:
            return f"the same within a point: {interval}"
        if not self.low <= 0 <= self.high:
            return f"too few to tell: {interval}; McNemar's p is {self.p_value:.2f}"
        # The interval narrows with the root of the number of samples: until it leaves out 0, or stays within a point.
        half, apart = (self.high - self.low) / 2, abs(self.difference)
        ways = [half / room for room in (apart, MARGIN - apart) if room > 0]
        wanted = max(ceil(self.samples * min(ways) ** 2 / 100), self.samples // 100 + 1) * 100
        return f"too few to tell: {interval}; about {wanted:,} would tell"

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}


def paired(full: Sequence[float], pruned: Sequence[float], same: Sequence[bool], *, seed: int = 0) -> Paired:
    """Compares two settings, sample by sample.

    The interval is the percentile bootstrap's over samples (10,000 draws, seeded). Where no sample's score differs a
    bootstrap would claim that none ever does: there it is the exact bound on how many of all could, 3 / N or so.

    Graded scores (VQA accuracy, ANLS) enter McNemar's test by whether they are lower or higher: the sign test, which
    for scores of 0 and 1 is McNemar's.

    Args:
        full, pruned: scores from 0 to 1 of the same samples, `[N]`.
        same: whether the answers are the same, `[N]`.
        seed: of the bootstrap.

    Raises:
        ValueError: there are no samples, or not as many of one as of the others.
    """
    ours, theirs = np.asarray(pruned, dtype=float), np.asarray(full, dtype=float)
    count = len(theirs)
    if not count or not len(ours) == count == len(same):
        raise ValueError(f"there are {count} full and {len(ours)} pruned scores and {len(same)} comparisons; give as "
                         "many of each, and at least one")
    apart = ours - theirs
    worse, better = int((apart < 0).sum()), int((apart > 0).sum())
    if worse + better:
        low, high = _of_mean(apart, seed) if count > 1 else (-1.0, 1.0)
        p_value = float(binomtest(min(worse, better), worse + better).pvalue)
    else:
        high = _bound(count)
        low, p_value = -high, 1.0
    return Paired(count, float(theirs.mean()), float(ours.mean()), float(apart.mean()), low, high, worse, better,
                  p_value, float(np.mean(same)))


def interval(scores: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of a mean score, by the same bootstrap; all of 0 to 1 for a single sample."""
    values = np.asarray(scores, dtype=float)
    if len(values) < 2:
        return 0.0, 1.0
    if (values == values[0]).all():
        bound = _bound(len(values))
        return max(0.0, float(values[0]) - bound), min(1.0, float(values[0]) + bound)
    return _of_mean(values, seed)


def _of_mean(values: np.ndarray[Any, np.dtype[np.float64]], seed: int) -> tuple[float, float]:
    found = bootstrap((values,), np.mean, n_resamples=9999, batch=max(1, 10_000_000 // len(values)), rng=seed,
                      confidence_level=LEVEL, method="percentile").confidence_interval
    return float(found.low), float(found.high)


def _bound(count: int) -> float:
    """The largest share of all samples that may differ where none of `count` does."""
    return 1 - (1 - LEVEL) ** (1 / count)
