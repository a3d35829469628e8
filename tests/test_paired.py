"""Paired differences: against figures worked out by hand, against known populations, and on too few samples."""

from __future__ import annotations

import numpy as np
import pytest
from paired import interval, paired


def counts(both, only_full, only_pruned, neither):
    full = [1] * both + [1] * only_full + [0] * only_pruned + [0] * neither
    pruned = [1] * both + [0] * only_full + [1] * only_pruned + [0] * neither
    return paired(full, pruned, [ours == theirs for ours, theirs in zip(full, pruned)])


def test_a_worked_case():
    found = counts(70, 10, 2, 18)
    assert (found.samples, found.full, found.pruned, found.worse, found.better) == (100, 0.8, 0.72, 10, 2)
    assert found.difference == pytest.approx(-0.08)
    # McNemar, exact: 2 * P(at most 2 of 12 | 1/2) = 2 * (1 + 12 + 66) / 4096
    assert found.p_value == pytest.approx(2 * 79 / 4096)
    # The mean of 100 differences with variance (12 / 100 - 0.08 ** 2), by the normal curve.
    spread = 1.96 * ((0.12 - 0.08**2) / 100) ** 0.5
    assert found.low == pytest.approx(-0.08 - spread, abs=0.011)
    assert found.high == pytest.approx(-0.08 + spread, abs=0.011)
    assert found.loyalty == pytest.approx(0.88)
    assert found == counts(70, 10, 2, 18)  # seeded
    assert found.verdict.startswith("worse: -1")


def test_verdicts():
    assert counts(700, 20, 100, 180).verdict.startswith("better: +")
    assert counts(20, 1, 0, 4).verdict.startswith("too few to tell: -12.0 to +0.0 points; about")
    found = counts(30, 4, 0, 6)  # the bootstrap alone would say worse: p is 1 / 8
    assert found.high < 0
    assert found.verdict.startswith("too few")
    assert counts(1500, 3, 2, 500).verdict.startswith("the same within a point: ")


@pytest.mark.parametrize("found", [(1700, 42, 32, 226), (495, 5, 0, 0), (0, 3, 0, 0), (190, 7, 3, 0),
                                   (900, 30, 30, 40)])
def test_as_many_as_are_said_to_tell_do(found):
    """So many samples of the same population, and not those that were asked, tell."""
    said = counts(*found).verdict
    assert said.startswith("too few")
    if "McNemar" in said:
        assert counts(*found).p_value > 0.05
        return
    wanted = int(said.split("about ")[1].split(" ")[0].replace(",", ""))
    assert wanted > sum(found)
    larger = counts(*(round(1.3 * count * wanted / sum(found)) for count in found))
    assert not larger.verdict.startswith("too few")


def test_no_difference_is_not_no_doubt():
    found = counts(20, 0, 0, 5)
    assert (found.difference, found.p_value, found.loyalty) == (0, 1, 1)
    assert found.high == -found.low == pytest.approx(1 - 0.05 ** (1 / 25))  # 11 %: one in nine could still differ
    assert "too few" in found.verdict
    assert counts(400, 0, 0, 0).verdict.startswith("the same within a point")
    assert "too few" in counts(0, 1, 0, 0).verdict


def test_graded_scores():
    found = paired([1, 0.6, 0.3, 0], [0.9, 0.6, 0.6, 0], [False, True, False, True])
    assert (found.worse, found.better, found.p_value, found.loyalty) == (1, 1, 1, 0.5)
    assert found.difference == pytest.approx(0.2 / 4)


def test_the_interval_covers_the_truth():
    draw = np.random.default_rng(0)
    covered = 0
    for seed in range(60):
        apart = draw.choice([-1, 0, 1], 150, p=[0.1, 0.85, 0.05])
        found = paired((apart < 0).astype(float), (apart > 0).astype(float), apart == 0, seed=seed)
        covered += found.low <= -0.05 <= found.high
    assert covered >= 52  # 57 expected


def test_interval_of_a_score():
    low, high = interval([1] * 80 + [0] * 20)
    assert low == pytest.approx(0.72, abs=0.011)
    assert high == pytest.approx(0.88, abs=0.011)
    assert interval([1.0] * 30) == (pytest.approx(0.05 ** (1 / 30)), 1)
    assert interval([0.5]) == (0, 1)


@pytest.mark.parametrize("scores", [([], [], []), ([1], [1, 0], [True, True]), ([1], [1], [])])
def test_unpaired(scores):
    with pytest.raises(ValueError, match="give as many of each"):
        paired(*scores)
