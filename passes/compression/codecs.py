"""Codecs: rows of numbers encoded as smaller messages, and decoded, by plain tensor functions.

A codec turns a table [n, width], of a width that fits, into messages [n, ...], each of which can be
read alone, and back into numbers; `total` adds up what several messages say. What is inf or nan
comes out as inf or nan, if need be with its neighbours: nothing hides an overflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from autopar.plan.compression import Compression

ROW = 2**16
"""Elements among which top-k selects: their places fit into two bytes."""

GROUP = 8
"""Elements of which top-k first looks at the largest alone."""


class Codec(Protocol):
    """Writes and reads messages."""

    def fit(self, width: int) -> int:
        """The least width of a padded table.

        Callers pad and cut, because inductor miscompiles tables padded and cut in a codec.
        """
        ...

    def encode(self, table: Tensor) -> Tensor:
        """The message of each row of a table [n, width]."""
        ...

    def decode(self, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The table [n, width] that messages stand for."""
        ...

    def total(self, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The sum [width] of the rows that messages stand for."""
        ...

    def lost(self, table: Tensor, messages: Tensor) -> Tensor:
        """Facts about a table beside its messages."""
        ...


def codec(given: Compression) -> Codec:
    """Encodes and decodes the messages of a compression method, except PowerSGD and random-k."""
    match given.method:
        case "bf16":
            return Cast(torch.bfloat16)
        case "fp16":
            return Cast(torch.float16)
        case "int8":
            return Int8(given.block)
        case "sign":
            return Sign(given.block)
        case "topk":
            return TopK(given.density)
        case "threshold":
            return TopK(given.density, given.threshold)
    raise AssertionError(f"{given} has no codec")


class _Read:
    """Sums messages, and computes the loss of encoding, by decoding all of them."""

    def total(self: Codec, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return self.decode(messages, width, dtype).sum(0)

    def lost(self: Codec, table: Tensor, messages: Tensor) -> Tensor:
        return table - self.decode(messages, table.shape[1], table.dtype)


@dataclass(frozen=True)
class Cast(_Read):
    """A narrower floating type."""

    narrow: torch.dtype

    def fit(self, width: int) -> int:
        return width

    def encode(self, table: Tensor) -> Tensor:
        return table.to(self.narrow)

    def decode(self, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return messages.to(dtype)


@dataclass(frozen=True)
class Int8(_Read):
    """127 steps to either side; each block has a scale, in float32.

    (Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016; in blocks as ZeRO++.)
    """

    block: int

    def fit(self, width: int) -> int:
        return math.ceil(width / self.block) * self.block

    def encode(self, table: Tensor) -> Tensor:
        blocks = table.view(table.shape[0], -1, self.block)
        scales = (blocks.abs().amax(-1, keepdim=True) / 127).float()
        steps = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round()
        return _joined(steps.to(torch.int8), scales)

    def decode(self, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        bodies, scales = _parted(messages, width // self.block, self.block)
        steps = bodies.view(torch.int8).view(*scales.shape[:2], self.block)
        return (steps * scales).to(dtype).flatten(1)


@dataclass(frozen=True)
class Sign(_Read):
    """A bit an element; each block has its mean magnitude, in float32.

    (Karimireddy et al., Error Feedback Fixes SignSGD, 2019.)
    """

    block: int

    def fit(self, width: int) -> int:
        return math.ceil(width / self.block) * self.block

    def encode(self, table: Tensor) -> Tensor:
        blocks = table.view(table.shape[0], -1, self.block)
        scales = blocks.abs().mean(-1, keepdim=True).float()
        return _joined(_packed(blocks >= 0), scales)

    def decode(self, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        bodies, scales = _parted(messages, width // self.block, self.block // 8)
        signs = _unpacked(bodies, dtype).view(*scales.shape[:2], self.block)
        return (signs * scales.to(dtype)).flatten(1)


@dataclass(frozen=True)
class TopK:
    """The largest elements of every row, each as a bfloat16 and its place in two bytes.

    (Stich, Cordonnier & Jaggi, Sparsified SGD with Memory, 2018.)

    Attributes:
        density: part of the elements that are sent, one of every row at least.
        threshold: those not larger than this are not sent; their places in the message are zero.
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
            values = values.where(~(values.abs() <= self.threshold), 0.0)
        short = torch.stack([values.bfloat16().view(torch.int16), places.to(torch.int16)])
        return _bytes(short.transpose(0, 1))

    def decode(self, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return torch.stack([self._read(message, width, dtype) for message in messages.unbind()])

    def total(self, messages: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """One message after the other, so that all ranks add in the same order."""
        first, *rest = messages.unbind()
        found = self._read(first, width, dtype, whole=True)
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

    def _read(
        self, message: Tensor, width: int, dtype: torch.dtype, *, whole: bool = False
    ) -> Tensor:
        values, places = self._entries(message, width, dtype)
        rows = math.ceil(width / ROW)
        found = values.new_zeros((rows, width // rows)).scatter(-1, places, values)
        return found if whole else found.view(-1)

    def _entries(self, message: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows = math.ceil(width / ROW)
        short = message.view(torch.int16)
        values, places = short.view(2, rows, self._count(width // rows)).unbind()
        return values.contiguous().view(torch.bfloat16).to(dtype), places.long() & (ROW - 1)

    def _count(self, length: int) -> int:
        return min(length, max(1, round(self.density * length)))


def _largest(sizes: Tensor, count: int) -> Tensor:
    """The places of the largest elements of each row.

    They lie in the groups that are first by their largest elements, of which no more are needed
    than elements: what is sorted is a fraction of the row.
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
    """One place of every stretch of `width`, another at every count, the same on all ranks.

    Args:
        count: int64 scalar, how often this was done before.
        width: of the rows.
        density: part of the places that is taken.
    """
    stretch = max(1, min(width, round(1 / density)))
    starts = torch.arange(0, width, stretch, device=count.device)
    mixed = (starts + 1) * 0x9E3779B1 + (count + 1) * 0x85EBCA77
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D & 0x7FFFFFFF
    mixed = (mixed ^ (mixed >> 13)) * 0x297A2D39 & 0x7FFFFFFF
    return (starts + (mixed ^ (mixed >> 15)) % stretch).clamp_max(width - 1)


def _joined(bodies: Tensor, scales: Tensor) -> Tensor:
    """Bytes: those of the bodies, then those of the scales."""
    return torch.cat([_bytes(bodies), _bytes(scales)], 1)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).flatten(1)


def _parted(messages: Tensor, blocks: int, body: int) -> tuple[Tensor, Tensor]:
    """Bodies [n, blocks * body] of bytes, and scales [n, blocks, 1]."""
    bodies, scales = messages.split([blocks * body, blocks * 4], 1)
    return bodies.contiguous(), scales.contiguous().view(torch.float32).unsqueeze(-1)


_GATHER = 0x0102040810204080
"""Of eight bytes that are 0 or 1, seen as one integer, puts every bit into the highest byte."""


def _packed(bits: Tensor) -> Tensor:
    """Booleans [n, ...] as bits [n, an eighth of them]."""
    eights = bits.flatten(1).view(torch.int64)
    return ((eights * _GATHER) >> 56).to(torch.uint8)


def _unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """1 or -1 for each bit [eight times as many], read from a table of all bytes."""
    bytes_, bits = torch.arange(256, device=packed.device), torch.arange(8, device=packed.device)
    table = ((bytes_.unsqueeze(1) >> bits) & 1).to(dtype) * 2 - 1
    return table.index_select(0, packed.reshape(-1).int())
