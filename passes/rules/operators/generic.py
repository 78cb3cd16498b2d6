"""Rules for families of operators: pointwise, reductions, contractions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.passes.rules.loops import (
    Access,
    DimAccess,
    Loop,
    Operator,
    Reduced,
    Rule,
    broadcast_access,
)


def pointwise(operator: Operator) -> list[Loop]:
    """Each dim of the result; operands are broadcast."""
    shape, results = operator.results[0].shape, len(operator.results)
    return [
        Loop.over(size, [broadcast_access(t, shape, d) for t in operator.operands], [d] * results)
        for d, size in enumerate(shape)
    ]


def created(operator: Operator) -> list[Loop]:
    """Each dim of a result that is created from a shape and a number.

    An operand gives only its dtype and device. It may be sharded like the result in a dim of the
    same size, or in any dim if the result is whole.
    """
    shape, like = operator.results[0].shape, operator.operands
    # Rows of a key are made from those of its parts, which are narrower: other dims may differ.
    loops = [
        Loop.over(size, [dim if size in t.shape[dim : dim + 1] else None for t in like], (dim,))
        for dim, size in enumerate(shape)
    ]
    for tensor in like:
        loops += [Loop(size, (DimAccess(dim),), (None,)) for dim, size in enumerate(tensor.shape)]
    return loops


def along(operator: Operator) -> list[Loop]:
    """All dims but the one that the argument `dim` names."""
    return every_dim_but(operator, int(operator.argument("dim")))


def own_dim(interleavable: bool = True) -> Rule:
    """The dim that the argument `dim` names, in all operands and results."""

    def rule(operator: Operator) -> list[Loop]:
        count, dim = operator.operands[0].dim(), operator.argument("dim")
        loops = same_dims(operator, [dim % count] if count else [])
        return [replace(loop, interleavable=interleavable) for loop in loops]

    return rule


def same_dims(operator: Operator, dims: Sequence[int]) -> list[Loop]:
    """Loops over dims that all operands and results share."""
    return [moved(operator, dim, dim) for dim in dims]


def moved(operator: Operator, before: int, after: int) -> Loop:
    """The loop over dim `before` of all operands, which is dim `after` of all results."""
    operands, results = len(operator.operands), len(operator.results)
    return Loop.over(operator.operands[0].shape[before], (before,) * operands, (after,) * results)


def leading(
    operator: Operator,
    dims: Iterable[int],
    count: int,
    results: Sequence[Reduced | None] | None = None,
) -> list[Loop]:
    """Loops over dims of the first `count` operands and of the results; other operands are whole.

    Results after the first have the reductions `results`, or the dim if it is None.
    """
    shape, whole = operator.operands[0].shape, (None,) * (len(operator.operands) - count)
    loops = []
    for dim in dims:
        others = (dim,) * (len(operator.results) - 1) if results is None else results
        loops.append(Loop.over(shape[dim], (dim,) * count + whole, (dim, *others)))
    return loops


def reduction(how: Reduced | None) -> Rule:
    """Remaining dims, and reduced dims that leave partial sums or maxima.

    Partial results cannot be combined if `how` is None (a variance).
    """

    def rule(operator: Operator) -> list[Loop]:
        source, over = operator.operands[0], reduced_dims(operator)
        kept = bool(operator.argument("keepdim"))
        loops = []
        for dim, size in enumerate(source.shape):
            if dim not in over:
                at = DimAccess(dim if kept else dim - sum(d < dim for d in over))
                loops.append(Loop.over(size, (dim,), (at,) * len(operator.results)))
            elif how is not None:
                loops.append(Loop.over(size, (dim,), (how,) * len(operator.results)))
        return loops

    return rule


def reduced_dims(operator: Operator) -> list[int]:
    """The dims that the argument `dim` names; all dims if it names none."""
    count = operator.operands[0].dim()
    given = operator.argument("dim")
    dims = [given] if isinstance(given, int) else list(given or range(count))
    return sorted({dim % count for dim in dims}) if count else []


def over_dims(result: Reduced | None, interleavable: bool = True) -> Rule:
    """The dims that a reduction reduces; every result is whole or a partial sum."""

    def rule(operator: Operator) -> list[Loop]:
        shape, results = operator.operands[0].shape, (result,) * len(operator.results)
        return [
            Loop.over(shape[dim], (dim,), results, interleavable=interleavable)
            for dim in reduced_dims(operator)
        ]

    return rule


def histogram(operator: Operator) -> list[Loop]:
    """(source, bins, min, max): every dim, if the range does not depend on the source."""
    given = operator.argument("min") != operator.argument("max")
    shape = operator.operands[0].shape if given else ()
    return [Loop.over(size, (dim,), ("sum",)) for dim, size in enumerate(shape)]


def contraction(equation: str, added: bool = False) -> Rule:
    """An einsum: one loop for each letter; letters that the result lacks are summed.

    Args:
        equation: operands and result, as in "mk,kn->mn"; an operand with fewer dims than letters
            is broadcast at the front (the bias of `addmm`).
        added: whether the first operand is added to the product of the others.
    """
    left, result = equation.split("->")

    def rule(operator: Operator) -> list[Loop]:
        words = [
            word[len(word) - tensor.dim() :]
            for word, tensor in zip(left.split(","), operator.operands, strict=True)
        ]
        sizes: dict[str, int] = {}
        for word, tensor in zip(words, operator.operands, strict=True):
            for letter, size in zip(word, tensor.shape, strict=True):
                sizes[letter] = max(size, sizes.get(letter, 1))
        loops = []
        for letter, size in sizes.items():
            places: list[Access] = [
                DimAccess(dim) if (dim := word.find(letter)) >= 0 and t.shape[dim] == size else None
                for word, t in zip(words, operator.operands, strict=True)
            ]
            at = _place_in(result, letter)
            if added and at == "sum":
                places[0] = "sum"
            loops.append(Loop(size, tuple(places), (at,)))
        return loops

    return rule


def _place_in(result: str, letter: str) -> DimAccess | Reduced:
    return DimAccess(result.index(letter)) if letter in result else "sum"


def grouped_mm(operator: Operator) -> list[Loop]:
    """(a, b, ends): products of groups of rows R with one matrix each; rows stay whole.

    Kernels require strides in multiples of 16 bytes, so these are the units of a loop.
    """
    a, b = operator.operands[:2]
    if len(operator.operands) != (2 if a.dim() == b.dim() == 3 else 3):
        return []
    letters = {(2, 3): "Rk,gkn,Rn", (2, 2): "mR,Rn,Gmn", (3, 2): "gmk,kR,mR"}
    first, second, result = letters.get((a.dim(), b.dim()), "gmk,gkn,gmn").split(",")
    rest = (None,) * (len(operator.operands) - 2)
    loops = []
    for letter in "mnk" if rest else "gmnk":
        places = [DimAccess(w.index(letter)) if letter in w else None for w in (first, second)]
        if any(places):
            size = next(t.shape[p.dim] for t, p in zip((a, b), places, strict=True) if p)
            unit = 1 if letter == "g" else max(1, 16 // a.dtype.itemsize)
            loops.append(Loop(size // unit, (*places, *rest), (_place_in(result, letter),)))
    return loops


def scaled_mm(operator: Operator) -> list[Loop]:
    """(a, b, scale of a, scale of b, bias): a product of float8; scales of rows or of all of a.

    Kernels require multiples of 16 elements of k and n, so these are the units of a loop.
    """
    a, b, a_scale, b_scale, *bias = operator.operands
    by_row = a_scale.shape == (a.shape[0], 1) and b_scale.shape == (1, b.shape[1])
    by_all = a_scale.numel() == b_scale.numel() == 1
    if not (by_row or by_all) or len(bias) > 1 or any(t.dim() != 1 for t in bias):
        return []
    product = contraction("mk,kn,mk,kn" + ",n" * len(bias) + "->mn")
    loops = []
    for letter, loop in zip("mkn", product(operator), strict=True):
        unit, operands = (1 if letter == "m" else 16), loop.operands
        if letter == "k":
            partial: tuple[Reduced, ...] = tuple("sum" for _ in bias)
            operands = (*operands[:4], *partial)
        if loop.size % unit == 0:
            loops.append(replace(loop, size=loop.size // unit, operands=operands))
    return loops


def every_dim_but(operator: Operator, dims: int | Sequence[int]) -> list[Loop]:
    """All dims but some, the same in all operands and results."""
    count = operator.operands[0].dim()
    whole = {dim % count for dim in ([dims] if isinstance(dims, int) else dims)}
    return same_dims(operator, [dim for dim in range(count) if dim not in whole])


def roll(operator: Operator) -> list[Loop]:
    """(source, shifts, dims): every dim that is not rolled; without `dims` all are rolled."""
    return every_dim_but(operator, operator.argument("dims") or range(operator.operands[0].dim()))


def pad(operator: Operator) -> list[Loop]:
    """(source, pads, value): every dim without padding; pads start at the last dim."""
    pads, count = operator.args[1], operator.operands[0].dim()
    return every_dim_but(operator, [count - 1 - i // 2 for i, pad in enumerate(pads) if pad])
