"""Operators that partial sums pass through: f(a + b) = f(a) + f(b)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from autopar._torch import OpOverload
from autopar.core.ir.placement import OpStrategy, Partial, Replicate
from autopar.core.operators.experts import expert_mm, expert_outer
from autopar.passes.core.collective_ops import STARTS, start_all_reduce
from autopar.passes.rules.loops import Operator, overloads

aten = torch.ops.aten

JOINTLY_LINEAR = frozenset(
    {
        *overloads("add.Tensor sub.Tensor neg mul.Scalar div.Scalar cat stack clone detach alias"),
        *overloads("view _unsafe_view reshape t permute transpose.int expand unsqueeze"),
        *overloads("squeeze squeeze.dim squeeze.dims slice.Tensor slice_backward"),
        *overloads("select.int select_backward split.Tensor split_with_sizes unbind.int"),
        *overloads("sum sum.dim_IntList mean mean.dim cumsum flip roll"),
        *STARTS,
    }
)
"""Operators that are linear in all their tensors together."""

LINEAR_IN_EACH: Mapping[OpOverload, tuple[int, ...]] = {
    **dict.fromkeys(overloads("mul.Tensor mm bmm mv dot"), (0, 1)),
    **dict.fromkeys(overloads("div.Tensor embedding embedding_dense_backward gather"), (0,)),
    **dict.fromkeys(overloads("index_select index.Tensor _unsafe_index.Tensor"), (0,)),
    **dict.fromkeys(
        overloads(
            "threshold_backward gelu_backward silu_backward tanh_backward _softmax_backward_data"
        ),
        (0,),
    ),
    aten._log_softmax_backward_data.default: (0,),
    expert_mm: (0, 1),
    expert_outer: (0, 1),
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
        return operator.kwargs.get("op", [*operator.args, "sum"][2]) == "sum"
    if operator.target in (aten.add.Tensor, aten.sub.Tensor):
        return len(operator.operands) == 2
    return True
