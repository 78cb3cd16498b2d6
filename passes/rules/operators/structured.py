"""Rules for operators with a shape of their own: norms, losses, convolution, pooling."""

from __future__ import annotations

from typing import Any

import torch

from autopar.passes.rules.loops import DimAccess, Loop, Operator, Reduced
from autopar.passes.rules.operators.generic import same_dims

aten = torch.ops.aten

# -- norms -------------------------------------------------------------------------------------


def layer_norm(operator: Operator) -> list[Loop]:
    """(input, normalized_shape, weight, bias): the dims that are not normalised."""
    source = operator.operands[0]
    rest = (None,) * (len(operator.operands) - 1)
    free = source.dim() - len(operator.args[1])
    return [
        Loop(source.shape[d], (DimAccess(d), *rest), tuple(DimAccess(d) for _ in operator.results))
        for d in range(free)
    ]


def layer_norm_backward(operator: Operator) -> list[Loop]:
    """(gradient, input, normalized_shape, mean, rstd, weight, bias, mask)."""
    source = operator.operands[0]
    free = source.dim() - len(operator.args[2])
    weights = (None,) * (len(operator.operands) - 4)
    return [
        Loop(source.shape[d], (DimAccess(d),) * 4 + weights, (DimAccess(d), "sum", "sum"))
        for d in range(free)
    ]


def group_norm(operator: Operator) -> list[Loop]:
    """(input, weight, bias, N, C, HxW, groups, eps): rows."""
    rest = (None,) * (len(operator.operands) - 1)
    return [Loop(operator.operands[0].shape[0], (DimAccess(0), *rest), (DimAccess(0),) * 3)]


def group_norm_backward(operator: Operator) -> list[Loop]:
    """(gradient, input, mean, rstd, weight, N, C, HxW, groups, mask): rows."""
    weights = (None,) * (len(operator.operands) - 4)
    return [
        Loop(
            operator.operands[0].shape[0],
            (DimAccess(0),) * 4 + weights,
            (DimAccess(0), "sum", "sum"),
        )
    ]


def rms_norm_backward(operator: Operator) -> list[Loop]:
    """(gradient, input, normalized_shape, rstd, weight, mask): the dims that are not normalised."""
    source = operator.operands[0]
    free = source.dim() - len(operator.args[2])
    weights = (None,) * (len(operator.operands) - 3)
    return [
        Loop(source.shape[d], (DimAccess(d),) * 3 + weights, (DimAccess(d), "sum"))
        for d in range(free)
    ]


def batch_norm(operator: Operator) -> list[Loop]:
    """(input, weight, bias, ...): channels; where statistics are given, rows and the other dims."""
    functional = operator.target is aten._native_batch_norm_legit_functional.default
    trains = operator.argument(5, "training") if functional else operator.argument(3, "training")
    if operator.target is aten._native_batch_norm_legit_no_training.default:
        trains = False
    source = operator.operands[0]
    loops = _channels(operator)
    if not trains:
        rest = (None,) * (len(operator.operands) - 1)
        none = (None,) * (len(operator.results) - 1)
        dims = [dim for dim in range(source.dim()) if dim != 1]
        loops += [Loop(source.shape[d], (DimAccess(d), *rest), (DimAccess(d), *none)) for d in dims]
    return loops


def batch_norm_backward(operator: Operator) -> list[Loop]:
    """(gradient, input, weight, ..., training, eps, mask): as the forward."""
    source = operator.operands[0]
    loops = _channels(operator)
    if not operator.args[7]:
        rest = (None,) * (len(operator.operands) - 2)
        dims = [dim for dim in range(source.dim()) if dim != 1]
        loops += [
            Loop(source.shape[d], (DimAccess(d), DimAccess(d), *rest), (DimAccess(d), "sum", "sum"))
            for d in dims
        ]
    return loops


def weight_norm(operator: Operator) -> list[Loop]:
    """(v, g, dim), and (gradient, v, g, norms, dim): the dim that is normalised by itself."""
    place = len(operator.operands)
    dim = int(operator.argument(place, "dim", 0))
    at = DimAccess(dim)
    size = operator.operands[0].shape[dim]
    return [Loop(size, (at,) * place, (at,) * len(operator.results))]


