"""Random calls of operators: the registry and the strategies that draw them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from autopar.core.ir.placement import OpStrategy
from autopar.passes.rules.loops import Loop, Operator, feasible_loops, split_loop
from autopar.passes.rules.proof.oracle import run_operator

aten = torch.ops.aten
SIZES = (1, 2, 3, 4, 5, 6, 12)


class Draw:
    """Draws the arguments of a sample."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.generator = torch.Generator().manual_seed(0)
        self.dtype = data.draw(st.sampled_from([torch.float64, torch.float32]), "dtype")

    def size(self) -> int:
        """A size that 2 and 3 ranks divide, or leave the last of them a smaller chunk of."""
        return self.data.draw(st.sampled_from(SIZES))

    def sizes(self, low: int = 1, high: int = 4) -> list[int]:
        """A shape."""
        return [self.size() for _ in range(self.data.draw(st.integers(low, high)))]

    def below(self, count: int) -> int:
        """A dim of `count`, from the front or the back."""
        return self.data.draw(st.integers(-count, count - 1))

    def flag(self) -> bool:
        """Yes or no."""
        return self.data.draw(st.booleans())

    def rand(self, *shape: int) -> Tensor:
        """Numbers from 0.1 to 1.1."""
        made = torch.rand(shape, dtype=torch.float64, generator=self.generator) + 0.1
        return made.to(self.dtype)

    def randint(self, high: int, *shape: int) -> Tensor:
        """Integers below `high`."""
        return torch.randint(0, high, shape, generator=self.generator)


Sample = Callable[[Draw], tuple[Any, ...]]
SAMPLES: dict[Any, Sample] = {}


def sample(*targets: Any) -> Callable[[Sample], Sample]:
    """Registers a function that draws the arguments of some operators."""

    def register(function: Sample) -> Sample:
        SAMPLES.update(dict.fromkeys(targets, function))
        return function

    return register


def draw_operator(target: Any, data: st.DataObject) -> Operator:
    """A call of an operator."""
    *args, last = SAMPLES[target](Draw(data))
    args, kwargs = (args, last) if isinstance(last, dict) else ([*args, last], {})
    made = Operator(target, tuple(args), kwargs, ())
    return Operator(target, made.args, kwargs, run_operator(made))


def loop_strategies(
    loops: list[Loop], ranks: int, interleaves: Sequence[int] = (1,)
) -> Iterator[OpStrategy]:
    """The strategies that split one loop over `ranks`, in each number of pieces."""
    for loop in loops:
        yield from map(split_loop, feasible_loops(loop, ranks, interleaves))
