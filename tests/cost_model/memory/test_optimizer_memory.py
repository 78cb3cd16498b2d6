from functools import partial

import pytest
import torch
from torch import nn, optim

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
