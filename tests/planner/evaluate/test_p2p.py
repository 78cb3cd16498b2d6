"""Messages of pipelines, from curves that a person can check."""

from dataclasses import replace

import pytest

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.planner.evaluate.p2p import P2PCost

NEAR, FAR, FAR_AT_ONCE = GroupShape(2, 2, 2), GroupShape(2, 1), GroupShape(2, 1, 2)
RATES = {NEAR: 1e9, FAR: 1e8, FAR_AT_ONCE: 0.5e8}  # bytes a second
NBYTES = 1 << 20


def link(**mesh: int) -> P2PCost:
    """Four ranks on two nodes, whose link is ten times slower than their own memory."""
    curves = {
        CurveKey("send", shape, "float32"): Measured(
            Curve.fit({n: [n / rate] for n in (2**12, 2**20, 2**27)}), "measured", ""
        )
        for shape, rate in RATES.items()
    }
    cluster = replace(Cluster.default(4), ranks_per_node=2, curves=curves, link=None)
    return P2PCost(cluster, tuple(mesh.items()))


def seconds(shape: GroupShape) -> float:
    return pytest.approx(NBYTES / RATES[shape], rel=0.01)  # type: ignore[no-any-return]


def test_only_messages_between_nodes_cross_the_link() -> None:
    pipeline = link(pp=4)
    assert pipeline.seconds(NBYTES, 0, 1) == pipeline.seconds(NBYTES, 3, 2) == seconds(NEAR)
    assert pipeline.seconds(NBYTES, 1, 2) == pipeline.seconds(NBYTES, 3, 0) == seconds(FAR)
    assert pipeline.slowest_s(NBYTES) == seconds(FAR)


def test_ranks_of_a_node_share_the_link() -> None:
    pipeline = link(pp=2, dp=2)
    assert pipeline.seconds(NBYTES, 0, 1) == pipeline.slowest_s(NBYTES) == seconds(FAR_AT_ONCE)
    message, _ = pipeline.priced(NBYTES, 0, 1)
    assert (message.collective, message.shape) == ("send", FAR_AT_ONCE)


def test_one_rank_sends_nothing() -> None:
    assert link(dp=4).slowest_s(NBYTES) == 0.0
