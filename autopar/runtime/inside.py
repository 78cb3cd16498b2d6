"""What a model holds, looked up once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autopar.capture.state.effects import attribute_of
from autopar.runtime.parameters.distribute import local


@dataclass(frozen=True)
class ModuleIndex:
    """The modules and parameters of a model, and where its buffers are kept."""

    modules: tuple[nn.Module, ...]
    parameters: Mapping[str, nn.Parameter]
    places: dict[str, tuple[nn.Module, str]]

    @staticmethod
    def of(model: nn.Module, carried: Iterable[tuple[str, str]]) -> ModuleIndex:
        """The modules, parameters and buffers; what is carried counts as buffers too."""
        places = {
            name: (model.get_submodule(module), key)
            for name, _ in model.named_buffers()
            for module, key in [attribute_of(name)]
        }
        for module, key in carried:
            places[f"{module}.{key}" if module else key] = (model.get_submodule(module), key)
        return ModuleIndex(tuple(model.modules()), dict(model.named_parameters()), places)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now: assigning to one replaces it."""
        found = {}
        for name, (module, key) in self.places.items():
            buffer = module._buffers.get(key)
            found[name] = local(getattr(module, key)) if buffer is None else buffer
        return found
