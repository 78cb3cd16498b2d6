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
from autopar.passes.collectives import STARTS, kind_of, message_bytes
from autopar.passes.rules import (
    own_batch_norm,
    own_lookup,
    own_loss,
    own_mean_loss,
    own_norms,
    own_random,
    own_scan,
    own_softmax,
)
from autopar.passes.rules.local import local_shape
from autopar.passes.rules.loops import Loop, Operator, Rule, Way
from autopar.passes.rules.site import Site

Lower = Callable[[Site], Sequence[fx.Node | None]]


@dataclass(frozen=True)
class Own:
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
        way: Way,
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
            way: how it is split; its `own` names this lowering.
            shards: what this rank has of each operand, in order.
            ranks: of the axis.
            rank: along the axis.
            axis: its name.

        Returns:
            A node for each result of the operator.
        """
        site = Site(graph, like, operator, way, tuple(shards), ranks, rank, axis)
        return list(self.lower(site))

    def traffic(self, operator: Operator, way: Way, ranks: int) -> tuple[tuple[str, int], ...]:
        """The collectives that it starts: kind and message size in bytes, in order."""
        found = []
        for node in program(operator, way, ranks, 0).nodes:
            if node.target in STARTS:
                found.append((kind_of(node), message_bytes(node)))
        return tuple(found)


def program(operator: Operator, way: Way, ranks: int, rank: int, axis: str = "axis") -> fx.Graph:
    """What one rank runs for an operator alone: a placeholder for each operand's shard.

    Args:
        operator: on whole tensors, fake or real ones.
        way: of an own lowering.
        ranks: of the axis.
        rank: along the axis.
        axis: its name.
    """
    operator = _faked(operator)
    graph = fx.Graph()
    like = fx.Graph().call_function(operator.target)
    like.meta = {"phase": "forward", "block": "", "source": None}
    shards = []
    for place, (tensor, placement) in enumerate(zip(operator.operands, way.operands, strict=True)):
        node = graph.placeholder(f"operand_{place}")
        node.meta = {
            **like.meta,
            "val": tensor.new_empty(local_shape(tensor.shape, placement, ranks, rank)),
        }
        shards.append(node)
    graph.output(OWN[way.own].emit(graph, like, operator, way, shards, ranks, rank, axis))
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

OWN: Mapping[str, Own] = {
    name: Own(*parts) for family in FAMILIES for name, parts in family.LOWERINGS.items()
}
"""Every own lowering, by name."""


def own_loops(operator: Operator) -> list[Loop]:
    """The loops of an operator that an own lowering splits."""
    return [
        replace(loop, own=name)
        for name, own in OWN.items()
        if operator.target in own.targets
        for loop in own.rule(operator)
    ]
