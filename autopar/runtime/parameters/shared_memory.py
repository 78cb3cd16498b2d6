"""`check_own_memory`: no parameter that a plan divides shares memory with another tensor.

    self.register_buffer("anchor", self.layer.weight.detach())

On one device such a tensor follows its parameter as it trains. A shard has memory of its own.
Attributes are left out: spectral norm keeps one of its weight, and computes it anew in forward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from autopar.errors import StrategyError
from autopar.runtime.parameters.distribute import local_part

Place = tuple[torch.device, int, int, str, torch.Tensor]
"""Device, first byte and the one after the last, name, tensor."""


def check_own_memory(model: nn.Module) -> None:
    """Raises StrategyError for a trained parameter that shares memory with another tensor.

    Those are parameters and buffers. One parameter of several modules is no other tensor.
    """
    last: Place | None = None
    for place in sorted(_places(model), key=lambda each: (str(each[0]), *each[1:4])):
        if last is not None and last[0] == place[0] and place[1] < last[2]:
            pair = last[4], place[4]
            is_trained = any(isinstance(x, nn.Parameter) and x.requires_grad for x in pair)
            if pair[0] is not pair[1] and is_trained:
                raise StrategyError(
                    f"{last[3]} and {place[3]} share memory, which ends where the plan divides "
                    "parameters. Make it one parameter of both modules (b.weight = a.weight), "
                    "compute the other tensor in forward, copy it (clone()), or give a strategy "
                    "that leaves parameters whole."
                )
        if last is None or last[0] != place[0] or place[2] > last[2]:
            last = place


def _places(model: nn.Module) -> Iterator[Place]:
    for path, module in model.named_modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is None or value.is_meta:
                continue
            part = local_part(value)
            if part.layout is not torch.strided or not part.numel():
                continue
            pairs = zip(part.shape, part.stride(), strict=True)
            elements = 1 + sum((size - 1) * stride for size, stride in pairs)
            begin = part.data_ptr()
            end = begin + elements * part.element_size()
            yield part.device, begin, end, f"{path}.{name}" if path else name, value
