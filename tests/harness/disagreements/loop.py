"""The training loop that scenarios of disagreement change on one rank."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import autopar
from tests.harness.training import fixed

STEPS, FAULT = 7, 2
ROWS, WIDTH, LAYERS = 12, 12, 6

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"zero": 0},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "tp": {"zero": 0, "tp": "size"},
    "pp": {"zero": 0, "pp": "size", "schedule": "1f1b", "micro_batches": 1},
    "pp, 2 micro-batches": {"zero": 0, "pp": "size", "schedule": "1f1b", "micro_batches": 2},
}


class Model(nn.Module):
    """Some layers, a running mean in a buffer, and a loss."""

    def __init__(self, seed: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.scale = scale

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) * self.scale).square().mean()


def named_alike(kind: type[nn.Module]) -> type[nn.Module]:
    """A class by the name of `Model`, which other ranks do not know from it."""
    kind.__name__ = Model.__name__
    return kind


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Loop:
    """A training loop in steps that a scenario can change on one rank.

    Args:
        rank: this one.
        size: of the world.
        strategy: a key of `STRATEGIES`.
        folder: for files.
    """

    batch_mode: ClassVar[str] = "global"
    abstract: ClassVar[bool] = False
    """Whether it is no scenario."""
    only: ClassVar[tuple[str, ...]] = ()
    """Strategies under which the scenario is one; () for all."""
    leaves: ClassVar[bool] = False
    """Whether the odd rank leaves without an error."""
    legitimate: ClassVar[bool] = False
    """Whether ranks may differ so, and train."""

    def __init__(self, rank: int, size: int, strategy: str, folder: str) -> None:
        self.rank, self.size, self.strategy, self.folder = rank, size, strategy, folder
        self.losses: list[float] = []

    def plan_options(self) -> dict[str, Any]:
        options = dict(STRATEGIES[self.strategy])
        return {k: self.size if v == "size" else v for k, v in options.items()}

    def options(self) -> dict[str, Any]:
        strategy = fixed(**self.plan_options())
        return {"strategy": strategy, "batch": self.batch_mode, "fallback": False}

    def make(self) -> nn.Module:
        return Model()

    def compile(self) -> None:
        self.model = autopar.compile(self.make(), **self.options())

    def rate(self) -> float:
        return 0.1

    def make_optimizer(self) -> None:
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(parameters, lr=self.rate(), momentum=0.9)

    def rows(self, step: int) -> int:
        return ROWS

    def seed(self, step: int) -> int:
        return step

    def data(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed(step))
        return torch.randn(self.rows(step), WIDTH, generator=generator)

    def loader(self) -> Iterator[tuple[int, Tensor]]:
        for step in range(STEPS):
            yield step, self.data(step)

    def forward(self, step: int, x: Tensor) -> Tensor:
        return self.model(x)

    def backward(self, step: int, loss: Tensor) -> None:
        loss.backward()

    def clip(self, step: int) -> None:
        return None

    def update(self, step: int) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def after(self, step: int) -> None:
        return None

    def end(self) -> None:
        return None

    def begin_step(self, step: int) -> None:
        """The place of faults that happen between two steps."""

    def run(self) -> list[float]:
        """Trains; gives the losses."""
        self.compile()
        self.make_optimizer()
        for step, x in self.loader():
            self.begin_step(step)
            loss = self.forward(step, x)
            self.backward(step, loss)
            self.clip(step)
            self.update(step)
            self.after(step)
            self.losses.append(loss.item())
        self.end()
        return self.losses
