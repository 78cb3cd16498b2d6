"""Rules for whole families of operators: pointwise, reductions, contractions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.passes.rules.loops import DimAccess, Loop, Operator, Reduced, Rule


def pointwise(operator: Operator) -> list[Loop]:
    """Each dim of the result; operands are aligned at their last dims and broadcast."""
    shape = operator.results[0].shape

    def place(tensor: torch.Tensor, dim: int) -> DimAccess | None:
        own = dim - len(shape) + tensor.dim()
        return DimAccess(own) if own >= 0 and tensor.shape[own] == shape[dim] != 1 else None

    return [
        Loop(
            size,
            tuple(place(t, dim) for t in operator.operands),
            tuple(DimAccess(dim) for _ in operator.results),
        )
        for dim, size in enumerate(shape)
    ]


def created(operator: Operator) -> list[Loop]:
    """Each dim of a result that is made of a shape and one number.

    An operand is not looked at: it may be split at the same dim, or at any while the result is
    whole.
    """
    shape = operator.results[0].shape
    like = operator.operands

    def same(tensor: torch.Tensor, dim: int) -> DimAccess | None:
        return DimAccess(dim) if tensor.shape == shape else None

    loops = [
        Loop(size, tuple(same(t, dim) for t in like), (DimAccess(dim),))
        for dim, size in enumerate(shape)
    ]
    for tensor in like:
        loops += [Loop(size, (DimAccess(dim),), (None,)) for dim, size in enumerate(tensor.shape)]
    return loops


def along(place: int, default: int = 0) -> Rule:
    """All dims but one, at the same place in operands and results.

    Args:
        place: of the argument that names the dim which must stay whole.
        default: that dim where the argument is left out.
    """

    def rule(operator: Operator) -> list[Loop]:
        return every_dim_but(operator, int(operator.argument(place, "dim", default)))

    return rule


def same_dims(operator: Operator, dims: Sequence[int]) -> list[Loop]:
    """Loops over dims that all operands and results have at the same place."""
    first = operator.operands[0]
    return [
        Loop(
            first.shape[dim],
            tuple(DimAccess(dim) for _ in operator.operands),
            tuple(DimAccess(dim) for _ in operator.results),
        )
        for dim in dims
    ]


def reduction(how: Reduced | None, place: int = 1, keep: int = 2) -> Rule:
    """Dims that stay are loops of the result; those reduced leave parts of a sum or maximum.

    Args:
        how: what the reduction is, None if parts of it do not add up (a variance).
        place: of the argument with the dims.
        keep: place of `keepdim`.
    """

    def rule(operator: Operator) -> list[Loop]:
        source, over = operator.operands[0], reduced_dims(operator, place)
        kept = bool(operator.argument(keep, "keepdim", False))
        loops = []
        for dim, size in enumerate(source.shape):
            if dim not in over:
                at = DimAccess(dim if kept else dim - sum(d < dim for d in over))
                loops.append(Loop(size, (DimAccess(dim),), tuple(at for _ in operator.results)))
            elif how is not None:
                loops.append(Loop(size, (DimAccess(dim),), tuple(how for _ in operator.results)))
        return loops

    return rule


def reduced_dims(operator: Operator, place: int) -> list[int]:
    """The dims that argument `place` of a reduction names; all if it names none."""
    count = operator.operands[0].dim()
    given = operator.argument(place, "dim")
    dims = [given] if isinstance(given, int) else list(given or range(count))
    return sorted({dim % count for dim in dims}) if count else []


def counted(operator: Operator) -> list[Loop]:
    """(source, bins, least, most): every dim, if the range is given and not that of the source."""
    given = operator.argument(2, "min", 0) != operator.argument(3, "max", 0)
    part: Reduced = "sum"
    shape = operator.operands[0].shape if given else ()
    return [Loop(size, (DimAccess(dim),), (part,)) for dim, size in enumerate(shape)]


def contraction(equation: str, added: bool = False) -> Rule:
    """An einsum: letters of the result are its loops, letters that vanish are summed.

    Args:
        equation: operands and result, such as "mk,kn->mn"; an operand of fewer dims than letters
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
    """(a, b, ends): products of groups of rows, of one matrix of each; rows stay whole.

    Kernels want strides of a multiple of 16 bytes, of shards too.

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
    """All dims but some, at the same place in all operands and results."""
    count = operator.operands[0].dim()
    whole = {dim % count for dim in ([dims] if isinstance(dims, int) else dims)}
    return same_dims(operator, [dim for dim in range(count) if dim not in whole])


def rolled(operator: Operator) -> list[Loop]:
    """(source, shifts, dims): every dim that is not rolled; without dims all are, as one."""
    dims = operator.argument(2, "dims", ())
    return every_dim_but(operator, dims or range(operator.operands[0].dim()))


def unpadded(operator: Operator) -> list[Loop]:
    """(source, pads, value): every dim without padding; pads name dims from the last."""
    pads, count = operator.args[1], operator.operands[0].dim()
    return every_dim_but(operator, [count - 1 - i // 2 for i, pad in enumerate(pads) if pad])
