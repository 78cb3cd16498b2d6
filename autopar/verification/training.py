"""Batch, loss and optimizer of the two trainings that `compare_training` compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from autopar._torch import pytree
from autopar.arguments import precision_of
from autopar.capture.call import batch_shard_of
from autopar.cost_model.memory.optimizer_memory import Optimizer
from autopar.errors import StrategyError
from autopar.runtime.agreement.consensus import gather_objects, is_multi_rank
from autopar.runtime.module import DistributedModule


@dataclass(frozen=True)
class ComparedBatch:
    """Arguments of the plain model and of the model under a plan.

    Attributes:
        own: arguments and keyword arguments of this rank's call.
        whole: arguments and keyword arguments with the rows of all ranks, for the plain model.
        weight: this rank's fraction of all rows, divided among the ranks with the same rows.
    """

    own: tuple[Any, Any]
    whole: tuple[Any, Any]
    weight: float

    @staticmethod
    def of(
        leaves: list[Any], structure: Any, mode: str, parallel: DistributedModule
    ) -> ComparedBatch:
        """Gathers the rows of all ranks under `mode` "local"."""
        ranks, dp_rank = parallel.data_parallel_size, parallel.data_parallel_rank
        shard = batch_shard_of(leaves, structure, mode=mode, rank=dp_rank, ranks=ranks)
        own = whole = pytree.tree_unflatten(leaves, structure)
        if mode == "local" and ranks > 1:
            by_rank = dict(gather_objects((dp_rank, leaves)))
            columns = zip(*(by_rank[index] for index in range(ranks)), strict=True)
            joined = [
                torch.cat(column) if has_batch_dim else column[0]
                for has_batch_dim, column in zip(shard.call.has_batch_dim, columns, strict=True)
            ]
            whole = pytree.tree_unflatten(joined, structure)
        peers = world_size() / ranks
        return ComparedBatch(own, whole, shard.rows / shard.global_rows / peers)


@dataclass(frozen=True)
class Training:
    """Loss, optimizer and precision of both trainings.

    Attributes:
        take_loss: extracts the loss from a result, None for the default.
        optimizer: optimizer class, factory or instance.
        options: arguments of `compile`.
    """

    take_loss: Callable[[Any], Tensor] | None
    optimizer: Optimizer
    options: Mapping[str, Any]

    def run_plain(self, model: nn.Module, args: Any, kwargs: Any, device: torch.device) -> Any:
        """The result of the plain model, or of the `loss_fn` of `compile`."""
        loss_fn = self.options.get("loss_fn")
        dtype = precision_of(self.options.get("precision"))
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            if loss_fn is None:
                return model(*args, **kwargs)
            return loss_fn(model(*args[:-1], **kwargs), args[-1])

    def loss_of(self, result: Any) -> Tensor:
        """The loss to differentiate."""
        return _default_loss(result)[0] if self.take_loss is None else self.take_loss(result)

    def loss_notes(self, result: Any) -> list[str]:
        """A note if the result has no loss."""
        if self.take_loss is not None or _default_loss(result)[1]:
            return []
        return ["the mean square of what the model returns stood in for a loss"]


def _default_loss(result: Any) -> tuple[Tensor, bool]:
    """The loss in a model's result, else a substitute, and whether the result has a loss."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss, True
    leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        raise StrategyError(
            "the model returns nothing that can be trained. Give verify(loss=...), which takes "
            "the loss out of what it returns."
        )
    for leaf in leaves:
        if leaf.dim() == 0:
            return leaf, True
    return torch.stack([leaf.square().mean() for leaf in leaves]).sum(), False


def world_size() -> int:
    """Number of running ranks."""
    return dist.get_world_size() if is_multi_rank() else 1
