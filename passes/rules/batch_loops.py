"""`batch_loops`: loops of an operator along the batch axis.

They differ from its other loops in random numbers: each slice draws the numbers of its own rows,
while every rank of a model axis draws all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from autopar.core.ir.placement import OpStrategy, Partial, Placement, Replicate
from autopar.passes.core import node_builder
from autopar.passes.rules.loops import Loop, Operator, overloads
from autopar.passes.rules.lowerings.random import DRAW_EACH, DRAW_LIKE
from autopar.passes.rules.operators import attention
from autopar.passes.rules.operators.generic import reduction, same_dims
from autopar.passes.rules.registry import CANONICAL, RULES, loops_of

aten = torch.ops.aten

_DRAWS = frozenset(overloads(f"{DRAW_LIKE} {DRAW_EACH} native_dropout"))


def draws_random(operator: Operator) -> bool:
    """Whether an operator draws random numbers; attention without dropout does not."""
    return node_builder.draws_random(operator.target, operator.args, operator.kwargs)


LOGICAL_REDUCTIONS = {aten.all.default: reduction("min"), aten.any.default: reduction("max")}
"""Reductions of booleans over all dims."""


def is_cast(operator: Operator) -> bool:
    """Whether an operator only casts floating-point numbers, which is linear up to rounding.

    Numbers of 8 bits are too coarse for partial sums.
    """
    tensors = (*operator.operands, *operator.results)
    floats = all(t.is_floating_point() and t.itemsize > 1 for t in tensors if t is not None)
    return operator.target is aten._to_copy.default and floats


def batch_strategies(operator: Operator) -> Iterator[OpStrategy]:
    """Strategies along the batch axis, beside the linear ones, that take partial values."""
    if operator.target in (aten._assert_async.default, aten._assert_async.msg):
        results: tuple[Placement, ...] = (Replicate(),) * len(operator.results)
        yield OpStrategy((Partial("min"),), results)
    if is_cast(operator):
        yield OpStrategy((Partial(),), (Partial(),))


def batch_loops(operator: Operator) -> list[Loop]:
    """The loops of an operator along the batch axis."""
    if operator.target in LOGICAL_REDUCTIONS:
        return LOGICAL_REDUCTIONS[operator.target](operator)
    if operator.target in CANONICAL and not attention.has_no_dropout(operator):
        return attention.windows(operator)[:1]
    if not draws_random(operator):
        return loops_of(operator)
    if operator.target in _DRAWS:
        return same_dims(operator, range(operator.operands[0].dim()))
    if RULES.get(operator.target) is attention.kernel_heads:
        loops = attention.kernel_heads(operator, draws=True)
        return [replace(loop, interleavable=False) for loop in loops[:1]]
    return []
