"""Codecs: encode rows of numbers as smaller messages and decode them, with plain tensor functions.

Codecs never hide an overflow: inf and NaN decode to inf or NaN and may spread within their block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.core.plan.compression import Compression

ROW = 2**16
"""Greatest number of elements in a row of top-k: their indices fit in two bytes."""

GROUP = 8
"""Number of elements in a group: top-k first selects groups by their largest element."""


NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Floating type of each casting method."""


class Codec(ABC):
    """Encodes a table [n, width] as messages [n, ...] and decodes them."""

    def fit(self, width: int) -> int:
        """Least width, at or above `width`, that the codec accepts.

        Callers pad and cut tables, because inductor miscompiles codecs that do so.
        """
        return width

    @abstractmethod
    def encode(self, table: Tensor) -> Tensor:
        """Encodes each row of a table [n, width] as a message."""

    @abstractmethod
    def decode(self, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Decodes messages into a table [n, width]."""

    def total(self, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Sums the decoded rows of messages: [width]."""
        return self.decode(messages, width, dtype).sum(0)

    def lost(self, table: Tensor, messages: Tensor) -> Tensor:
        """Encoding error: the table minus its decoded messages."""
        return table - self.decode(messages, table.shape[1], table.dtype)


def codec(given: Compression) -> Codec:
    """Codec of a compression method; PowerSGD and random-k have none."""
    match given.method:
        case "bf16" | "fp16":
            return Cast(NARROW[given.method])
        case "int8":
            return Int8(given.block)
        case "sign":
            return Sign(given.block)
        case "topk":
            return TopK(given.density)
        case "threshold":
            return TopK(given.density, given.threshold)
    raise AssertionError(f"{given} has no codec")


@dataclass(frozen=True)
class Cast(Codec):
    """Casts to a narrower floating type."""

    narrow: torch.dtype

    def encode(self, table: Tensor) -> Tensor:
        return table.to(self.narrow)

    def decode(self, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return messages.to(dtype)


@dataclass(frozen=True)
class Blockwise(Codec):
    """Encodes blocks of elements, with one float32 scale per block."""

    block: int

    def fit(self, width: int) -> int:
        return math.ceil(width / self.block) * self.block


class Int8(Blockwise):
    """Symmetric int8 quantization.

    (Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016; blocks as in ZeRO++.)
    """

    def encode(self, table: Tensor) -> Tensor:
        blocks = table.view(table.shape[0], -1, self.block)
        scales = (blocks.abs().amax(-1, keepdim=True) / 127).float()
        # A block of zeros has the scale 0. 0 / 0 is NaN, for which a cast to int8 is undefined.
        steps = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round()
        return _joined(steps.to(torch.int8), scales)

    def decode(self, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        bodies, scales = _parted(messages, width // self.block, self.block)
        steps = bodies.view(torch.int8).view(*scales.shape[:2], self.block)
        return (steps * scales).to(dtype).flatten(1)


class Sign(Blockwise):
    """One sign bit per element, scaled by the mean magnitude.

    (Karimireddy et al., Error Feedback Fixes SignSGD, 2019.)
    """

    def encode(self, table: Tensor) -> Tensor:
        blocks = table.view(table.shape[0], -1, self.block)
        scales = blocks.abs().mean(-1, keepdim=True).float()
        return _joined(_packed(blocks >= 0), scales)

    def decode(self, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        bodies, scales = _parted(messages, width // self.block, self.block // 8)
        signs = _unpacked(bodies, dtype).view(*scales.shape[:2], self.block)
        return (signs * scales.to(dtype)).flatten(1)


@dataclass(frozen=True)
class TopK(Codec):
    """Largest elements of each row, as bfloat16 values and two-byte indices.

    (Stich, Cordonnier & Jaggi, Sparsified SGD with Memory, 2018.)

    Attributes:
        density: fraction of the elements to send, at least one per row.
        threshold: magnitude up to which selected elements are sent as zeros.
    """

    density: float
    threshold: float = 0.0

    def fit(self, width: int) -> int:
        rows = math.ceil(width / ROW)
        return rows * math.ceil(width / rows / GROUP) * GROUP

    def encode(self, table: Tensor) -> Tensor:
        rows = table.view(table.shape[0], math.ceil(table.shape[1] / ROW), -1)
        places = _largest(rows.abs(), self._count(rows.shape[-1]))
        values = rows.gather(-1, places)
        if self.threshold:
            # NaN fails every comparison. So `>` would send it as zero, and hide an overflow.
            values = values.where(~(values.abs() <= self.threshold), 0.0)
        short = torch.stack([values.bfloat16().view(torch.int16), places.to(torch.int16)])
        return _bytes(short.transpose(0, 1))

    def decode(self, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        rows = [self._read(message, width, dtype).view(-1) for message in messages.unbind()]
        return torch.stack(rows)

    def total(self, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Sums messages one after the other, so that all ranks add in the same order."""
        first, *rest = messages.unbind()
        found = self._read(first, width, dtype)
        for message in rest:
            values, places = self._entries(message, width, dtype)
            found = found.scatter_add(-1, places, values)
        return found.view(-1)

    def lost(self, table: Tensor, messages: Tensor) -> Tensor:
        rows = []
        for own, message in zip(table.unbind(), messages.unbind(), strict=True):
            values, places = self._entries(message, own.numel(), own.dtype)
            own = own.view(places.shape[0], -1)
            rows.append(own.scatter_add(-1, places, -values).view(-1))
        return torch.stack(rows)

    def _read(self, message: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        values, places = self._entries(message, width, dtype)
        rows = math.ceil(width / ROW)
        return values.new_zeros((rows, width // rows)).scatter(-1, places, values)

    def _entries(self, message: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows = math.ceil(width / ROW)
        short = message.view(torch.int16)
        values, places = short.view(2, rows, self._count(width // rows)).unbind()
        # Places travel as int16, so those from 2**15 on come back negative: the mask undoes that.
        return values.contiguous().view(torch.bfloat16).to(dtype), places.long() & (ROW - 1)

    def _count(self, length: int) -> int:
        return min(length, max(1, round(self.density * length)))


def _largest(sizes: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest elements of each row.

    The `count` groups with the largest maxima contain all of them.
    """
    groups = sizes.shape[-1] // GROUP
    if count >= groups:
        return sizes.topk(count, sorted=False).indices
    table = sizes.unflatten(-1, (GROUP, groups))
    first = table.amax(-2).topk(count, sorted=False).indices
    chosen = table.gather(-1, first.unsqueeze(-2).expand(*table.shape[:-1], count)).flatten(-2)
    places = chosen.topk(count, sorted=False).indices
    return places // count * groups + first.gather(-1, places % count)


def random_places(count: Tensor, width: int, density: float) -> Tensor:
    """Pseudo-random column indices, one per stretch of `1 / density` columns.

    All ranks draw the same indices, and new ones for each int64 `count` of earlier draws.
    """
    stretch = max(1, min(width, round(1 / density)))
    starts = torch.arange(0, width, stretch, device=count.device)
    mixed = (starts + 1) * 0x9E3779B1 + (count + 1) * 0x85EBCA77
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D & 0x7FFFFFFF
    mixed = (mixed ^ (mixed >> 13)) * 0x297A2D39 & 0x7FFFFFFF
    return (starts + (mixed ^ (mixed >> 15)) % stretch).clamp_max(width - 1)


def _joined(bodies: Tensor, scales: Tensor) -> Tensor:
    return torch.cat([_bytes(bodies), _bytes(scales)], 1)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).flatten(1)


def _parted(messages: Tensor, blocks: int, body: int) -> tuple[Tensor, Tensor]:
    """Splits messages into bodies [n, blocks * body] of bytes and scales [n, blocks, 1]."""
    bodies, scales = messages.split([blocks * body, blocks * 4], 1)
    return bodies.contiguous(), scales.contiguous().view(torch.float32).unsqueeze(-1)


_GATHER = 0x0102040810204080
"""Multiplier that packs eight bytes of 0 or 1, viewed as one int64, into its highest byte."""


def _packed(bits: Tensor) -> Tensor:
    eights = bits.flatten(1).view(torch.int64)
    return ((eights * _GATHER) >> 56).to(torch.uint8)


def _unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpacks each bit to 1 or -1 by a table of all bytes: [bytes, 8]."""
    bytes_, bits = torch.arange(256, device=packed.device), torch.arange(8, device=packed.device)
    table = ((bytes_.unsqueeze(1) >> bits) & 1).to(dtype) * 2 - 1
    return table.index_select(0, packed.reshape(-1).int())