def _channels(operator: Operator) -> list[Loop]:
    """Dim 1 of what has more than one dim, dim 0 of what has one."""
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


def targets(source: torch.Tensor) -> list[tuple[int, int]]:
    """The dims of log-probabilities [rows, classes, ...] that targets have too, and where those do.

    None if there are no rows.
    """
    return [(dim, max(dim - 1, 0)) for dim in range(source.dim()) if dim != 1 < source.dim()]


def nll_loss(operator: Operator) -> list[Loop]:
    """(log-probabilities [rows, classes, ...], targets, weights, reduction, ignored): all of a sum
    but classes."""
    source = operator.operands[0]
    if operator.args[3] == 1:
        return []  # a mean divides by how many targets count: that is for a lowering of its own
    weights = (None,) * (len(operator.operands) - 2)

    def kept(place: int) -> DimAccess | Reduced:
        return DimAccess(place) if operator.args[3] == 0 else "sum"

    return [
        Loop(source.shape[dim], (DimAccess(dim), DimAccess(place), *weights), (kept(place), "sum"))
        for dim, place in targets(source)
    ]


def nll_loss_backward(operator: Operator) -> list[Loop]:
    """(gradient, log-probabilities, targets, weights, reduction, ignored, total weight): all but
    classes."""
    gradient, source = operator.operands[:2]
    rest = (None,) * (len(operator.operands) - 3)
    return [
        Loop(
            source.shape[dim],
            (DimAccess(place) if gradient.dim() else None, DimAccess(dim), DimAccess(place), *rest),
            (DimAccess(dim),),
        )
        for dim, place in targets(source)
    ]


# -- convolution and pooling -------------------------------------------------------------------


def convolution(operator: Operator) -> list[Loop]:
    """(input, weight, bias, stride, padding, dilation, transposed, ...): rows, channels out and in.

    Channels in are summed, and the bias once. With groups, these are what may be split.
    """
    source, weight, *bias = operator.operands
    transposed, groups = operator.args[6], operator.args[8]
    loops = [Loop(source.shape[0], (DimAccess(0), None, *(None for _ in bias)), (DimAccess(0),))]
    if groups > 1:
        loops.append(
            Loop(
                groups, (DimAccess(1), DimAccess(0), *(DimAccess(0) for _ in bias)), (DimAccess(1),)
            )
        )
    else:
        into, out = (0, 1) if transposed else (1, 0)
        loops.append(
            Loop(
                weight.shape[out],
                (None, DimAccess(out), *(DimAccess(0) for _ in bias)),
                (DimAccess(1),),
            )
        )
        part: Reduced = "sum"
        summed = (part,) * len(bias)
        loops.append(Loop(source.shape[1], (DimAccess(1), DimAccess(into), *summed), (part,)))
    return loops


def convolution_backward(operator: Operator) -> list[Loop]:
    """(gradient, input, weight, bias sizes, ..., mask): rows; channels out and in, or groups."""
    _, source, weight = operator.operands
    transposed, groups = operator.args[7], operator.args[9]
    loops = [
        Loop(source.shape[0], (DimAccess(0), DimAccess(0), None), (DimAccess(0), "sum", "sum"))
    ]
    if groups > 1:
        loops.append(
            Loop(
                groups,
                (DimAccess(1), DimAccess(1), DimAccess(0)),
                (DimAccess(1), DimAccess(0), DimAccess(0)),
            )
        )
    else:
        into, out = (0, 1) if transposed else (1, 0)
        by_out: tuple[Any, ...] = ("sum", DimAccess(out), DimAccess(0))
        loops.append(Loop(weight.shape[out], (DimAccess(1), None, DimAccess(out)), by_out))
        if operator.results[2] is None:
            loops.append(
                Loop(
                    source.shape[1],
                    (None, DimAccess(1), DimAccess(into)),
                    (DimAccess(1), DimAccess(into), "sum"),
                )
            )
    return loops


def pooling(operator: Operator) -> list[Loop]:
    """Rows and channels."""
    return same_dims(operator, (0, 1)) if operator.operands[0].dim() == 4 else []
