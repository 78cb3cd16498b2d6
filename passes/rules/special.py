"""Rules for operators with a shape of their own: norms, attention, convolution, indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.passes.rules.generic import same_dims
from autopar.passes.rules.loops import At, Loop, Operator, Reduced

# -- norms -------------------------------------------------------------------------------------


def layer_norm(operator: Operator) -> list[Loop]:
    """(input, normalized_shape, weight, bias): the dims that are not normalised."""
    source = operator.operands[0]
    rest = (None,) * (len(operator.operands) - 1)
    free = source.dim() - len(operator.args[1])
    return [
        Loop(source.shape[d], (At(d), *rest), tuple(At(d) for _ in operator.results))
        for d in range(free)
    ]


def layer_norm_backward(operator: Operator) -> list[Loop]:
    """(gradient, input, normalized_shape, mean, rstd, weight, bias, mask)."""
    source = operator.operands[0]
    free = source.dim() - len(operator.args[2])
    weights = (None,) * (len(operator.operands) - 4)
    return [
        Loop(source.shape[d], (At(d),) * 4 + weights, (At(d), "sum", "sum")) for d in range(free)
    ]


def group_norm(operator: Operator) -> list[Loop]:
    """(input, weight, bias, N, C, HxW, groups, eps): rows."""
    rest = (None,) * (len(operator.operands) - 1)
    return [Loop(operator.operands[0].shape[0], (At(0), *rest), (At(0),) * 3)]


def batch_norm_channels(operator: Operator) -> list[Loop]:
    """Channels: dim 1 of what has more than one dim, dim 0 of what has one. Rows are not free."""
    channels = operator.operands[0].shape[1]
    results = tuple(_channel(t) for t in operator.results if t is not None)
    known = all(r is not None for r in results)
    operands = tuple(_channel(t) for t in operator.operands)
    return [Loop(channels, operands, results)] if known else []


def _channel(tensor: torch.Tensor) -> At | None:
    if tensor.dim() == 0 or tensor.numel() == 0:
        return None
    return At(1 if tensor.dim() > 1 else 0)


# -- softmax and cross-entropy -----------------------------------------------------------------


def nll_loss(operator: Operator) -> list[Loop]:
    """(log-probabilities [rows, classes], targets, weights, reduction, ignored): rows of a sum."""
    if operator.operands[0].dim() != 2 or operator.args[3] == 1:
        return []  # a mean divides by how many rows count: that is for a lowering of its own
    rows = operator.operands[0].shape[0]
    kept: At | Reduced = At(0) if operator.args[3] == 0 else "sum"
    weights = (None,) * (len(operator.operands) - 2)
    return [Loop(rows, (At(0), At(0), *weights), (kept, "sum"))]


def nll_loss_backward(operator: Operator) -> list[Loop]:
    """(gradient, log-probabilities, targets, weights, reduction, ignored, total weight): rows."""
    gradient, source = operator.operands[:2]
    if source.dim() != 2:
        return []
    of_rows = At(0) if gradient.dim() else None
    rest = (None,) * (len(operator.operands) - 3)
    return [Loop(source.shape[0], (of_rows, At(0), At(0), *rest), (At(0),))]


# -- attention ---------------------------------------------------------------------------------


def attention(statistics: int, masked: bool) -> Any:
    """softmax(q k) v over [batch, heads, sequence, width].

    Batch and heads are loops; so is the sequence of queries, unless a causal mask counts from its
    start. Keys and values are then whole: context parallelism that gathers them.

    Args:
        statistics: how many of the results beside the first run over batch, heads and queries.
        masked: whether an additive mask may be among the operands.
    """

    def rule(operator: Operator) -> list[Loop]:
        q, k, v, *others = operator.operands
        if _dropout(operator) or len(operator.results) < 1 + statistics:
            return []
        mask = others[:1] if masked else []
        results = (At(0), *(At(0) for _ in operator.results[1:]))
        loops = []
        for dim in (0, 1):
            if not q.shape[dim] == k.shape[dim] == v.shape[dim]:
                continue  # grouped heads: queries and keys are cut differently
            at = (At(dim),) * 3
            places = tuple(_mask_place(m, q, dim) for m in mask)
            loops.append(Loop(q.shape[dim], at + places, tuple(At(dim) for _ in results)))
        if not _causal(operator):
            places = tuple(_mask_place(m, q, 2) for m in mask)
            loops.append(
                Loop(q.shape[2], (At(2), None, None, *places), tuple(At(2) for _ in results))
            )
        return loops

    return rule


def attention_backward(operator: Operator) -> list[Loop]:
    """(gradient, q, k, v, out, logsumexp, dropout, causal; mask): as the forward."""
    _, q, k, v, _, _, *mask = operator.operands
    if operator.args[6]:
        return []
    loops = []
    for dim in (0, 1):
        if q.shape[dim] == k.shape[dim] == v.shape[dim]:
            places = tuple(_mask_place(m, q, dim) for m in mask)
            loops.append(Loop(q.shape[dim], (At(dim),) * 6 + places, (At(dim),) * 3))
    if not operator.args[7]:
        places = tuple(_mask_place(m, q, 2) for m in mask)
        at = (At(2), At(2), None, None, At(2), At(2))
        loops.append(Loop(q.shape[2], at + places, (At(2), "sum", "sum")))
    return loops


def _mask_place(mask: torch.Tensor, q: torch.Tensor, dim: int) -> At | None:
    own = dim - 4 + mask.dim()
    return At(own) if own >= 0 and mask.shape[own] == q.shape[dim] != 1 else None


def _dropout(operator: Operator) -> bool:
    return bool(_keyword(operator, "dropout_p"))


def _causal(operator: Operator) -> bool:
    return bool(_keyword(operator, "is_causal"))


def _keyword(operator: Operator, name: str) -> Any:
    """An argument by the name that the schema gives it."""
    for place, argument in enumerate(operator.target._schema.arguments):
        if argument.name == name:
            return operator.argument(place, name, argument.default_value)
    return None


# -- convolution and pooling -------------------------------------------------------------------


def convolution(operator: Operator) -> list[Loop]:
    """(input, weight, bias, stride, padding, dilation, transposed, ...): rows, channels out and in.

    Channels in are summed, and the bias once. With groups channels stay whole.
    """
    source, weight, *bias = operator.operands
    transposed, groups = operator.args[6], operator.args[8]
    loops = [Loop(source.shape[0], (At(0), None, *(None for _ in bias)), (At(0),))]
    if groups == 1:
        into, out = (0, 1) if transposed else (1, 0)
        loops.append(Loop(weight.shape[out], (None, At(out), *(At(0) for _ in bias)), (At(1),)))
        part: Reduced = "sum"
        summed = (part,) * len(bias)
        loops.append(Loop(source.shape[1], (At(1), At(into), *summed), (part,)))
    return loops


def convolution_backward(operator: Operator) -> list[Loop]:
    """(gradient, input, weight, bias sizes, ..., mask): rows; channels out and in."""
    _, source, weight = operator.operands
    transposed, groups = operator.args[7], operator.args[9]
    loops = [Loop(source.shape[0], (At(0), At(0), None), (At(0), "sum", "sum"))]
    if groups == 1:
        into, out = (0, 1) if transposed else (1, 0)
        by_out: tuple[Any, ...] = ("sum", At(out), At(0))
        loops.append(Loop(weight.shape[out], (At(1), None, At(out)), by_out))
        if operator.results[2] is None:
            loops.append(Loop(source.shape[1], (None, At(1), At(into)), (At(1), At(into), "sum")))
    return loops


def pooling(operator: Operator) -> list[Loop]:
    """Rows and channels."""
    return same_dims(operator, (0, 1)) if operator.operands[0].dim() == 4 else []


# -- indexing ----------------------------------------------------------------------------------


def embedding(operator: Operator) -> list[Loop]:
    """(weight [entries, width], indices): every dim of the indices, and the width."""
    weight, indices = operator.operands
    loops = [Loop(size, (None, At(d)), (At(d),)) for d, size in enumerate(indices.shape)]
    return [*loops, Loop(weight.shape[1], (At(1), None), (At(indices.dim()),))]


def embedding_backward(operator: Operator) -> list[Loop]:
    """(gradient, indices, entries, ...): indices are summed over, the width is free."""
    gradient, indices = operator.operands
    loops = [Loop(size, (At(d), At(d)), ("sum",)) for d, size in enumerate(indices.shape)]
    return [*loops, Loop(gradient.shape[-1], (At(gradient.dim() - 1), None), (At(1),))]


def gather(operator: Operator) -> list[Loop]:
    """(source, dim, index): other dims of equal size in both."""
    source, index = operator.operands
    gone = operator.args[1] % max(source.dim(), 1)
    return [
        Loop(size, (At(d), At(d)), (At(d),))
        for d, size in enumerate(source.shape)
        if d != gone and index.shape[d] == size
    ]


def scatter(operator: Operator) -> list[Loop]:
    """(target, dim, index[, source]): other dims of equal size in all."""
    target, *others = operator.operands
    gone = operator.args[1] % max(target.dim(), 1)
    return [
        Loop(size, tuple(At(d) for _ in operator.operands), (At(d),))
        for d, size in enumerate(target.shape)
        if d != gone and all(t.shape[d] == size for t in others)
    ]


def index(operator: Operator) -> list[Loop]:
    """(source, indices): dims of the source that are not indexed, dims of a single index."""
    source, chosen = operator.operands[0], operator.args[1]
    places = [d for d, i in enumerate(chosen) if i is not None]
    given = [i for i in chosen if i is not None]
    if any(i.dtype == torch.bool for i in given) or not _adjacent(places):
        return []
    shape = torch.broadcast_shapes(*(i.shape for i in given))
    first, wide = places[0], len(shape)
    loops = []
    for d, size in enumerate(source.shape):
        if d not in places:
            at = At(d if d < first else d - len(places) + wide)
            loops.append(Loop(size, (At(d), *(None for _ in given)), (at,)))
    for d, size in enumerate(shape):
        own = tuple(_aligned(i, d, shape) for i in given)
        loops.append(Loop(size, (None, *own), (At(first + d),)))
    return loops


def index_select(operator: Operator) -> list[Loop]:
    """(source, dim, indices): every other dim, and the indices."""
    source, chosen = operator.operands
    gone = operator.args[1] % source.dim()
    loops = [
        Loop(size, (At(d), None), (At(d),)) for d, size in enumerate(source.shape) if d != gone
    ]
    return [*loops, Loop(chosen.shape[0], (None, At(0)), (At(gone),))]


def _adjacent(places: Sequence[int]) -> bool:
    return bool(places) and list(places) == list(range(places[0], places[0] + len(places)))


def _aligned(tensor: torch.Tensor, dim: int, shape: Sequence[int]) -> At | None:
    own = dim - len(shape) + tensor.dim()
    return At(own) if own >= 0 and tensor.shape[own] == shape[dim] != 1 else None
