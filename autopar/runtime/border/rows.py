"""`GatherRows` and `OwnRows`: rows of a batch between one rank and all of them, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from autopar.core.common.world import world
from autopar.core.ir.placement import Shard
from autopar.runtime.agreement.channel import finish_exchange
from autopar.runtime.parameters.whole_gradient import none_for_none, whole_gradient
from autopar.runtime.process_groups import explaining_comm_errors


@dataclass(frozen=True)
class RowLayout:
    """The places of a tensor's rows on the ranks.

    Attributes:
        shard: dim of the rows.
        rows: number of rows of the batch on each data-parallel rank.
        index: this rank's place among them.
        sources: a rank of the world with the rows of each place.
        announce: agrees with the other ranks on a gathering before it starts.
    """

    shard: Shard
    rows: tuple[int, ...]
    index: int
    sources: tuple[int, ...]
    announce: Callable[[], None]

    @property
    def weight(self) -> float:
        """The number of the batch's rows by that of this rank's."""
        return sum(self.rows) / self.rows[self.index]

    def shape_of_whole(self, own: torch.Tensor) -> tuple[int, ...]:
        """The shape of a tensor with the rows of all ranks."""
        shape = list(own.shape)
        shape[self.shard.dim] = shape[self.shard.dim] * sum(self.rows) // self.rows[self.index]
        return tuple(shape)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks; all ranks call this at once."""
        shard, rows = self.shard, self.rows
        self.announce()
        finish_exchange()
        parts = own.unflatten(shard.dim, (shard.interleave, -1)).movedim(shard.dim + 1, 0)
        sizes = [parts.shape[0] * n // rows[self.index] for n in rows]
        # gloo gathers parts of equal size only, and ranks may have uneven numbers of rows.
        padded = parts.contiguous()
        if max(sizes) > parts.shape[0]:
            padded = own.new_zeros(max(sizes), *parts.shape[1:])
            padded[: parts.shape[0]] = parts
        group = world()
        received = padded.new_empty(dist.get_world_size(group), *padded.shape)
        with explaining_comm_errors("the gathering of rows"):
            dist.all_gather(list(received.unbind()), padded, group=group)
        kept = [received[source][:n] for source, n in zip(self.sources, sizes, strict=True)]
        return torch.cat(kept).movedim(0, shard.dim + 1).flatten(shard.dim, shard.dim + 1)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor with all rows."""
        shard, total = self.shard, sum(self.rows)
        parts = whole.unflatten(shard.dim, (shard.interleave, -1))
        size = parts.shape[shard.dim + 1]
        begin = size * sum(self.rows[: self.index]) // total
        length = size * self.rows[self.index] // total
        return parts.narrow(shard.dim + 1, begin, length).flatten(shard.dim, shard.dim + 1)


class GatherRows(torch.autograd.Function):
    """All rows from each rank's, scaled; the backward takes this rank's rows of the gradient.

    Every rank has the same gradient of all rows, since it computes the same from them.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, layout: RowLayout, scale: float) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.scale = layout, scale
        return layout.gather(own if scale == 1 else own * scale)  # ranks scale by other numbers

    @staticmethod
    @none_for_none
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return OwnRows.apply(whole_gradient(gradients[0]), ctx.layout, ctx.scale), None, None


class OwnRows(torch.autograd.Function):
    """This rank's rows, scaled; the backward gathers the gradients of all rows."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, layout: RowLayout, scale: float) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.scale = layout, scale
        own = layout.own(whole)
        return own.clone() if scale == 1 else own * scale

    @staticmethod
    @none_for_none
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return GatherRows.apply(gradients[0], ctx.layout, ctx.scale), None, None


class ScaledGradient(torch.autograd.Function):
    """A tensor whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.scale = scale
        return value.view_as(value)

    @staticmethod
    @none_for_none
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return whole_gradient(gradients[0]) * ctx.scale, None


class Entered(torch.autograd.Function):
    """A value of this rank's loop inside of the model, scaled; its gradient leaves.

    A gradient inside is one of the loss of all ranks, of which this rank's is a part of `weight`. A
    gradient in the loop is one of this rank's loss. What leaves enters the loop, by the inverse.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, scale: float, weight: float) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.weight = scale, weight
        return value.view_as(value) if scale == 1 else value * scale

    @staticmethod
    @none_for_none
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return Entered.apply(gradients[0], ctx.scale / ctx.weight, 1 / ctx.weight), None, None


class EnteredWhole(torch.autograd.Function):
    """The average over the ranks' loops of a value without rows; its gradient leaves unscaled."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight, group = weight, world()
        finish_exchange()
        total = value * weight
        with explaining_comm_errors("the averaging of a gradient's gradient"):
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @none_for_none
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return LeftWhole.apply(gradients[0], ctx.weight), None


class LeftWhole(torch.autograd.Function):
    """A value without rows in the ranks' loops, each of which gives it a gradient of its own.

    Weights of all ranks add up to 1.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return value.view_as(value)

    @staticmethod
    @none_for_none
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return EnteredWhole.apply(whole_gradient(gradients[0]), ctx.weight), None
