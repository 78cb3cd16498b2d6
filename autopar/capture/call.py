"""`Call`: the arguments of one call of a model, tensors as specs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.graph import dense_strides


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype, device and differentiability of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    stride: tuple[int, ...] | None = None

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor, with the global shape for a DTensor."""
        return TensorSpec(
            tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, tensor.stride()
        )

    def with_batch_size(self, rows: int) -> TensorSpec:
        """The spec with another size of dim 0, and the same order of dims in memory."""
        shape = (rows, *self.shape[1:])
        stride = None if self.stride is None else dense_strides(shape, self.stride)
        return replace(self, shape=shape, stride=stride)

    def fake(self) -> torch.Tensor:
        """A new tensor of this spec; inside a fake mode it holds no memory."""
        stride = self.stride or torch.empty(self.shape, device="meta").stride()
        return torch.empty_strided(
            self.shape,
            stride,
            dtype=self.dtype,
            device=self.device,
            requires_grad=self.requires_grad,
        )


@dataclass(frozen=True)
class Call:
    """One call of the model.

    Attributes:
        leaves: flattened arguments, tensors as `TensorSpec`.
        structure: tree structure of (args, kwargs).
        has_batch_dim: for each leaf, whether dim 0 is the batch dim.
    """

    leaves: tuple[Any, ...]
    structure: Any
    has_batch_dim: tuple[bool, ...]

    @property
    def tensor_indices(self) -> tuple[int, ...]:
        """Indices of the tensors among the leaves."""
        return tuple(i for i, leaf in enumerate(self.leaves) if isinstance(leaf, TensorSpec))

    @property
    def key(self) -> tuple[Any, ...]:
        """A hashable key of the call; unhashable arguments are keyed by their repr."""
        leaves = tuple(x if _hashable(x) else repr(x) for x in self.leaves)
        return leaves, self.structure, self.has_batch_dim

    def with_batch_size(self, rows: int) -> Call:
        """The same call with another number of rows."""
        leaves = tuple(
            leaf.with_batch_size(rows) if split else leaf
            for leaf, split in zip(self.leaves, self.has_batch_dim, strict=True)
        )
        return replace(self, leaves=leaves)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
