"""The sequential test of a trial."""

import random

from autopar.session.round_times import RoundTimes


def rounds(steps: list[float], noise: float, count: int) -> RoundTimes:
    """Times of plans on a machine that becomes twice as slow."""
    draw, times = random.Random(0), RoundTimes(list(range(len(steps))))
    for number in range(count):
        drift = 1 + number / count
        times.add([steps[i] * drift * draw.uniform(1, 1 + noise) for i in times.left])
        if number >= 4:
            times.rule_out()
    return times


def test_slower_plans_are_ruled_out_and_equal_ones_stay() -> None:
    times = rounds([1.0, 1.2, 1.0, 2.0], noise=0.2, count=30)
    assert times.left == [0, 2]
    assert len(times.rounds[0]) == 4
    assert len(times.rounds[-1]) == 2


def test_medians_are_relative_to_plans_that_stay() -> None:
    """A plan that ran in fast rounds alone does not seem fast."""
    times = rounds([1.0, 3.0], noise=0.0, count=20)
    assert times.left == [0]
    medians = times.medians()
    assert abs(medians[1] / medians[0] - 3.0) < 1e-9


def test_equal_times_rule_nothing_out() -> None:
    assert rounds([1.0, 1.0], noise=0.0, count=10).left == [0, 1]
