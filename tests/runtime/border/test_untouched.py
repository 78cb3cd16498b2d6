"""Parameters that a loss does not depend on have no gradient, so that optimizers leave them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.runtime.parameters.distribute import is_remote
from tests.harness.training import ADAMW, Pair, close, fixed, whole_state
from tests.harness.worlds import run

f64 = torch.float64


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.deep = nn.Linear(6, 8), nn.Linear(8, 8)
        self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 1)
        self.to(f64)

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        h = self.deep(self.body(x).tanh()).tanh()
        return F.cross_entropy(self.a(h), t), F.mse_loss(self.b(h)[:, 0], y)


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x, y = (torch.randn(*shape, dtype=f64, generator=draw) for shape in ((6, 6), (6,)))
    return x, y, torch.randint(3, (6,), generator=draw)


def train(model: nn.Module) -> list[list[bool]]:
    """Which gradients are None after each backward; the losses take turns, then come together."""
    optimizer, absent = ADAMW(model.parameters()), []
    for step in range(5):
        first, second = model(*batch(step))
        (first + second if step == 4 else (first, second)[step % 2]).backward()
        own = [p for p in model.parameters() if not is_remote(p)]
        absent.append([p.grad is None for p in own])
        optimizer.step()
        optimizer.zero_grad()
    return absent


def as_on_one_device(rank: int, world_size: int) -> None:
    plain = TwoHeads()
    expected = train(plain)
    assert sum(expected[0]) == 2
    pipeline = fixed(0, pp=2, micro_batches=2)
    several = [fixed(0), fixed(3), fixed(0, tp=2), pipeline]
    for strategy in several if world_size > 1 else [fixed(0)]:
        model = autopar.compile(TwoHeads(), strategy=strategy, fallback=False)
        absent = train(model)
        if strategy is not pipeline:  # there each rank has the parameters of its stages
            assert absent == expected
        close(whole_state(model), plain.state_dict())


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_in_turn_train_as_on_one_device(ranks: int) -> None:
    run(as_on_one_device, ranks)


class Masked(nn.Module):
    """Only the sign of the second argument is read, whose gradient is None."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(y > 0, self.layer(x), 0.0).square().sum(1)


def leave_argument(rank: int, world_size: int, batch: str) -> None:
    pair = Pair(Masked, strategy=fixed(3), batch=batch)
    draw = torch.Generator().manual_seed(1)
    for model in pair.models:
        x, y = (torch.rand(4, 4, dtype=f64, generator=draw).requires_grad_() for _ in range(2))
        model(x, y).mean().backward()
        assert x.grad is not None
        assert y.grad is None


@pytest.mark.parametrize("batch", ["global", "local"])
def test_gradient_of_an_argument_that_is_only_compared(batch: str) -> None:
    run(leave_argument, 2, batch=batch)
