"""Rules for operators that change only the shape or order of elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from autopar.passes.rules.loops import DimAccess, Loop, Operator


def view(operator: Operator) -> list[Loop]:
    """The common factors of both shapes.

    A view of [B, S, 3 H D] as [B, S, 3, H, D] has the loops B, S, 3, H and D. The loop H accesses
    the last dim of the source inside each of 3 pieces, hence interleaved shards.
    """
    source, result = operator.operands[0].shape, operator.results[0].shape
    return [
        Loop(size, (before,), (after,))
        for size, before, after in factors(tuple(source), tuple(result))
    ]


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
    order = [dim % count for dim in operator.args[1]]
    return _moved(operator, order)


def transpose(operator: Operator) -> list[Loop]:
    """Every dim; two are exchanged."""
    count = operator.operands[0].dim()
    order = list(range(count))
    first, second = operator.args[1] % count, operator.args[2] % count
    order[first], order[second] = order[second], order[first]
    return _moved(operator, order)


def t(operator: Operator) -> list[Loop]:
    """Both dims of a matrix."""
    return _moved(operator, list(range(operator.operands[0].dim()))[::-1])


def _moved(operator: Operator, order: Sequence[int]) -> list[Loop]:
    shape = operator.operands[0].shape
    return [Loop(shape[old], (DimAccess(old),), (DimAccess(new),)) for new, old in enumerate(order)]


def unsqueeze(operator: Operator) -> list[Loop]:
    """Every dim; dims after the new one shift by one."""
    shape = operator.operands[0].shape
    new = operator.args[1] % (len(shape) + 1)
    return [
        Loop(size, (DimAccess(d),), (DimAccess(d + (d >= new)),)) for d, size in enumerate(shape)
    ]


def squeeze(operator: Operator) -> list[Loop]:
    """Every dim that is not dropped."""
    shape = operator.operands[0].shape
    given = operator.argument(1, "dim")
    chosen = range(len(shape)) if given is None else [given] if isinstance(given, int) else given
    dropped = {d % len(shape) for d in chosen if shape[d] == 1} if shape else set()
    kept = [d for d in range(len(shape)) if d not in dropped]
    return [Loop(shape[old], (DimAccess(old),), (DimAccess(new),)) for new, old in enumerate(kept)]


def expand(operator: Operator) -> list[Loop]:
    """Every dim of the result; the source is whole along expanded dims."""
    source, result = operator.operands[0].shape, operator.results[0].shape
    lead = len(result) - len(source)
    return [
        Loop(
            size,
            (DimAccess(dim - lead) if dim >= lead and source[dim - lead] == size else None,),
            (DimAccess(dim),),
        )
        for dim, size in enumerate(result)
    ]


def repeat(operator: Operator) -> list[Loop]:
    """(source, repeats): every dim of the source, interleaved in the result if repeated."""
    source, repeats = operator.operands[0], operator.args[1]
    lead = len(repeats) - source.dim()
    return [
        Loop(size, (DimAccess(dim),), (DimAccess(dim + lead, repeats[dim + lead]),))
        for dim, size in enumerate(source.shape)
    ]


def select(operator: Operator) -> list[Loop]:
    """Every dim but the selected one."""
    shape = operator.operands[0].shape
    gone = operator.args[1] % len(shape)
    return [
        Loop(size, (DimAccess(d),), (DimAccess(d - (d > gone)),))
        for d, size in enumerate(shape)
        if d != gone
    ]


def select_backward(operator: Operator) -> list[Loop]:
    """Every dim but the selected one."""
    shape = operator.results[0].shape
    new = operator.args[2] % len(shape)
    return [
        Loop(size, (DimAccess(d - (d > new)),), (DimAccess(d),))
        for d, size in enumerate(shape)
        if d != new
    ]


def select_scatter(operator: Operator) -> list[Loop]:
    """(source, element, dim, index): every dim but the selected one."""
    shape = operator.operands[0].shape
    gone = operator.args[2] % len(shape)
    return [
        Loop(size, (DimAccess(d), DimAccess(d - (d > gone))), (DimAccess(d),))
        for d, size in enumerate(shape)
        if d != gone
    ]


def stack(operator: Operator) -> list[Loop]:
    """Every dim of the operands; dims after the new one shift by one."""
    shape = operator.operands[0].shape
    new = operator.argument(1, "dim", 0) % (len(shape) + 1)
    return [
        Loop(size, tuple(DimAccess(d) for _ in operator.operands), (DimAccess(d + (d >= new)),))
        for d, size in enumerate(shape)
    ]


def unbind(operator: Operator) -> list[Loop]:
    """Every dim but the unbound one."""
    shape = operator.operands[0].shape
    gone = operator.argument(1, "dim", 0) % len(shape)
    return [
        Loop(size, (DimAccess(d),), tuple(DimAccess(d - (d > gone)) for _ in operator.results))
        for d, size in enumerate(shape)
        if d != gone
    ]
