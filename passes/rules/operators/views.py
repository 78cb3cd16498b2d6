"""Rules for operators that change only the shape or order of elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch

from autopar.passes.rules.loops import DimAccess, Loop, Operator


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
    cuts_before, cuts_after = _prefixes(source), _prefixes(result)
    edges = sorted({*cuts_before, *cuts_after})
    chain = [1]
    for edge in edges[1:]:
        if edge % chain[-1] == 0:
            chain.append(edge)
    for low, high in pairwise(chain):
        before, after = _place(cuts_before, low, high), _place(cuts_after, low, high)
        if before is not None and after is not None:
            yield high // low, before, after


def _prefixes(shape: Sequence[int]) -> list[int]:
    """Products of the leading sizes: 1, d0, d0 d1, ..."""
    found = [1]
    for size in shape:
        found.append(found[-1] * size)
    return found


def _place(prefixes: Sequence[int], low: int, high: int) -> DimAccess | None:
    """The access to the factor from `low` to `high`; None if no dim contains it evenly."""
    for dim in range(len(prefixes) - 1):
        start, end = prefixes[dim], prefixes[dim + 1]
        if start <= low and high <= end and start < end:
            even = low % start == 0 and end % high == 0
            return DimAccess(dim, low // start) if even else None
    return None


def permute(operator: Operator) -> list[Loop]:
    """Every dim."""
    count = operator.operands[0].dim()
    return _moved(operator, ((dim % count, new) for new, dim in enumerate(operator.args[1])))


def transpose(operator: Operator) -> list[Loop]:
    """Every dim; two are exchanged."""
    order = list(range(operator.operands[0].dim()))
    first, second = operator.args[1], operator.args[2]
    order[first], order[second] = order[second], order[first]
    return _moved(operator, ((dim, new) for new, dim in enumerate(order)))


def t(operator: Operator) -> list[Loop]:
    """Both dims of a matrix."""
    count = operator.operands[0].dim()
    return _moved(operator, ((dim, count - 1 - dim) for dim in range(count)))


def squeeze(operator: Operator) -> list[Loop]:
    """Every dim that is not dropped."""
    shape = operator.operands[0].shape
    dims = operator.argument(1, "dim")
    chosen = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    dropped = {dim % len(shape) for dim in chosen if shape[dim] == 1} if shape else set()
    kept = [dim for dim in range(len(shape)) if dim not in dropped]
    return _moved(operator, ((dim, new) for new, dim in enumerate(kept)))


def expand(operator: Operator) -> list[Loop]:
    """Every dim of the result; the source is whole along expanded dims."""
    source, result = operator.operands[0].shape, operator.results[0].shape
    lead = len(result) - len(source)
    return [
        Loop.over(
            size,
            (dim - lead if dim >= lead and source[dim - lead] == size else None,),
            (dim,),
        )
        for dim, size in enumerate(result)
    ]


def repeat(operator: Operator) -> list[Loop]:
    """(source, repeats): every dim of the source, interleaved in the result if repeated."""
    source, repeats = operator.operands[0], operator.args[1]
    lead = len(repeats) - source.dim()
    return [
        Loop.over(size, (dim,), (DimAccess(dim + lead, repeats[dim + lead]),))
        for dim, size in enumerate(source.shape)
    ]


def unsqueeze(operator: Operator) -> list[Loop]:
    """Every dim; dims after the new one shift by one."""
    return _moved(operator, _without(operator.args[1], operator.results[0]), inserts=True)


def stack(operator: Operator) -> list[Loop]:
    """Every dim of the operands; dims after the new one shift by one."""
    new = operator.argument(1, "dim", 0)
    return _moved(operator, _without(new, operator.results[0]), inserts=True)


def select(operator: Operator) -> list[Loop]:
    """Every dim but the selected one."""
    return _moved(operator, _without(operator.args[1], operator.operands[0]))


def unbind(operator: Operator) -> list[Loop]:
    """Every dim but the unbound one."""
    return _moved(operator, _without(operator.argument(1, "dim", 0), operator.operands[0]))


def select_backward(operator: Operator) -> list[Loop]:
    """Every dim but the selected one."""
    return _moved(operator, _without(operator.args[2], operator.results[0]), inserts=True)


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


def _moved(
    operator: Operator, dims: Iterable[tuple[int, int]], inserts: bool = False
) -> list[Loop]:
    """Loops over dims of the operands that have other indices in the results.

    Args:
        operator: the operator, whose operands have one shape, and whose results have one shape.
        dims: pairs of the dim before and after.
        inserts: whether pairs are given the other way round.
    """
    loops = []
    for before, after in dims:
        before, after = (after, before) if inserts else (before, after)
        operands = (DimAccess(before),) * len(operator.operands)
        results = (DimAccess(after),) * len(operator.results)
        loops.append(Loop(operator.operands[0].shape[before], operands, results))
    return loops
