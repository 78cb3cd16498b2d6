"""`Loop`: one iteration dimension of an operator, which implies a strategy.

An operator is a nest of loops. Splitting a loop over the ranks of an axis shards every tensor that
the loop runs over, replicates the others, and makes a result that the loop reduces a partial sum.
A rule lists the loops of an operator; `split_loop` derives a strategy from each.

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
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import fx

from autopar._torch import OpOverload, pytree
from autopar.core.ir.graph import elements
from autopar.core.ir.placement import OpStrategy, Partial, Placement, Replicate, Shard, can_cut
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
        interleavable: whether its pieces may be interleaved: nothing depends on their order.
        lowering: the custom lowering that splits it, "" if the operator is run on shards.
        even_only: whether only chunks of equal size will do.
        unit: divides the size of the largest chunk.
    """

    size: int
    operands: tuple[Access, ...]
    results: tuple[Access, ...]
    interleavable: bool = True
    lowering: str = ""
    even_only: bool = False
    unit: int = 1

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

        operands, results = tuple(map(inside, self.operands)), tuple(map(inside, self.results))
        return replace(self, size=self.size // pieces, operands=operands, results=results)


@dataclass(frozen=True)
class Operator:
    """An operator with fake or real tensors; a result that is left out is None."""

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

    def with_operands(self, values: Iterable[Any]) -> Operator:
        """The operator with other values for the tensors among its arguments."""
        given = iter(values)

        def fill(leaf: Any) -> Any:
            return next(given) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = pytree.tree_map(fill, (list(self.args), self.kwargs))
        return replace(self, args=tuple(args), kwargs=kwargs)

    def argument(self, name: str) -> Any:
        """An argument by its name in the schema, or its default; None if there is none."""
        for place, argument in enumerate(self.target._schema.arguments):
            if argument.name == name:
                default = self.kwargs.get(name, argument.default_value)
                return self.args[place] if place < len(self.args) else default
        return None


Rule = Callable[[Operator], list[Loop]]


def overloads(names: str | tuple[OpOverload, ...]) -> tuple[OpOverload, ...]:
    """The operators of aten that a text names, of which `.default` may be left out."""
    if isinstance(names, tuple):
        return names
    full = (name if "." in name else f"{name}.default" for name in names.split())
    return tuple(attrgetter(name)(torch.ops.aten) for name in full)


def broadcast_access(tensor: torch.Tensor, shape: Sequence[int], dim: int) -> DimAccess | None:
    """The access of a loop over `dim` of a shape to a tensor that is broadcast to the shape."""
    own = dim - len(shape) + tensor.dim()
    return DimAccess(own) if own >= 0 and tensor.shape[own] == shape[dim] != 1 else None


def replicated(operator: Operator) -> OpStrategy:
    """The strategy with every operand and result replicated, which any operator allows."""
    whole = Replicate()
    return OpStrategy((whole,) * len(operator.operands), (whole,) * len(operator.results))


def feasible_loops(loop: Loop, ranks: int, interleaves: Iterable[int]) -> Iterator[Loop]:
    """The loop in each number of pieces that `ranks` divides; one piece may be uneven."""
    for pieces in interleaves if loop.interleavable else (1,):
        evenly = loop.size % (pieces * ranks) == 0
        if -(-loop.size // (pieces * ranks)) % loop.unit:
            continue
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
