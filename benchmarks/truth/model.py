"""A model assembled from blocks, and the recipe that says of which."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

import benchmarks.truth.blocks
import benchmarks.truth.heads  # noqa: F401 (importing both registers all blocks)
from benchmarks.truth.inputs import sample
from benchmarks.truth.registry import BLOCKS, WIDTH, Block

STEMS = {"rows": "x", "sequence": "frames", "tokens": "tokens", "image": "pixels"}
"""Kind of a stem -> name of its input."""


@dataclass(frozen=True)
class Recipe:
    """A model, its data and its training; everything else follows from the seed.

    Attributes:
        seed: seed of parameters and inputs.
        stem: kind of what the model is given.
        blocks: names of the blocks in order, the head last.
        traits: further properties: "tied", "frozen", "decay", "untouched".
        call: way of passing inputs: "positional", "keywords" or "dict".
        returns: what forward returns: "loss", "tuple" or "dict".
        optimizer: "adamw" or "sgd".
        rows: rows of a batch.
        planned_early: whether `compile` is given example inputs.
    """

    seed: int
    stem: str
    blocks: tuple[str, ...]
    traits: tuple[str, ...] = ()
    call: str = "positional"
    returns: str = "loss"
    optimizer: str = "adamw"
    rows: int = 8
    planned_early: bool = False

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Recipe:
        """A recipe from `asdict` of one that went through JSON."""
        tuples = {name: tuple(fields[name]) for name in ("blocks", "traits")}
        return cls(**{**fields, **tuples})

    @property
    def name(self) -> str:
        """Stem, blocks and what is unusual."""
        unusual = [*self.traits, *({self.call, self.returns} - {"positional", "loss"})]
        return ">".join([self.stem, *self.blocks]) + "".join(f"+{word}" for word in unusual)

    @property
    def parts(self) -> list[Block]:
        """The blocks."""
        return [BLOCKS[name] for name in self.blocks]

    @property
    def multiple(self) -> int:
        """Number that the number of rows must be a multiple of."""
        return lcm(*(block.divides for block in self.parts))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of all inputs in the order of forward's arguments."""
        names = [STEMS[self.stem], *(name for block in self.parts for name in block.inputs)]
        return tuple(dict.fromkeys(names))

    def make(self) -> nn.Module:
        """The model in float64, the same on every call."""
        torch.manual_seed(self.seed)
        return Drawn(self).double()

    def batch(self, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the model at a step."""
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


class Drawn(nn.Module):
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
        given = self._named(args, kwargs)
        h, losses = given[STEMS[self.recipe.stem]], []
        if self.embedding is not None:
            h = self.embedding(h)
        for layer, block, part in zip(self.layers, self.blocks, self.recipe.parts, strict=True):
            hidden = layer(h)
            h = block(hidden, *(given[name] for name in part.inputs))
            if isinstance(h, tuple):
                h, extra = h
                losses.append(extra)
        loss = h + sum(losses)
        if "decay" in self.recipe.traits:
            loss = loss + 1e-2 * sum(p.square().sum() for p in self.parameters())
        return self._returned(loss, hidden)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        if self.recipe.call == "dict":
            return args[0]
        return kwargs or dict(zip(self.recipe.inputs, args, strict=True))

    def _returned(self, loss: Tensor, hidden: Tensor) -> Any:
        if self.recipe.returns == "tuple":
            return loss, hidden
        if self.recipe.returns == "dict":
            return {"loss": loss, "hidden": hidden}
        return loss


def loss_of(returned: Any) -> Tensor:
    """The loss in what a model returned."""
    if isinstance(returned, dict):
        return returned["loss"]
    return returned[0] if isinstance(returned, tuple) else returned
