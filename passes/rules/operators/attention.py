"""Rules for the kernels of scaled dot product attention."""

from __future__ import annotations

from typing import Any

import torch

from autopar.passes.rules.loops import DimAccess, Loop, Operator


def heads(operator: Operator, draws: bool = False) -> list[Loop]:
    """softmax(q k) v over [batch, heads, sequence, width], forward or backward: batch and heads.

    The loops run over dims 0 and 1 of every tensor that has them, masks and statistics too. Query
    heads that share a key head are split by these groups.

    Args:
        operator: the attention.
        draws: whether shards may draw their own dropout.
    """
    if _keyword(operator, "dropout_p") and not draws:
        return []
    shapes = {name: _keyword(operator, name).shape for name in ("query", "key")}
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
    names = [argument.name for argument in operator.target._schema.arguments]
    return "dropout_p" in names and not _keyword(operator, "dropout_p")


def _leading(tensor: Any, dim: int, sizes: set[int]) -> DimAccess | None:
    """The access to a leading dim of batch or heads; None if the tensor is broadcast along it."""
    fits = isinstance(tensor, torch.Tensor) and tensor.dim() > 2 and tensor.shape[dim] in sizes
    return DimAccess(dim) if fits and tensor.shape[dim] > 1 else None


def attention(operator: Operator) -> list[Loop]:
    """(q, k, v, dropout, causal; mask) for CPUs: batch, heads and, if not causal, queries.

    Keys and values are whole along the loop of queries, which is context parallelism.
    """
    loops = heads(operator)
    if loops and not _keyword(operator, "is_causal"):
        q, _, _, *mask = operator.operands
        places = tuple(_mask_place(m, q, 2) for m in mask)
        loops.append(Loop.over(q.shape[2], (2, None, None, *places), (2, 2)))
    return loops


def attention_backward(operator: Operator) -> list[Loop]:
    """(gradient, q, k, v, out, logsumexp, dropout, causal; mask) for CPUs: as the forward."""
    loops = heads(operator)
    if loops and not _keyword(operator, "is_causal"):
        _, q, _, _, _, _, *mask = operator.operands
        places = tuple(_mask_place(m, q, 2) for m in mask)
        at = (DimAccess(2), DimAccess(2), None, None, DimAccess(2), DimAccess(2))
        loops.append(Loop.over(q.shape[2], at + places, (2, "sum", "sum")))
    return loops


def _mask_place(mask: torch.Tensor, q: torch.Tensor, dim: int) -> DimAccess | None:
    own = dim - 4 + mask.dim()
    return DimAccess(own) if own >= 0 and mask.shape[own] == q.shape[dim] != 1 else None


def _keyword(operator: Operator, name: str) -> Any:
    """An argument by its name in the schema."""
    for place, argument in enumerate(operator.target._schema.arguments):
        if argument.name == name:
            return operator.argument(place, name, argument.default_value)
    return None
