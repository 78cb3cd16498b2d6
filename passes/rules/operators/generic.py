"""Rules for families of operators: pointwise, reductions, contractions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.passes.rules.loops import DimAccess, Loop, Operator, Reduced, Rule


def pointwise(operator: Operator) -> list[Loop]:
    """Each dim of the result; operands are broadcast."""
    shape = operator.results[0].shape

    def place(tensor: torch.Tensor, dim: int) -> DimAccess | None:
        own = dim - len(shape) + tensor.dim()
        return DimAccess(own) if own >= 0 and tensor.shape[own] == shape[dim] != 1 else None

    return [
        Loop.over(
            size,
            tuple(place(t, dim) for t in operator.operands),
            (dim,) * len(operator.results),
        )
        for dim, size in enumerate(shape)
    ]


def created(operator: Operator) -> list[Loop]:
    """Each dim of a result that is created from a shape and a number.

    An operand gives only its dtype and device. It may be sharded like the result, or in any dim if
    the result is whole.
    """
    shape = operator.results[0].shape
    like = operator.operands

    def same(tensor: torch.Tensor, dim: int) -> DimAccess | None:
        return DimAccess(dim) if tensor.shape == shape else None

    loops = [
        Loop.over(size, tuple(same(t, dim) for t in like), (dim,)) for dim, size in enumerate(shape)
    ]
    for tensor in like:
        loops += [Loop(size, (DimAccess(dim),), (None,)) for dim, size in enumerate(tensor.shape)]
    return loops


def along(place: int, default: int = 0) -> Rule:
    """All dims but one, the same in operands and results.

    Args:
        place: index of the argument that names the whole dim.
        default: the whole dim if the argument is left out.
    """

    def rule(operator: Operator) -> list[Loop]:
        return every_dim_but(operator, int(operator.argument(place, "dim", default)))

    return rule


def same_dims(operator: Operator, dims: Sequence[int]) -> list[Loop]:
    """Loops over dims that all operands and results share."""
    first = operator.operands[0]
    return [
        Loop.over(
            first.shape[dim],
            (dim,) * len(operator.operands),
            (dim,) * len(operator.results),
        )
        for dim in dims
    ]


def leading(
    operator: Operator,
    dims: Iterable[int],
    count: int,
    results: Sequence[Reduced | None] | None = None,
) -> list[Loop]:
    """Loops over dims of the first operands and results, the other operands being whole.

    Args:
        operator: the operator.
        dims: the dims.
        count: number of operands that the loops run over.
        results: reductions of the results after the first; None if all have the dim.
    """
    source, whole = operator.operands[0], (None,) * (len(operator.operands) - count)
    loops = []
    for dim in dims:
        access = DimAccess(dim)
        others = (access,) * (len(operator.results) - 1) if results is None else tuple(results)
        loops.append(Loop(source.shape[dim], (access,) * count + whole, (access, *others)))
    return loops


def reduction(how: Reduced | None, place: int = 1, keep: int = 2) -> Rule:
    """Remaining dims, and reduced dims that leave partial sums or maxima.

    Args:
        how: the reduction; None if its partial results cannot be combined (a variance).
        place: index of the argument with the dims.
        keep: index of the argument `keepdim`.
    """

    def rule(operator: Operator) -> list[Loop]:
        source, over = operator.operands[0], reduced_dims(operator, place)
        kept = bool(operator.argument(keep, "keepdim", False))
        loops = []
        for dim, size in enumerate(source.shape):
            if dim not in over:
                at = DimAccess(dim if kept else dim - sum(d < dim for d in over))
                loops.append(Loop.over(size, (dim,), (at,) * len(operator.results)))
            elif how is not None:
                loops.append(Loop.over(size, (dim,), (how,) * len(operator.results)))
        return loops

    return rule


def reduced_dims(operator: Operator, place: int) -> list[int]:
    """The dims that argument `place` of a reduction names; all dims if it names none."""
    count = operator.operands[0].dim()
    given = operator.argument(place, "dim")
    dims = [given] if isinstance(given, int) else list(given or range(count))
    return sorted({dim % count for dim in dims}) if count else []


def histogram(operator: Operator) -> list[Loop]:
    """(source, bins, min, max): every dim, if the range does not depend on the source."""
    given = operator.argument(2, "min", 0) != operator.argument(3, "max", 0)
    part: Reduced = "sum"
    shape = operator.operands[0].shape if given else ()
    return [Loop(size, (DimAccess(dim),), (part,)) for dim, size in enumerate(shape)]


def contraction(equation: str, added: bool = False) -> Rule:
    """An einsum: one loop for each letter; letters that the result lacks are summed.

    Args:
        equation: operands and result, as in "mk,kn->mn"; an operand with fewer dims than letters
            is broadcast at the front (the bias of `addmm`).
        added: whether the first operand is added to the product of the others.
    """
    left, result = equation.split("->")
    operands = left.split(",")

    def rule(operator: Operator) -> list[Loop]:
        sizes: dict[str, int] = {}
        for letters, tensor in zip(operands, operator.operands, strict=True):
            for letter, size in zip(
                letters[len(letters) - tensor.dim() :], tensor.shape, strict=True
            ):
                sizes[letter] = max(size, sizes.get(letter, 1))

        def place(letters: str, tensor: torch.Tensor, letter: str) -> DimAccess | Reduced | None:
            dim = letters.find(letter) - (len(letters) - tensor.dim())
            fits = letter in letters and dim >= 0 and tensor.shape[dim] == sizes[letter]
            return DimAccess(dim) if fits else None

        loops = []
        for letter, size in sizes.items():
            places = tuple(
                place(letters, t, letter)
                for letters, t in zip(operands, operator.operands, strict=True)
            )
            at: DimAccess | Reduced = DimAccess(result.index(letter)) if letter in result else "sum"
            if added and at == "sum":
                places = ("sum", *places[1:])
            loops.append(Loop(size, places, (at,)))
        return loops

    return rule


def grouped_mm(operator: Operator) -> list[Loop]:
    """(a, b, ends): products of groups of rows with one matrix each; rows stay whole.

    Kernels require strides in multiples of 16 bytes, so these are the units of a loop.

    | a | b | result |
    |---|---|---|
    | rows, k | group, k, n | rows, n |
    | m, rows | rows, n | group, m, n |
    | group, m, k | k, rows | m, rows |
    | group, m, k | group, k, n | group, m, n |
    """
    a, b = operator.operands[:2]
    if len(operator.operands) != (2 if a.dim() == b.dim() == 3 else 3):
        return []
    letters = {(2, 3): "Rk,gkn->Rn", (2, 2): "mR,Rn->Gmn", (3, 2): "gmk,kR->mR"}
    equation = letters.get((a.dim(), b.dim()), "gmk,gkn->gmn")
    loops = []
    left, result = equation.split("->")
    first, second = left.split(",")
    free = "mnk" if a.dim() + b.dim() < 6 else "gmnk"
    for letter in free:
        places = [DimAccess(w.index(letter)) if letter in w else None for w in (first, second)]
        if any(places):
            size = next(t.shape[p.dim] for t, p in zip((a, b), places, strict=True) if p)
            at: DimAccess | Reduced = DimAccess(result.index(letter)) if letter in result else "sum"
            rest = (None,) * (len(operator.operands) - 2)
            unit = 1 if letter == "g" else max(1, 16 // a.dtype.itemsize)
            loops.append(Loop(size // unit, (*places, *rest), (at,)))
    return loops


def every_dim_but(operator: Operator, dims: int | Sequence[int]) -> list[Loop]:
    """All dims but some, the same in all operands and results."""
    count = operator.operands[0].dim()
    whole = {dim % count for dim in ([dims] if isinstance(dims, int) else dims)}
    return same_dims(operator, [dim for dim in range(count) if dim not in whole])


def roll(operator: Operator) -> list[Loop]:
    """(source, shifts, dims): every dim that is not rolled; without `dims` all are rolled."""
    dims = operator.argument(2, "dims", ())
    return every_dim_but(operator, dims or range(operator.operands[0].dim()))


def pad(operator: Operator) -> list[Loop]:
    """(source, pads, value): every dim without padding; pads start at the last dim."""
    pads, count = operator.args[1], operator.operands[0].dim()
    return every_dim_but(operator, [count - 1 - i // 2 for i, pad in enumerate(pads) if pad])
