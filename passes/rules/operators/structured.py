"""Rules for operators with particular arguments: norms, losses, convolution, pooling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.passes.rules.loops import DimAccess, Loop, Operator, Reduced, Rule
from autopar.passes.rules.operators.generic import leading, same_dims

aten = torch.ops.aten

# -- norms -------------------------------------------------------------------------------------


def norm(count: int, sums: Sequence[Reduced] | None = None) -> Rule:
    """Dims that a norm leaves alone: those before the normalized ones, or rows of a group norm.

    Args:
        count: number of operands that have the dims, the others being weights.
        sums: reductions of the results after the first; None if all have the dims.
    """

    def rule(operator: Operator) -> list[Loop]:
        sizes = operator.argument("normalized_shape")
        dims = 1 if sizes is None else operator.operands[0].dim() - len(sizes)
        return leading(operator, range(dims), count, sums)

    return rule


def batch_norm(operator: Operator) -> list[Loop]:
    """(input, weight, bias, ...): channels; all other dims too if statistics are given."""
    whole = (None,) * (len(operator.results) - 1)
    trains = operator.argument("training")
    return _channels(operator) + ([] if trains else leading(operator, spatial(operator), 1, whole))


def batch_norm_backward(operator: Operator) -> list[Loop]:
    """(gradient, input, weight, ..., training, eps, mask): as the forward."""
    rows = [] if operator.args[7] else leading(operator, spatial(operator), 2, ("sum", "sum"))
    return _channels(operator) + rows


def spatial(operator: Operator) -> list[int]:
    """All dims of the first operand but channels."""
    return [dim for dim in range(operator.operands[0].dim()) if dim != 1]


def weight_norm(operator: Operator) -> list[Loop]:
    """(v, g, dim), and (gradient, v, g, norms, dim): the dim, whose slices have own norms."""
    return same_dims(operator, [int(operator.argument("dim"))])


def _channels(operator: Operator) -> list[Loop]:
    """Channels: dim 1 of tensors with several dims, dim 0 of vectors."""
    channels = operator.operands[0].shape[1]
    results = tuple(None if t is None else _channel(t) for t in operator.results)
    known = all(r or t is None for r, t in zip(results, operator.results, strict=True))
    operands = tuple(_channel(t) for t in operator.operands)
    return [Loop(channels, operands, results)] if known else []


def _channel(tensor: torch.Tensor) -> DimAccess | None:
    if tensor.dim() == 0 or tensor.numel() == 0:
        return None
    return DimAccess(1 if tensor.dim() > 1 else 0)


# -- softmax and cross-entropy -----------------------------------------------------------------


def target_dims(source: torch.Tensor) -> list[tuple[int, int]]:
    """Pairs of dims: of log-probabilities [rows, classes, ...] and of their targets [rows, ...].

    Empty if there are no rows.
    """
    return [(dim, max(dim - 1, 0)) for dim in range(source.dim()) if dim != 1 < source.dim()]


def nll_loss(operator: Operator) -> list[Loop]:
    """(log-probabilities [rows, classes, ...], targets, weights, reduction, ignored).

    All dims but classes, unless the reduction is a mean, which a custom lowering splits.
    """
    source, reduction = operator.operands[0], operator.args[3]
    weights = (None,) * (len(operator.operands) - 2)
    return [
        Loop.over(source.shape[d], (d, place, *weights), ("sum" if reduction else place, "sum"))
        for d, place in target_dims(source)
        if reduction != 1
    ]


def nll_loss_backward(operator: Operator) -> list[Loop]:
    """(gradient, log-probabilities, targets, weights, reduction, ignored, total weight).

    All dims but classes.
    """
    gradient, source = operator.operands[:2]
    rest = (None,) * (len(operator.operands) - 3)
    return [
        Loop.over(source.shape[d], (place if gradient.dim() else None, d, place, *rest), (d,))
        for d, place in target_dims(source)
    ]


def ctc(operator: Operator) -> list[Loop]:
    """Rows: dim 1 of [time, rows, classes], log-probabilities and their gradient; 0 of others."""
    rows = lambda tensor: 1 if tensor.dim() == 3 else 0  # noqa: E731
    (result,) = operator.results
    size = result.shape[rows(result)]
    return [Loop.over(size, map(rows, operator.operands), [rows(result)])]


# -- convolution and pooling -------------------------------------------------------------------


def convolution(operator: Operator) -> list[Loop]:
    """(input, weight, bias, stride, padding, dilation, transposed, ..., groups).

    Rows, output channels, and input channels, which are summed; or rows and groups.
    """
    source, weight, *bias = operator.operands
    transposed, groups = operator.args[6], operator.args[8]
    none, first, second = (None,) * len(bias), DimAccess(0), DimAccess(1)
    of_bias = (first,) * len(bias)
    loops = [Loop(source.shape[0], (first, None, *none), (first,))]
    if groups > 1:
        return [*loops, Loop(groups, (second, first, *of_bias), (second,))]
    into, out = (0, 1) if transposed else (1, 0)
    partial: tuple[Reduced, ...] = tuple("sum" for _ in bias)
    return [
        *loops,
        Loop.over(weight.shape[out], (None, out, *of_bias), (second,)),
        Loop.over(source.shape[1], (second, into, *partial), ("sum",)),
    ]


def convolution_backward(operator: Operator) -> list[Loop]:
    """(gradient, input, weight, bias sizes, ..., mask): rows and channels, or rows and groups."""
    _, source, weight = operator.operands
    transposed, groups = operator.args[7], operator.args[9]
    first, second = DimAccess(0), DimAccess(1)
    loops = [Loop(source.shape[0], (first, first, None), (first, "sum", "sum"))]
    if groups > 1:
        return [*loops, Loop(groups, (second, second, first), (second, first, first))]
    into, out = (DimAccess(0), DimAccess(1)) if transposed else (DimAccess(1), DimAccess(0))
    loops.append(Loop(weight.shape[out.dim], (second, None, out), ("sum", out, first)))
    if operator.results[2] is None:
        loops.append(Loop(source.shape[1], (None, second, into), (second, into, "sum")))
    return loops


def pooling(operator: Operator) -> list[Loop]:
    """Rows and channels."""
    return same_dims(operator, (0, 1)) if operator.operands[0].dim() == 4 else []
