"""Memory that a loop gives to sharded parameters: followed on one device, or told."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import NumericsWarning, StrategyError
from tests.harness.worlds import run
from tests.runtime.border.test_replicated import compiled, f64, values

Compile = Callable[[nn.Module], nn.Module]


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(f64)


def fused(model: nn.Module) -> Tensor:
    """One tensor with all parameters as views."""
    parameters = list(model.parameters())
    flat, begin = torch.cat([p.detach().reshape(-1) for p in parameters]), 0
    for parameter in parameters:
        parameter.data = flat[begin : begin + parameter.numel()].view(parameter.shape)
        begin += parameter.numel()
    return flat


def slope(model: nn.Module, step: int) -> Tensor:
    model.zero_grad()
    model(values(step, 6, 4)).square().mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def fused_before_compile(compile_it: Compile) -> nn.Module:
    model = make()
    flat = fused(model)
    model = compile_it(model)
    for step in range(2):
        flat.sub_(0.1 * slope(model, step))
    return model


def fused_after(compile_it: Compile, calls: int) -> nn.Module:
    model = compile_it(make())
    for step in range(calls):
        slope(model, step)
    flat = fused(model)
    for step in range(2):
        flat.sub_(0.1 * slope(model, step))
    return model


def assigned_anew(compile_it: Compile) -> nn.Module:
    model = compile_it(make())
    for step in range(3):
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        vector = vector - 0.1 * slope(model, step)
        nn.utils.vector_to_parameters(vector, model.parameters())
    return model


def swapped_for_averages(compile_it: Compile) -> nn.Module:
    """Averages take the places of weights to evaluate, then change in place."""
    model = compile_it(make())
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(3):
        slope(model, step)
        kept = {}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            parameter.data.sub_(0.1 * parameter.grad)
            averages[name].mul_(0.9).add_(0.1 * parameter.detach())
            kept[name], parameter.data = parameter.data.clone(), averages[name]
        model(values(9, 6, 4))
        for name, parameter in model.named_parameters():
            parameter.data = kept[name]
    return model


def read_later(compile_it: Compile) -> nn.Module:
    model = compile_it(make())
    slope(model, 0)
    flat = fused(model)
    for step in range(2):
        slope(model, step)
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert flat.norm() > 0
    return model


def refusals(rank: int, world_size: int, loops: Sequence[Callable[[Compile], nn.Module]]) -> None:
    for loop in loops:
        with pytest.raises(StrategyError, match="changes memory in place from which parameter 0"):
            loop(lambda model: compiled(model, "zero3"))


def exact(rank: int, world_size: int) -> list[str]:
    for loop in (assigned_anew, swapped_for_averages):
        state = loop(lambda model: compiled(model, "zero3")).full_state_dict()  # type: ignore[operator]
        for name, value in loop(lambda model: model).state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read_later(lambda model: compiled(model, "zero3"))
    return [str(w.message) for w in caught if issubclass(w.category, NumericsWarning)]


def test_writes_to_memory_that_a_shard_left_are_refused() -> None:
    loops = fused_before_compile, *(partial(fused_after, calls=calls) for calls in (0, 1))
    run(refusals, 2, loops=loops)


def test_values_assigned_anew_are_those_of_one_device() -> None:
    (told,), _ = run(exact, 2)
    assert "a larger tensor that the loop still holds" in told
