"""The arithmetic of part `live`."""

import pytest

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cluster.interference import NO_SLOWDOWN
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from benchmarks.prediction import live
from benchmarks.prediction.settings import Setting


def cluster(ranks: int, seconds: dict[int, float]) -> Cluster:
    curve = Curve(tuple(seconds), tuple(seconds.values()))
    entry = Measured(curve, "measured today", "gloo")
    key = CurveKey("all_reduce", GroupShape(ranks, 1))
    return Cluster(
        name="here",
        device="cpu",
        world_size=ranks,
        ranks_per_node=1,
        curves={key: entry},
        backend="gloo",
        versions={},
        provenance="measured today",
        slowdown=NO_SLOWDOWN,
        uniform=True,
    )


def test_the_first_measurement_predicts_every_point_of_the_second() -> None:
    first = cluster(2, {1000: 1.0, 4000: 4.0})
    second = cluster(2, {1000: 1.0, 2000: 2.5, 4000: 5.0})
    cases = live.compare("here", first, second)
    assert [case["size"] for case in cases] == ["measured", "between", "measured"]
    assert [case["error"] for case in cases] == pytest.approx([0, 0.2, 0.2], abs=0.01)


def test_other_groups_are_predicted_from_the_fabric() -> None:
    small, large = cluster(2, {10**6: 1.0}), cluster(4, {10**6: 1.5})
    (case,) = live.compare("2 -> 4", small, large)
    assert case["predicted"] == pytest.approx(1.5)


def test_settings_have_names_and_are_valid() -> None:
    assert str(Setting(1, 4)) == "one host, 4 ranks"
    assert str(Setting(2, 1, "1gbit")) == "2x1 at 1gbit"
    with pytest.raises(ValueError, match="one host is one node"):
        Setting(2, 1)
    assert len(set(live.SETTINGS)) == 9
