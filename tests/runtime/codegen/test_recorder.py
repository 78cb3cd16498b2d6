"""Steps recorded in the time of a simulated GPU."""

import pytest
import torch
from torch import fx

from autopar._torch import BoxedCodeGen
from autopar.core.ir.roles import Input, Output
from autopar.core.ir.signature import time_key
from autopar.cost_model.simulator.streams import COMPUTE
from autopar.runtime.codegen.clocks import DeviceClock, HostClock
from autopar.runtime.codegen.recorder import LAUNCH, Recorder
from autopar.session.profiler.calibration import TimedCollectives, calibrated
from tests.cost_model.sketch import Sketch, aten, c10d
from tests.harness.fake_cuda import FakeCuda
from tests.session.profiler.test_calibration import machine

MS = 1e-3


@pytest.fixture
def gpu(monkeypatch):
    return FakeCuda(monkeypatch)


def step_of_two_streams():
    """A reduction beside a long operator; a short one, a view and a short one after its wait."""
    g = Sketch(dp=2)
    x = g.take(Input(0), 10, 10)
    sent = g.call(c10d.all_reduce.default, x, "sum", "dp")
    long = g.call(aten.sin.default, x)
    turned = g.call(aten.t.default, long)
    short = g.call(aten.cos.default, turned)
    done = g.call(c10d.wait_tensor.default, sent)
    return g.give({Output(0): g.call(aten.add.Tensor, done, short)})


def recorded(gpu, graph, kernels):
    """One step, and the start of the next; (device, host) seconds by operator."""
    recorder = Recorder(torch.device("cuda"))
    copy = graph.copy().graph
    run_on = recorder.instrument(copy)
    arrival = []

    def issue(x, *options):
        gpu.launch(0.0, 0.02 * MS)
        arrival.append(gpu.free_at + 4 * MS)
        return x

    def wait(x):
        gpu.now += 0.01 * MS
        gpu.free_at = max(gpu.free_at, gpu.now, arrival.pop())
        return x

    for node in copy.find_nodes(op="call_function", target=c10d.all_reduce.default):
        node.target = issue
    for node in copy.find_nodes(op="call_function", target=c10d.wait_tensor.default):
        node.target = wait
    for node in copy.nodes:
        name = node.name.split("_")[0]
        if name in kernels:
            device_s, host_s = kernels[name]
            node.target = lambda *args, d=device_s, h=host_s: gpu.launch(d, h) or args[0]
    copy.set_codegen(BoxedCodeGen())
    forward = recorder.starting_step(graph, run_on(fx.GraphModule({}, copy).forward))
    forward([torch.rand(10, 10)])
    gpu.launch(MS)  # the optimizer's step
    recorder.start_step(graph)
    recorder.clock.synchronize()
    return recorder.steps[0]


KERNELS = {"sin": (3 * MS, 0.1 * MS), "cos": (0.5 * MS, 0.1 * MS), "add": (0.2 * MS, 0.1 * MS)}


def spans(step):
    events = {e.name: e for e in step.events() if e.stream == COMPUTE}
    return {name: (round(e.seconds / MS, 2), e.kind) for name, e in events.items()}


def test_a_step_is_recorded_in_the_time_of_the_device(gpu):
    step = recorded(gpu, step_of_two_streams(), KERNELS)
    found = spans(step)
    assert found["sin"] == (3.1, LAUNCH), "the device had nothing to do before"
    assert found["cos"] == (0.5, COMPUTE)
    assert found["wait_tensor"] == (0.4, "wait")
    assert found["add"] == (0.2, COMPUTE)
    assert found["t"][1] == found["all_reduce"][1] == LAUNCH
    sent = next(event for event in step.events() if event.kind == "all_reduce")
    assert (sent.stream, round(sent.seconds / MS, 2)) == ("dp", 4.02)
    assert step.seconds == pytest.approx(step.inside_s + MS, rel=0.01)
    taken = TimedCollectives.of(step.graph, [step.events()])
    assert set(taken.operators) == {"cos", "add"}
    assert set(taken.waits) == {"all_reduce"}


def test_launches_do_not_reach_the_cache(gpu):
    """A host that is slower than its device: what follows no wait is recorded with its launch."""
    graph = step_of_two_streams()
    slow = dict.fromkeys(("sin", "cos", "add"), (0.01 * MS, 0.5 * MS))
    step = recorded(gpu, graph, slow)
    taken = TimedCollectives.of(graph, [step.events()])
    assert taken.operators == {"add": pytest.approx(0.01 * MS)}
    names = {time_key(node): node.name for node in graph.calls()}
    times = calibrated(machine(graph), graph, taken, "a test").measured().times
    assert [names[key] for key in times] == ["add"]


def test_the_clock_is_that_of_the_device(gpu):
    assert type(Recorder(torch.device("cpu")).clock) is HostClock
    assert type(Recorder(torch.device("cuda")).clock) is DeviceClock
