"""`Loop`: one iteration dimension of an operator, which implies a strategy.

An operator is a nest of loops. Splitting a loop over the ranks of an axis shards every tensor that
the loop runs over, replicates the others, and makes a result that the loop reduces a partial sum.
A rule lists the loops of an operator; `loop_strategies` derives the strategies.

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
from autopar.ir.placement import OpStrategy, Partial, Placement, Replicate, Shard, can_cut
from autopar.passes.core.node_builder import value

Reduced = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class DimAccess:
    """A loop over `dim` of a tensor, inside each of `interleave` equal pieces of it."""

    dim: int
    interleave: int = 1


Access = DimAccess | Reduced | None
"""Access of a loop to a tensor: a dim, a reduction, or none."""


@dataclass(frozen=True)
class Loop:
    """One loop of an operator.

    Attributes:
        size: number of iterations.
        operands: access to each tensor among the arguments; None if there is none; "sum" for a
            tensor that is added to the sum of the loop, of which ranks must hold partial sums.
        results: access to each result, or the reduction over the loop; None if every rank computes
            the whole result.
        free: whether its pieces may be interleaved: nothing depends on their order.
        own: the lowering that splits it (`own.OWN`), "" if the operator is run on shards.
        even: whether only chunks of equal size will do.
    """

    size: int
    operands: tuple[Access, ...]
    results: tuple[Access, ...]
    interleavable: bool = True
    lowering: str = ""
    even_only: bool = False

    @classmethod
    def over(
        cls,
        size: int,
        operands: Iterable[Access | int],
        results: Iterable[Access | int],
        **options: Any,
    ) -> Loop:
        """A loop with plain dims given as integers."""

        def access(place: Access | int) -> Access:
            return DimAccess(place) if isinstance(place, int) else place

        return cls(size, tuple(map(access, operands)), tuple(map(access, results)), **options)

    def interleaved(self, pieces: int) -> Loop:
        """The loop inside each of `pieces` equal pieces of it."""

        def inside(access: Any) -> Any:
            if not isinstance(access, DimAccess):
                return access
            return replace(access, interleave=access.interleave * pieces)

        return replace(
            self,
            size=self.size // pieces,
            operands=tuple(map(inside, self.operands)),
            results=tuple(map(inside, self.results)),
        )


@dataclass(frozen=True)
class Operator:
    """An operator with its arguments.

    Attributes:
        target: the aten operator.
        args: positional arguments, with fake or real tensors.
        kwargs: keyword arguments.
        results: fake or real results; None for a result that is left out.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Any, ...]

    @classmethod
    def of(cls, node: fx.Node) -> Operator:
        """The operator of a node on fake tensors."""
        args, kwargs = value((node.args, dict(node.kwargs)))
        return cls(node.target, tuple(args), dict(kwargs), elements(node))

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """The tensors among the arguments, in order."""
        leaves = pytree.tree_leaves((list(self.args), self.kwargs))
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by its index or its name."""
        if place < len(self.args):
            return self.args[place]
        return self.kwargs.get(name, default)


Rule = Callable[[Operator], list[Loop]]


def replicated(operator: Operator) -> OpStrategy:
    """The strategy with every operand and result replicated, which any operator allows."""
    whole = Replicate()
    return OpStrategy((whole,) * len(operator.operands), (whole,) * len(operator.results))


def loop_strategies(
    loops: list[Loop], ranks: int, interleaves: Sequence[int] = (1,)
) -> Iterator[OpStrategy]:
    """The strategies that split one loop over `ranks`.

    Args:
        loops: loops of the operator.
        ranks: size of the axis.
        interleaves: numbers of pieces to try for loops that may be interleaved.
    """
    for loop in loops:
        yield from map(split_loop, feasible_loops(loop, ranks, interleaves))


def feasible_loops(loop: Loop, ranks: int, interleaves: Iterable[int]) -> Iterator[Loop]:
    """The loop in each number of pieces that `ranks` divides; one piece may be uneven."""
    for pieces in interleaves if loop.interleavable else (1,):
        evenly = loop.size % (pieces * ranks) == 0
        if evenly or (not loop.even_only and can_cut(loop.size, ranks, pieces)):
            yield loop.interleaved(pieces)


def fills_dims(loop: Loop, operator: Operator) -> bool:
    """Whether a loop runs over the whole of each dim that it accesses.

    Uneven chunks of a dim are not chunks of a loop that is only a factor of the dim.
    """
    tensors = (*operator.operands, *operator.results)
    places = (*loop.operands, *loop.results)
    return all(
        at.interleave == 1 and tensor.shape[at.dim] == loop.size
        for at, tensor in zip(places, tensors, strict=False)
        if isinstance(at, DimAccess) and tensor is not None
    )


def split_loop(loop: Loop) -> OpStrategy:
    """The strategy that splits a loop over ranks."""
    operands, results = (tuple(map(_placement, at)) for at in (loop.operands, loop.results))
    return OpStrategy(operands, results, loop.lowering)


def _placement(access: Access) -> Placement:
    if access is None:
        return Replicate()
    if isinstance(access, DimAccess):
        return Shard(access.dim, access.interleave)
    return Partial(access)
