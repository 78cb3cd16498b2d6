"""`autopar::expert_mm`: each row times the matrix of its expert, the same on every device.

A row says its expert by number. So rows are independent of each other, and a batch of them can be
divided. Grouped products that libraries call read rows sorted by expert, and where each group ends:
`grouped_like` finds the expert of every row from the ends.

rows [rows, k], weight [experts, k, n], experts [rows] -> [rows, n]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from autopar._torch import GROUPED_MM

aten = torch.ops.aten

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define(
    "expert_mm(Tensor rows, Tensor weight, Tensor experts, int first=0, int total=0) -> Tensor"
)
_LIBRARY.define(
    "expert_outer(Tensor rows, Tensor gradients, Tensor experts, int count, int first=0, "
    "int total=0) -> Tensor"
)
expert_mm = torch.ops.autopar.expert_mm.default
"""(rows, weight, experts, first, total) -> products.

`weight` is that of the experts from `first` on, of `total` (0: of all). The products
of other experts' rows are zero.
"""

expert_outer = torch.ops.autopar.expert_outer.default
"""(rows [rows, k], gradients [rows, n], experts, count, first, total) -> [count, k, n].

The sum of outer products of the rows of each of `count` experts from `first` on.
"""


def grouped_like(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The product of sorted rows with the matrix of their group, by `expert_mm`.

    `ends` has the number of the row behind the last of each group.
    """
    places = torch.arange(rows.shape[0], dtype=ends.dtype, device=ends.device)
    experts = torch.searchsorted(ends, places, right=True)
    return expert_mm(rows, weight, experts)


def _form(function: Callable[..., Any]) -> Callable[..., Any]:
    """A grouped product, by `expert_mm` where rows are grouped and nothing else is asked for."""

    def call(mat_a: Tensor, mat_b: Tensor, *args: Any, **options: Any) -> Any:
        offs, *rest = [*args, None] if args else [options.get("offs")]
        others = [*rest, *(option for name, option in options.items() if name != "offs")]
        plain = all(option is None for option in others) and mat_a.dtype == mat_b.dtype
        if offs is not None and plain and (mat_a.dim(), mat_b.dim()) == (2, 3):
            return grouped_like(mat_a, mat_b, offs)
        return function(mat_a, mat_b, *args, **options)

    return call


_PRODUCTS = (GROUPED_MM, torch.nn.functional.grouped_mm, aten._grouped_mm.default)
_FORMS: dict[Any, Callable[..., Any]] = {product: _form(product) for product in _PRODUCTS}
_OF_LIBRARIES = frozenset({"aten::_grouped_mm", "transformers::grouped_mm_fallback"})
"""Operators (rows, weight, ends), by their qualified names."""


def grouped_form(function: Any) -> Callable[..., Any] | None:
    """The form of a grouped product; None for any other function."""
    if getattr(function, "_qualified_op_name", None) in _OF_LIBRARIES:
        return _form(function)
    return _FORMS.get(function)


# -- results -----------------------------------------------------------------------------------


@torch.library.register_fake("autopar::expert_mm", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _mm_fake(
    rows: Tensor, weight: Tensor, experts: Tensor, first: int = 0, total: int = 0
) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.register_fake("autopar::expert_outer", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _outer_fake(
    rows: Tensor, gradients: Tensor, experts: Tensor, count: int, first: int = 0, total: int = 0
) -> Tensor:
    return rows.new_empty(count, rows.shape[1], gradients.shape[1])


# -- autograd ----------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, experts, *ctx.part = inputs
    ctx.save_for_backward(rows, weight, experts)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    rows, weight, experts = ctx.saved_tensors
    of_rows, of_weight, *_ = ctx.needs_input_grad
    return (
        expert_mm(gradient, weight.transpose(1, 2), experts, *ctx.part) if of_rows else None,
        expert_outer(rows, gradient, experts, weight.shape[0], *ctx.part) if of_weight else None,
        *(None for _ in ctx.needs_input_grad[2:]),
    )


torch.library.register_autograd("autopar::expert_mm", _backward, setup_context=_keep, lib=_LIBRARY)


# -- work --------------------------------------------------------------------------------------


@register_flop_formula(torch.ops.autopar.expert_mm)
def _mm_flops(
    rows: Any, weight: Any, experts: Any, first: int = 0, total: int = 0, **options: Any
) -> int:
    count, width, columns = weight
    return 2 * rows[0] * width * columns * count // max(total, count)


@register_flop_formula(torch.ops.autopar.expert_outer)
def _outer_flops(
    rows: Any,
    gradients: Any,
    experts: Any,
    count: int,
    first: int = 0,
    total: int = 0,
    **options: Any,
) -> int:
    return 2 * rows[0] * rows[1] * gradients[1] * count // max(total, count)


# -- implementations ---------------------------------------------------------------------------


@torch.library.impl(_LIBRARY, "expert_mm", "CompositeExplicitAutograd")
def _run_mm(
    rows: Tensor, weight: Tensor, experts: Tensor, first: int = 0, total: int = 0
) -> Tensor:
    count = weight.shape[0]
    out = rows.new_zeros(rows.shape[0], weight.shape[2])
    if _is_fused(rows):
        order, ends, known = _sorted(experts, first, count)
        products = GROUPED_MM(rows[order], weight, ends)
        out[order] = products.masked_fill_(known.logical_not()[:, None], 0)  # rows behind the ends
        return out
    for expert, places in _members(experts, first, count):
        out[places] = rows[places] @ weight[expert]
    return out


@torch.library.impl(_LIBRARY, "expert_outer", "CompositeExplicitAutograd")
def _run_outer(
    rows: Tensor, gradients: Tensor, experts: Tensor, count: int, first: int = 0, total: int = 0
) -> Tensor:
    if _is_fused(rows):
        order, ends, _ = _sorted(experts, first, count)
        return GROUPED_MM(rows[order].t(), gradients[order], ends)
    out = rows.new_zeros(count, rows.shape[1], gradients.shape[1])
    for expert, places in _members(experts, first, count):
        out[expert] = rows[places].t() @ gradients[places]
    return out


def _is_fused(rows: Tensor) -> bool:
    """Whether torch has a kernel for groups of rows: on GPUs, in bfloat16, if there are rows."""
    is_bf16 = rows.device.type == "cuda" and rows.dtype == torch.bfloat16
    return len(rows) > 0 and is_bf16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)


def _sorted(experts: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order of rows by expert, ends of the experts, and whether each row in order has one here."""
    local = experts - first
    local = torch.where((local >= 0) & (local < count), local, count)
    ordered, order = local.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(count, device=local.device), right=True)
    return order, ends.to(torch.int32), ordered < count


def _members(experts: Tensor, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
    """The rows of each expert that has any, by its index among `count` from `first` on."""
    order, ends, _ = _sorted(experts, first, count)
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            yield expert, order[begin:end]
        begin = end
