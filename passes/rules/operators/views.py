"""Rules for operators that change only the shape or order of elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import mul

import torch

from autopar.passes.rules.loops import DimAccess, Loop, Operator
from autopar.passes.rules.operators.generic import moved


def view(operator: Operator) -> list[Loop]:
    """The common factors of both shapes.

    A view of [B, S, 3 H D] as [B, S, 3, H, D] has the loops B, S, 3, H and D. The loop H accesses
    the last dim of the source inside each of 3 pieces, hence interleaved shards.
    """
    shapes = factors(operator.operands[0].shape, operator.results[0].shape)
    return [Loop(size, (before,), (after,)) for size, before, after in shapes]


def factors(
    source: Sequence[int], result: Sequence[int]
) -> Iterator[tuple[int, DimAccess, DimAccess]]:
    """The common factors of two shapes of equally many elements, with their access to both.

    Factors that straddle two dims of a shape are left out.
    """
    if 0 in source:
        return
    cuts_before, cuts_after = (list(accumulate(s, mul, initial=1)) for s in (source, result))
    edges = sorted({*cuts_before, *cuts_after})
    chain = [1]
    for edge in edges[1:]:
        if edge % chain[-1] == 0:
            chain.append(edge)
    for low, high in pairwise(chain):
        before, after = _place(cuts_before, low, high), _place(cuts_after, low, high)
        if before is not None and after is not None:
            yield high // low, before, after


def _place(prefixes: Sequence[int], low: int, high: int) -> DimAccess | None:
    """The access to the factor from `low` to `high`; None if no dim contains it evenly."""
    for dim, (start, end) in enumerate(pairwise(prefixes)):
        if start <= low and high <= end and start < end:
            even = low % start == 0 and end % high == 0
            return DimAccess(dim, low // start) if even else None
    return None


def permute(operator: Operator) -> list[Loop]:
    """Every dim."""
    count = operator.operands[0].dim()
    return _moved(operator, [dim % count for dim in operator.args[1]])


def transpose(operator: Operator) -> list[Loop]:
    """Every dim; two are exchanged."""
    order = list(range(operator.operands[0].dim()))
    first, second = operator.args[1], operator.args[2]
    order[first], order[second] = order[second], order[first]
    return _moved(operator, order)


def t(operator: Operator) -> list[Loop]:
    """Both dims of a matrix."""
    return _moved(operator, range(operator.operands[0].dim())[::-1])[::-1]


def squeeze(operator: Operator) -> list[Loop]:
    """Every dim that is not dropped."""
    shape = operator.operands[0].shape
    dims = operator.argument("dim")
    chosen = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    dropped = {dim % len(shape) for dim in chosen if shape[dim] == 1} if shape else set()
    return _moved(operator, [dim for dim in range(len(shape)) if dim not in dropped])


def expand(operator: Operator) -> list[Loop]:
    """Every dim of the result; the source is whole along expanded dims."""
    source, result = operator.operands[0].shape, operator.results[0].shape
    lead = len(result) - len(source)
    return [
        Loop.over(size, (d - lead if d >= lead and source[d - lead] == size else None,), (d,))
        for d, size in enumerate(result)
    ]


def repeat(operator: Operator) -> list[Loop]:
    """(source, repeats): every dim of the source, interleaved in the result if repeated."""
    source, repeats = operator.operands[0], operator.args[1]
    lead = len(repeats) - source.dim()
    return [
        Loop.over(size, (dim,), (DimAccess(dim + lead, repeats[dim + lead]),))
        for dim, size in enumerate(source.shape)
    ]


def removes(operator: Operator) -> list[Loop]:
    """Every dim of the operands but the argument `dim`, which results lack."""
    pairs = _without(operator.argument("dim"), operator.operands[0])
    return [moved(operator, dim, after) for dim, after in pairs]


def inserts(operator: Operator) -> list[Loop]:
    """Every dim of the operands; dims after the argument `dim` shift by one."""
    pairs = _without(operator.argument("dim"), operator.results[0])
    return [moved(operator, dim, after) for after, dim in pairs]


def select_scatter(operator: Operator) -> list[Loop]:
    """(source, element, dim, index): every dim but the selected one."""
    source = operator.operands[0]
    return [
        Loop.over(source.shape[dim], (dim, of_element), (dim,))
        for dim, of_element in _without(operator.args[2], source)
    ]


def _without(gone: int, tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The dims of a tensor but one, each with its index when that one is gone."""
    gone %= tensor.dim()
    return [(dim, dim - (dim > gone)) for dim in range(tensor.dim()) if dim != gone]


def _moved(operator: Operator, order: Sequence[int]) -> list[Loop]:
    """Loops over each dim of the results, which was dim `order[i]` of all operands."""
    return [moved(operator, dim, new) for new, dim in enumerate(order)]
