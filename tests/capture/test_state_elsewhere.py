"""State of Python outside of the model that forward reads: modules, the environment, iterators."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import StrategyError
from tests.capture import settings_of_a_run
from tests.harness.training import fixed

X = torch.randn(4, 6)


class ReadsEnvironment(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean() * float(os.environ["SCALE"])


def scale_of_run() -> float:
    return settings_of_a_run.scale * settings_of_a_run.options["scale"]


class ReadsModule(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean() * scale_of_run()


@pytest.mark.parametrize("kind", [ReadsEnvironment, ReadsModule])
def test_changes_are_followed(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = kind(6, 6)
    compiled = autopar.compile(kind(6, 6), strategy=fixed(0))
    compiled.load_state_dict(plain.state_dict())
    for scale in (1.0, 3.0, 0.5):
        monkeypatch.setenv("SCALE", str(scale))
        monkeypatch.setattr(settings_of_a_run, "scale", scale)
        monkeypatch.setitem(settings_of_a_run.options, "scale", 2 * scale)
        torch.testing.assert_close(compiled(X), plain(X))


class Iterates(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.factors = iter([1.0, 2.0, 3.0] * 9)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean() * next(self.factors)


def test_iterators_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"reads self\.factors, a list_iterator"):
        autopar.compile(Iterates(), strategy=fixed(0))(X)
