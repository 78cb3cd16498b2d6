"""Micro-batches whose number does not divide the rows: they differ by a row, and train exactly."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.core.common.notices import ISSUED
from autopar.core.ir.batch_slicing import BatchSlices
from tests.harness.models import MODELS
from tests.harness.training import Pair, close, rows_of
from tests.harness.worlds import run
from tests.training.test_pipeline import batch_of, staged

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipe_v")


def rows_of_micro_batches(model: Any) -> list[int]:
    """Rows of each micro-batch of the latest new kind of call."""
    return list(list(model._execution.executor.compiled_calls.values())[-1].rows)


def test_slices_of_micro_batches() -> None:
    ranks = BatchSlices(2, 1, 9)
    parts = ranks.over_micro_batches(3)
    assert [part.sizes for part in parts] == [(2, 2, 1, 2, 1, 1)] * 3
    assert [part.unit_indices().tolist() for part in parts] == [[5, 6], [7], [8]]
    assert [part.next_alike.index for part in parts] == [0, 5, 2]
    assert BatchSlices(2, 0, 12).over_micro_batches(3) == [
        BatchSlices(6, index, 12, over_time=True) for index in range(3)
    ]


def train(rank: int, world_size: int, setups: list[dict[str, Any]], rows: list[int]) -> Any:
    """The rows of micro-batches of each step under each setup."""
    found = []
    for options in setups:
        pair, counts = Pair("gpt", strategy=staged(2, **options)), []
        for step, count in enumerate(rows):
            args, _ = batch_of("gpt", step, count)
            losses = [model(*args) for model in pair.models]
            close(losses[1], losses[0])
            for loss in losses:
                loss.backward()
            pair.step()
            counts.append(rows_of_micro_batches(pair.parallel))
        pair.check_state()
        found.append(counts)
    return found


def test_every_schedule_trains_exactly() -> None:
    """The last batch of an epoch is short, too."""
    setups = [{"schedule": schedule, "zero": index % 2} for index, schedule in enumerate(SCHEDULES)]
    for found in run(train, 2, setups=setups, rows=[7, 5, 3], timeout=300):
        assert found == [[[2, 2, 2, 1], [2, 1, 1, 1], [1, 1, 1]]] * len(setups)


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_over_data_parallel_ranks(zero: int) -> None:
    """Ranks have other numbers of rows, and so the larger micro-batches have other numbers."""
    setups = [{"zero": zero, "micro_batches": 3, "schedule": "zero_bubble"}]
    first, *_, last = run(train, 4, setups=setups, rows=[9, 11], timeout=300)
    assert first == [[[2, 2, 1], [2, 2, 2]]]
    assert last == [[[2, 1, 1], [2, 2, 1]]]


@pytest.mark.slow
def test_other_axes_beside() -> None:
    setups = [{"tp": 2, "micro_batches": 3, "zero": 1}, {"cp": 2, "micro_batches": 3}]
    for found in run(train, 4, setups=setups, rows=[7, 6], timeout=300):
        assert found == [[[3, 2, 2], [2, 2, 2]]] * len(setups)


def last_of_an_epoch(rank: int, world_size: int) -> list[str]:
    model = autopar.compile(MODELS["gpt"].make(), strategy=staged(2))
    ISSUED.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for rows in (8, 6, 3, 3):
            model(*batch_of("gpt", 0, rows)[0]).backward()
    return [str(each.message) for each in told if "micro-batches" in str(each.message)]


def test_fewer_micro_batches_than_planned_are_told() -> None:
    told, _ = run(last_of_an_epoch, 2)
    (line,) = told
    assert line.startswith("a call runs in 3 micro-batches instead of 4, because a rank has 3 rows")


class Rows(nn.Module):
    """Ignores targets, and returns rows beside the mean loss over the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.layers(x)
        loss = F.cross_entropy(hidden, labels, ignore_index=-1)
        return loss, hidden, hidden.square().sum()


def several_losses(rank: int, world_size: int, batch: str) -> list[int]:
    """Rows of micro-batches after steps on a loss over some labels, rows and a sum."""
    pair = Pair(Rows, strategy=staged(2, 3), batch=batch)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(7 * 2, 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(-1, 6, (7 * 2,), generator=generator)
        own = pair.parallel.data_parallel_rank, pair.parallel.data_parallel_size
        given = rows_of(((x, labels), {}), *own)[0] if batch == "local" else (x, labels)
        for model, args in zip(pair.models, ((x, labels), given), strict=True):
            loss, hidden, total = model(*args)
            if step:  # every output has a gradient
                loss = loss + hidden.square().mean() + 0.01 * total
            loss.backward()
        pair.step()
    pair.check_state()
    return rows_of_micro_batches(pair.parallel)


@pytest.mark.parametrize("batch", ["global", "local"])
def test_losses_of_rows_and_ignored_labels(batch: str) -> None:
    for found in run(several_losses, 2, batch=batch):
        assert found == [5, 5, 4]


class Odd(nn.Module):
    """Averages odd numbers of rows alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] % 2:
            self.average += x.mean(0)
        return self.second(self.first(x).tanh()).square().mean()


def average_some(rank: int, world_size: int) -> list[list[int]]:
    strategy = staged(2, 2, batch_semantics="local")
    pair, counts = Pair(Odd, strategy=strategy), []
    for rows in (8, 5):
        for model in pair.models:
            model(torch.ones(rows, 6, dtype=torch.float64)).backward()
        pair.step()
        counts.append(rows_of_micro_batches(pair.parallel))
    pair.check_state()
    return counts


def test_micro_batches_that_do_not_add_up_are_one() -> None:
    for found in run(average_some, 2):
        assert found == [[4, 4], [5]]


def norms(rank: int, world_size: int) -> list[list[int]]:
    """Batch norm needs one micro-batch, as it does of even ones."""
    pair, counts = Pair("conv", strategy=staged(2, 2)), []
    for step, rows in enumerate((7, 8)):
        args, kwargs = batch_of("conv", step, rows)
        for model in pair.models:
            model(*args, **kwargs).backward()
        pair.step()
        counts.append(rows_of_micro_batches(pair.parallel))
    pair.check_state()
    return counts


def test_batch_norm_over_uneven_micro_batches() -> None:
    for found in run(norms, 2):
        assert found == [[7], [8]]
