"""A machine known wrongly, by known factors, is put right by one step on the true one."""

from dataclasses import replace

import pytest

from autopar.core.ir.roles import Input, Output
from autopar.cost_model.cluster.interference import Slowdown
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.measurement.optimizer_step import UpdateCost
from autopar.cost_model.measurement.timing_context import Timing
from autopar.cost_model.memory.liveness import Overhead
from autopar.cost_model.simulator.step import simulate
from autopar.planner.machine import Machine
from autopar.session.profiler.calibration import TimedCollectives, calibrated
from tests.cost_model.simulator.test_step import cluster, times
from tests.cost_model.sketch import Sketch, aten, c10d

PAIRS = GroupShape(2, 2, 1)
SLOWED = Slowdown((1,), (1.2,), (1.1,), 1e-3, 1e-3, "measured now")


def step_of(large, small):
    """Two all-reduces that are waited for, computing beside and behind them."""
    g = Sketch(dp=2)
    x, y = g.take(Input(0), large), g.take(Input(1), small)
    first = g.call(c10d.all_reduce.default, x, "sum", "dp")
    beside = g.call(aten.sin.default, x)
    done = g.call(c10d.wait_tensor.default, first)
    second = g.call(c10d.all_reduce.default, y, "sum", "dp")
    other = g.call(c10d.wait_tensor.default, second)
    total = g.call(aten.add.Tensor, done, beside)
    return g.give({Output(0): total, Output(1): g.call(aten.neg.default, other)})


def machine(graph, operators=1.0, large=1.0, small=1.0):
    """Figures so many times those of the true machine."""
    curve = Curve((4_000, 4_000_000), (small * 0.1, large * 1.0))
    entry = Measured(curve, "measured before", "gloo")
    kinds = ("all_reduce", "all_gather")
    known = {CurveKey(kind, PAIRS): entry for kind in kinds}
    found = times(sin=0.4 * operators, add=0.3 * operators, neg=0.01 * operators)(graph)
    unseen = {"unseen": Timing(0.2 * operators, 0, 0, "then")}
    return Machine(
        replace(cluster(SLOWED), curves=known),
        replace(found, times={**found.times, **unseen}),
        UpdateCost(Curve((4,), (1.0,)), 0.0, 0.0, "measured before"),
        Overhead(),
    )


def simulated(graph, of):
    return simulate(graph, of.cluster, of.operators, overhead=of.overhead)


def test_known_factors_are_found():
    graph = step_of(1_000_000, 1_000)
    truth, wrong = machine(graph), machine(graph, 0.5, 0.25, 2.0)
    taken = TimedCollectives.of(graph, [simulated(graph, truth).timeline])
    refit = calibrated(wrong, graph, taken, "a sketch")
    assert refit.operators == pytest.approx(2.0, rel=1e-3)
    step_s = simulated(graph, truth).step_s
    assert simulated(graph, wrong).step_s < 0.5 * step_s
    assert simulated(graph, refit.machine).step_s == pytest.approx(step_s, rel=0.02)
    assert refit.machine.operators.times["unseen"].seconds == pytest.approx(0.2, rel=0.02)
    assert "unseen" not in refit.measured().times
    curves = refit.machine.cluster.curves
    for kind, origin in (("all_reduce", "measured 20"), ("all_gather", "modelled by other")):
        entry = curves[CurveKey(kind, PAIRS)]
        assert entry.provenance.startswith(origin)
        assert entry.curve.seconds == pytest.approx((0.1, 1.0), rel=0.02)


def test_late_ranks_and_hidden_ends_tell_nothing_of_a_link():
    graph = step_of(1_000_000, 1_000)
    known = machine(graph)
    taken = TimedCollectives.of(graph, [simulated(graph, known).timeline])
    late = replace(taken, collectives={k: 3.0 * s for k, s in taken.collectives.items()})
    both = TimedCollectives.together(taken, Both(late))
    assert both.collectives == taken.collectives
    hidden = replace(late, waits=dict.fromkeys(late.waits, 0.0))
    assert calibrated(known, graph, hidden, "a sketch").collectives == {}


class Both:
    """Ranks of which one took something else."""

    def __init__(self, other):
        self.other = other

    def gather(self, value):
        return [value, self.other]
