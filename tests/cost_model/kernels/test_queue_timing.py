"""Times of operators in the queue of a simulated GPU."""

from dataclasses import replace

import pytest
import torch

from autopar.core.ir.roles import Input, Output
from autopar.core.ir.signature import time_key
from autopar.cost_model.kernels import queue_timing
from autopar.cost_model.kernels.queue_timing import QueueTimer
from autopar.cost_model.kernels.timing import operator_bytes
from autopar.cost_model.measurement.operator_times import OperatorTimes
from tests.cost_model.sketch import Sketch, aten
from tests.harness.fake_cuda import FakeCuda

US = 1e-6


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return FakeCuda(monkeypatch, queue_timing)


def node_of(kernel, rows=8):
    """An operator that runs `kernel` on one tensor."""
    g = Sketch()
    node = g.call(aten.sin.default, g.take(Input(0), rows))
    node.target = kernel
    return node


def timed(node):
    return QueueTimer(device="cpu").times({"it": node})["it"]


@pytest.mark.parametrize("device_s", [2 * US, 300 * US])
def test_seconds_of_device_and_host_are_told_apart(gpu, device_s):
    node = node_of(lambda x: gpu.launch(device_s, host_s=10 * US))
    before = torch.get_rng_state()
    found = timed(node)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.device_s == pytest.approx(device_s, rel=0.01)
    assert found.host_s == pytest.approx(10 * US, rel=0.01)


def test_inputs_rotate_through_twice_the_l2_cache(gpu):
    seen = []

    def kernel(x):
        seen.append(x.data_ptr())
        gpu.launch(2 * US, host_s=5 * US)

    node = node_of(kernel, rows=4 * 2**20)
    timed(node)
    l2 = gpu.properties.L2_cache_size
    runs = seen[-16:]
    for first, again in enumerate(runs):
        later = runs[first + 1 :]
        if again in later:
            assert (later.index(again) + 1) * operator_bytes(node) >= 2 * l2
    assert 1 < len(set(seen)) < len(seen)


def test_an_operator_that_reads_the_device_is_timed_with_its_wait(gpu):
    def kernel(x):
        gpu.launch(20 * US, host_s=5 * US)
        gpu.synchronize()

    found = timed(node_of(kernel))
    assert found.device_s == pytest.approx(25 * US, rel=0.1)


def test_too_large_operators_are_left_out_by_the_memory_of_the_timed_device(gpu):
    node = node_of(lambda x: gpu.launch(US), rows=1000)
    gpu.free, gpu.reserved, gpu.allocated = 20_000, 10_000, 0
    timer = QueueTimer(device="cpu")
    timer.device = "cuda"
    assert set(timer.times({"it": node})) == set()  # 8000 bytes of 30,000, at most a quarter
    gpu.reserved = 15_000
    assert set(timer.times({"it": node})) == {"it"}


def test_times_of_a_gpu_have_both_clocks_and_survive_the_cache(gpu, monkeypatch):
    monkeypatch.setattr(queue_timing.QueueTimer.__init__, "__defaults__", (0.02, "cpu"))
    empty, dispatch = "time_empty_kernel", "time_dispatch"
    module = "autopar.cost_model.measurement.operator_times"
    monkeypatch.setattr(f"{module}.{empty}", lambda: 1.5 * US)
    monkeypatch.setattr(f"{module}.{dispatch}", lambda device: 4 * US)
    g = Sketch()
    x = g.take(Input(0), 64, 64)
    turned = g.call(aten.t.default, x)
    product = g.call(aten.sin.default, turned)
    graph = g.give({Output(0): product})
    other = node_of(aten.cos.default)
    product.target = lambda x: gpu.launch(7 * US, host_s=9 * US)
    OperatorTimes.load("cuda").measure([graph]).save()

    monkeypatch.setattr(queue_timing, "QueueTimer", None)
    times = OperatorTimes.load("cuda").measure([graph])
    assert (times.setting.model, time_key(product) in times.times) == (gpu.name, True)
    cost, view, unknown = map(times.seconds, (product, turned, other))
    assert (cost.seconds, cost.host_s) == (pytest.approx(7 * US), pytest.approx(9 * US))
    assert (view.seconds, view.host_s) == (0.0, 4 * US)
    assert unknown.host_s == 4 * US
    assert unknown.kind == "modelled"
    assert replace(times, times={}).seconds(turned).host_s == 0.0, "unknown GPUs have no host time"
