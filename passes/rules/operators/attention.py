"""Rules for the kernels of scaled dot product attention."""

from __future__ import annotations

from typing import Any

import torch

from autopar.passes.rules.loops import Access, DimAccess, Loop, Operator, broadcast_access


def heads(operator: Operator, draws: bool = False) -> list[Loop]:
    """softmax(q k) v over [batch, heads, sequence, width], forward or backward: batch and heads.

    The loops run over dims 0 and 1 of every tensor that has them, masks and statistics too. Query
    heads that share a key head are split by these groups. Shards draw their own dropout if `draws`.
    """
    if operator.argument("dropout_p") and not draws:
        return []
    shapes = {name: operator.argument(name).shape for name in ("query", "key")}
    loops = []
    for dim in (0, 1):
        sizes = {shape[dim] for shape in shapes.values()}
        if max(sizes) % min(sizes) == 0:
            operands, results = (
                tuple(_leading(tensor, dim, sizes) for tensor in tensors)
                for tensors in (operator.operands, operator.results)
            )
            loops.append(Loop(min(sizes), operands, results))
    return loops


def has_no_dropout(operator: Operator) -> bool:
    """Whether an operator is an attention whose dropout is off."""
    dropout = operator.argument("dropout_p")
    return dropout is not None and not dropout


def _leading(tensor: Any, dim: int, sizes: set[int]) -> DimAccess | None:
    """The access to a leading dim of batch or heads; None if the tensor is broadcast along it."""
    fits = isinstance(tensor, torch.Tensor) and tensor.dim() > 2 and tensor.shape[dim] in sizes
    return DimAccess(dim) if fits and tensor.shape[dim] > 1 else None


def attention(operator: Operator) -> list[Loop]:
    """(q, k, v, dropout, causal; mask) for CPUs: batch, heads and, if not causal, queries.

    Keys and values are whole along the loop of queries, which is context parallelism. The backward
    has (gradient, q, k, v, out, logsumexp, dropout, causal; mask).
    """
    loops, q = heads(operator), operator.argument("query")
    if loops and not operator.argument("is_causal"):
        is_forward = len(operator.results) == 2
        places = (2, None, None) if is_forward else (2, 2, None, None, 2, 2)
        mask = (broadcast_access(m, q.shape, 2) for m in operator.operands[len(places) :])
        results: tuple[Access | int, ...] = (2, 2) if is_forward else (2, "sum", "sum")
        loops.append(Loop.over(q.shape[2], (*places, *mask), results))
    return loops
