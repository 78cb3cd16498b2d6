from dataclasses import replace

import pytest

from autopar.core.ir.messages import WRITE, is_wait
from autopar.core.ir.roles import Gradient, Input, Output, Parameter
from autopar.core.ir.signature import signature, time_key
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cluster.interference import Slowdown
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.timing_context import Timing, TimingContext
from autopar.cost_model.simulator.step import simulate
from autopar.cost_model.simulator.streams import Clock
from autopar.cost_model.storage import LANES, UNMEASURED
from tests.cost_model.sketch import Sketch, aten, c10d

BYTES = 400


def factors(compute, communication, issue_s=0.0, wait_s=0.0):
    return Slowdown((1,), (compute,), (communication,), issue_s, wait_s, "measured now")


def cluster(slowdown, seconds=2.0):
    entry = Measured(Curve((BYTES,), (seconds,)), "measured now", "gloo")
    return Cluster(
        name="test",
        device="cpu",
        world_size=4,
        ranks_per_node=4,
        curves={CurveKey("all_reduce", GroupShape(2, 2, groups)): entry for groups in (1, 2)},
        backend="gloo",
        versions={},
        provenance="measured now",
        slowdown=slowdown,
    )


def times(**seconds):
    """Operator times by the nodes' operators; what is not given takes no time."""

    def of(graph):
        table = {"dispatch": Timing(0.0, 0, 0, "now")}
        for node in graph.calls():
            name = node.target.__name__.split(".")[0]
            table[signature(node)] = Timing(seconds.get(name, 0.0), 0, 0, "now")
        return OperatorTimes(TimingContext("cpu", "test", 1, 1, "2"), True, table)

    return of


APART = factors(1.0, 1.0)
HALVED = factors(2.0, 2.0)


def step(graph, slowdown, **seconds):
    return simulate(graph, cluster(slowdown), times(**seconds)(graph))


