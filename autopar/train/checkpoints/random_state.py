"""`RandomState`: the default random generators of Python, NumPy and torch on this rank."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar.train.checkpoints.plain_data import with_arrays, without_arrays


@dataclass(frozen=True)
class RandomState:
    """State of every default generator.

    Attributes:
        cpu: state of torch's generator for the CPU, bytes.
        device: state of the current GPU's generator, bytes; None without a GPU.
    """

    python: tuple[Any, ...]
    numpy: Mapping[str, Any]
    cpu: Tensor
    device: Tensor | None

    @classmethod
    def now(cls) -> RandomState:
        """The state of this moment."""
        # Reading the state would make a context on a GPU that this run does not use.
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            random.getstate(),
            without_arrays(np.random.get_state(legacy=False)),
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if on_gpu else None,
        )

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RandomState:
        """The state of a `state_dict`."""
        return cls(**state)

    def restore(self) -> None:
        """Gives every generator this state."""
        random.setstate(self.python)
        np.random.set_state(with_arrays(self.numpy))
        torch.set_rng_state(self.cpu)
        if self.device is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.device)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return dict(vars(self))
