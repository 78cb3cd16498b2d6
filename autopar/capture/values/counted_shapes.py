"""`with_counts`: functions whose result has a shape that depends on values, given that shape.

    h = h[labels != -100]

A trace knows shapes alone. Where Python may read how many elements of the mask are true, the
function is called in a form that takes the count. An operator of known shape does the same then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar._torch import pytree

Read = Callable[[Callable[..., Any], Tensor], tuple[Any] | None]
"""The value of a function of a tensor, in a tuple; None if Python may not read it."""
Called = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Form = Callable[[Any, dict[str, Any], Read], Called | None]
"""Changes the arguments of a call, and the function that they go to."""


def count_nonzero(x: Tensor) -> int:
    """The number of elements that are not zero."""
    return int(torch.count_nonzero(x).item())


def total(x: Tensor) -> int:
    """The sum of all elements."""
    return int(x.sum().item())


def count_unique(x: Tensor) -> int:
    """The number of different elements."""
    return torch.unique(x).numel()


def count_runs(x: Tensor) -> int:
    """The number of runs of equal elements."""
    return torch.unique_consecutive(x).numel()


def with_counts(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], read: Read
) -> Called | None:
    """The call with counts; None for functions that need none, and where `read` has none."""
    form = _FORMS.get(func)
    return None if form is None else form(args, dict(kwargs), read)


def with_numbers(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], read: Read
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments with numbers for 0-dim integers; None without any, or if one may not be read."""
    reads: list[bool] = []

    def number(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() or leaf.is_floating_point():
            return leaf
        value = read(Tensor.item, leaf)
        reads.append(value is not None)
        return leaf if value is None else value[0]

    numbers = pytree.tree_map(number, (args, dict(kwargs)))
    return numbers if reads and all(reads) else None


def _nonzero(args: Any, kwargs: dict[str, Any], read: Read) -> Called | None:
    (x, *_), as_tuple = args, kwargs.get("as_tuple", False)
    count = read(count_nonzero, x) if x.dim() else None
    if count is None:
        return None
    return indices_of_nonzero, (x,), {"count": count[0], "as_tuple": as_tuple}


def _where(args: Any, kwargs: dict[str, Any], read: Read) -> Called | None:
    return _nonzero(args, {"as_tuple": True}, read) if len(args) == 1 and not kwargs else None


def _masked_select(args: Any, kwargs: dict[str, Any], read: Read) -> Called | None:
    if len(args) != 2 or kwargs:
        return None
    x, mask = args
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    count = read(count_nonzero, mask) if mask.dim() and mask.numel() else None
    if count is None:
        return None
    copies = math.prod(shape) // mask.numel()
    return selected, (x, mask), {"count": count[0] * copies}


def _getitem(args: Any, kwargs: dict[str, Any], read: Read) -> Called | None:
    counts = _counts(args[1], read)
    return None if counts is None else (item, args, {"counts": counts})


def _setitem(args: Any, kwargs: dict[str, Any], read: Read) -> Called | None:
    value = args[2]
    if not isinstance(value, Tensor) or value.numel() == 1:
        return None  # fills the mask, whatever the count
    counts = _counts(args[1], read)
    return None if counts is None else (with_item, args, {"counts": counts})


def _repeat_interleave(args: Any, kwargs: dict[str, Any], read: Read) -> Called | None:
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
    if kwargs.get("output_size") is not None or not isinstance(repeats, Tensor):
        return None
    size = read(total, repeats)
    if size is None or repeats.numel() == 1:
        return None
    return torch.repeat_interleave, args, kwargs | {"output_size": size[0]}


def _tensor_split(args: Any, kwargs: dict[str, Any], read: Read) -> Called | None:
    if len(args) < 2 or not isinstance(args[1], Tensor):
        return None
    places = read(Tensor.tolist, args[1])
    return None if places is None else (torch.tensor_split, (args[0], places[0], *args[2:]), kwargs)


def _uniques_of(count_of: Callable[[Tensor], int]) -> Form:
    """The form of `unique` or `unique_consecutive`, which has so many elements."""

    def form(args: Any, kwargs: dict[str, Any], read: Read) -> Called | None:
        x, *positional = args
        names = ["sorted", "return_inverse", "return_counts", "dim"]
        names = names[1:] if count_of is count_runs else names
        options = dict(zip(names, positional, strict=False)) | kwargs
        if options.pop("dim", None) is not None or not x.numel():
            return None
        count = read(count_of, x)
        if count is None:
            return None
        options["sorted"] = count_of is count_unique
        return uniques, (x,), options | {"count": count[0]}

    return form


_FORMS: dict[Any, Form] = {
    **dict.fromkeys((torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere), _nonzero),
    torch.where: _where,
    **dict.fromkeys((torch.masked_select, Tensor.masked_select), _masked_select),
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    **dict.fromkeys((torch.repeat_interleave, Tensor.repeat_interleave), _repeat_interleave),
    **dict.fromkeys((torch.unique, Tensor.unique), _uniques_of(count_unique)),
    **dict.fromkeys((torch.unique_consecutive, Tensor.unique_consecutive), _uniques_of(count_runs)),
    **dict.fromkeys((torch.tensor_split, Tensor.tensor_split), _tensor_split),
}


def _is_mask(index: Any) -> bool:
    is_tensor = isinstance(index, Tensor) and index.dim() > 0
    return is_tensor and index.dtype in (torch.bool, torch.uint8)


def _counts(index: Any, read: Read) -> tuple[int, ...] | None:
    """The count of each mask in an index; None without any, or if one may not be read."""
    masks = [each for each in _parts(index) if _is_mask(each)]
    counts = [read(count_nonzero, mask) for mask in masks]
    return tuple(c[0] for c in counts if c) if masks and all(counts) else None


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _without_masks(index: Any, counts: tuple[int, ...]) -> tuple[Any, ...]:
    """An index with the places of true elements for each mask."""
    left, parts = iter(counts), list[Any]()
    for each in _parts(index):
        if _is_mask(each):
            parts += indices_of_nonzero(each, count=next(left), as_tuple=True)
        else:
            parts.append(each)
    return tuple(parts)


def indices_of_nonzero(x: Tensor, *, count: int, as_tuple: bool) -> Any:
    """`torch.nonzero` of a tensor with `count` such elements."""
    indices = torch.nonzero_static(x, size=count)
    return indices.unbind(1) if as_tuple else indices


def uniques(
    x: Tensor,
    *,
    count: int,
    sorted: bool,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Any:
    """`torch.unique` of a tensor with `count` different elements; of `count` runs if not sorted."""
    flat = x.detach().flatten()
    order = torch.arange(len(flat), device=flat.device)
    if sorted:
        flat, order = flat.sort(stable=True)
    starts = torch.cat([flat.new_ones(1, dtype=torch.bool), flat[1:] != flat[:-1]])
    (places,) = indices_of_nonzero(starts, count=count, as_tuple=True)
    results = [flat[places]]
    if return_inverse:
        inverse = torch.zeros_like(order).scatter(0, order, starts.cumsum(0) - 1)
        results.append(inverse.view(x.shape))
    if return_counts:
        results.append(torch.diff(places, append=places.new_full((1,), len(flat))))
    return results[0] if len(results) == 1 else tuple(results)


def selected(x: Tensor, mask: Tensor, *, count: int) -> Tensor:
    """`torch.masked_select` with a mask of `count` true elements."""
    x, mask = torch.broadcast_tensors(x, mask)
    return x[indices_of_nonzero(mask, count=count, as_tuple=True)]


def item(x: Tensor, index: Any, *, counts: tuple[int, ...]) -> Tensor:
    """`x[index]` with masks of so many true elements."""
    return x[_without_masks(index, counts)]


def with_item(x: Tensor, index: Any, value: Any, *, counts: tuple[int, ...] = ()) -> Tensor:
    """The tensor, in which an item is set."""
    x[_without_masks(index, counts) if counts else index] = value
    return x