def one_reduction():
    g = Sketch(dp=2)
    x = g.take(Input(0), BYTES // 4)
    issued = g.call(c10d.all_reduce.default, x, "sum", "dp")
    y = g.call(aten.sin.default, x)
    done = g.call(c10d.wait_tensor.default, issued)
    return g.give({Output(0): g.call(aten.add.Tensor, done, y)})


@pytest.mark.parametrize(
    ("slowdown", "compute", "takes"),
    [
        (APART, 3.0, 3.0),  # hidden
        (APART, 0.5, 2.0),  # sticks out
        (HALVED, 3.0, 5.0),  # one after the other
        (HALVED, 0.5, 2.5),
        (factors(1.5, 1.0), 3.0, 2 + (3 - 2 / 1.5)),  # two seconds beside each other, then alone
        (factors(1.5, 1.0), 0.5, 2.0),
        (factors(1.0, 3.0), 3.0, 3 + 1.0),  # a third of it by the end of compute
    ],
)
def test_compute_beside_one_collective(slowdown, compute, takes):
    result = step(one_reduction(), slowdown, sin=compute)
    assert result.step_s == pytest.approx(takes)
    assert result.compute_s == pytest.approx(compute)
    assert result.communication_s == pytest.approx(2)
    assert result.exposed_s == pytest.approx(takes - compute)


@pytest.mark.parametrize(
    ("compute", "replayed", "takes"),
    [
        (0.5, 2.0, 2.0 + 1 / 3 + 0.5),  # 1.5 of an empty one are left, the last rank comes 0.5 late
        (3.0, 0.5, 4.0),  # the empty one has ended long before: beside the rest of this one
        (3.0, 1.5, 4.5),
    ],
)
def test_lateness_that_replays_show(compute, replayed, takes):
    graph = one_reduction()
    known = times(sin=compute)(graph)
    (wait,) = (node for node in graph.calls() if is_wait(node))
    table = {**known.times, time_key(wait): Timing(replayed, 0, 0, "now", rehearsed=True)}
    operators = OperatorTimes(known.setting, True, table)
    flat = Measured(Curve((8, BYTES), (2.0, 2.0)), "measured now", "gloo")
    where = cluster(factors(1.0, 3.0))
    where = replace(where, curves=dict.fromkeys(where.curves, flat))
    assert simulate(graph, where, operators).step_s == pytest.approx(takes)


def test_the_timeline_shows_who_waits():
    result = step(one_reduction(), APART, sin=0.5, add=1.0)
    shown = [(e.stream, e.kind, e.start_s, e.end_s) for e in result.timeline]
    assert shown == [
        ("compute", "compute", 0.0, 0.5),
        ("dp", "all_reduce", 0.0, 2.0),
        ("compute", "wait", 0.5, 2.0),
        ("compute", "compute", 2.0, 3.0),
    ]
    assert result.provenance == {"measured": 5}
    assert result.waits == {"all_reduce": 1.5}
    assert [at for at, _ in result.memory_curve] == [0.0, 0.0, 0.5, 2.0, 3.0]  # and the end


def test_calls_of_collectives_take_the_computing_thread():
    result = step(one_reduction(), factors(1.0, 1.0, issue_s=0.25, wait_s=0.125), sin=3.0)
    assert (result.step_s, result.exposed_s) == (0.25 + 3.0 + 0.125, 0)
    waiting = step(one_reduction(), factors(1.0, 1.0, issue_s=0.25, wait_s=0.125), sin=0.5)
    assert waiting.step_s == 2.0 + 0.125  # the price counts from the call


def test_larger_messages_may_slow_more():
    slowdown = Slowdown((100, 10_000), (1.0, 2.0), (1.0, 1.0), 0, 0, "measured now")
    assert [slowdown.of_compute(n) for n in (1, 100, 1000, 10_000, 10**6)] == [1, 1, 1.5, 2, 2]
    with pytest.raises(ClusterError, match="numbers from 1"):
        factors(0.5, 1.0)


def two_reductions(first, second):
    g = Sketch(dp=2, tp=2)
    x = g.take(Input(0), BYTES // 4)
    w = g.take(Parameter("w"), BYTES // 4)
    a = g.call(c10d.all_reduce.default, x, "sum", first)
    b = g.call(c10d.all_reduce.default, w, "sum", second)
    y = g.call(aten.sin.default, x)
    done_a = g.call(c10d.wait_tensor.default, a)
    z = g.call(aten.add.Tensor, done_a, y)
    g.phase = "backward"
    w2 = g.call(aten.cos.default, z)
    done_b = g.call(c10d.wait_tensor.default, b)
    return g.give({Gradient(Input(0)): w2, Gradient(Parameter("w")): done_b})


def test_collectives_of_one_axis_queue_and_those_of_two_do_not():
    queued = step(two_reductions("dp", "dp"), APART, sin=1.0, cos=1.0)
    assert (queued.forward_s, queued.step_s) == pytest.approx((2.0, 4.0))
    shared = step(two_reductions("dp", "tp"), APART, sin=1.0, cos=1.0)
    assert (shared.forward_s, shared.step_s) == pytest.approx((4.0, 5.0))  # the same links


def test_axes_inside_nodes_and_between_them_share_no_links():
    graph = two_reductions("dp", "tp")
    inside, across = GroupShape(2, 2, 2), GroupShape(2, 1, 2)
    entry = Measured(Curve((BYTES,), (2.0,)), "measured now", "gloo")
    curves = {CurveKey("all_reduce", shape): entry for shape in (inside, across)}
    nodes = replace(cluster(APART), ranks_per_node=2, curves=curves)
    apart = simulate(graph, nodes, times(sin=1.0, cos=1.0)(graph))
    assert (apart.forward_s, apart.backward_s) == pytest.approx((2.0, 1.0))


def test_what_nobody_waits_for_still_ends_within_the_step():
    g = Sketch(dp=2)
    x = g.take(Input(0), BYTES // 4)
    issued = g.call(c10d.all_reduce.default, x, "sum", "dp")
    assert step(g.give({Output(0): issued}), APART).step_s == pytest.approx(2.0)


def test_an_unknown_axis_is_an_error():
    g = Sketch(dp=2)
    x = g.take(Input(0), BYTES // 4)
    issued = g.call(c10d.all_reduce.default, x, "sum", "tp")
    with pytest.raises(ClusterError, match="communicates over 'tp'"):
        step(g.give({Output(0): issued}), APART)


def test_transfers_of_storage_and_compute_slow_each_other_down():
    clock = Clock(APART)
    storage = replace(UNMEASURED, on_compute=2.0, beside_compute=1.5)
    transfer = Transfer(WRITE, LANES[WRITE], BYTES, GroupShape(1, 1), "uint8")
    flight = clock.issue("write", transfer, 1.0, storage)
    clock.compute("product", 1.0)
    assert (flight.end_s, clock.now) == pytest.approx((1.5, 0.75 + 1.0))
    clock.wait("read", clock.issue("read", transfer, 1.0, storage))
    assert clock.now == pytest.approx(2.75)
