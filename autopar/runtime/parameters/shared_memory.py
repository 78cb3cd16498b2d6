"""No parameter that a plan divides may share memory with another tensor.

    self.register_buffer("anchor", self.layer.weight.detach())
    p.data = flat[: p.numel()].view_as(p)

On one device such a tensor follows its parameter as it trains. A shard has memory of its own.
Attributes are left out: spectral norm keeps one of its weight, and computes it anew in forward.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._torch import live_storage, local_tensor
from autopar.core.common.notices import warn_once
from autopar.errors import NumericsWarning, StrategyError
from autopar.runtime.batch_checks import sampled_bytes
from autopar.runtime.parameters.sharded_view import version_of

MAX_ELEMENTS = 64
"""Elements by which memory is compared, or up to twice as many."""

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
        # The one that reaches furthest: a small view in a large tensor must not hide what follows.
        if last is None or last[0] != place[0] or place[2] > last[2]:
            last = place


def _places(model: nn.Module) -> Iterator[Place]:
    for path, module in model.named_modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is None or value.is_meta:
                continue
            part = local_tensor(value)
            if part.layout is not torch.strided or not part.numel():
                continue
            pairs = zip(part.shape, part.stride(), strict=True)
            elements = 1 + sum((size - 1) * stride for size, stride in pairs)
            begin = part.data_ptr()
            end = begin + elements * part.element_size()
            yield part.device, begin, end, f"{path}.{name}" if path else name, value


class GivenMemory:
    """Memory of a loop from which a sharded parameter got its values.

    It is left alone while the loop holds it, and forgotten with the last tensor there.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self.is_part = _is_part(value)
        self._storage = StorageWeakRef(value.untyped_storage())
        self._place = value.storage_offset(), value.shape, value.stride()
        self._dtype, self._device = value.dtype, value.device
        self._hash = _hash(value)
        self._version: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: the values of a copy have no memory in common with others."""

    def check(self, name: str, version: int) -> None:
        """Checks that neither the memory nor the parameter has changed without the other.

        Raises:
            StrategyError: the loop has written to the memory.
        """
        first = self._version = version if self._version is None else self._version
        storage = live_storage(self._storage.cdata)
        if storage is None:
            return
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        if _hash(empty.set_(storage, *self._place)) != self._hash:
            raise StrategyError(
                f"the loop changes memory in place from which parameter {name} got its values, as "
                "by p.data = flat[...] and flat.add_(...). The plan divides the parameter, whose "
                "shards have memory of their own. Assign p.data again after each change, or give "
                "a strategy that leaves parameters whole."
            )
        if self.is_part and version != first:
            warn_once(
                NumericsWarning,
                "parameters got their values from a larger tensor that the loop still holds, as by "
                "p.data = flat[...]. On one device that tensor follows them as they train; here it "
                "keeps its values. Read the parameters instead.",
            )


def check_given_memory(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Checks memory that loops gave to sharded parameters, which is forgotten when they drop it."""
    for name, parameter in parameters:
        memory: GivenMemory | None = getattr(parameter, "given_memory", None)
        if memory is not None:
            memory.check(name, version_of(parameter))


def given_memory_of(parameter: torch.Tensor, values: torch.Tensor) -> GivenMemory | None:
    """The memory by which a loop may change a parameter's values; None where it has no other use.

    That is a part of a larger tensor, such as one of all parameters.
    """
    memory: GivenMemory | None = getattr(parameter, "given_memory", None)
    if memory is None and _is_part(values):
        memory = GivenMemory(values)
    return memory if memory is not None and memory.is_part else None


def _is_part(value: torch.Tensor) -> bool:
    return value.untyped_storage().nbytes() > value.nbytes


def _hash(value: torch.Tensor) -> int:
    """A hash of a few elements, of which one that trains changes with all others."""
    if value.is_meta:
        return 0
    return zlib.crc32(sampled_bytes(value, MAX_ELEMENTS * value.element_size()))
