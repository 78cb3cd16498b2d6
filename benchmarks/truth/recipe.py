"""`Recipe`: a model assembled from blocks, its data and its training."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

import benchmarks.truth.blocks  # noqa: F401 (registers all blocks)
from benchmarks.truth.inputs import sample
from benchmarks.truth.registry import BLOCKS, WIDTH, Block

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
