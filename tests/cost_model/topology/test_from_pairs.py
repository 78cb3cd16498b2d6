"""The topology of measured CPUs."""

import pytest

from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.topology.from_pairs import wired
from autopar.cost_model.topology.link_levels import levels


def sends(shape: GroupShape, latency_s: float, bytes_per_s: float) -> dict[CurveKey, Measured]:
    sizes = (1, 10**4, 10**6, 10**7)
    curve = Curve(sizes, tuple(latency_s + n / bytes_per_s for n in sizes))
    return {CurveKey("send", shape): Measured(curve, "measured today", "gloo")}


NEAR = sends(GroupShape(2, 2), 1e-4, 1e9)
FAR = sends(GroupShape(2, 1), 3e-4, 1e8)


def test_ranks_of_two_nodes_share_a_nic():
    found = levels(wired({**NEAR, **FAR}, 2, 2), GroupShape(4, 2))
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert found.node_bytes_per_s == pytest.approx(1e8, rel=0.05)
    assert found.latency_s == pytest.approx(1e-4, rel=0.01)
    assert found.node_latency_s == pytest.approx(3e-4, rel=0.01)
    assert found.provenance == "measured today"


def test_what_was_not_measured_is_not_drawn():
    assert wired({}, 1, 2) is None
    assert wired(NEAR, 2, 2) is None
    assert wired(FAR, 2, 2) is None
    one_each = levels(wired(FAR, 2, 1), GroupShape(2, 1))
    assert one_each.node_latency_s == pytest.approx(3e-4, rel=0.01)
    assert levels(wired(NEAR, 1, 4), GroupShape(4, 4)).latency_s == pytest.approx(1e-4, rel=0.01)
