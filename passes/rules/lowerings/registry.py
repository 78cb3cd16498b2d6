"""Own lowerings: what splits an operator where running it on shards would not do.

Each is a set of loops, found like those of a rule, and a program of plain operators and small
collectives that one rank runs in the place of the operator.

| family | what is split |
|---|---|
| `own_lookup` | the entries of an embedding, the dim that is indexed, gathered or scattered to |
| `own_loss` | the classes of a negative log-likelihood, the rows that it is averaged over |
| `own_softmax` | the dim that a softmax, log-softmax or log-sum-exp runs over |
| `own_mean_loss` | whatever a mean loss is over |
| `own_batch_norm` | the rows of a batch norm |
| `own_norms` | the dim that a layer norm, mean, variance or norm runs over |
| `own_scan` | the dim that a cumulative sum runs over, or in which an extremum is looked for |
| `own_random` | what is drawn at random: drawn whole everywhere, as one device draws it |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar._torch import FakeTensorMode, OpOverload, pytree
from autopar.ir.op_strategy import OpStrategy
from autopar.passes.core.collective_ops import STARTS, kind_of, message_bytes
from autopar.passes.rules.local_args import local_shape
from autopar.passes.rules.loops import Loop, Operator, Rule
from autopar.passes.rules.lowerings import batch_norm as own_batch_norm
from autopar.passes.rules.lowerings import embedding as own_lookup
from autopar.passes.rules.lowerings import mean_loss as own_mean_loss
from autopar.passes.rules.lowerings import nll_loss as own_loss
from autopar.passes.rules.lowerings import norms as own_norms
from autopar.passes.rules.lowerings import random as own_random
from autopar.passes.rules.lowerings import scan as own_scan
from autopar.passes.rules.lowerings import softmax as own_softmax
from autopar.passes.rules.lowerings.context import LoweringContext

Lower = Callable[[LoweringContext], Sequence[fx.Node | None]]


@dataclass(frozen=True)
class CustomLowering:
    """An own lowering.

    Attributes:
        targets: the operators that it splits.
        rule: the loops that it splits them by.
        lower: writes what one rank runs; yields a node for each result, None for one left out.
    """

    targets: tuple[OpOverload, ...]
    rule: Rule
    lower: Lower

    def emit(
        self,
        graph: fx.Graph,
        like: fx.Node,
        operator: Operator,
        op_strategy: OpStrategy,
        shards: Sequence[fx.Node],
        ranks: int,
        rank: int,
        axis: str,
    ) -> list[fx.Node | None]:
        """Writes what `rank` runs at the graph's insertion point.

        Args:
            graph: of this rank.
            like: the node that is lowered: phase, block and source are taken from it.
            operator: on whole tensors.
            op_strategy: how it is split; its `own` names this lowering.
            shards: what this rank has of each operand, in order.
            ranks: of the axis.
            rank: along the axis.
            axis: its name.

        Returns:
            A node for each result of the operator.
        """
        site = LoweringContext(graph, like, operator, op_strategy, tuple(shards), ranks, rank, axis)
        return list(self.lower(site))

    def traffic(
        self, operator: Operator, op_strategy: OpStrategy, ranks: int
    ) -> tuple[tuple[str, int], ...]:
        """The collectives that it starts: kind and message size in bytes, in order."""
        found = []
        for node in program(operator, op_strategy, ranks, 0).nodes:
            if node.target in STARTS:
                found.append((kind_of(node), message_bytes(node)))
        return tuple(found)


def program(
    operator: Operator, op_strategy: OpStrategy, ranks: int, rank: int, axis: str = "axis"
) -> fx.Graph:
    """What one rank runs for an operator alone: a placeholder for each operand's shard.

    Args:
        operator: on whole tensors, fake or real ones.
        op_strategy: of an own lowering.
        ranks: of the axis.
        rank: along the axis.
        axis: its name.
    """
    operator = _faked(operator)
    graph = fx.Graph()
    like = fx.Graph().call_function(operator.target)
    like.meta = {"phase": "forward", "block": "", "source": None}
    shards = []
    for place, (tensor, placement) in enumerate(
        zip(operator.operands, op_strategy.operands, strict=True)
    ):
        node = graph.placeholder(f"operand_{place}")
        node.meta = {
            **like.meta,
            "val": tensor.new_empty(local_shape(tensor.shape, placement, ranks, rank)),
        }
        shards.append(node)
    graph.output(
        CUSTOM_LOWERINGS[op_strategy.lowering].emit(
            graph, like, operator, op_strategy, shards, ranks, rank, axis
        )
    )
    return graph


def _faked(operator: Operator) -> Operator:
    """The operator on fake tensors."""
    known = (getattr(t, "fake_mode", None) for t in operator.operands)
    mode = next(filter(None, known), None) or FakeTensorMode()

    def fake(leaf: Any) -> Any:
        is_real = isinstance(leaf, torch.Tensor) and not hasattr(leaf, "fake_mode")
        return mode.from_tensor(leaf) if is_real else leaf

    args, kwargs, results = pytree.tree_map(
        fake, (operator.args, operator.kwargs, operator.results)
    )
    return Operator(operator.target, args, kwargs, results)


FAMILIES = (
    own_lookup,
    own_loss,
    own_mean_loss,
    own_softmax,
    own_norms,
    own_batch_norm,
    own_scan,
    own_random,
)

CUSTOM_LOWERINGS: Mapping[str, CustomLowering] = {
    name: CustomLowering(*parts) for family in FAMILIES for name, parts in family.LOWERINGS.items()
}
"""Every own lowering, by name."""


def lowering_loops(operator: Operator) -> list[Loop]:
    """The loops of an operator that an own lowering splits."""
    return [
        replace(loop, lowering=name)
        for name, own in CUSTOM_LOWERINGS.items()
        if operator.target in own.targets
        for loop in own.rule(operator)
    ]
