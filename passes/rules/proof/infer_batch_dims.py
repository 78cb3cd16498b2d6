"""`infer_batch_dims`: batch dims of new nodes, found by writing them again for twice the batch.

A lowering or redistribution in a data-parallel graph is written a second time for operands of twice
the rows. The dims of its results that double are `meta["batch_dims"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.core.ir.graph import elements
from autopar.core.ir.placement import OpStrategy, Placement, Shard
from autopar.passes.rules.loops import Operator

Dims = tuple[int, ...]


def infer_batch_dims(
    new_nodes: Sequence[fx.Node],
    operands: Sequence[fx.Node],
    write_doubled: Callable[[fx.Graph, list[fx.Node]], object],
) -> None:
    """Records the batch dims of nodes that were written into a graph.

    `write_doubled` writes them into another graph for placeholders of twice the rows of `operands`;
    it may write more copies.
    """
    graph = fx.Graph()
    doubled = [graph.placeholder(operand.name) for operand in operands]
    for operand, placeholder in zip(operands, doubled, strict=True):
        whole = double_tensor(operand.meta["val"], operand.meta["batch_dims"][0])
        placeholder.meta = {**operand.meta, "val": whole}
    write_doubled(graph, doubled)
    candidates = iter([node for node in graph.nodes if node.op != "placeholder"])
    for node in new_nodes:
        # Twice the rows may need a copy that one row does not, so extra twins are skipped.
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
        return replace(placement, interleave=placement.interleave * 2)
    return placement


def double_operator(
    operator: Operator,
    op_strategy: OpStrategy,
    operand_dims: Sequence[Dims],
    result_dims: Sequence[Dims],
) -> tuple[Operator, OpStrategy]:
    """An operator and its strategy at twice the rows, by the batch dims of operands and results."""
    twice = operator.with_operands(map(double_tensor, operator.operands, operand_dims))
    results = tuple(
        t if t is None else double_tensor(t, rows)
        for t, rows in zip(operator.results, result_dims, strict=True)
    )
    strategy = replace(
        op_strategy,
        operands=tuple(map(double_placement, op_strategy.operands, operand_dims)),
        results=tuple(map(double_placement, op_strategy.results, result_dims)),
    )
    return replace(twice, results=results), strategy
