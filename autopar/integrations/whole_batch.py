"""`WholeBatchAccelerator`: accelerate's view of a model whose ranks all see the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from autopar.errors import StrategyError
from autopar.runtime.module import DistributedModule


class WholeBatchAccelerator(Accelerator):
    """An accelerator whose loops see one process with the whole batch.

    Loaders are not divided, and values are not gathered, since every rank has those of all rows.
    A compiled model divides the rows itself.
    """

    @classmethod
    def adopt(cls, accelerator: Accelerator) -> None:
        """Turns an accelerator into one of this class.

        Raises:
            StrategyError: it wraps models itself, or hands out parts of batches.
        """
        if accelerator.dataloader_config.dispatch_batches:
            raise StrategyError(
                "dispatch_batches=True hands each rank its part of a batch, and autopar divides "
                "batches itself: leave it out."
            )
        kind = accelerator.distributed_type.value
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise StrategyError(
                f"accelerate is configured for {kind}, which divides the model itself: configure "
                "it for plain multi-GPU or multi-CPU training, or run without autopar."
            )
        accelerator.dataloader_config.dispatch_batches = False
        accelerator.__class__ = cls

    @property
    def num_processes(self) -> int:
        """Number of processes that a batch is divided over by the loop: one."""
        return 1

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with model.no_sync() if isinstance(model, DistributedModule) else super().no_sync(model):
            yield

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if isinstance(model, DistributedModule) and model not in self._models:
            self._models.append(model)
        return model

    def gather(self, tensor: Any) -> Any:
        return tensor

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        self.unscale_gradients()
        for model in self._models:
            if isinstance(model, DistributedModule):
                return model.clip_grad_norm_(max_norm, norm_type)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
