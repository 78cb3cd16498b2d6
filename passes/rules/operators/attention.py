"""Rules for scaled dot product attention."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from typing import Any

import torch

from autopar.core.ir.graph import Value
from autopar.core.operators.attention import attention as forward
from autopar.core.operators.attention import attention_backward as backward
from autopar.passes.rules.loops import Access, DimAccess, Loop, Operator

_OPERANDS = {
    forward: ("query", "key", "value", "attn_mask"),
    backward: (
        "grad_out", "query", "key", "value", "attn_mask", "out", "logsumexp", "rng_state",
    ),
}  # fmt: skip
_RESULTS = {
    forward: ("out", "logsumexp", "rng_state"),
    backward: ("query", "key", "value", "mask_grad"),
}
_OF_QUERIES = ("grad_out", "query", "out", "logsumexp")


def attention(operator: Operator) -> list[Loop]:
    """`autopar::attention` without dropout, forward or backward; see `attention_loops`."""
    return [] if operator.argument("dropout_p") else attention_loops(operator)


def windows(operator: Operator) -> list[Loop]:
    """The loops of attention with dropout, whose shards apply part of the whole call's draws."""
    if not operator.argument("dropout_p"):
        return []
    return [replace(loop, interleavable=False) for loop in attention_loops(operator)]


def attention_loops(operator: Operator) -> list[Loop]:
    """Batch, heads and, if not causal, queries.

    Query heads that share a key head are split by these groups. Keys and values are whole along
    the loop of queries, which is context parallelism.
    """
    query, key = operator.argument("query").shape, operator.argument("key").shape
    sizes = [query[0], key[1]] + ([] if operator.argument("is_causal") else [query[2]])
    operands = [n for n in _OPERANDS[operator.target] if operator.argument(n) is not None]
    results = _RESULTS[operator.target]
    return [
        Loop(
            size,
            tuple(_access(operator, name, dim) for name in operands),
            tuple(_access(operator, name, dim, is_result=True) for name in results),
        )
        for dim, size in enumerate(sizes)
    ]


def query_heads(operator: Operator) -> list[Loop]:
    """The loop of query heads that share key heads; every rank reads all of these."""
    heads, shared = (operator.argument(name).shape[1] for name in ("query", "key"))
    draws = operator.argument("dropout_p") or operator.argument("mask_grad")
    if draws or heads == shared:
        return []

    def access(name: str, is_result: bool = False) -> Access:
        if name == "mask_grad":
            return None
        if name in ("key", "value"):
            return "sum" if is_result else None
        return _access(operator, name, 1, is_result)

    operands = [n for n in _OPERANDS[operator.target] if operator.argument(n) is not None]
    results = map(access, _RESULTS[operator.target], repeat(True))
    loop = Loop(heads, tuple(map(access, operands)), tuple(results), interleavable=False)
    return [replace(loop, even_only=True)]


def _access(operator: Operator, name: str, dim: int, is_result: bool = False) -> Access:
    if name == "rng_state":
        return None
    if name in ("attn_mask", "mask_grad"):
        return _mask_access(operator, dim, is_result)
    if dim == 2 and name not in _OF_QUERIES:
        return "sum" if is_result else None
    return DimAccess(dim)


def _mask_access(operator: Operator, dim: int, is_result: bool) -> Access:
    """The dim of a mask, which may be broadcast; its gradient is then summed."""
    if is_result and not operator.argument("mask_grad"):
        return None
    shape = operator.argument("attn_mask").shape
    own = dim - 4 + len(shape)
    if own >= 0 and shape[own] > 1:
        return DimAccess(own)
    return "sum" if is_result else None


def ties_backward(value: Value) -> bool:
    """Whether a value ties attention's backward to its forward, so that both divide one loop.

    The backward reads what the kernel of the forward left behind. The values are statistics and
    random state, which say on which shard it ran.
    """
    return value.node.target is forward and value.index > 0


def kernel_heads(operator: Operator, draws: bool = False) -> list[Loop]:
    """A kernel of aten over [batch, heads, sequence, width], forward or backward: batch and heads.

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
