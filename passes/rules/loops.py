"""`Loop`: what an operator iterates over, and what follows for where its tensors may lie.

An operator is a nest of loops. To split one over the ranks of an axis shards every tensor that the
loop runs over, leaves the others whole, and makes a result that the loop is reduced out of a
partial sum. So a rule has to say only which loops there are; `loop_strategies` derives the rest.

For `mm` of [m, k] and [k, n]:

| loop | operands | result | placements |
|---|---|---|---|
| m | dim 0, - | dim 0 | S(0), R -> S(0) |
| n | -, dim 1 | dim 1 | R, S(1) -> S(1) |
| k | dim 1, dim 0 | sum | S(1), S(0) -> P |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from autopar._torch import pytree
from autopar.ir.graph import elements
from autopar.ir.op_strategy import OpStrategy
from autopar.ir.placement import Partial, Placement, Replicate, Shard, can_cut
from autopar.passes.core.node_builder import value

Reduced = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class DimAccess:
    """Where a loop runs in a tensor: over `dim`, inside each of `interleave` equal pieces of it."""

    dim: int
    interleave: int = 1


@dataclass(frozen=True)
class Loop:
    """One loop of an operator.

    Attributes:
        size: how often it runs.
        operands: where it runs in each tensor among the arguments; None if it does not; "sum" if
            the tensor is added to what the loop sums, so that ranks must hold parts of it.
        results: where it runs in each result, or how it is reduced out of it; None if every rank
            comes to the whole result.
        free: whether its pieces may be interleaved: nothing depends on their order.
        own: the lowering that splits it (`own.OWN`), "" if the operator is run on shards.
        even: whether only chunks of equal size will do.
    """

    size: int
    operands: tuple[DimAccess | Reduced | None, ...]
    results: tuple[DimAccess | Reduced | None, ...]
    interleavable: bool = True
    lowering: str = ""
    even_only: bool = False

    def interleaved(self, pieces: int) -> Loop:
        """The loop inside of each of `pieces` equal pieces of it."""

        def inside(at: Any) -> Any:
            return (
                replace(at, interleave=at.interleave * pieces) if isinstance(at, DimAccess) else at
            )

        return replace(
            self,
            size=self.size // pieces,
            operands=tuple(map(inside, self.operands)),
            results=tuple(map(inside, self.results)),
        )


@dataclass(frozen=True)
class Operator:
    """An operator and what it is applied to.

    Attributes:
        target: the aten operator.
        args: its positional arguments, tensors being fake or real ones.
        kwargs: its keyword arguments.
        results: its results, as fake or real tensors; None for one that is left out.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Any, ...]

    @classmethod
    def of(cls, node: fx.Node) -> Operator:
        """The operator of a node, on the fake tensors of its arguments."""
        args, kwargs = value((node.args, dict(node.kwargs)))
        return cls(node.target, tuple(args), dict(kwargs), elements(node))

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """The tensors among the arguments, in order."""
        leaves = pytree.tree_leaves((list(self.args), self.kwargs))
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by its place or its name."""
        if place < len(self.args):
            return self.args[place]
        return self.kwargs.get(name, default)


Rule = Callable[[Operator], list[Loop]]


def replicated(operator: Operator) -> OpStrategy:
    """Everything whole on every rank: right for every operator."""
    whole = Replicate()
    return OpStrategy((whole,) * len(operator.operands), (whole,) * len(operator.results))


def loop_strategies(
    loops: list[Loop], ranks: int, interleaves: Sequence[int] = (1,)
) -> Iterator[OpStrategy]:
    """The ways that splitting one loop over `ranks` allows.

    Args:
        loops: of the operator.
        ranks: of the axis.
        interleaves: numbers of pieces to try for loops whose pieces may be interleaved.
    """
    for loop in loops:
        yield from map(split_loop, feasible_loops(loop, ranks, interleaves))


def feasible_loops(loop: Loop, ranks: int, interleaves: Iterable[int]) -> Iterator[Loop]:
    """A loop in each of these numbers of pieces that `ranks` divide, in one also unevenly."""
    for pieces in interleaves if loop.interleavable else (1,):
        evenly = loop.size % (pieces * ranks) == 0
        if evenly or (not loop.even_only and can_cut(loop.size, ranks, pieces)):
            yield loop.interleaved(pieces)


def fills_dims(loop: Loop, operator: Operator) -> bool:
    """Whether a loop is all that there is of each dim that it runs over.

    If it is but a factor of a dim, uneven chunks of the dim are not those of the loop.
    """
    tensors = (*operator.operands, *operator.results)
    places = (*loop.operands, *loop.results)
    return all(
        at.interleave == 1 and tensor.shape[at.dim] == loop.size
        for at, tensor in zip(places, tensors, strict=False)
        if isinstance(at, DimAccess) and tensor is not None
    )


def split_loop(loop: Loop) -> OpStrategy:
    """Where the tensors lie if a loop is split over ranks."""
    operands, results = (tuple(map(_placement, at)) for at in (loop.operands, loop.results))
    return OpStrategy(operands, results, loop.lowering)


def _placement(at: DimAccess | Reduced | None) -> Placement:
    if at is None:
        return Replicate()
    return Shard(at.dim, at.interleave) if isinstance(at, DimAccess) else Partial(at)
