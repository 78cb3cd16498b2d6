"""Which dims of what a lowering writes run over the rows of the batch: it is written twice.

What a pass puts in the place of an operator has to say, like every node of a graph that runs on
several data-parallel ranks, which of its dims run over rows (`meta["batch_dims"]`). So it is
written again for twice the rows; what doubled runs over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar._torch import pytree
from autopar.ir.graph import elements
from autopar.ir.op_strategy import OpStrategy
from autopar.ir.placement import Placement, Shard
from autopar.passes.rules.loops import Operator

Dims = tuple[int, ...]


def record_batch_dims(
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
        twin.meta = {
            **node.meta,
            "val": double_tensor(node.meta["val"], node.meta["batch_dims"][0]),
        }
        twins.append(twin)
    again(graph, twins)
    others = iter([node for node in graph.nodes if node.op != "placeholder"])
    for node in written:
        other = next(twin for twin in others if twin.target is node.target)
        pairs = zip(elements(node), elements(other), strict=True)
        node.meta["batch_dims"] = tuple(
            () if a is None else tuple(d for d, n in enumerate(a.shape) if b.shape[d] != n)
            for a, b in pairs
        )


def double_tensor(tensor: torch.Tensor, rows: Dims) -> torch.Tensor:
    """A tensor like this of twice the rows, contiguous where it is."""
    strides = tensor.stride()
    return tensor.new_empty_strided(
        [size * 2 if d in rows else size for d, size in enumerate(tensor.shape)],
        [own * 2 ** sum(strides[d] < own for d in rows) for own in strides],
    )


def double_placement(placement: Placement, rows: Dims) -> Placement:
    """Where a tensor lies at twice the rows: what is cut inside of each row has more pieces."""
    if isinstance(placement, Shard) and placement.interleave > 1 and placement.dim in rows:
        return Shard(placement.dim, placement.interleave * 2)
    return placement


def double_operator(
    operator: Operator, op_strategy: OpStrategy, read: Sequence[Dims], made: Sequence[Dims]
) -> tuple[Operator, OpStrategy]:
    """An operator and its way at twice the rows.

    Args:
        operator: on whole fake tensors.
        op_strategy: how it is split.
        read: of each operand, the dims over rows.
        made: of each result.
    """
    dims = iter(read)

    def double(leaf: Any) -> Any:
        return double_tensor(leaf, next(dims)) if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = pytree.tree_map(double, (list(operator.args), operator.kwargs))
    results = tuple(
        t if t is None else double_tensor(t, rows)
        for t, rows in zip(operator.results, made, strict=True)
    )
    return (
        Operator(operator.target, tuple(args), kwargs, results),
        replace(
            op_strategy,
            operands=tuple(map(double_placement, op_strategy.operands, read)),
            results=tuple(map(double_placement, op_strategy.results, made)),
        ),
    )
