import math
import random

import pytest

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.curve import Curve

SIZES = tuple(2**power for power in range(10, 26))


def protocols(nbytes: float) -> float:
    """Three affine regimes: low latency, middling, high bandwidth."""
    return min(1e-5 + nbytes / 1e9, 2e-5 + nbytes / 4e9, 6e-5 + nbytes / 1e11)


def test_passes_through_its_points_and_is_log_log_between_them():
    curve = Curve((1000, 100_000), (1e-3, 1e-1))
    assert [curve(n) for n in (1000, 100_000)] == pytest.approx([1e-3, 1e-1])
    assert curve(10_000) == pytest.approx(1e-2)


def test_held_out_sizes_are_predicted_within_a_few_per_cent():
    curve = Curve(SIZES[::2], tuple(map(protocols, SIZES[::2])))
    errors = sorted(abs(curve(n) / protocols(n) - 1) for n in SIZES[1:-1:2])
    assert errors[len(errors) // 2] < 0.05
    assert errors[-1] < 0.2


def test_outside_the_range_it_follows_the_affine_pieces():
    curve = Curve(SIZES, tuple(map(protocols, SIZES)))
    assert len(curve.pieces) == 3
    assert curve(8 * SIZES[-1]) == pytest.approx(protocols(8 * SIZES[-1]), rel=0.02)
    assert curve(0) == pytest.approx(1e-5, rel=0.05)


def test_never_falls_even_across_the_ends_of_the_range():
    rng = random.Random(0)
    samples = {n: [protocols(n) * rng.uniform(0.5, 2) for _ in range(5)] for n in SIZES}
    curve = Curve.fit(samples)
    times = [curve(2 ** (power / 8)) for power in range(8 * 30)]
    assert times == sorted(times)
    assert all(width > 0 for width in curve.spread)


def test_fit_takes_medians_and_smooths_what_falls():
    curve = Curve.fit({100: [9.0, 1.0, 2.0], 200: [1.0], 400: [4.0]})
    assert curve.seconds == pytest.approx((math.sqrt(2), math.sqrt(2), 4.0))


def test_one_point_is_enough_and_scales_with_bytes_above():
    assert Curve((100,), (2.0,))(300) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("sizes", "seconds", "says"),
    [
        ((), (), "at least one point"),
        ((1, 2), (1.0,), "2 sizes has 1 times"),
        ((2, 1), (1.0, 2.0), "must ascend, but 1 follows 2"),
        ((-1,), (1.0,), "size -1"),
        ((1.5,), (1.0,), "size 1.5"),
        ((1,), (-1.0,), "1 bytes is -1.0"),
        ((1,), (math.nan,), "1 bytes is nan"),
        ((1,), ("1",), "1 bytes is '1'"),
        ((1, 2), (2.0, 1.0), "2 bytes take 1 s, less than the 2 s of 1 bytes"),
    ],
)
def test_bad_tables_are_refused_with_the_place(sizes, seconds, says):
    with pytest.raises(ClusterError, match=says):
        Curve(sizes, seconds)


def test_bad_samples_and_questions_are_refused():
    with pytest.raises(ClusterError, match="timings at 4 bytes"):
        Curve.fit({4: [1.0, -1.0]})
    with pytest.raises(ClusterError, match="-1 bytes"):
        Curve((1,), (1.0,))(-1)
