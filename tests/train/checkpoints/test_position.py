"""A resumed run reads the batch that comes next, whatever shuffles or draws in the loader."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from autopar.train.checkpoints.position import DataPosition
from autopar.train.checkpoints.random_state import RandomState

ROWS = 10


class Noisy(Dataset[Tensor]):
    """Rows with noise from the default generator, as augmentation draws it."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Tensor:
        return row + torch.rand(())


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "in order": lambda: DataLoader(Noisy(), 3),
    "shuffled": lambda: DataLoader(Noisy(), 3, shuffle=True),
    "workers": lambda: DataLoader(Noisy(), 3, shuffle=True, num_workers=1),
    "distributed": lambda: DataLoader(Noisy(), 2, sampler=DistributedSampler(Noisy(), 2, 1)),
    # it draws a seed of its own as it goes on, so rows are compared without noise
    "stateful": lambda: StatefulDataLoader(list(range(ROWS)), 3, shuffle=True),
}


def read(position: DataPosition, loader: Iterable[Any], batches: int) -> list[Tensor]:
    """Batches over as many epochs as it takes; each step draws a number of its own."""
    found: list[Tensor] = []
    while True:
        for batch in position.epoch_batches(loader):
            found.append(batch)
            torch.rand(1)
            if len(found) == batches:
                return found


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("done", [2, 4, 5])
def test_the_next_batch_follows(kind: str, done: int) -> None:
    torch.manual_seed(7)
    want = read(DataPosition(), LOADERS[kind](), 9)

    torch.manual_seed(7)
    first = DataPosition()
    got = read(first, LOADERS[kind](), done)
    state, numbers = first.state_dict(), RandomState.now()

    torch.manual_seed(99)
    second = DataPosition()
    second.load_state_dict(state)
    numbers.restore()
    got += read(second, LOADERS[kind](), 9 - done)
    assert torch.cat(got).equal(torch.cat(want))
