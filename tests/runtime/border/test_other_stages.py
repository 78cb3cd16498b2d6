"""Under pipelines a loop that reads gradients or values of all parameters is refused."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import StrategyError
from tests.harness.training import fixed, whole_state
from tests.harness.worlds import run


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.b(self.a(x).tanh()) - y).square().mean()


X, Y = (torch.randn(8, 6, generator=torch.Generator().manual_seed(i)) for i in (0, 1))


class Sam(torch.optim.SGD):
    """Sharpness-aware minimisation, as an optimizer of one device."""

    def norm(self) -> Tensor:
        return torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()


READS: dict[str, Callable[[Any], Any]] = {
    "torch's clipping": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "norm of gradients": lambda m: sum(p.grad.norm().item() for p in m.parameters()),
    "vector of gradients": lambda m: torch.cat([p.grad.flatten() for p in m.parameters()]),
    "gradients of a part": lambda m: [p.grad.mul_(2) for x in (m.a, m.b) for p in x.parameters()],
    "penalty": lambda m: sum(p.square().sum() for p in m.parameters()),
    "copy": lambda m: [p.clone() for p in m.parameters()],
    "noise": lambda m: [p.data.add_(torch.randn_like(p)) for p in m.parameters()],
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
}


def refuse(rank: int, world_size: int) -> None:
    for strategy in (fixed(0, pp=2), fixed(3, pp=2)):
        model = autopar.compile(Regression(), strategy=strategy, example_inputs=(X, Y))
        model(X, Y).backward()
        for read in READS.values():
            with pytest.raises(StrategyError, match=r"clip_grad_norm_\(\).*model\.gathered\(\)"):
                read(model)
        model.clip_grad_norm_(1.0)
        model.zero_grad()
        assert sum(p.numel() for p in model.parameters()) == 110


def test_reads_are_refused() -> None:
    run(refuse, 2)


def step_parts(rank: int, world_size: int) -> None:
    """Optimizers for two parts of a model, each of which lies on one stage."""
    plain = Regression()
    for given in ({}, {"example_inputs": (X, Y)}):
        models = (
            copy.deepcopy(plain),
            autopar.compile(copy.deepcopy(plain), strategy=fixed(0, pp=2), **given),
        )
        for model in models:
            parts = (
                torch.optim.SGD(model.a.parameters(), 0.1),
                torch.optim.AdamW(model.b.parameters(), 0.1),
            )
            for _ in range(3):
                model(X, Y).backward()
                for optimizer in parts:
                    optimizer.step()
                    optimizer.zero_grad()
        torch.testing.assert_close(whole_state(models[1]), models[0].state_dict())


def test_optimizers_of_parts() -> None:
    run(step_parts, 2)


def warn(rank: int, world_size: int) -> None:
    model = autopar.compile(Regression(), strategy=fixed(0, pp=2), example_inputs=(X, Y))
    text = "Sam has the parameters of this rank's stage alone"
    told = pytest.warns(autopar.NumericsWarning, match=text)
    with told if rank == 0 else contextlib.nullcontext():
        Sam(model.parameters(), 0.1)


def test_optimizers_that_are_not_torchs() -> None:
    run(warn, 2)
