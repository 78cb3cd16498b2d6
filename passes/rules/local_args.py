"""Arguments of an operator on one rank: shards for tensors, local sizes for sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar._torch import OpOverload
from autopar.core.ir.placement import OpStrategy, Placement, Shard, chunk_of
from autopar.passes.core.collective_ops import start_all_gather, start_reduce_scatter
from autopar.passes.rules.loops import Operator, overloads

aten = torch.ops.aten

SIZE_ARGUMENTS: Mapping[OpOverload, int] = {
    **dict.fromkeys(overloads("full zeros ones empty.memory_format"), 0),
    **dict.fromkeys(overloads("view _unsafe_view reshape expand slice_backward"), 1),
    **dict.fromkeys(overloads("select_backward new_zeros new_ones new_empty new_full"), 1),
    **dict.fromkeys(overloads("upsample_nearest2d_backward upsample_bilinear2d_backward"), 2),
    aten.upsample_bicubic2d_backward.default: 2,
}
"""Index of the argument with the sizes of the first result."""

COUNT_ARGUMENTS: Mapping[OpOverload, tuple[tuple[int, int, int], ...]] = {
    aten.native_group_norm.default: ((3, 0, 0),),
    aten.native_group_norm_backward.default: ((5, 0, 0),),
    aten.convolution.default: ((8, 1, 0),),
    aten.convolution_backward.default: ((3, 0, 1), (9, 2, 0)),
}
"""Indices of arguments that count rows, groups or channels, with the operand and dim counted."""

SQUEEZES = frozenset(overloads("squeeze squeeze.dim squeeze.dims"))
"""Operators that drop dims of size 1; a shard may have size 1 where the whole has not."""


def local_shape(shape: Sequence[int], placement: Placement, ranks: int, rank: int = 0) -> list[int]:
    """The shape of a rank's shard; rank 0 has the largest."""
    local = list(shape)
    if isinstance(placement, Shard):
        local[placement.dim] = chunk_of(local[placement.dim], ranks, rank)[1]
    return local


def local_bytes(tensor: torch.Tensor, placement: Placement, ranks: int) -> int:
    """The bytes of the shard of rank 0, which is the largest."""
    return math.prod(local_shape(tensor.shape, placement, ranks)) * tensor.element_size()


def local_arguments(
    operator: Operator, op_strategy: OpStrategy, shards: Sequence[Any], ranks: int, rank: int = 0
) -> Operator:
    """An operator on whole tensors, on the shards of one rank, which are nodes or tensors."""
    local = operator.with_operands(shards)
    args = list(local.args)
    if operator.target in SQUEEZES:
        shape = local_shape(operator.results[0].shape, op_strategy.results[0], ranks, rank)
        return replace(operator, target=aten.view.default, args=(args[0], shape), kwargs={})
    if (place := SIZE_ARGUMENTS.get(operator.target)) is not None:
        args[place] = local_shape(operator.results[0].shape, op_strategy.results[0], ranks, rank)
    if operator.target in (start_all_gather, start_reduce_scatter):
        pairs = zip(operator.results, op_strategy.results, strict=True)
        args[1] = [local_shape(t.shape, p, ranks, rank)[0] for t, p in pairs]
    for index, operand, dim in COUNT_ARGUMENTS.get(operator.target, ()):
        placement = op_strategy.operands[operand]
        if isinstance(placement, Shard) and placement.dim == dim:
            args[index] = _share(args[index], ranks, rank)
    return replace(local, args=tuple(args))


def _share(count: Any, ranks: int, rank: int) -> Any:
    """One rank's share of a count, or of each of several counts; a count of 1 is shared by all."""
    if isinstance(count, (list, tuple)):
        return [_share(each, ranks, rank) for each in count]
    return chunk_of(count, ranks, rank)[1] if count and count > 1 else count
