"""`pad_to_bucket`: rounds the lengths of batches up, so that few shapes occur."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from autopar.core.common.checks import count, demand
from autopar.errors import BatchError

Fill = float | int | bool
Key = str | int


def pad_to_bucket(
    collate_or_batch: Any,
    values: Mapping[Any, Fill],
    *,
    buckets: Sequence[int] | None = None,
    dim: int = 1,
) -> Any:
    """Pads the tensors of a batch, or of every batch of a collate function, to a few lengths.

    Every shape of a call has a program of its own, so ragged lengths cost a compilation each.
    Positions are added at the end. The loss stays exact where it ignores them: labels filled with
    the loss's `ignore_index`, and a mask filled with 0 unless the model is causal.

    Args:
        collate_or_batch: a collate function, for `DataLoader(collate_fn=)`, or a batch: a tuple,
            list, mapping or tensor.
        values: fill value of each tensor to pad, by its name or position in the batch, such as
            `{"input_ids": 0, "labels": -100, "attention_mask": 0}`; position 0 if it is a tensor.
        buckets: lengths to round up to; None for 16, 24, 32, 48, 64, 96, ...
        dim: dim of the lengths.

    Returns:
        A collate function, or the padded batch, whose other members stay as they are.

    Raises:
        StrategyError: an argument is invalid.
        BatchError: a batch lacks a tensor of `values`, their lengths differ, or exceed the buckets.
    """
    lengths = _lengths("buckets", buckets)
    count("dim", dim, 0, 64)
    wanted = 'give fill values by name or position, such as {"input_ids": 0, "labels": -100}'
    demand(isinstance(values, Mapping) and len(values) > 0, "values", values, wanted)
    padding = _Padding(dict(values), lengths, dim)
    is_batch = isinstance(collate_or_batch, (torch.Tensor, Mapping, tuple, list))
    if is_batch or not callable(collate_or_batch):
        return padding.pad(collate_or_batch)
    return _PaddingCollate(collate_or_batch, padding)


@dataclass(frozen=True)
class _Padding:
    """Fill values by name or position, increasing lengths (none for the default), and the dim."""

    values: dict[Key, Fill]
    lengths: tuple[int, ...]
    dim: int

    def pad(self, batch: Any) -> Any:
        """The batch with its tensors padded to a common bucket."""
        members = _members(batch)
        found = {key: self._tensor(members, key) for key in self.values}
        sizes = {key: tensor.shape[self.dim] for key, tensor in found.items()}
        if len(set(sizes.values())) > 1:
            raise BatchError(f"lengths of one batch differ along dim {self.dim}: {sizes}")
        length = next(iter(sizes.values()))
        more = self._bucket(length) - length
        if not more:
            return batch
        padded = {key: self._padded(tensor, more, key) for key, tensor in found.items()}
        return _with_members(batch, padded)

    def _tensor(self, members: Mapping[Any, Any], key: Key) -> torch.Tensor:
        tensor = members.get(key)
        if not isinstance(tensor, torch.Tensor) or tensor.dim() <= self.dim:
            raise BatchError(
                f"the batch has no tensor {key!r} with a dim {self.dim} to pad: it has "
                f"{', '.join(map(repr, members)) or 'no members'}. Name the tensors to pad in "
                "`values`, and their dim."
            )
        return tensor

    def _padded(self, tensor: torch.Tensor, more: int, key: Key) -> torch.Tensor:
        ends = (0, 0) * (tensor.dim() - 1 - self.dim) + (0, more)
        return F.pad(tensor, ends, value=self.values[key])

    def _bucket(self, length: int) -> int:
        """The smallest bucket of at least this length."""
        if not self.lengths:
            return _default_bucket(length)
        fitting = (bucket for bucket in self.lengths if bucket >= length)
        if (bucket := next(fitting, None)) is None:
            raise BatchError(
                f"a batch of length {length} exceeds the longest bucket, {self.lengths[-1]}: add a "
                "bucket, or cut the batch off."
            )
        return bucket


@dataclass(frozen=True)
class _PaddingCollate:
    """A collate function whose batches are padded; it can be pickled if the inner one can."""

    collate: Callable[..., Any]
    padding: _Padding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.padding.pad(self.collate(*args, **kwargs))


def _default_bucket(length: int) -> int:
    """The smallest of 16, 24, 32, 48, 64, 96, ... of at least this length."""
    power = 16
    while power < length:
        power *= 2
    middle = power // 4 * 3
    return middle if power > 16 and length <= middle else power


def _lengths(name: str, buckets: Any) -> tuple[int, ...]:
    if buckets is None:
        return ()
    wanted = "give lengths such as [128, 256, 512]"
    is_list = isinstance(buckets, Sequence) and not isinstance(buckets, str) and len(buckets) > 0
    demand(is_list, name, buckets, wanted)
    return tuple(sorted({count(name, bucket) for bucket in buckets}))


def _members(batch: Any) -> Mapping[Any, Any]:
    """The members of a batch by name or position."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, (tuple, list)):
        return dict(enumerate(batch))
    if isinstance(batch, torch.Tensor):
        return {0: batch}
    raise BatchError(
        f"a batch of class {type(batch).__qualname__} cannot be padded: give a collate function, "
        "or a batch that is a tuple, list, mapping or tensor."
    )


def _with_members(batch: Any, padded: Mapping[Any, torch.Tensor]) -> Any:
    """A copy of a batch of the same class with other tensors."""
    if isinstance(batch, torch.Tensor):
        return padded[0]
    if isinstance(batch, Mapping):
        made: Any = copy.copy(batch)
        for key, tensor in padded.items():
            made[key] = tensor
        return made
    values = [padded.get(place, member) for place, member in enumerate(batch)]
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
