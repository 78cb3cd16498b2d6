from functools import partial

import pytest
import torch
from torch import nn, optim

from autopar.cost_model.memory import optimizer_memory
from autopar.cost_model.memory.allocation_tracker import track_allocations
from autopar.cost_model.memory.optimizer_memory import OptimizerMemory, optimizer_state_ratio
from autopar.errors import StrategyError

MOMENTUM = partial(optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("optimizer", "ratio"),
    [
        (optim.AdamW, 2.0),
        (partial(optim.Adam, amsgrad=True), 3.0),
        (optim.SGD, 0.0),
        (MOMENTUM, 1.0),
        (optim.Adagrad, 1.0),
        (lambda parameters: optim.RMSprop(parameters, momentum=0.1), 2.0),
    ],
)
def test_state_bytes_for_each_parameter_byte(optimizer, ratio):
    assert optimizer_state_ratio(optimizer) == ratio


@pytest.mark.parametrize(
    ("optimizer", "needs"),
    [
        (optim.AdamW, (2, 1, 0)),
        (partial(optim.AdamW, foreach=True), (0, 0, 1)),
        (partial(optim.AdamW, fused=True), (0, 0, 0)),
        (MOMENTUM, (0, 0, 0)),
        (partial(MOMENTUM, weight_decay=0.1), (1, 0, 0)),
        (partial(MOMENTUM, weight_decay=0.1, foreach=True), (0, 0, 1)),
    ],
)
def test_what_a_step_needs_beside_its_state(optimizer, needs):
    memory = OptimizerMemory.measure(optimizer)
    assert (memory.each, memory.before, memory.every) == needs
    assert memory.provenance.startswith("measured")


def test_a_gpu_s_default_is_to_update_all_at_once():
    memory = OptimizerMemory.measure(optim.AdamW, "cuda")
    assert (memory.state, memory.each, memory.every) == ((1.0, 1.0), 0.0, 1.0)


@pytest.mark.parametrize("optimizer", [optim.AdamW, partial(optim.Adam, foreach=True), MOMENTUM])
def test_it_is_what_a_real_step_allocates(optimizer):
    """Held against a step over parameters of other sizes."""
    sizes = (30_000, 10_000, 50_000)
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    used = optimizer(parameters)
    for _ in range(2):
        for p in parameters:
            p.grad = torch.ones_like(p)
        allocated = track_allocations(used.step)
    memory = OptimizerMemory.measure(optimizer)
    want = 4 * (memory.needed(sizes) + memory.every * sum(sizes))
    assert want <= allocated.peak < want + 100


def test_an_optimizer_in_use_is_left_alone():
    weight = nn.Parameter(torch.ones(3))
    used = optim.SGD([weight], lr=0.1, momentum=0.9)
    assert optimizer_state_ratio(used) == 1.0
    assert not used.state
    assert torch.equal(weight, torch.ones(3))


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(StrategyError, match="cannot be made from parameters and stepped"):
        optimizer_state_ratio(dict)


class Fused(optim.AdamW):
    """Refuses parameters on a CPU, as apex's FusedAdam and bitsandbytes do."""

    def __init__(self, parameters, **options):
        parameters = list(parameters)
        if any(p.device.type == "cpu" for p in parameters):
            raise RuntimeError("parameters must be on a GPU")
        super().__init__(parameters, **options)


@pytest.mark.parametrize("wanted", ["cpu", "cuda"])
def test_an_optimizer_that_refuses_a_cpu_is_stepped_on_the_gpu(monkeypatch, wanted):
    """Meta tensors stand in for those of a GPU."""
    monkeypatch.setattr(optimizer_memory, "_devices", lambda device: ["cpu", "meta"])
    assert optimizer_state_ratio(Fused, device=wanted) == 2.0
    assert optimizer_state_ratio(partial(Fused, amsgrad=True), device=wanted) == 3.0
    # it is asked for 4 bytes of counters, which stay on the CPU
    memory = OptimizerMemory.measure(Fused, "cpu")
    assert (memory.state, memory.provenance[:8]) == ((1.0, 1.0), "measured")


def test_the_model_s_device_comes_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert optimizer_memory._devices("cuda") == ["cuda", "cpu"]
    assert optimizer_memory._devices("cpu") == ["cpu", "cuda"]
    with pytest.raises(StrategyError, match="cannot be made from parameters and stepped here"):
        optimizer_state_ratio(dict, device="cuda")


def test_an_optimizer_of_gpus_without_one_says_what_to_do():
    with pytest.raises(StrategyError, match=r"on cpu: parameters must be on a GPU.*AdamW for a f"):
        optimizer_state_ratio(Fused, device="cuda")
