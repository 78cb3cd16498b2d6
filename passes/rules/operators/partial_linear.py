"""Operators that partial sums pass through: f(a + b) = f(a) + f(b)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from autopar._torch import OpOverload
from autopar.ir.placement import OpStrategy, Partial, Replicate
from autopar.passes.core.collective_ops import STARTS, start_all_reduce
from autopar.passes.rules.loops import Operator

aten = torch.ops.aten

JOINTLY_LINEAR = frozenset(
    {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.neg.default,
        aten.cat.default,
        aten.stack.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.t.default,
        aten.permute.default,
        aten.transpose.int,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.slice_backward.default,
        aten.select.int,
        aten.select_backward.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
        aten.clone.default,
        aten.detach.default,
        aten.alias.default,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.mul.Scalar,
        aten.div.Scalar,
        aten.cumsum.default,
        aten.flip.default,
        aten.roll.default,
        *STARTS,
    }
)
"""Operators that are linear in all their tensors together."""

LINEAR_IN_EACH: Mapping[OpOverload, tuple[int, ...]] = {
    aten.mul.Tensor: (0, 1),
    aten.div.Tensor: (0,),
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.mv.default: (0, 1),
    aten.dot.default: (0, 1),
    aten.embedding_dense_backward.default: (0,),
    aten.embedding.default: (0,),
    aten.gather.default: (0,),
    aten.index_select.default: (0,),
    aten.index.Tensor: (0,),
    aten.threshold_backward.default: (0,),
    aten.gelu_backward.default: (0,),
    aten.silu_backward.default: (0,),
    aten.tanh_backward.default: (0,),
    aten._softmax_backward_data.default: (0,),
    aten._log_softmax_backward_data.default: (0,),
}
"""Operands that an operator is linear in while the others are whole."""


def linear_strategies(operator: Operator) -> Iterator[OpStrategy]:
    """Strategies that take partial sums to partial sums."""
    partial, whole = Partial(), Replicate()
    count = len(operator.operands)
    results = (partial,) * len(operator.results)
    if not all(t.is_floating_point() for t in operator.results if t is not None):
        return
    if operator.target in JOINTLY_LINEAR and _adds_tensors(operator):
        yield OpStrategy((partial,) * count, results)
    for place in LINEAR_IN_EACH.get(operator.target, ()):
        if place < count and operator.operands[place].is_floating_point():
            yield OpStrategy(tuple(partial if i == place else whole for i in range(count)), results)


def _adds_tensors(operator: Operator) -> bool:
    """Whether only tensors are added: `x + 1` would add 1 on every rank."""
    if operator.target is start_all_reduce:
        return bool(operator.argument(2, "op", "sum") == "sum")
    if operator.target in (aten.add.Tensor, aten.sub.Tensor):
        return len(operator.operands) == 2
    return True
