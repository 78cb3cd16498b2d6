"""CTC as a layer: rows are divided, and loss and gradients are torch's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.traceable import traceable
from autopar.core.operators.ctc import Selection, ctc_like, select_like
from autopar.errors import BatchError
from tests.harness.training import Pair, fixed
from tests.harness.worlds import run

ROWS, TIME, CLASSES = 6, 9, 5
INPUTS, TARGETS = torch.tensor([9, 7, 9, 8, 4, 9]), torch.tensor([3, 2, 3, 1, 3, 0])


def labels() -> Tensor:
    """Targets [rows, 3], of which -100 is none."""
    drawn = torch.randint(1, CLASSES, (ROWS, 3), generator=torch.Generator().manual_seed(0))
    return drawn.masked_fill(torch.arange(3) >= TARGETS[:, None], -100)


class Recognizer(nn.Module):
    """Log-probabilities of a layer, and CTC as transformers' speech models compute it."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head, self.reduction = nn.Linear(8, 8), nn.Linear(8, CLASSES), reduction

    def forward(self, x: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        scores = self.head(self.inner(x).tanh())
        mask = targets >= 0
        joined = targets.masked_select(mask)
        return F.ctc_loss(
            F.log_softmax(scores, -1).transpose(0, 1),
            joined,
            lengths,
            mask.sum(-1),
            reduction=self.reduction,
            zero_infinity=True,
        )


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, TIME, 8, dtype=torch.float64, generator=generator)
    return x, labels(), INPUTS


def divided(rank: int, world_size: int) -> None:
    for options in ({"zero": 0}, {"zero": 3}, {"strategy": fixed(0, tp=2)}):
        for reduction in ("mean", "sum"):
            pair = Pair(lambda: Recognizer(reduction), **options)  # noqa: B023
            for seed in range(2):
                for model in pair.models:
                    model(*batch(seed)).backward()
                pair.check_gradients()
                pair.step()
            pair.check_state()


def test_rows_of_ctc_are_divided() -> None:
    run(divided, 2)


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("as_numbers", [False, True])
def test_ctc(reduction: str, zero_infinity: bool, as_numbers: bool) -> None:
    """One row needs more time than it has, so that its loss is infinite."""
    source = torch.randn(TIME, ROWS, CLASSES, dtype=torch.float64).log_softmax(-1)
    inputs, targets = INPUTS.clamp(max=8), labels().clamp(min=0)
    inputs[0] = 2
    lengths: Any = (inputs.tolist(), TARGETS.tolist()) if as_numbers else (inputs, TARGETS)
    gradients = []
    for function in (F.ctc_loss, ctc_like):
        x = source.clone().requires_grad_()
        loss = function(x, targets, *lengths, 0, reduction, zero_infinity)
        loss[1:].sum().backward() if reduction == "none" else loss.backward()
        gradients.append((loss.detach(), x.grad))
    torch.testing.assert_close(*gradients, rtol=0, atol=0, equal_nan=True)


def test_a_selection_is_torchs_for_anyone_else() -> None:
    x = torch.tensor([[1, 2], [3, 4]])
    selection = select_like(x, x > 1)
    assert isinstance(selection, Selection)
    assert selection.tolist() == [2, 3, 4] == [int(each) for each in selection]
    assert (1 + selection).tolist() == [3, 4, 5] == (selection + 1).tolist()
    assert torch.cat([selection, x[0]]).tolist() == [2, 3, 4, 1, 2]
    assert len(selection) == 3


def test_target_lengths_of_other_rows() -> None:
    x, targets, lengths = batch(0)
    scores = x[..., :CLASSES].log_softmax(-1).transpose(0, 1)
    with pytest.raises(BatchError, match="other target_lengths"):
        ctc_like(scores, select_like(targets, targets >= 0), lengths, TARGETS.flip(0))


class Spread(nn.Module):
    """A mean and a variance of each row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, variance = self.head(x).chunk(2, -1)
        return F.gaussian_nll_loss(mean, y, variance, full=True)


def test_a_negative_variance_is_refused_in_the_program() -> None:
    pair = Pair(Spread, zero=0)
    x, y = torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    for model in pair.models:
        with torch.no_grad():
            model.head.bias[2:] += 9.0
        model(x, y).backward()
    pair.check_gradients()
    with torch.no_grad():
        pair.parallel.head.bias[2:] -= 30.0
    with pytest.raises(BatchError, match="negative"):
        pair.parallel(x, y)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_gaussian_nll(reduction: str) -> None:
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    variance = (torch.rand(4, 3, dtype=torch.float64) * 1e-5).requires_grad_()
    gradients = []
    for function in (F.gaussian_nll_loss, traceable(F.gaussian_nll_loss)):
        loss = function(x, y, variance, reduction=reduction)
        gradients.append((loss, *torch.autograd.grad(loss.sum(), variance)))
    torch.testing.assert_close(*gradients, rtol=1e-14, atol=0)
