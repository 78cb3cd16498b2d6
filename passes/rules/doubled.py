"""Which dims of what a lowering writes run over the rows of the batch: it is written twice.

What a pass puts in the place of an operator has to say, like every node of a graph that runs on
several data-parallel ranks, which of its dims run over rows (`meta["rows"]`). So it is written
again for twice the rows; what doubled runs over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar._torch import pytree
from autopar.graph import elements
from autopar.passes.rules.loops import Operator, Way
from autopar.placement import Placement, Shard

Dims = tuple[int, ...]


def mark_rows(
    written: Sequence[fx.Node],
    given: Sequence[fx.Node],
    again: Callable[[fx.Graph, list[fx.Node]], object],
) -> None:
    """Marks nodes that were written into a graph.

    Args:
        written: the new nodes, in order.
        given: the nodes that they were written for.
        again: writes them into a graph for stand-ins of `given` at twice the rows; where one row
            lies as it should, more rows may have to be copied.
    """
    graph = fx.Graph()
    twins = []
    for node in given:
        twin = graph.placeholder(node.name)
        twin.meta = {**node.meta, "val": doubled(node.meta["val"], node.meta["rows"][0])}
        twins.append(twin)
    again(graph, twins)
    others = iter([node for node in graph.nodes if node.op != "placeholder"])
    for node in written:
        other = next(twin for twin in others if twin.target is node.target)
        pairs = zip(elements(node), elements(other), strict=True)
        node.meta["rows"] = tuple(
            () if a is None else tuple(d for d, n in enumerate(a.shape) if b.shape[d] != n)
            for a, b in pairs
        )


def doubled(tensor: torch.Tensor, rows: Dims) -> torch.Tensor:
    """A tensor like this of twice the rows, contiguous where it is."""
    strides = tensor.stride()
    return tensor.new_empty_strided(
        [size * 2 if d in rows else size for d, size in enumerate(tensor.shape)],
        [own * 2 ** sum(strides[d] < own for d in rows) for own in strides],
    )


def doubled_placement(placement: Placement, rows: Dims) -> Placement:
    """Where a tensor lies at twice the rows: what is cut inside of each row has more pieces."""
    if isinstance(placement, Shard) and placement.interleave > 1 and placement.dim in rows:
        return Shard(placement.dim, placement.interleave * 2)
    return placement


def doubled_operator(
    operator: Operator, way: Way, read: Sequence[Dims], made: Sequence[Dims]
) -> tuple[Operator, Way]:
    """An operator and its way at twice the rows.

    Args:
        operator: on whole fake tensors.
        way: how it is split.
        read: of each operand, the dims over rows.
        made: of each result.
    """
    dims = iter(read)

    def double(leaf: Any) -> Any:
        return doubled(leaf, next(dims)) if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = pytree.tree_map(double, (list(operator.args), operator.kwargs))
    results = tuple(
        t if t is None else doubled(t, rows) for t, rows in zip(operator.results, made, strict=True)
    )
    return (
        Operator(operator.target, tuple(args), kwargs, results),
        replace(
            way,
            operands=tuple(map(doubled_placement, way.operands, read)),
            results=tuple(map(doubled_placement, way.results, made)),
        ),
    )
