"""Rules for embedding, gather, scatter and indexing."""

from __future__ import annotations

import torch

from autopar.passes.rules.loops import DimAccess, Loop, Operator, broadcast_access


def embedding(operator: Operator) -> list[Loop]:
    """(weight [entries, width], indices): every dim of the indices, and the width."""
    weight, indices = operator.operands
    loops = [Loop.over(size, (None, d), (d,)) for d, size in enumerate(indices.shape)]
    return [*loops, Loop.over(weight.shape[1], (1, None), (indices.dim(),))]


def embedding_backward(operator: Operator) -> list[Loop]:
    """(gradient, indices, entries, ...): every dim of the indices, summed, and the width.

    What is scaled by the frequency of entries needs all indices.
    """
    gradient, indices = operator.operands
    loops = [Loop.over(size, (d, d), ("sum",)) for d, size in enumerate(indices.shape)]
    if operator.argument("scale_grad_by_freq"):
        loops = []
    return [*loops, Loop.over(gradient.shape[-1], (gradient.dim() - 1, None), (1,))]


def gather(operator: Operator) -> list[Loop]:
    """(source, dim, index): other dims of equal size; dim `dim` of the index."""
    source, index = operator.operands
    gone = operator.args[1] % max(source.dim(), 1)
    loops = [
        Loop.over(size, (d, d), (d,))
        for d, size in enumerate(source.shape)
        if d != gone and index.shape[d] == size
    ]
    return loops + [Loop.over(n, (None, gone), (gone,)) for n in index.shape[gone:][:1]]


def scatter(operator: Operator) -> list[Loop]:
    """(target, dim, index[, source]): other dims of equal size; the summands of a sum."""
    target, *others = operator.operands
    gone = operator.args[1] % max(target.dim(), 1)
    loops = [
        Loop.over(size, (d,) * len(operator.operands), (d,))
        for d, size in enumerate(target.shape)
        if d != gone and all(t.shape[d] == size for t in others)
    ]
    sizes = {t.shape[gone] for t in others if t.dim()}
    if operator.target is torch.ops.aten.scatter_add.default and len(sizes) == 1:
        loops.append(Loop.over(sizes.pop(), ("sum", gone, gone), ("sum",)))
    return loops


def index(operator: Operator) -> list[Loop]:
    """(source, indices): dims of the source that are not indexed, and dims of the indices."""
    source, chosen = operator.operands[0], operator.args[1]
    places = [d for d, i in enumerate(chosen) if i is not None]
    given = [i for i in chosen if i is not None]
    adjacent = bool(places) and places == list(range(places[0], places[-1] + 1))
    if any(i.dtype == torch.bool for i in given) or not adjacent:
        return []
    shape = torch.broadcast_shapes(*(i.shape for i in given))
    first, wide = places[0], len(shape)
    loops = []
    for d, size in enumerate(source.shape):
        if d not in places:
            at = DimAccess(d if d < first else d - len(places) + wide)
            loops.append(Loop.over(size, (d, *(None for _ in given)), (at,)))
    for d, size in enumerate(shape):
        own = (broadcast_access(i, shape, d) for i in given)
        loops.append(Loop.over(size, (None, *own), (first + d,)))
    return loops


def index_put(operator: Operator) -> list[Loop]:
    """(target, indices, values, accumulate): dims that are not indexed; all dims of a sum."""
    target, chosen = operator.operands[0], operator.args[1]
    source = Operator(operator.target, (target, chosen), {}, ())
    values = operator.operands[-1]
    adds = bool(operator.argument("accumulate"))
    loops = []
    for loop in index(source):
        (at,) = loop.results
        assert isinstance(at, DimAccess)
        if values.dim() <= at.dim or values.shape[at.dim] != loop.size:
            continue  # they are broadcast
        if loop.operands[0] is not None:
            loops.append(Loop(loop.size, (*loop.operands, at), (loop.operands[0],)))
        elif adds:
            loops.append(Loop(loop.size, ("sum", *loop.operands[1:], at), ("sum",)))
    return loops


def index_add(operator: Operator) -> list[Loop]:
    """(target, dim, index, summands): every other dim, and the summands."""
    target, _, summands = operator.operands
    dim = operator.args[1] % target.dim()
    loops = [Loop.over(size, (d, None, d), (d,)) for d, size in enumerate(target.shape) if d != dim]
    return [*loops, Loop.over(summands.shape[dim], ("sum", 0, dim), ("sum",))]


def index_select(operator: Operator) -> list[Loop]:
    """(source, dim, indices): every other dim, and the indices."""
    source, chosen = operator.operands
    gone = operator.args[1] % source.dim()
    loops = [Loop.over(size, (d, None), (d,)) for d, size in enumerate(source.shape) if d != gone]
    return [*loops, Loop.over(chosen.shape[0], (None, 0), (gone,))]
