from functools import partial

import pytest
import torch
from torch import nn, optim

from autopar.cost_model.optimizer import optimizer_state_ratio
from autopar.errors import StrategyError


@pytest.mark.parametrize(
    ("optimizer", "ratio"),
    [
        (optim.AdamW, 2.0),
        (partial(optim.Adam, amsgrad=True), 3.0),
        (optim.SGD, 0.0),
        (partial(optim.SGD, lr=0.1, momentum=0.9), 1.0),
        (optim.Adagrad, 1.0),
        (lambda parameters: optim.RMSprop(parameters, momentum=0.1), 2.0),
    ],
)
def test_state_bytes_for_each_parameter_byte(optimizer, ratio):
    assert optimizer_state_ratio(optimizer) == ratio


def test_an_optimizer_in_use_is_left_alone():
    weight = nn.Parameter(torch.ones(3))
    used = optim.SGD([weight], lr=0.1, momentum=0.9)
    assert optimizer_state_ratio(used) == 1.0
    assert not used.state
    assert torch.equal(weight, torch.ones(3))


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(StrategyError, match="cannot be made from parameters and stepped"):
        optimizer_state_ratio(dict)
