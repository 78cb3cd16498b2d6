"""Arguments of an operator on one rank: shards for tensors, local sizes for sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar._torch import OpOverload, pytree
from autopar.ir.placement import OpStrategy, Placement, Shard, chunk_of
from autopar.passes.core.collective_ops import start_all_gather, start_reduce_scatter
from autopar.passes.rules.loops import Operator

aten = torch.ops.aten

SIZE_ARGUMENTS: Mapping[OpOverload, int] = {
    aten.view.default: 1,
    aten._unsafe_view.default: 1,
    aten.reshape.default: 1,
    aten.expand.default: 1,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
    aten.new_zeros.default: 1,
    aten.new_ones.default: 1,
    aten.new_empty.default: 1,
    aten.new_full.default: 1,
    aten.upsample_nearest2d_backward.default: 2,
    aten.upsample_bilinear2d_backward.default: 2,
    aten.upsample_bicubic2d_backward.default: 2,
    aten.full.default: 0,
    aten.zeros.default: 0,
    aten.ones.default: 0,
    aten.empty.memory_format: 0,
}
"""Index of the argument with the sizes of the first result."""

COUNT_ARGUMENTS: Mapping[OpOverload, tuple[tuple[int, int, int], ...]] = {
    aten.native_group_norm.default: ((3, 0, 0),),
    aten.native_group_norm_backward.default: ((5, 0, 0),),
    aten.convolution.default: ((8, 1, 0),),
    aten.convolution_backward.default: ((3, 0, 1), (9, 2, 0)),
}
"""Indices of arguments that count rows, groups or channels, with the operand and dim counted."""

SQUEEZES = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})
"""Operators that drop dims of size 1; a shard may have size 1 where the whole has not."""


def local_shape(shape: Sequence[int], placement: Placement, ranks: int, rank: int = 0) -> list[int]:
    """The shape of a rank's shard; rank 0 has the largest."""
    local = list(shape)
    if isinstance(placement, Shard):
        local[placement.dim] = chunk_of(local[placement.dim], ranks, rank)[1]
    return local


def with_operands(operator: Operator, shards: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an operator with other values for its tensors."""
    given = iter(shards)

    def fill(leaf: Any) -> Any:
        return next(given) if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = pytree.tree_map(fill, (list(operator.args), operator.kwargs))
    return args, kwargs


def local_bytes(tensor: torch.Tensor, placement: Placement, ranks: int) -> int:
    """The bytes of the shard of rank 0, which is the largest."""
    return math.prod(local_shape(tensor.shape, placement, ranks)) * tensor.element_size()


def local_arguments(
    operator: Operator, op_strategy: OpStrategy, shards: Sequence[Any], ranks: int, rank: int = 0
) -> Operator:
    """The operator on one rank's shards.

    Args:
        operator: the operator on whole tensors.
        op_strategy: placements of its operands and results.
        shards: this rank's shard of each operand, as nodes or tensors.
        ranks: size of the axis.
        rank: this rank's coordinate on it.
    """
    args, kwargs = with_operands(operator, shards)
    place = SIZE_ARGUMENTS.get(operator.target)
    if operator.target in SQUEEZES:
        shape = local_shape(operator.results[0].shape, op_strategy.results[0], ranks, rank)
        return replace(operator, target=aten.view.default, args=(args[0], shape), kwargs={})
    if place is not None:
        args[place] = local_shape(operator.results[0].shape, op_strategy.results[0], ranks, rank)
    if operator.target in (start_all_gather, start_reduce_scatter):
        pairs = zip(operator.results, op_strategy.results, strict=True)
        args[1] = [local_shape(t.shape, p, ranks, rank)[0] for t, p in pairs]
    for index, operand, dim in COUNT_ARGUMENTS.get(operator.target, ()):
        placement = op_strategy.operands[operand]
        if isinstance(placement, Shard) and placement.dim == dim:
            args[index] = _share(args[index], ranks, rank)
    return replace(operator, args=tuple(args), kwargs=kwargs)


def _share(count: Any, ranks: int, rank: int) -> Any:
    """One rank's share of a count, or of each of several counts; a count of 1 is shared by all."""
    if isinstance(count, (list, tuple)):
        return [_share(each, ranks, rank) for each in count]
    return chunk_of(count, ranks, rank)[1] if count and count > 1 else count
