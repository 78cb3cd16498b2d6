"""`infer_batch_dims`: batch dims of new nodes, found by writing them again for twice the batch.

Every node of a data-parallel graph records in `meta["batch_dims"]` which dims of its results run
over the rows of the batch. A lowering or redistribution is written a second time for operands of
twice the rows; the dims that double are the batch dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar._torch import pytree
from autopar.ir.graph import elements
from autopar.ir.placement import OpStrategy, Placement, Shard
from autopar.passes.rules.loops import Operator

Dims = tuple[int, ...]


def infer_batch_dims(
    new_nodes: Sequence[fx.Node],
    operands: Sequence[fx.Node],
    write_doubled: Callable[[fx.Graph, list[fx.Node]], object],
) -> None:
    """Records the batch dims of nodes that were written into a graph.

    Args:
        new_nodes: the nodes, in order.
        operands: nodes that they were written for.
        write_doubled: writes them into a graph for placeholders of twice the rows. It may write
            additional copies, where strides allow a view of one row only.
    """
    graph = fx.Graph()
    doubled = []
    for operand in operands:
        placeholder = graph.placeholder(operand.name)
        rows = operand.meta["batch_dims"][0]
        placeholder.meta = {**operand.meta, "val": double_tensor(operand.meta["val"], rows)}
        doubled.append(placeholder)
    write_doubled(graph, doubled)
    candidates = iter([node for node in graph.nodes if node.op != "placeholder"])
    for node in new_nodes:
        twin = next(other for other in candidates if other.target is node.target)
        node.meta["batch_dims"] = tuple(
            () if a is None else tuple(d for d, n in enumerate(a.shape) if b.shape[d] != n)
            for a, b in zip(elements(node), elements(twin), strict=True)
        )


def double_tensor(tensor: torch.Tensor, batch_dims: Dims) -> torch.Tensor:
    """A tensor of twice the rows, contiguous where this one is."""
    strides = tensor.stride()
    return tensor.new_empty_strided(
        [size * 2 if d in batch_dims else size for d, size in enumerate(tensor.shape)],
        [stride * 2 ** sum(strides[d] < stride for d in batch_dims) for stride in strides],
    )


def double_placement(placement: Placement, batch_dims: Dims) -> Placement:
    """The placement at twice the rows: a dim sharded inside each row has twice the pieces."""
    if isinstance(placement, Shard) and placement.interleave > 1 and placement.dim in batch_dims:
        return Shard(placement.dim, placement.interleave * 2)
    return placement


def double_operator(
    operator: Operator,
    op_strategy: OpStrategy,
    operand_dims: Sequence[Dims],
    result_dims: Sequence[Dims],
) -> tuple[Operator, OpStrategy]:
    """An operator and its strategy at twice the rows.

    Args:
        operator: the operator on whole fake tensors.
        op_strategy: its strategy.
        operand_dims: batch dims of each operand.
        result_dims: batch dims of each result.
    """
    dims = iter(operand_dims)

    def double(leaf: Any) -> Any:
        return double_tensor(leaf, next(dims)) if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = pytree.tree_map(double, (list(operator.args), operator.kwargs))
    results = tuple(
        t if t is None else double_tensor(t, rows)
        for t, rows in zip(operator.results, result_dims, strict=True)
    )
    return (
        Operator(operator.target, tuple(args), kwargs, results),
        replace(
            op_strategy,
            operands=tuple(map(double_placement, op_strategy.operands, operand_dims)),
            results=tuple(map(double_placement, op_strategy.results, result_dims)),
        ),
    )
