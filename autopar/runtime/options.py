"""How a module captures and runs its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.runtime.codegen.recorder import Recorder


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
    model_parallel_size: int = 1
    pp_size: int = 1
    recorder: Recorder | None = None
    local: bool = False
    on_trial: bool = False

    def dp_rank(self, rank: int) -> int:
        """Which of these parts a rank of the world has."""
        return rank // self.model_parallel_size % self.dp_size

    @property
    def dp_size(self) -> int:
        """Over how many ranks the rows of a batch are divided."""
        return self.ranks // self.model_parallel_peers

    @property
    def model_parallel_peers(self) -> int:
        """How many ranks have the same rows."""
        return self.model_parallel_size * self.pp_size
