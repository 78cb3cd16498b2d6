"""What a model holds, looked up once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Inside:
    """The modules and parameters of a model, and where its buffers are kept."""

    modules: tuple[nn.Module, ...]
    parameters: Mapping[str, nn.Parameter]
    places: Mapping[str, tuple[nn.Module, str]]

    @staticmethod
    def of(model: nn.Module) -> Inside:
        places = {
            name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in model.named_buffers()
        }
        return Inside(tuple(model.modules()), dict(model.named_parameters()), places)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now: assigning to one replaces it."""
        return {name: module._buffers[key] for name, (module, key) in self.places.items()}  # type: ignore[misc]
