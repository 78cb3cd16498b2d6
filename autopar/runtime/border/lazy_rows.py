"""`LazyRows`: a tensor of all rows that gathers them when it is read."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from autopar._torch import empty_subclass, pytree, without_subclasses
from autopar.core.ir.graph import dense_strides
from autopar.runtime.agreement.transforms import check_not_batched
from autopar.runtime.border.linked_results import check_link
from autopar.runtime.border.rows import OwnRows, RowLayout
from autopar.runtime.parameters.whole_gradient import none_for_none, whole_gradient

aten = torch.ops.aten

_READS_MEMORY = frozenset(
    {
        "numpy",
        "tolist",
        "__array__",
        "__dlpack__",
        "__reduce_ex__",
        "__deepcopy__",
        "__repr__",
        "__format__",
        "data_ptr",
        "storage",
        "untyped_storage",
        "share_memory_",
        "pin_memory",
    }
)
"""Methods that reach for memory without an operator."""


class Gathers(Protocol):
    """A layout that finds a whole tensor from the parts of all ranks."""

    def shape_of_whole(self, own: torch.Tensor) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The whole tensor; all ranks call this at once."""


class _Rows:
    """This rank's rows, and all rows once they were read."""

    def __init__(self, own: torch.Tensor, layout: Gathers) -> None:
        self.own: torch.Tensor | None = own
        self.layout = layout
        self.whole: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        if self.whole is None:
            assert self.own is not None
            with torch.no_grad():
                self.whole = self.layout.gather(self.own)
            self.own = None
        return self.whole


class LazyRows(torch.Tensor):
    """All rows of a result. Ranks keep their own until any operator reads it, on all at once.

    Models return logits beside their loss, and most loops never look at them: a gathering at every
    call would be wasted.
    """

    _rows: _Rows

    @staticmethod
    def __new__(cls, rows: _Rows, shape: tuple[int, ...], like: torch.Tensor) -> LazyRows:
        made = empty_subclass(cls, shape, dense_strides(shape, like.stride()), like)
        made._rows = rows
        return made

    @staticmethod
    def of(own: torch.Tensor, layout: Gathers) -> LazyRows:
        """The whole tensor of which this rank has its own part."""
        return LazyRows(_Rows(own.detach(), layout), layout.shape_of_whole(own), own)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_subclasses():
            check_link(func, args, kwargs or {})
            if getattr(func, "__name__", "") in _READS_MEMORY:
                args, kwargs = pytree.tree_map(_plain, (tuple(args), kwargs or {}))
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return LazyRows(args[0]._rows, args[0].shape, args[0])
        plain_args, plain_kwargs = pytree.tree_map(_read, (tuple(args), kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        writes = func._schema.arguments and func._schema.arguments[0].is_write
        return args[0] if writes and isinstance(args[0], LazyRows) else result


def _read(value: Any) -> Any:
    return value._rows.read() if isinstance(value, LazyRows) else value


def _plain(value: Any) -> Any:
    """A view of all rows, part of autograd's graph."""
    return value.view(value.shape) if isinstance(value, LazyRows) else value


class ReadLater(torch.autograd.Function):
    """A `LazyRows` of this rank's rows; the backward takes these rows of the gradient, scaled."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, layout: RowLayout, scale: float) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.scale = layout, scale
        return LazyRows.of(own, layout)

    @staticmethod
    @none_for_none
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        check_not_batched(gradients)
        return OwnRows.apply(whole_gradient(gradients[0]), ctx.layout, ctx.scale), None, None
