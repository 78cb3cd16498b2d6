"""Batches and results in containers that torch's pytree does not know."""

import dataclasses
from collections import UserDict
from operator import is_
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar._torch import pytree
from autopar.core.common.containers import flatten
from tests.harness.training import Pair, close, fixed
from tests.harness.worlds import run


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    x: Tensor
    names: tuple[str, ...] = ()


@dataclasses.dataclass
class Result:
    loss: Tensor
    parts: SimpleNamespace


class Box:
    """A class of the user's, which could be anything."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Model(nn.Module):
    """Takes a batch and returns a result in a container each; what it returns, a test may say."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.result = (result,)

    def forward(self, batch: Any) -> Any:
        y = self.layer(batch.x)
        if self.result[0] is not None:
            return self.result[0](y)
        return Result(y.square().mean(), SimpleNamespace(y=y, name="y"))


def test_objects_come_back_as_they_were() -> None:
    x = torch.ones(2)
    batch = Batch(x, ("a",))
    for value in (batch, SimpleNamespace(x=[batch]), UserDict(a=x)):
        leaves, structure = flatten((value,))
        assert leaves[0] is x
        (again,) = pytree.tree_unflatten(leaves, structure)
        assert type(again) is type(value)
        assert all(map(is_, flatten((again,))[0], leaves))
        assert flatten((value,))[1] == structure
    config = SimpleNamespace(width=3)
    assert flatten(config)[0] == [config]


def train(rank: int, world_size: int) -> None:
    pair = Pair(Model, zero=0)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        batch = Batch(torch.randn(5, 4, dtype=torch.float64, generator=generator))
        want, have = pair.plain(batch), pair.parallel(batch)
        assert isinstance(have, Result)
        assert have.parts.name == "y"
        close(have.loss, want.loss)
        want.loss.backward()
        have.loss.backward()
        pair.check_gradients()
        pair.step()
    pair.check_state()


def test_rows_are_found_inside_of_them() -> None:
    run(train, 2)


def test_tensors_that_cannot_be_seen_are_refused() -> None:
    x = torch.randn(5, 4)
    result = autopar.compile(Model(Box), strategy=fixed(0))(Batch(x))
    with pytest.raises(autopar.ModelError, match="returned a Box, whose tensors autopar does not"):
        _ = result.x
    with pytest.raises(autopar.BatchError, match="an argument of the model is a Box"):
        autopar.compile(Model(), strategy=fixed(0))(Box(x))
    with pytest.raises(autopar.BatchError, match="an argument of the model is a Box"):
        autopar.compile(Model(), strategy=fixed(0), example_inputs=(Box(x),))
