"""`whole_later`: outputs of which each rank of a partitioned axis has a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from autopar.core.ir.graph import dense_strides
from autopar.core.ir.placement import AxisShard, chunk_of
from autopar.runtime.agreement.channel import finish_exchange
from autopar.runtime.border.lazy_rows import LazyRows
from autopar.runtime.process_groups import explaining_comm_errors

if TYPE_CHECKING:
    from autopar.runtime.codegen.program import Program
    from autopar.runtime.spmd.executor import SpmdCall


@dataclass(frozen=True)
class ShardLayout:
    """Divisions of an output, one after the other.

    Attributes:
        groups: the process group of each division's axis.
        announce: agrees with the other ranks on a gathering before it starts.
    """

    shards: tuple[AxisShard, ...]
    groups: tuple[dist.ProcessGroup, ...]
    announce: Callable[[], None]

    def shape_of_whole(self, own: torch.Tensor) -> tuple[int, ...]:
        """The shape of the output before any division."""
        shape = list(own.shape)
        for each in reversed(self.shards):  # a dim may be divided along several axes
            shape[each.shard.dim] = each.size
        return tuple(shape)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The whole output; all ranks call this at once."""
        self.announce()
        finish_exchange()
        with explaining_comm_errors("the gathering of an output"):
            for each, group in zip(reversed(self.shards), reversed(self.groups), strict=True):
                own = _gathered(own, each, group)
        return own


def _gathered(own: torch.Tensor, each: AxisShard, group: dist.ProcessGroup) -> torch.Tensor:
    """A tensor before one division, from the parts of the ranks of an axis."""
    dim, pieces, ranks = each.shard.dim, each.shard.interleave, dist.get_world_size(group)
    chunks = [chunk_of(each.size // pieces, ranks, rank) for rank in range(ranks)]
    largest, length = chunks[0][1], own.shape[dim] // pieces
    part = own.unflatten(dim, (pieces, length)).contiguous()
    if length < largest:  # gloo gathers parts of equal size only
        padded = part.new_zeros(*part.shape[: dim + 1], largest, *part.shape[dim + 2 :])
        padded.narrow(dim + 1, 0, length).copy_(part)
        part = padded
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part, group=group)
    shape = [*own.shape[:dim], each.size, *own.shape[dim + 1 :]]
    whole = own.new_empty_strided(shape, dense_strides(shape, own.stride()))
    split = whole.unflatten(dim, (pieces, each.size // pieces))
    for (begin, count), received in zip(chunks, parts, strict=True):
        split.narrow(dim + 1, begin, count).copy_(received.narrow(dim + 1, 0, count))
    return whole


def whole_later(
    call: SpmdCall, program: Program, outputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The outputs of a call, with whole ones in place of this rank's parts.

    The loop may never read them. What autograd or the model gets is gathered now.
    """
    shards, context = program.graph.output_shards, call.context
    mesh, found = context.mesh, list(outputs)
    if not shards:
        return found
    assert mesh is not None
    derives, assigned = bool(call.shard.call.derivatives), program.capture.assigned_outputs
    for place, index in enumerate(program.returned):
        if index in shards:
            groups = tuple(mesh.get_group(each.axis) for each in shards[index])
            event = f"reads output {index}, of which each rank has a part,"
            layout = ShardLayout(shards[index], groups, partial(context.announce, event))
            is_read = derives or index in assigned
            own = found[place]
            whole = layout.gather(own) if is_read else LazyRows.of(own, layout)
            found[place] = whole
    return found
