"""Rules for collectives of other axes, which an earlier partition has written into a graph.

They join or cut dim 0, and do the same to every element of the other dims.

| collective | loops |
|---|---|
| all_reduce | every dim |
| all_gather | every dim but 0; the rows of a rank, of which the result has some from each rank |
| reduce_scatter | the same, the other way round |
| all_to_all | every dim but 0 |
"""

from __future__ import annotations

from autopar.passes.rules.loops import DimAccess, Loop, Operator


def all_reduce(operator: Operator) -> list[Loop]:
    """Every dim."""
    return _dims(operator, 0)


def all_to_all(operator: Operator) -> list[Loop]:
    """Every dim but the one that is exchanged."""
    return _dims(operator, 1)


def all_gather(operator: Operator) -> list[Loop]:
    """Rows of a rank lie in the result inside of its piece."""
    given, made = operator.operands[0], operator.results[0]
    pieces, rest = divmod(made.shape[0], given.shape[0])
    rows = [Loop(given.shape[0], (DimAccess(0),), (DimAccess(0, pieces),), even_only=True)]
    return _dims(operator, 1) + ([] if rest or len(operator.results) > 1 else rows)


def reduce_scatter(operator: Operator) -> list[Loop]:
    """Rows of a rank lie in the operand inside of its piece."""
    given, made = operator.operands[0], operator.results[0]
    pieces, rest = divmod(given.shape[0], made.shape[0])
    rows = [Loop(made.shape[0], (DimAccess(0, pieces),), (DimAccess(0),), even_only=True)]
    return _dims(operator, 1) + ([] if rest or len(operator.results) > 1 else rows)


def _dims(operator: Operator, first: int) -> list[Loop]:
    """The dims from `first` on, where all tensors of a message are of one size there."""
    shapes = [tensor.shape for tensor in operator.operands]
    places = range(first, min(map(len, shapes)))
    return [
        Loop(shapes[0][dim], (DimAccess(dim),) * len(shapes), (DimAccess(dim),) * len(shapes))
        for dim in places
        if len({shape[dim] for shape in shapes}) == 1
    ]
