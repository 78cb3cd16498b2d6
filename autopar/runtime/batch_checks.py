"""Hashes of batches, which ranks compare, without waiting for accelerators."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import torch

MAX_SAMPLE_BYTES = 1 << 20
"""Bytes of a tensor on the host that are hashed."""

MAX_SAMPLE_WORDS = 1 << 16
"""Elements of a tensor on an accelerator that are hashed."""

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
"""Classes of arguments with the same text on every rank."""

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Integers of a size in bytes; larger elements are int64s."""


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether reading a tensor waits for no accelerator."""
    return tensor.device.type == "cpu"


class LateNumbers:
    """Numbers that an accelerator computes, copied to the host while other work continues."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._copied = values, None
        if values.is_cuda:
            # a copy to pageable memory would make the host wait
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[Any]:
        """The numbers; waits until they are computed."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


def host_hash(leaves: Sequence[Any]) -> int:
    """A number that almost surely differs for different arguments; skips accelerators' tensors."""
    value = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if is_on_host(leaf):
                value = zlib.crc32(sampled_bytes(leaf), value)
        else:
            text = repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__qualname__
            value = zlib.crc32(text.encode(), value)
    return value


def device_hashes(leaves: Sequence[Any]) -> LateNumbers | None:
    """The hash of each tensor on an accelerator, None if there is no such tensor."""
    found = [x for x in leaves if isinstance(x, torch.Tensor) and not is_on_host(x)]
    if not found:
        return None
    with torch.no_grad():
        return LateNumbers(torch.stack([_device_hash(x) for x in found]))


def _device_hash(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of evenly spaced elements, read as integers, times fixed random weights."""
    flat = tensor.detach().reshape(-1)
    few = flat[:: max(1, -(-flat.numel() // MAX_SAMPLE_WORDS))].contiguous()
    words = few.view(WORDS.get(few.element_size(), torch.int64)).to(torch.int64)
    return (words * _weights(tensor.device)[: words.numel()]).sum()


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers below 2**63, random in all bits; a complex128 has two words."""
    generator = torch.Generator().manual_seed(0)
    # An odd factor is invertible modulo 2**64, where int64 wraps. So a change of any single word
    # changes the sum.
    drawn = torch.randint(2**62, (2 * MAX_SAMPLE_WORDS,), generator=generator)
    return (2 * drawn + 1).to(device)


def sampled_bytes(tensor: torch.Tensor, max_bytes: int = MAX_SAMPLE_BYTES) -> memoryview:
    """The bytes of a tensor, or of evenly spaced elements of one with more than `max_bytes`."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() * flat.element_size() // max_bytes)
    return flat[::step].contiguous().view(torch.uint8).cpu().numpy().data
