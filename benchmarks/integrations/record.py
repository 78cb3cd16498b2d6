"""`Record`: figures of a run, and their distance from another's."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass
class Record:
    """Figures of a run of a loop.

    Attributes:
        losses: loss of each step.
        norms: norm of the gradients of each step, before clipping.
        weights: whole parameters after the last step.
        evaluation: results of the evaluation, by name.
        resumed: whole parameters of a run that was resumed in its middle.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    evaluation: dict[str, Tensor] = field(default_factory=dict)
    resumed: dict[str, Tensor] = field(default_factory=dict)

    def distance(self, other: Record) -> dict[str, float]:
        """Largest relative difference of each kind of figure."""
        pairs: dict[str, list[tuple[Any, Any]]] = {
            "losses": list(zip(self.losses, other.losses, strict=True)),
            "norms": list(zip(self.norms, other.norms, strict=True)),
        }
        for kind in ("weights", "evaluation", "resumed"):
            own, others = getattr(self, kind), getattr(other, kind)
            assert own.keys() == others.keys(), f"{kind}: {sorted(own.keys() ^ others.keys())}"
            pairs[kind] = [(own[name], others[name]) for name in others]
        return {kind: max(map(difference, found), default=0.0) for kind, found in pairs.items()}


def difference(pair: tuple[Any, Any]) -> float:
    """The relative difference of a figure from the one wanted; infinite where it is no number."""
    got, want = (torch.as_tensor(value, dtype=torch.float64) for value in pair)
    assert got.shape == want.shape, f"shapes differ: {tuple(got.shape)}, {tuple(want.shape)}"
    error, norm = (got - want).norm().item(), want.norm().item()
    relative = error / norm if norm > 1e-9 else error
    return math.inf if math.isnan(relative) else relative


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as one process has it; all ranks call this at once."""
    inner = getattr(model, "_forward_module", model)  # of Fabric
    return {name: whole(value).clone() for name, value in inner.state_dict().items()}


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor of a sharded one; all ranks call this at once."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def quieten() -> None:
    """Keeps the libraries from telling of every run."""
    for name in ("transformers", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def forget_accelerator() -> None:
    """Resets what accelerate keeps for the process."""
    quieten()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
