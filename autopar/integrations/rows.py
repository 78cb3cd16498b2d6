"""`whole_rows`: results for the rows of all ranks, for a loop that sees the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from autopar._torch import pytree
from autopar.capture.call import batch_shard_of
from autopar.core.common.containers import flatten
from autopar.core.ir.placement import Shard
from autopar.runtime.module import DistributedModule
from autopar.runtime.parameters.whole_gradient import none_for_none
from autopar.runtime.process_groups import explaining_comm_errors


def gather_results(model: DistributedModule, args: Any, kwargs: Any, result: Any) -> Any:
    """The result of a call as a loop reads it, alike on every rank.

    A model that returns its loss trains on that alone: other results are then None, since a message
    of the size of the logits would be wasted.
    """
    if model._options.is_replicated:
        return result
    leaves, structure = flatten(result)
    losses = [_is_trainable_loss(leaf) for leaf in leaves]
    if not any(losses) or model.data_parallel_size == 1:
        return whole_rows(model, args, kwargs, result)
    kept = [leaf if is_loss else None for leaf, is_loss in zip(leaves, losses, strict=True)]
    return pytree.tree_unflatten(kept, structure)


def _is_trainable_loss(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.requires_grad


def whole_rows(model: DistributedModule, args: Any, kwargs: Any, result: Any) -> Any:
    """Replaces results for this rank's rows by those for the whole batch, alike on every rank.

    All ranks call this at once. A loss computed from them trains as on one device.

    Args:
        model: model that was called under batch="global".
        args: positional arguments of the call, with the rows of the whole batch.
        kwargs: keyword arguments of the call.
        result: result of the call; tensors that are this rank's part of a batch are gathered.
    """
    if model._options.is_replicated:
        return result
    index, parts = model.data_parallel_rank, model.data_parallel_size
    shard = batch_shard_of(
        *flatten((args, kwargs)),
        mode="global",
        rank=index,
        ranks=parts,
        shares=model.row_shares,
        stated=model._options.rows,
        undivided=model._options.undivided,
    )
    rows = shard.slices.sizes
    if parts == 1 or not shard.has_rows:
        return result
    leaves, structure = flatten(result)
    sources = tuple(model.ranks_of_rows)
    found = model.rows_of_results
    shards = [_rows_of(leaf, shard.rows) for leaf in leaves] if found is None else found
    with explaining_comm_errors("the gathering of rows"):
        leaves = [
            leaf if own is None else _WholeRows.apply(leaf, own, rows, index, sources)
            for leaf, own in zip(leaves, shards, strict=False)
        ]
    return pytree.tree_unflatten(leaves, structure)


def _rows_of(leaf: Any, rows: int) -> Shard | None:
    """The shard of a result that torch's data parallelism computed: dim 0 if it has the rows."""
    has_rows = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows
    return Shard(0) if has_rows else None


class _WholeRows(torch.autograd.Function):
    """Gathers rows; the backward keeps this rank's, undoing the weight that its rows have.

    A module weighs gradients of rows by the rank's fraction of the batch, as for a mean.
    """

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        shard: Shard,
        rows: tuple[int, ...],
        index: int,
        sources: tuple[int, ...],
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.shard, ctx.rows, ctx.index = shard, rows, index
        parts = own.unflatten(shard.dim, (shard.interleave, -1)).movedim(shard.dim + 1, 0)
        sizes = [parts.shape[0] * n // rows[index] for n in rows]
        padded = own.new_zeros(max(sizes), *parts.shape[1:])
        padded[: parts.shape[0]] = parts
        gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, padded)
        whole = torch.cat([gathered[source][:n] for source, n in zip(sources, sizes, strict=True)])
        return whole.movedim(0, shard.dim + 1).flatten(shard.dim, shard.dim + 1)

    @staticmethod
    @none_for_none
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        shard, rows, index = ctx.shard, ctx.rows, ctx.index
        parts = gradients[0].unflatten(shard.dim, (shard.interleave, -1))
        size, total = parts.shape[shard.dim + 1], sum(rows)
        begin, length = (size * n // total for n in (sum(rows[:index]), rows[index]))
        own = parts.narrow(shard.dim + 1, begin, length).flatten(shard.dim, shard.dim + 1)
        return own * (total / rows[index]), None, None, None, None
