"""Checks of the loop around a compiled model: other libraries would train it a second way."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from autopar.core.common.containers import check_no_hidden_tensors
from autopar.errors import BatchError, StrategyError
from autopar.runtime.options import Options


def check_prepared(options: Options) -> None:
    """Checks the loop that prepares a compiled model, without importing its library.

    Raises:
        StrategyError: `transformers.Trainer` would multiply gradients by the number of ranks, or
            accelerate's mixed precision would be ignored.
    """
    trainer = sys.modules.get("transformers.trainer")
    if options.ranks > 1 and trainer is not None and _caller(trainer.Trainer):
        raise StrategyError(
            "transformers.Trainer multiplies losses by the number of ranks, and a compiled model "
            "has summed them already: use autopar.integrations.transformers.AutoparTrainer, "
            "which takes the plain model and the arguments of autopar.compile."
        )
    state = sys.modules.get("accelerate.state")
    mixed = "no" if state is None else state.AcceleratorState().mixed_precision
    if mixed != "no" and options.precision is None:
        raise StrategyError(
            f"mixed_precision={mixed!r} of the Accelerator has no effect on a compiled model. Give "
            f"autopar.compile precision={mixed!r}, or leave it out of the Accelerator."
        )


def check_arguments(leaves: Sequence[Any]) -> None:
    """Checks the arguments of a call.

    Raises:
        BatchError: one hides tensors, or holds no values.
    """
    check_no_hidden_tensors(leaves)
    # parameters of other stages are on the meta device, too: they have an error of their own
    if any(type(leaf) is torch.Tensor and leaf.is_meta for leaf in leaves):
        raise BatchError(
            "an argument of the model is on the meta device, which holds no values. Give tensors "
            "with values; `autopar.plan` plans without them."
        )


def check_not_wrapped() -> None:
    """Raises StrategyError if torch's data parallelism calls a compiled model."""
    if wrapper := _caller((DistributedDataParallel, FullyShardedDataParallel)):
        raise StrategyError(
            f"the compiled model runs inside of {type(wrapper).__name__}, which reduces gradients "
            "a second time: leave it out. With Lightning, give the plain model and "
            "strategy=autopar.integrations.lightning.AutoparStrategy(...)."
        )


def _caller(kind: Any) -> Any:
    """The instance of `kind` a method of which is running, if any."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), kind):
            return found
        frame = frame.f_back
    return None
