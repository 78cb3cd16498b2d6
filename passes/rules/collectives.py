"""Rules for collectives along other axes, which an earlier partition wrote into the graph.

| collective | loops |
|---|---|
| all_reduce | every dim |
| all_gather | every dim but 0; rows of one rank, interleaved in the result |
| reduce_scatter | every dim but 0; rows of one rank, interleaved in the operand |
| all_to_all | every dim but 0 |
"""

from __future__ import annotations

from autopar.passes.rules.loops import DimAccess, Loop, Operator


def all_reduce(operator: Operator) -> list[Loop]:
    """Every dim."""
    return _dims(operator, 0)


def all_to_all(operator: Operator) -> list[Loop]:
    """Every dim but dim 0, which is exchanged."""
    return _dims(operator, 1)


def all_gather(operator: Operator) -> list[Loop]:
    """Every dim but 0, and the rows of one rank."""
    source, result = operator.operands[0], operator.results[0]
    pieces, rest = divmod(result.shape[0], source.shape[0])
    rows = [Loop(source.shape[0], (DimAccess(0),), (DimAccess(0, pieces),), even_only=True)]
    return _dims(operator, 1) + ([] if rest or len(operator.results) > 1 else rows)


def reduce_scatter(operator: Operator) -> list[Loop]:
    """Every dim but 0, and the rows of one rank."""
    source, result = operator.operands[0], operator.results[0]
    pieces, rest = divmod(source.shape[0], result.shape[0])
    rows = [Loop(result.shape[0], (DimAccess(0, pieces),), (DimAccess(0),), even_only=True)]
    return _dims(operator, 1) + ([] if rest or len(operator.results) > 1 else rows)


def _dims(operator: Operator, first: int) -> list[Loop]:
    """The dims from `first` on in which all tensors of a message have the same size."""
    shapes = [tensor.shape for tensor in operator.operands]
    places = range(first, min(map(len, shapes)))
    return [
        Loop.over(shapes[0][dim], (dim,) * len(shapes), (dim,) * len(shapes))
        for dim in places
        if len({shape[dim] for shape in shapes}) == 1
    ]
