"""`least_seconds`: what no schedule of a program's collectives undercuts."""

import random

import pytest

from autopar.core.ir.roles import Gradient, Input, Output, Parameter
from autopar.cost_model.simulator.bound import least_seconds
from autopar.cost_model.simulator.step import simulate
from tests.cost_model.simulator.test_step import APART, BYTES, HALVED, cluster, times
from tests.cost_model.sketch import Sketch, aten, c10d


def chain(*, early: bool):
    """A reduction that compute needs and one that it does not, started early or late."""
    g = Sketch(dp=2)
    x = g.take(Input(0), BYTES // 4)
    w = g.take(Parameter("w"), BYTES // 4)
    if early:
        a = g.call(c10d.all_reduce.default, x, "sum", "dp")
        y = g.call(aten.sin.default, x)
    else:
        y = g.call(aten.sin.default, x)
        a = g.call(c10d.all_reduce.default, x, "sum", "dp")
    b = g.call(c10d.all_reduce.default, w, "sum", "dp")
    z = g.call(aten.cos.default, g.call(aten.add.Tensor, g.call(c10d.wait_tensor.default, a), y))
    done_b = g.call(c10d.wait_tensor.default, b)
    return g.give({Output(0): z, Gradient(Parameter("w")): done_b})


@pytest.mark.parametrize("early", [True, False])
def test_operators_wait_for_what_they_need_only(early):
    graph = chain(early=early)
    seconds = times(sin=1.0, add=0.5, cos=0.5)(graph)  # a reduction takes 2 s
    assert least_seconds(graph, cluster(APART), seconds) == pytest.approx(2.0 + 0.5 + 0.5)
    hidden = times(sin=3.0, add=0.5, cos=0.5)(graph)
    assert least_seconds(graph, cluster(APART), hidden) == pytest.approx(4.0)


@pytest.mark.parametrize("slowdown", [APART, HALVED], ids=["apart", "halved"])
def test_no_schedule_is_faster(slowdown):
    draw = random.Random(0)
    for _ in range(30):
        graph = chain(early=draw.random() < 0.5)
        seconds = times(sin=draw.uniform(0, 4), add=draw.random(), cos=draw.random())(graph)
        least_s = least_seconds(graph, cluster(slowdown), seconds)
        found = simulate(graph, cluster(slowdown), seconds)
        assert found.compute_s - 1e-9 <= least_s <= found.step_s + 1e-9
