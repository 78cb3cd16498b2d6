"""A trace leaves the values of the model as they are."""

import torch
from torch import Tensor, nn

import autopar


class Counting(nn.Module):
    """Counts its calls in a plain tensor, in place, and weighs its result with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.calls = nn.Linear(4, 4), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.linear(x).mean() * self.calls


def test_plain_tensors_changed_in_place_keep_their_values_while_traced() -> None:
    x = torch.rand(3, 4)
    plain, model = Counting(), Counting()
    compiled = autopar.compile(model, 1, example_inputs=(x,), fallback=False)
    assert model.calls.item() == 0
    for _ in range(3):
        torch.testing.assert_close(compiled(x), plain(x))
    assert model.calls.item() == 3
