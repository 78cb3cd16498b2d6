"""Whoever reads a parameter of another stage is told, wherever it stands among the arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from autopar.errors import StrategyError
from autopar.runtime.parameters.remote import mark_remote


def average_of(parameter: nn.Parameter) -> None:
    model = nn.ParameterList([parameter])
    AveragedModel(model).update_parameters(model)


READS: dict[str, Callable[[nn.Parameter, torch.Tensor], Any]] = {
    "a sum": lambda p, x: p.sum(),
    "a product": lambda p, x: x * p,
    "a list": lambda p, x: torch.stack([x, p]),
    "a norm of many": lambda p, x: torch._foreach_norm([p, x]),
    "backward(inputs=)": lambda p, x: x.sum().backward(inputs=[x, p]),
    "torch.autograd.grad": lambda p, x: torch.autograd.grad(x.sum(), [x, p], allow_unused=True),
    "its data": lambda p, x: p.data,
    "its gradient": lambda p, x: p.grad,
    "a detached copy": lambda p, x: p.detach().clone(),
    "a list of detached values": lambda p, x: [t.detach() for t in (x, p)][1].tolist(),
    "an average of weights": lambda p, x: average_of(p),
}


@pytest.mark.parametrize("name", READS)
def test_reads_are_refused(name: str) -> None:
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    mark_remote(parameter)
    assert parameter.shape == (3,)
    with pytest.raises(StrategyError, match=r"of a parameter of shape \[3\] is read"):
        READS[name](parameter, torch.ones(3, requires_grad=True))
