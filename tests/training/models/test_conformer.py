"""A Conformer block, and a batch norm between two transpositions, train as on one device."""

import pytest
import torch
from torch import Tensor, nn

from tests.harness.training import Pair, close
from tests.harness.worlds import run

ROWS, SEQ, WIDTH = 5, 6, 8


class FeedForward(nn.Sequential):
    def __init__(self) -> None:
        norm = nn.LayerNorm(WIDTH)
        super().__init__(norm, nn.Linear(WIDTH, 16), nn.SiLU(), nn.Linear(16, WIDTH))


class Convolution(nn.Module):
    """Pointwise and depthwise convolutions over time, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.wide = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depth = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.narrow = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.glu(self.wide(self.before(x).transpose(1, 2)), dim=1)
        y = self.norm(self.depth(y)).transpose(1, 2)
        return self.narrow(nn.functional.silu(y))


class Conformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = FeedForward(), FeedForward()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.convolution = Convolution()

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.first(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.convolution(x)
        return self.out(x + 0.5 * self.last(x)).square().mean()


class Turned(nn.Module):
    """Batch norm of channels that lie last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(y).tanh().square().mean()


MODELS = {"conformer": Conformer, "turned": Turned}


def train(rank: int, world_size: int, name: str) -> None:
    pair = Pair(MODELS[name], zero=0)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, SEQ, WIDTH, dtype=torch.float64, generator=generator)
        want, have = pair.plain(x), pair.parallel(x)
        close(have, want)
        want.backward()
        have.backward()
        pair.check_gradients()
        pair.step()
    pair.check_state()


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_exactly(name: str) -> None:
    run(train, 2, name=name)
