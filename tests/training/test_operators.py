"""Single operators as layers, on one process: outputs and gradients are eager's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.harness.training import Pair, close


class Applied(nn.Module):
    """A function of an input and a parameter of zeros, such as their sum."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def compare(
    function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], x: Tensor
) -> None:
    """Outputs and gradients of both models are equal, for an output that is weighted."""
    pair = Pair(lambda: Applied(function, *shape), zero=0)
    results = []
    for model in pair.models:
        given = x.clone().requires_grad_()
        output = model(given)
        weights = torch.arange(output.numel(), dtype=torch.float64).view(output.shape).cos()
        (output * weights).sum().backward()
        results.append({"output": output.detach(), "input": given.grad})
    close(results[1], results[0])
    pair.check_gradients()


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_gradient_that_is_the_incoming_one(shape: tuple[int, ...]) -> None:
    compare(torch.add, shape, torch.randn(shape, dtype=torch.float64))


def test_a_batch_without_rows() -> None:
    compare(torch.mul, (3,), torch.empty(0, 3, dtype=torch.float64))
