"""A trace leaves the values of the model as they are."""

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError


class Counting(nn.Module):
    """Counts its calls in a plain tensor, in place, and weighs its result with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.calls = nn.Linear(4, 4), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.linear(x).mean() * self.calls


CALLS = torch.zeros(())


class Elsewhere(Counting):
    """Counts in a global variable, a class attribute and a list, which no graph can replay."""

    number = torch.zeros(())

    def __init__(self) -> None:
        super().__init__()
        self.numbers = [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        for number in (CALLS, Elsewhere.number, self.numbers[0]):
            number.add_(1)
        return self.linear(x).mean()


def test_a_refused_capture_changes_no_tensor() -> None:
    model = Elsewhere()
    with pytest.raises(CaptureError):
        autopar.compile(model, 1, example_inputs=(torch.rand(3, 4),), fallback=False)
    assert (CALLS.item(), Elsewhere.number.item(), model.numbers[0].item()) == (0, 0, 0)


def test_plain_tensors_changed_in_place_keep_their_values_while_traced() -> None:
    x = torch.rand(3, 4)
    plain, model = Counting(), Counting()
    compiled = autopar.compile(model, 1, example_inputs=(x,), fallback=False)
    assert model.calls.item() == 0
    for _ in range(3):
        torch.testing.assert_close(compiled(x), plain(x))
    assert model.calls.item() == 3
