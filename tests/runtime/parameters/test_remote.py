"""A parameter of another stage: what changes it alone passes, what reads a value is told."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.core.common.notices import ISSUED
from autopar.errors import AutoparWarning, NumericsWarning, StrategyError
from autopar.runtime.parameters.optimizers import leave_out_of_optimizers
from autopar.runtime.parameters.remote import mark_remote

Use = Callable[[nn.Parameter, torch.Tensor], Any]


def remote() -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(3, 3, device="meta"))
    mark_remote(parameter, torch.device("cpu"))
    return parameter


def write(x: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        x[0] = value


READS: dict[str, Use] = {
    "a number": lambda p, x: p.sum().item(),
    "a condition": lambda p, x: bool(p.max() > 0),
    "a product with what is trained here": lambda p, x: x * p,
    "a list with what is trained here": lambda p, x: torch.stack([x, p]),
    "a norm that scales what is here": lambda p, x: x.detach().mul_(p.detach().norm()),
    "a list of what is here": lambda p, x: torch._foreach_mul_([x.detach()], p.detach().norm()),
    "lists of what is here": lambda p, x: torch._foreach_add_([x.detach()], [p.detach()]),
    "running statistics": lambda p, x: nn.functional.batch_norm(
        x.detach(), torch.zeros(3), torch.ones(3), p[0], p[1], training=True
    ),
    "an address of memory": lambda p, x: p.untyped_storage().data_ptr(),
    "a row of what is here": lambda p, x: write(x, p.detach()[0]),
    "values of a copy": lambda p, x: p.detach().clone().tolist(),
    "an array": lambda p, x: p.detach().numpy(),
    "a comparison": lambda p, x: torch.equal(p, x.detach()),
    "an address": lambda p, x: p.data_ptr(),
    "a file": lambda p, x: pickle.dumps(p.detach()),
    "as many values as are positive": lambda p, x: p.detach()[p > 0],
    "draws whose number depends on values": lambda p, x: torch.poisson(p.detach().abs()),
    "draws until all are in bounds": lambda p, x: nn.init.trunc_normal_(p),
}


@pytest.mark.parametrize("name", READS)
def test_reads_are_refused(name: str) -> None:
    with pytest.raises(StrategyError, match=r"of a parameter of shape \[3, 3\] is read"):
        READS[name](remote(), torch.ones(3, 3, requires_grad=True))


DRAWS: dict[str, Callable[[nn.Parameter], Any]] = {
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda p: nn.init.sparse_(p, 0.5),
    "kaiming": nn.init.kaiming_uniform_,
    "dropout": lambda p: nn.functional.dropout(p.detach(), 0.5),
    "noise": lambda p: p.data.add_(torch.randn_like(p)),
    "a transposed view": lambda p: p.data.T.exponential_(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_as_many_numbers_are_drawn_as_on_the_other_stage(name: str) -> None:
    states = []
    for parameter in (nn.Parameter(torch.ones(3, 3)), remote()):
        torch.manual_seed(0)
        DRAWS[name](parameter)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_lists_of_both_kinds_change_what_is_here() -> None:
    with torch.no_grad():
        here, there = torch.ones(2), remote()
        torch._foreach_mul_([there, here], [2.0, 3.0])
        sums = torch._foreach_add([there, here], [there, here])
    assert here.tolist() == [3.0, 3.0]
    assert sums[1].tolist() == [6.0, 6.0]
    assert sums[0].shape == (3, 3)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_states_of_other_stages_are_told(kind: type[torch.optim.Optimizer]) -> None:
    here, there = nn.Parameter(torch.ones(2)), remote()
    leave_out_of_optimizers([there])
    optimizer = kind([here, there], lr=0.1)  # type: ignore[call-arg]
    here.grad, there.grad = torch.ones(2), torch.ones(3, 3)
    optimizer.step()
    assert here.tolist() == [pytest.approx(0.9)] * 2
    with pytest.raises(StrategyError, match="state of a parameter"):
        _ = optimizer.state[there]
    ISSUED.clear()
    with pytest.warns(NumericsWarning, match="of this rank's stages alone"):
        _ = len(optimizer.state)
    with pytest.warns(AutoparWarning, match="full_optimizer_state_dict"):
        state = optimizer.state_dict()
    assert state["param_groups"][0]["params"] == [0, 1]
    assert 1 not in state["state"]
    optimizer.load_state_dict(state)
    with pytest.raises(StrategyError, match="state of a parameter"):
        _ = optimizer.state[there]


def test_a_remote_parameter_looks_like_one_of_this_rank() -> None:
    parameter = remote()
    assert parameter.device == torch.device("cpu")
    assert not parameter.is_meta
    assert parameter.grad is None
    parameter.grad = torch.ones(3, 3)
    assert parameter.grad is not None
    assert parameter.grad.shape == (3, 3)
    del parameter.grad
    assert copy.deepcopy(parameter.detach()).shape == (3, 3)
    assert isinstance(copy.deepcopy(parameter), nn.Parameter)
    assert isinstance(nn.Parameter(parameter), nn.Parameter)
    assert repr(parameter) == "RemoteTensor(shape=[3, 3], on another stage)"
