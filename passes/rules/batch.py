"""`batch_loops`: the loops of an operator that the batch axis may split.

They are the operator's loops, but for random numbers: each slice draws those of its own rows, where
an axis of the model would have every rank draw all of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.passes.rules import attention
from autopar.passes.rules.generic import same_dims
from autopar.passes.rules.loops import Loop, Operator
from autopar.passes.rules.own_random import LIKE, OF
from autopar.passes.rules.table import RULES, loops_of

aten = torch.ops.aten

_DRAWS = frozenset({*LIKE, *OF, aten.native_dropout.default})


def batch_loops(operator: Operator) -> list[Loop]:
    """The loops of an operator along the batch axis."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator.target, "tags", ()):
        return loops_of(operator)
    if operator.target in _DRAWS:
        return same_dims(operator, range(operator.operands[0].dim()))
    if RULES.get(operator.target) in (attention.heads, attention.attention):
        return [replace(loop, free=False) for loop in attention.heads(operator, draws=True)][:1]
    return []
