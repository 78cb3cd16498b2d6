"""`check_loop`: whether a loop of accelerate or transformers can train a compiled model."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from autopar.errors import StrategyError
from autopar.runtime.options import Options


def check_loop(options: Options) -> None:
    """Checks the loop that prepares a compiled model, without importing its library.

    Raises:
        StrategyError: `transformers.Trainer` would multiply gradients by the number of ranks, or
            accelerate's mixed precision would be ignored.
    """
    trainer = sys.modules.get("transformers.trainer")
    if options.ranks > 1 and trainer is not None and _is_called_by(trainer.Trainer):
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


def _is_called_by(kind: Any) -> bool:
    """Whether a method of an instance of `kind` is running."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), kind):
            return True
        frame = frame.f_back
    return False
