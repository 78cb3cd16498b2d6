"""Rules and custom lowerings of losses that compare two tensors element by element.

Without a reduction they are pointwise, and sums over shards are partial sums. A mean divides by the
number of elements of the whole, so its lowering sums a shard and divides by that number.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar._torch import OpOverload
from autopar.passes.rules.loops import DimAccess, Loop, Operator, Reduced
from autopar.passes.rules.lowerings.context import LoweringContext, aten

NONE, MEAN, SUM = 0, 1, 2

LOSSES: tuple[OpOverload, ...] = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default,
)

BACKWARDS: tuple[OpOverload, ...] = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
    aten.soft_margin_loss_backward.default,
)


def loss(operator: Operator) -> list[Loop]:
    """(input, target, ...): every dim, of the elements or of a sum."""
    return _dims(operator, (NONE, SUM), first=0)


def loss_backward(operator: Operator) -> list[Loop]:
    """(gradient, input, target, ...): every dim, unless the reduction is a mean."""
    return _dims(operator, (NONE, SUM), first=1)


def _mean(operator: Operator) -> list[Loop]:
    return _dims(operator, (MEAN,), first=0)


def _mean_backward(operator: Operator) -> list[Loop]:
    return _dims(operator, (MEAN,), first=1)


def _dims(operator: Operator, reductions: tuple[int, ...], first: int) -> list[Loop]:
    """The dims of the input, which is operand `first`; the others are broadcast to it."""
    how = _reduction(operator)
    if how not in reductions:
        return []
    shape = operator.operands[first].shape
    scalar: Reduced | None = "sum" if first == 0 and how != NONE else None

    def place(tensor: Any, dim: int) -> DimAccess | None:
        own = dim - len(shape) + tensor.dim()
        return DimAccess(own) if own >= 0 and tensor.shape[own] == shape[dim] != 1 else None

    if operator.operands[first + 1].shape != shape:
        return []  # input or target is broadcast
    return [
        Loop.over(
            size,
            tuple(place(tensor, dim) for tensor in operator.operands),
            (scalar or dim,),
        )
        for dim, size in enumerate(shape)
    ]


def _place(operator: Operator) -> int:
    """Index of the argument `reduction`."""
    names = [argument.name for argument in operator.target._schema.arguments]
    return names.index("reduction")


def _reduction(operator: Operator) -> Any:
    return operator.argument(_place(operator), "reduction", MEAN)


def _summed(ctx: LoweringContext) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with a sum instead of the mean."""
    args, kwargs = list(ctx.arguments.args), dict(ctx.arguments.kwargs)
    place = _place(ctx.operator)
    if place < len(args):
        args[place] = SUM
    else:
        kwargs["reduction"] = SUM
    return args, kwargs


def _lower(ctx: LoweringContext) -> list[fx.Node]:
    args, kwargs = _summed(ctx)
    total = ctx.op(ctx.operator.target, *args, **kwargs)
    return [ctx.op(aten.div.Scalar, total, ctx.operator.operands[0].numel())]


def _lower_backward(ctx: LoweringContext) -> list[fx.Node]:
    args, kwargs = _summed(ctx)
    args[0] = ctx.op(aten.div.Scalar, args[0], ctx.operator.operands[1].numel())
    return [ctx.op(ctx.operator.target, *args, **kwargs)]


LOWERINGS: dict[str, Any] = {
    "mean_loss": (LOSSES, _mean, _lower),
    "mean_loss_backward": (BACKWARDS, _mean_backward, _lower_backward),
}
"""Targets, loops and lowering, by name."""
