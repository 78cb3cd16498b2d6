"""`Recipe`: a model assembled from blocks, its data, and three steps of training."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import benchmarks.truth.blocks  # noqa: F401 (registers all blocks)
from autopar.runtime.parameters.distribute import is_remote
from benchmarks.truth.inputs import sample
from benchmarks.truth.registry import BLOCKS, WIDTH, Block
from tests.harness.training import rows_of

STEMS = {"rows": "x", "sequence": "frames", "tokens": "tokens", "image": "pixels"}
"""Kind of the model's input -> its name."""


@dataclass(frozen=True)
class Recipe:
    """A model, its data and its training; everything else follows from the seed."""

    seed: int
    stem: str  # a key of `STEMS`
    blocks: tuple[str, ...]  # the head last
    traits: tuple[str, ...] = ()  # "tied", "frozen", "decay", "untouched"
    call: str = "positional"  # or "keywords", "dict"
    returns: str = "loss"  # or "tuple", "dict"
    optimizer: str = "adamw"  # or "sgd"
    rows: int = 8
    example_inputs: bool = False  # whether `compile` gets them

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Recipe:
        tuples = {name: tuple(fields[name]) for name in ("blocks", "traits")}
        return cls(**{**fields, **tuples})

    @property
    def name(self) -> str:
        """Stem, blocks and unusual properties."""
        unusual = [*self.traits, *({self.call, self.returns} - {"positional", "loss"})]
        return ">".join([self.stem, *self.blocks]) + "".join(f"+{word}" for word in unusual)

    @property
    def parts(self) -> list[Block]:
        return [BLOCKS[name] for name in self.blocks]

    @property
    def divides(self) -> int:
        """Divisor of every valid number of rows."""
        return lcm(*(block.divides for block in self.parts))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of all inputs in the order of forward's arguments."""
        names = [STEMS[self.stem], *(name for block in self.parts for name in block.inputs)]
        return tuple(dict.fromkeys(names))

    def make(self) -> nn.Module:
        """Return the model in float64, the same on every call."""
        torch.manual_seed(self.seed)
        return RandomModel(self).double()

    def batch(self, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the model at a step."""
        inputs = sample(self.inputs, self.rows, 1000 * self.seed + step)
        if self.call == "dict":
            return (inputs,), {}
        if self.call == "keywords":
            return (), inputs
        return tuple(inputs.values()), {}


class Mixed(nn.Module):
    """A layer over the features of rows or tokens, or the channels of images."""

    def __init__(self, linear: nn.Linear | None = None) -> None:
        super().__init__()
        self.linear = linear or nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        if h.dim() == 4:
            return self.linear(h.movedim(1, -1)).tanh().movedim(-1, 1)
        return self.linear(h).tanh()


class RandomModel(nn.Module):
    """Blocks in turn, a layer before each; losses of blocks are added to that of the head."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.embedding = nn.Embedding(11, WIDTH) if recipe.stem == "tokens" else None
        self.layers = nn.ModuleList()
        self.blocks = nn.ModuleList()
        for block in recipe.parts:
            tied = self.layers[0].linear if "tied" in recipe.traits and self.layers else None
            self.layers.append(Mixed(tied))
            self.blocks.append(block.module(recipe.rows))
        if "frozen" in recipe.traits:
            self.layers[0].requires_grad_(False)
        if "untouched" in recipe.traits:
            self.never_used = nn.Linear(WIDTH, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.recipe.call == "dict":
            inputs = args[0]
        else:
            inputs = kwargs or dict(zip(self.recipe.inputs, args, strict=True))
        h, losses = inputs[STEMS[self.recipe.stem]], []
        if self.embedding is not None:
            h = self.embedding(h)
        for layer, block, part in zip(self.layers, self.blocks, self.recipe.parts, strict=True):
            hidden = layer(h)
            h = block(hidden, *(inputs[name] for name in part.inputs))
            if isinstance(h, tuple):
                h, extra = h
                losses.append(extra)
        loss = h + sum(losses)
        if "decay" in self.recipe.traits:
            loss = loss + 1e-2 * sum(p.square().sum() for p in self.parameters())
        outputs = {"tuple": (loss, hidden), "dict": {"loss": loss, "hidden": hidden}}
        return outputs.get(self.recipe.returns, loss)


def loss_of(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["loss"]
    return output[0] if isinstance(output, tuple) else output


STEPS = 3

OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=2e-3),
    "sgd": functools.partial(torch.optim.SGD, lr=2e-2, momentum=0.9),
}


@dataclass(frozen=True)
class Trained:
    """Losses, parameters and buffers (unsaved ones too), and largest gradients of parameters."""

    losses: list[float]
    state: dict[str, Tensor]
    gradients: dict[str, float] = field(default_factory=dict)


def train(
    model: nn.Module, recipe: Recipe, noise: float = 0.0, share: tuple[int, int] = (0, 1)
) -> Trained:
    """Train any model, with relative `noise` on parameters and floating-point inputs.

    `share` is rank and number of ranks, if the model gets the rows of a rank alone.
    """
    with torch.no_grad():
        for parameter in model.parameters() if noise else ():
            parameter.copy_(_with_noise(parameter, noise))
    optimizer = OPTIMIZERS[recipe.optimizer](model.parameters())
    losses, gradients = [], dict[str, float]()
    for step in range(STEPS):
        args, kwargs = pytree.tree_map(
            functools.partial(_with_noise, noise=noise), batch_of(recipe, step, share)
        )
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        for name, parameter in model.named_parameters():
            if is_remote(parameter):  # its gradient has no values here
                continue
            if noise == 0.0 and type(parameter.grad) is Tensor and parameter.grad.numel():
                largest = parameter.grad.abs().max().item()
                gradients[name] = max(largest, gradients.get(name, 0.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    values = {n: t.detach().clone() for n, t in state.items() if not is_remote(t)}
    return Trained(losses, values, gradients)


def batch_of(recipe: Recipe, step: int, share: tuple[int, int]) -> Any:
    """Return the batch of a step, or a rank's rows of it."""
    batch = recipe.batch(step)
    return batch if share[1] == 1 else rows_of(batch, *share)


def _with_noise(value: Tensor, noise: float) -> Tensor:
    if noise == 0.0 or not value.is_floating_point():
        return value
    return value * (1 + noise * torch.randn(value.shape, dtype=value.dtype))


def deviation(got: Trained, want: Trained) -> tuple[float, str]:
    """Return the worst deviation, relative above 1, and the tensor that has it."""
    losses = (torch.tensor(each.losses, dtype=torch.float64) for each in (got, want))
    found = [(_difference(*losses), "losses")]
    found += [(_difference(got.state.get(name), x), name) for name, x in want.state.items()]
    return max(found)


def _difference(got: Tensor | None, want: Tensor) -> float:
    if got is None or got.shape != want.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    got, want = got.double(), want.double()
    worst = ((got - want).abs().max() / want.abs().max().clamp(min=1.0)).item()
    return worst if worst == worst else float("inf")
