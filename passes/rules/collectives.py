"""Rules for collectives along other axes, which an earlier partition wrote into the graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.passes.core.collective_ops import (
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_permute,
    start_reduce_scatter,
)
from autopar.passes.rules.loops import DimAccess, Loop, Operator, Rule
from autopar.passes.rules.operators.generic import same_dims


def every_dim(operator: Operator, first: int = 0) -> list[Loop]:
    """The dims from `first` on in which all tensors of a message have the same size."""
    shapes = [tensor.shape for tensor in operator.operands]
    dims = range(first, min(map(len, shapes)))
    return same_dims(operator, [dim for dim in dims if len({s[dim] for s in shapes}) == 1])


def later_dims(operator: Operator) -> list[Loop]:
    """Every dim but dim 0, which is exchanged."""
    return every_dim(operator, 1)


def later_dims_and_rows(operator: Operator) -> list[Loop]:
    """Every dim but 0, and the rows of one rank, which the larger tensor interleaves."""
    rows = [tensors[0].shape[0] for tensors in (operator.operands, operator.results)]
    size = min(rows)
    places = [(DimAccess(0, count // size),) for count in rows]
    loop = Loop(size, places[0], places[1], even_only=True)
    alone = len(operator.results) == 1 and max(rows) % size == 0
    return later_dims(operator) + ([loop] if alone else [])


COLLECTIVE_RULES: Mapping[Any, Rule] = {
    start_all_reduce: every_dim,
    start_all_to_all: later_dims,
    start_permute: every_dim,
    start_all_gather: later_dims_and_rows,
    start_reduce_scatter: later_dims_and_rows,
}
