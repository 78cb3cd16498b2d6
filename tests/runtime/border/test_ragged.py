"""Packed rows of other lengths on other ranks, under batch="local"."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.harness.worlds import run
from tests.runtime.border.test_replicated import compiled, f64

LENGTHS = ((5, 5), (5, 3), (5, 3))
"""Tokens of each rank's row, by step; at first they are equal."""


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, ids: Tensor, starts: Tensor, longest: int) -> Tensor:
        mixed = self.layer(self.embedding(ids)).cumsum(1) / (1 + starts[:, None])
        logits = self.head(mixed.tanh() / longest)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def row(step: int, rank: int) -> tuple[Tensor, Tensor, int]:
    generator, length = torch.Generator().manual_seed(10 * step + rank), LENGTHS[step][rank]
    return torch.randint(7, (1, length), generator=generator), torch.arange(length), length


def losses(model: nn.Module, steps: list[list[tuple[Tensor, Tensor, int]]]) -> list[float]:
    """Trains on the mean of the losses of the rows of each step."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.5), []
    for rows in steps:
        total = 0.0
        for each in rows:
            loss = model(*each) / len(rows)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


def on_own_rows(rank: int, ranks: int, *, strategy: str) -> tuple[list[float], Tensor, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = compiled(Tagger().to(f64), strategy, batch="local")
        found = losses(model, [[row(step, rank)] for step in range(len(LENGTHS))])
    return (
        found,
        model.full_state_dict(rank0_only=False)["head.weight"],
        [
            str(each.message)
            for each in caught
            if issubclass(each.category, autopar.NumericsWarning)
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_each_rank_trains_on_its_own_packed_row(strategy: str) -> None:
    plain = Tagger().to(f64)
    steps = [[row(step, rank) for rank in range(2)] for step in range(len(LENGTHS))]
    wanted = losses(plain, steps)
    answers = run(on_own_rows, 2, strategy=strategy)
    for found, weight, _ in answers:
        assert found == pytest.approx(wanted, rel=1e-9)
        torch.testing.assert_close(weight, plain.head.weight.detach(), rtol=1e-9, atol=1e-12)
    assert any("as under DistributedDataParallel" in text for text in answers[0][2])


def one_row(rank: int, ranks: int) -> None:
    compiled(Tagger().to(f64), batch="global")(*row(0, 0))


def test_one_row_for_all_ranks_names_what_to_change() -> None:
    (first, _) = run(one_row, 2, expect_errors=True)
    assert first.type == "BatchError"
    for advice in ("Strategy(cp=2)", "batch='local'", "compile_options={'batch': 'local'}"):
        assert advice in first.message
