"""What cannot be captured trains under torch's own data parallelism."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.training import fixed, whole_state
from tests.worlds import run


class Branching(nn.Module):
    """A model that asks for the value of a tensor; a ModuleList so that it has blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.abs().max() > 1e3:
                x = x / 2
        return x.square().mean()


def rows(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)


def plain() -> dict[str, Tensor]:
    model = Branching().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        model(rows(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(rank: int, world_size: int, early: bool, options: dict[str, Any]) -> Any:
    given = {"example_inputs": (rows(0),)} if early else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = autopar.compile(Branching().double(), **given, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            model(rows(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [str(w.message) for w in caught if "autopar" in str(w.message)]
    return whole_state(model), said


@pytest.mark.parametrize(
    ("early", "options", "engine"),
    [
        (False, {"strategy": "auto"}, "DistributedDataParallel"),
        (True, {"strategy": "auto"}, "DistributedDataParallel"),
        (False, {"strategy": "ddp"}, "DistributedDataParallel"),
        (True, {"strategy": "zero3"}, "fully_shard"),
        (True, {"memory": 100}, "fully_shard"),
    ],
)
def test_trains_as_the_plain_model(early: bool, options: dict[str, Any], engine: str) -> None:
    want = plain()
    for state, said in run(train, 2, early=early, options=options):
        assert len(said) == 1
        assert f"torch's {engine} instead" in said[0]
        assert "x.abs().max() > 1e3" in said[0]
        assert list(state) == list(want)
        for name in want:
            torch.testing.assert_close(state[name], want[name], rtol=1e-9, atol=1e-12)


def test_alone_it_runs_as_it_is() -> None:
    state, said = train(0, 1, early=False, options={"strategy": "auto"})
    assert "runs the model as it is" in said[0]
    torch.testing.assert_close(state, dict(plain()))


def shard_late(rank: int, world_size: int) -> None:
    autopar.compile(Branching(), strategy=fixed(3))(rows(0).float())


def test_sharding_late_is_refused() -> None:
    for answer in run(shard_late, 2, expect_errors=True):
        assert answer[0] == "StrategyError"
        assert "example_inputs" in answer[1]
