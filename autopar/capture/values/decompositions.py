"""`DECOMPOSITIONS`: operators that a trace writes by others, which have rules.

Autograd calls them by itself, so no line of the user's can be written otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar._torch import OpOverload
from autopar.core.ir.graph import dense_strides

aten = torch.ops.aten


def zeros(size: Sequence[int], **options: Any) -> Tensor:
    """Zeros in place of a tensor without storage, which autograd makes for derivatives of steps."""
    return torch.zeros(size, dtype=options.get("dtype"), device=options.get("device"))


def empty_in_order(
    like: Tensor, size: Sequence[int], stride: Sequence[int], **options: Any
) -> Tensor:
    """An empty tensor whose memory has the order of `stride`, as a permuted contiguous one.

    Autograd copies the gradient of a tensor that was written in place into such a tensor. Its sizes
    have a rule; strides would be those of the whole on each shard.
    """
    if any(not isinstance(n, int) for n in (*size, *stride)):
        return NotImplemented
    if tuple(stride) != dense_strides(size, stride) or 0 in stride:
        return NotImplemented
    order = sorted(range(len(size)), key=lambda dim: (-stride[dim], dim))
    kept = {name: options[name] for name in ("dtype", "device") if options.get(name) is not None}
    dense = like.new_empty([size[dim] for dim in order], **kept)
    places = [order.index(dim) for dim in range(len(order))]
    return dense if order == places else dense.permute(places)


DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten._efficientzerotensor.default: zeros,
    aten.new_empty_strided.default: empty_in_order,
}
