"""Steps of a GPU whose host issues every operator."""

from dataclasses import replace

import pytest
import torch

from autopar.core.ir.roles import Input, Output
from autopar.core.ir.signature import time_key
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cluster.interference import Slowdown
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.timing_context import Timing, TimingContext
from autopar.cost_model.simulator.step import reads_device, simulate
from autopar.cost_model.simulator.streams import COMPUTE
from tests.cost_model.sketch import Sketch, aten, c10d

BYTES = 400


def cluster(seconds, issue_s=0.0, wait_s=0.0):
    entry = Measured(Curve((BYTES,), (seconds,)), "measured now", "nccl")
    slowdown = Slowdown((1,), (1.0,), (1.0,), issue_s, wait_s, "measured now")
    key = CurveKey("all_reduce", GroupShape(2, 2), "float32")
    return replace(Cluster.default(2, "cuda"), curves={key: entry}, slowdown=slowdown, link=None)


def step(graph, times, where=None, dispatch_s=0.0):
    """Simulates with (device, host) seconds by operator."""
    table = {"dispatch": Timing(0.5, 0, 0, "now", host_s=dispatch_s)}
    for node in graph.calls():
        name = node.target.__name__.split(".")[0]
        if name in times:
            device_s, host_s = times[name]
            table[time_key(node)] = Timing(device_s, 0, 0, "now", host_s=host_s)
    operators = OperatorTimes(TimingContext("H100", "H100", 1, 1, "2"), True, table)
    return simulate(graph, where or cluster(1.0), operators)


def chain(*targets):
    g = Sketch()
    x = g.take(Input(0), 10, 10)
    for target in targets:
        x = g.call(target, x)
    return g.give({Output(0): x})


def spans(result):
    return [(e.name, e.start_s, e.end_s) for e in result.timeline if e.stream == COMPUTE]


def test_a_slow_device_hides_its_host():
    graph = chain(aten.sin.default, aten.t.default, aten.cos.default)
    result = step(graph, {"sin": (5.0, 1.0), "cos": (5.0, 1.0)}, dispatch_s=1.0)
    assert spans(result) == [("sin", 1.0, 6.0), ("cos", 6.0, 11.0)]
    assert (result.step_s, result.host_s, result.idle_s) == (11.0, 3.0, 1.0)
    assert result.exposed_s == 0.0


def test_a_slow_host_starves_its_device_and_views_cost_it_time():
    graph = chain(aten.sin.default, aten.t.default, aten.cos.default, aten.t.default)
    result = step(graph, {"sin": (0.25, 1.0), "cos": (0.25, 1.0)}, dispatch_s=1.0)
    assert spans(result) == [("sin", 1.0, 1.25), ("cos", 3.0, 3.25)]
    assert result.step_s == result.host_s == 4.0
    assert result.idle_s == pytest.approx(3.5)
    assert (result.compute_s, result.exposed_s) == (0.5, 0.0)
    (note,) = result.notes()
    assert "3.50 s of 4.00 s" in note


def test_a_collective_runs_while_the_host_issues_on():
    g = Sketch(dp=2)
    x = g.take(Input(0), BYTES // 4)
    issued = g.call(c10d.all_reduce.default, x, "sum", "dp")
    y = g.call(aten.sin.default, x)
    done = g.call(c10d.wait_tensor.default, issued)
    graph = g.give({Output(0): g.call(aten.add.Tensor, done, y)})
    times = {"sin": (1.0, 1.0), "add": (1.0, 0.25)}
    result = step(graph, times, cluster(4.0, issue_s=0.5, wait_s=0.25))
    # the host issues by 0.5, 1.5, 1.75 and 2; the message arrives at 4.5
    assert spans(result) == [("sin", 1.5, 2.5), ("wait_tensor", 2.5, 4.5), ("add", 4.5, 5.5)]
    assert result.waits == {"all_reduce": 2.0}
    assert (result.host_s, result.idle_s, result.step_s) == (2.0, 1.5, 5.5)
    assert result.exposed_s == pytest.approx(2.0)


def test_the_host_waits_where_it_reads_the_device():
    g = Sketch()
    x = g.take(Input(0), 10, device="cuda")
    busy = g.call(aten.sin.default, x)
    copied = g.call(aten._to_copy.default, busy, device=torch.device("cpu"))
    ahead = g.call(aten._to_copy.default, busy, device=torch.device("cpu"), non_blocking=True)
    graph = g.give({Output(0): g.call(aten.cos.default, x), Output(1): copied})
    assert [reads_device(node) for node in (busy, copied, ahead)] == [False, True, False]
    times = {"sin": (5.0, 1.0), "_to_copy": (1.0, 1.0), "cos": (1.0, 1.0)}
    result = step(graph, times)
    # copied by 7; the host goes on: copied again, cos
    assert [span[1:] for span in spans(result)] == [(1, 6), (6, 7), (8, 9), (9, 10)]


def test_without_timings_the_host_takes_no_time():
    graph = chain(aten.sin.default, aten.t.default, aten.cos.default)
    operators = OperatorTimes.load("NVIDIA H100 80GB HBM3")
    result = simulate(graph, cluster(1.0), operators)
    assert result.step_s == result.compute_s > 0
    assert (result.host_s, result.idle_s, result.notes()) == (0.0, 0.0, ())
