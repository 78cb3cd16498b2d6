"""The parity models are what the other tests take them for."""

import functools
import math

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.harness.models import MODELS, Case
from tests.harness.reference import reference, relative_error, to_dtype, worst_error

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
CASES = pytest.mark.parametrize("case", MODELS.values(), ids=lambda case: case.name)


@CASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_trains_and_repeats(case: Case, dtype: torch.dtype) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append(reference(case, 6, dtype, ADAMW, rows=4))
    assert runs[0].losses == runs[1].losses
    assert worst_error(runs[0].state, runs[1].state)[0] == 0
    assert all(value.isfinite().all() for value in runs[0].state.values())
    assert len(set(runs[0].losses)) == 6


@CASES
def test_learns_one_batch(case: Case) -> None:
    model = case.make().train()
    args, kwargs = case.batch(4, 0)
    optimizer = ADAMW(model.parameters())
    losses = []
    for _ in range(20):
        loss = case.loss(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@CASES
def test_batches_differ_by_row_and_seed(case: Case) -> None:
    (first, *_), _ = case.batch(4, 0)
    (other, *_), _ = case.batch(4, 1)
    assert first.shape[0] == 4
    assert len({tuple(row.flatten().tolist()) for row in first}) == 4
    assert not torch.equal(first, other)


@CASES
def test_rows_are_a_batch_of_their_own(case: Case) -> None:
    """Every batch tensor but a 0-d one has the rows as its first dim, so that ranks can cut it."""
    shapes = [x.shape for x in pytree.tree_leaves(case.batch(5, 0)) if isinstance(x, torch.Tensor)]
    assert all(shape[0] == 5 for shape in shapes if shape)


@pytest.mark.parametrize("name", ["encdec", "odd"])
def test_counts_differ_between_rows(name: str) -> None:
    _, kwargs = MODELS[name].batch(4, 0)
    counted = kwargs["labels"] != -100 if name == "encdec" else kwargs["mask"]
    assert len(set(counted.sum(1).tolist())) > 1


def test_moe_loss_is_no_mean_over_rows() -> None:
    case = MODELS["moe"]
    model = case.make().double()
    (ids, targets), _ = case.batch(4, 0)
    whole = model(ids, targets)["aux"].item()
    halves = [model(ids[rows], targets[rows])["aux"].item() for rows in ([0, 1], [2, 3])]
    assert abs(whole - sum(halves) / 2) > 1e-4


def test_casting_leaves_integers_alone() -> None:
    args, kwargs = to_dtype(MODELS["odd"].batch(2, 0), torch.float64)
    assert args[0].dtype == kwargs["extra"]["temperature"].dtype == torch.float64
    assert kwargs["mask"].dtype == torch.bool
    assert kwargs["extra"]["none"] is None


def test_relative_error() -> None:
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])) == 0
    assert relative_error(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
    assert relative_error(1e-3, 0.0) == pytest.approx(1e-3)
    assert relative_error(math.nan, 1.0) == math.inf
