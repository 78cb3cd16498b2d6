"""`Recipe`: a drawn loop; `Loop`: the interpreter that trains a plain or a compiled model by it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.loops.models import Net, batch_of

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.1),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.02, eps=1e-3),
}


def contrastive(rows: Tensor, targets: Tensor) -> Tensor:
    """Each row's prediction against the targets of all rows."""
    scores = F.normalize(rows, dim=-1) @ F.normalize(targets, dim=-1).T
    return F.cross_entropy(4 * scores, torch.arange(len(rows)))


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.mse_loss,
    "sum": lambda rows, y: (rows - y).square().sum() / 8,
    "deviation": lambda rows, y: (rows - y).square().mean() + rows.var(0, correction=0).sum(),
    "contrastive": contrastive,
    "largest": lambda rows, y: torch.logsumexp((rows - y).square().flatten(), 0),
    "classes": lambda rows, y: F.cross_entropy(rows, y.argmax(-1)),
}
"""Losses that a loop computes from rows."""


@dataclass(frozen=True)
class Recipe:
    """A loop, its model and its data; everything else follows from the seed.

    Attributes:
        loss: a key of `LOSSES`, for a model that returns rows alone.
        elements: names of what the loop does beside the usual.
        traits: of the model, that its elements ask for.
        rows: number of rows of each step's batch.
        setup: name of a strategy.
        compute: "float64", "float32", or "bfloat16": a float32 model whose forward runs under
            autocast.
    """

    seed: int
    net: str
    form: str
    loss: str
    optimizer: str
    elements: tuple[str, ...]
    traits: tuple[str, ...]
    rows: tuple[int, ...]
    setup: str
    ranks: int
    compute: Literal["float64", "float32", "bfloat16"] = "float64"

    @property
    def name(self) -> str:
        loss = f":{self.loss}" if self.form in ("rows", "views") else ""
        parts = [f"{self.net}({self.form}{loss})", self.compute, self.optimizer, *self.elements]
        return f"{' '.join(parts)} rows {','.join(map(str, self.rows))}"

    @property
    def casts_forward(self) -> bool:
        """Whether forward itself computes in bfloat16: an element may open autocast around it."""
        return self.compute == "bfloat16" and "autocast" not in self.elements

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and batches."""
        return torch.float64 if self.compute == "float64" else torch.float32

    def make(self) -> nn.Module:
        """The plain model, the same at every call."""
        torch.manual_seed(self.seed)
        return Net(self.net, self.form, self.traits).to(self.dtype)


class Observed(NamedTuple):
    """Numbers that a loop sees, and the state that it ends with."""

    values: list[float]
    state: dict[str, Tensor]


class Element:
    """A change to the usual loop, at the moments that it overrides.

    Attributes:
        traits: of the model, as in `Net`.
        forms: results of forward that suit it; any if empty.
        is_global: whether it needs the rows of all ranks, so that `batch="local"` does not suit.
    """

    traits: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    is_global: bool = False

    def before_training(self, loop: Loop) -> None:
        """Called before the first step."""

    def batch(self, loop: Loop, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The batch that the model is given."""
        return x, y

    def result(self, loop: Loop, result: Any) -> None:
        """Called with what the model returns."""

    def penalty(self, loop: Loop) -> Tensor | None:
        """A term that is added to the loss."""

    def backward(self, loop: Loop, x: Tensor, y: Tensor) -> bool:
        """Computes the gradients of a step in place of the usual way, or returns False."""
        return False

    def gradients(self, loop: Loop) -> None:
        """Called between backward and the optimizer's step."""

    def after_step(self, loop: Loop) -> None:
        """Called after the optimizer's step and `zero_grad`."""

    def after_training(self, loop: Loop) -> None:
        """Called after the last step."""


class Loop:
    """Trains a model by a recipe.

    Args:
        compile_other: compiles a second model as the first was, or returns it plain.
        share: index and number of the rank whose rows of each batch the model is given.

    Attributes:
        values: numbers that the loop observed, in order.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Any,
        elements: Sequence[Element],
        compile_other: Callable[[nn.Module], Any],
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.recipe, self.model, self.elements = recipe, model, elements
        self.compile_other, self.share = compile_other, share
        self.values: list[float] = []
        self.step, self.others = 0, list[nn.Parameter]()
        self.optimizer: Any = None

    def run(self) -> list[float]:
        """Trains for all steps."""
        for element in self.elements:
            element.before_training(self)
        self.new_optimizer()
        for step, rows in enumerate(self.recipe.rows):
            self.step = step
            x, y = batch_of(self.recipe.net, rows, 100 * self.recipe.seed + self.step)
            first, ranks = self.share
            x, y = (t[first::ranks].to(self.recipe.dtype) for t in (x, y))
            for element in self.elements:
                x, y = element.batch(self, x, y)
            if not any(element.backward(self, x, y) for element in self.elements):
                self.loss(x, y).backward()
            for element in self.elements:
                element.gradients(self)
            self.optimizer.step()
            self.optimizer.zero_grad()
            for element in self.elements:
                element.after_step(self)
        for element in self.elements:
            element.after_training(self)
        return self.values

    def new_optimizer(self) -> None:
        """An optimizer of the model's parameters and the loop's others."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        group = {"params": iter([*trained, *self.others])}  # as layer.parameters() is
        self.optimizer = OPTIMIZERS[self.recipe.optimizer]([group])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch with the penalties of all elements; it is observed."""
        result = self.model(x, y)
        for element in self.elements:
            element.result(self, result)
        loss = self.loss_of(result, y)
        for element in self.elements:
            if (penalty := element.penalty(self)) is not None:
                loss = loss + penalty
        self.observe(loss)
        return loss

    def loss_of(self, result: Any, y: Tensor) -> Tensor:
        """The loss of a result of the model."""
        match self.recipe.form:
            case "rows":
                return LOSSES[self.recipe.loss](result, y)
            case "views":
                return LOSSES[self.recipe.loss](result[0], y) + 0.1 * result[1].square().mean()
            case "tuple":
                return result[0]
            case "dict":
                return result["loss"]
            case "losses":
                return result[0] + 0.5 * result[1]
        return result if isinstance(result, Tensor) else result[0]

    def observe(self, value: Any) -> None:
        """Notes a number that the loop sees."""
        self.values.append(float(value.detach() if isinstance(value, Tensor) else value))
