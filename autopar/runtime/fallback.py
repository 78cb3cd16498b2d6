"""torch's own data parallelism (DDP, fully_shard) for models that cannot be captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from autopar._torch import pytree
from autopar.capture.call import BatchShard
from autopar.capture.model_info import find_separate_blocks
from autopar.capture.provenance import first_line, user_frame
from autopar.common.containers import flatten
from autopar.errors import AutoparError, BatchError, StrategyError
from autopar.runtime.aliased_ddp import AliasedDDP, with_ddp
from autopar.runtime.process_groups import explaining_comm_errors


def wrap_with_ddp_or_fsdp(model: nn.Module, mesh: DeviceMesh, *, shard: bool) -> nn.Module:
    """The model under DDP, or under fully_shard block by block.

    Blocks that share a parameter are sharded together with the root module.

    Raises:
        StrategyError: parameters that an optimizer may hold as DTensors would be sharded.
    """
    has_dtensors = any(isinstance(p, DTensor) for p in model.parameters())
    if not shard:
        return AliasedDDP(model) if has_dtensors else with_ddp(model)
    if has_dtensors:
        raise StrategyError(
            "this model cannot be captured and must be sharded to fit. Give autopar.compile "
            "example_inputs, so that fully_shard is applied before an optimizer is made."
        )
    for block in find_separate_blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def describe_fallback_differences(model: nn.Module) -> str:
    """The results that differ between torch's data parallelism and one device, in words."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norms = [name for name, m in model.named_modules() if isinstance(m, kinds) and m.training]
    more = f" and {len(norms) - 3} more" if len(norms) > 3 else ""
    batch_norm = (
        f" Batch norm takes its statistics over a rank's own rows: {', '.join(norms[:3])}{more}."
    )
    return (
        "A loss that is a mean over rows trains as on one device, with uneven rows too. Others "
        "differ: a mean over anything else (such as tokens that are not ignored) weighs each "
        "rank's mean by its rows, a sum over rows is divided by the number of ranks, and rows "
        "see only those of their own rank (contrastive losses, a maximum over the batch)."
        + (batch_norm if norms else "")
    )


def average_over_batch(result: Any, shard: BatchShard, ranks: int) -> Any:
    """A rank's result with scalars replaced by their mean over the global batch.

    Each rank weights its gradients by its rows, so that a mean loss trains as on one device. This
    covers uneven rows, and losses computed from returned rows.

    Args:
        result: result of forward on this rank's rows.
        shard: this rank's rows of the arguments.
        ranks: number of ranks.

    Raises:
        StrategyError: a value is a DTensor.
    """
    values, structure = flatten(result)
    if any(isinstance(x, DTensor) for x in values):
        raise StrategyError(
            "forward returns a DTensor, since it uses sharded parameters outside of their modules, "
            "as a penalty on weights does. fully_shard cannot train that: give autopar.compile "
            'strategy="ddp", or change what the warning before this error names.'
        )
    scalars = {
        i: x
        for i, x in enumerate(values)
        if isinstance(x, torch.Tensor) and x.dim() == 0 and x.is_floating_point()
    }
    weight = shard.rows * ranks / shard.global_rows
    if scalars:
        fraction = shard.rows / shard.global_rows
        means = torch.stack([x.detach().double() * fraction for x in scalars.values()])
        with torch.no_grad(), explaining_comm_errors("forward"):
            dist.all_reduce(means)
        for (index, scalar), mean in zip(scalars.items(), means, strict=True):
            values[index] = _WeightedMean.apply(scalar, mean.to(scalar.dtype), weight)
    for index, value in enumerate(values):
        trains = isinstance(value, torch.Tensor) and value.requires_grad
        if trains and index not in scalars and weight != 1:
            values[index] = _WeightedRows.apply(value, weight)
    return pytree.tree_unflatten(values, structure)


class _WeightedMean(torch.autograd.Function):
    """The mean of the ranks' scalars; gradients go to this rank's scalar, times its weight."""

    @staticmethod
    def forward(ctx: Any, scalar: torch.Tensor, mean: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0] * ctx.weight, None, None


class _WeightedRows(torch.autograd.Function):
    """A rank's rows; their gradients are multiplied by the rank's weight."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.weight, None


@contextlib.contextmanager
def explaining_row_errors(ranks: int) -> Iterator[None]:
    """Explains errors of a model that runs on a rank's rows instead of the whole batch.

    Args:
        ranks: number of ranks; a single one runs the whole batch.

    Raises:
        BatchError: the model raises an error.
    """
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        where = user_frame(error)
        if ranks == 1 or not where:
            raise
        raise BatchError(
            f"the model raised {type(error).__name__}{where}: {first_line(error)}. It "
            "could not be captured, so each rank was given its rows of every argument whose dim 0 "
            "has the size of the batch. Change what the warning before this error names, or run "
            "the model on one rank."
        ) from error
