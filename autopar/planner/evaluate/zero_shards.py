"""`shard_replicated`: the parameters that ZeRO shards over cp and ep, which replicate them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.core.ir.graph import ParameterInfo
from autopar.core.ir.placement import Placement, Replicate, Shard, can_cut, shard_dim
from autopar.core.plan.partition import REPLICATED_OVER, Partition
from autopar.passes.rules.local_args import local_shape


def shard_replicated(
    partitions: Sequence[Partition], parameters: Iterable[ParameterInfo]
) -> tuple[Partition, ...]:
    """Partitions that shard each of `parameters` over the axes that replicate it.

    Each axis of `REPLICATED_OVER` divides the largest shard of the axes before it, on the dim that
    divides best. A parameter of which some rank would get nothing stays whole along that axis.
    A dim that operators read divided along a later axis is left to that axis.
    """
    shards: dict[str, list[tuple[str, Placement]]] = {
        partition.axis: [] for partition in partitions
    }
    for info in parameters:
        shape = list(info.shape)
        for index, partition in enumerate(partitions):
            placement = partition.layouts.get(info.name, Replicate())
            if placement == Replicate() and partition.axis in REPLICATED_OVER and shape:
                # Parameters lie in the order of axes, but are gathered to what operators read.
                later = (each.layouts.get(info.name) for each in partitions[index + 1 :])
                taken = {each.dim for each in later if isinstance(each, Shard)}
                free = [1 if dim in taken else size for dim, size in enumerate(shape)]
                dim = shard_dim(free, partition.ranks)
                if can_cut(free[dim], partition.ranks):
                    placement = Shard(dim)
                    shards[partition.axis].append((info.name, placement))
            shape = local_shape(shape, placement, partition.ranks)
    return tuple(replace(each, zero=tuple(shards[each.axis])) for each in partitions)
