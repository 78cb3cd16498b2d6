"""How a module captures and runs its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.runtime.recorder import Recorder


@dataclass(frozen=True)
class Options:
    """How a module captures and runs its calls.

    Attributes:
        batch: "global" or "local".
        loss_fn: computes the loss inside of the graph.
        precision: dtype of autocast, None for none.
        backend: "eager" or a backend of torch.compile.
        ranks: size of the world.
        tensor_ranks: over how many of them the model itself is partitioned.
        pipeline_ranks: over how many of them the stages of a pipeline lie.
        recorder: is told when each operator of each step runs, if the backend is "eager".
        local: whether each rank computes what it would of its own rows alone (`batch_semantics`).
        on_trial: whether the module is a copy that tries a plan, and gives no warnings.
    """

    batch: str = "global"
    loss_fn: Callable[..., Any] | None = None
    precision: torch.dtype | None = None
    backend: str = "eager"
    ranks: int = 1
    tensor_ranks: int = 1
    pipeline_ranks: int = 1
    recorder: Recorder | None = None
    local: bool = False
    on_trial: bool = False

    def data_rank(self, rank: int) -> int:
        """Which of these parts a rank of the world has."""
        return rank // self.tensor_ranks % self.data_ranks

    @property
    def data_ranks(self) -> int:
        """Over how many ranks the rows of a batch are divided."""
        return self.ranks // self.twins

    @property
    def twins(self) -> int:
        """How many ranks have the same rows."""
        return self.tensor_ranks * self.pipeline_ranks
