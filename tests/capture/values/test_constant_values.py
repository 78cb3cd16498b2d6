"""Constants of forward that Python reads, and branches for compilers, as in the plain model."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.call import Call, batch_shard_of, flattened
from autopar.capture.model_info import describe_parameters
from autopar.capture.shape_family import ShapeFamily
from autopar.capture.trace import capture, capture_symbolically
from autopar.errors import CaptureError

CPU = torch.device("cpu")


class Model(nn.Module):
    """`forward` is a function of the model and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.linear = function, nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x)


def packed(linear: Any, x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
    together = torch.diff(positions, prepend=positions[:, :1] - 1).ne(1).cumsum(-1)
    return linear(x).sum() if (together[:, -1] == 0).all() else linear(x).mean()


def short(linear: Any, x: Tensor) -> Tensor:
    last = int(torch.arange(x.shape[1])[-1])
    return linear(x).sum() * last if last < 8 else linear(x).mean() * last


def plain_branch(linear: Any, x: Tensor) -> Tensor:
    return linear(x).mean() if torch.compiler.is_compiling() else linear(x).sum()


def both_branches(linear: Any, x: Tensor) -> Tensor:
    """The first branch differs; the second one reads a value."""
    y = plain_branch(linear, x)
    return y if torch.compiler.is_compiling() or x.sum() < 1e9 else -y


@functools.lru_cache
def cached_positions(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float64)


def through_a_cache(linear: Any, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return linear(x).sum()
    return (linear(x).sum(-1) * cached_positions(x.shape[1])).sum()


def masked_by_floats(linear: Any, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[:2], dtype=x.dtype)
    if (1 - mask).any():
        return linear(x).mean()
    return (linear(x) * mask[..., None]).sum()


@pytest.mark.parametrize(
    "function",
    [packed, short, plain_branch, both_branches, through_a_cache, masked_by_floats],
)
def test_it_computes_what_the_plain_model_computes(function: Callable[..., Tensor]) -> None:
    x = torch.rand(3, 5, 4, dtype=torch.float64)
    compiled = autopar.compile(Model(function), 1, fallback=False)
    plain = Model(function)
    for model in (compiled, plain):  # the plain one last: nothing of the trace is left in caches
        model(x).backward()
    torch.testing.assert_close(compiled(x), plain(x))
    for one, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def written(linear: Any, x: Tensor) -> Tensor:
    """A view of the constant is overwritten with values of a parameter."""
    flags = torch.zeros(4, dtype=torch.int64)
    flags[:2].add_(linear.weight.sum().long())
    return linear(x).sum() if int(flags[0]) == 0 else linear(x).mean()


def written_by_an_operator(linear: Any, x: Tensor) -> Tensor:
    """No name of a function tells that the operator writes."""
    flags = torch.full((4,), 3)
    flags //= linear.weight.sum().long()
    return linear(x).sum() if int(flags[0]) == 3 else linear(x).mean()


def written_through_data(linear: Any, x: Tensor) -> Tensor:
    flags = torch.zeros(4, dtype=torch.int64)
    flags.data.add_(linear.weight.sum().long())
    return linear(x).sum() if int(flags[0]) == 0 else linear(x).mean()


def written_through_a_view(linear: Any, x: Tensor) -> Tensor:
    flags = torch.zeros(4, dtype=torch.int64)
    flags.view(2, 2)[0] = linear.weight.sum().long()
    return linear(x).sum() if int(flags[0]) == 0 else linear(x).mean()


def random(linear: Any, x: Tensor) -> Tensor:
    draw = torch.randint_like(torch.zeros(4, dtype=torch.int64), 9)
    return linear(x).sum() if bool(draw.any()) else linear(x).mean()


def random_by_a_generator(linear: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    draw = torch.zeros(4, dtype=torch.int64).random_(9, generator=generator)
    return linear(x).sum() if bool(draw.any()) else linear(x).mean()


def dropped(linear: Any, x: Tensor) -> Tensor:
    draw = torch.nn.functional.dropout(torch.ones(4))
    return linear(x).sum() if bool(draw.any()) else linear(x).mean()


def rounded_by_a_device(linear: Any, x: Tensor) -> Tensor:
    """Whether it is 1 depends on how a device multiplies."""
    third = torch.ones(4) / 3
    return linear(x).sum() if bool((third * 3 == 1).all()) else linear(x).mean()


def uninitialized(linear: Any, x: Tensor) -> Tensor:
    made = torch.empty_like(torch.zeros(4, dtype=torch.int64))
    return linear(x).sum() if bool(made.any()) else linear(x).mean()


@pytest.mark.parametrize(
    "function",
    [
        *(written, written_by_an_operator, written_through_data, written_through_a_view),
        *(random, random_by_a_generator, uninitialized, dropped, rounded_by_a_device),
    ],
)
def test_other_values_are_not_read(function: Callable[..., Tensor]) -> None:
    model = Model(function)
    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match="needs the value of a tensor"):
        autopar.compile(model, 1, example_inputs=(torch.ones(3, 5, 4).double(),), fallback=False)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("function", [packed, short, both_branches])
def test_further_lengths_are_derived_where_the_values_hold(function: Callable[..., Tensor]) -> None:
    model, traced = Model(function), []

    def trace(call: Call) -> Any:
        traced.append(call)
        return capture(model, call, describe_parameters(model), device=CPU)

    def symbolically(call: Call, sizes: Any, compiled: Any) -> Any:
        given: dict[str, Any] = {"device": CPU, "compiled": compiled}
        return capture_symbolically(model, call, describe_parameters(model), sizes, **given)

    family, lengths = ShapeFamily(), (3, 5, 6, 7, 12)
    for length in lengths:
        inputs = flattened((torch.rand(2, length, 4, dtype=torch.float64),))
        call = batch_shard_of(*inputs, mode="global", rank=0, ranks=1).call
        made = family.capture(call, trace, symbolically)
        direct = capture(model, call, describe_parameters(model), device=CPU)
        ours, theirs = made.graph.graph, direct.graph.graph
        assert [n.target for n in ours.nodes] == [n.target for n in theirs.nodes]
        assert [repr(n.args) for n in ours.nodes] == [repr(n.args) for n in theirs.nodes]
    assert len(traced) == {packed: 2, short: 5, both_branches: 2}[function]
