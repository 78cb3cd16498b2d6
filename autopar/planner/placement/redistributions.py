"""`redistributions`: values that a choice of strategies redistributes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.graph import TrainingGraph, Value, operands
from autopar.ir.op_strategy import OpStrategy
from autopar.ir.placement import Placement, Replicate
from autopar.ir.roles import Gradient, Parameter
from autopar.passes.core.collective_ops import is_name, value_of


@dataclass(frozen=True)
class PlannedRedistribution:
    """Redistribution of a value, and of equal values in repeated blocks.

    Attributes:
        value: the first of them.
        before: how it is made.
        after: how it is read.
        count: how many there are.
    """

    value: Value
    before: Placement
    after: Placement
    count: int


def redistributions(
    graph: TrainingGraph,
    same: Mapping[fx.Node, fx.Node],
    op_strategies: Mapping[fx.Node, OpStrategy],
) -> tuple[PlannedRedistribution, ...]:
    """Redistributions of each value to each placement in which it is read.

    Args:
        graph: as captured, on whole tensors.
        same: by node, the first of those that are chosen alike.
        op_strategies: of every operator and placeholder.
    """
    found: Counter[tuple[Value, Placement, Placement]] = Counter()
    for value, after in dict.fromkeys(_read(graph, op_strategies)):
        before = op_strategies[value.node].results[value.index]
        if before != after:
            found[Value(same[value.node], value.index), before, after] += 1
    return tuple(PlannedRedistribution(*key, count) for key, count in found.items())


def _read(
    graph: TrainingGraph, op_strategies: Mapping[fx.Node, OpStrategy]
) -> Iterator[tuple[Value, Placement]]:
    """Every value that is read, and in which placement: by operators, then by who gets the results.

    What leaves the graph is whole; a gradient lies as its parameter does.
    """
    for node in graph.calls():
        if not is_name(node):
            yield from zip(map(value_of, operands(node)), op_strategies[node].operands, strict=True)
    inputs = dict(zip(graph.inputs, graph.placeholders, strict=True))
    for role, result in zip(graph.outputs, graph.results, strict=True):
        if result is not None:
            of_parameter = isinstance(role, Gradient) and isinstance(role.of, Parameter)
            where = op_strategies[inputs[role.of]].results[0] if of_parameter else Replicate()  # type: ignore[union-attr]
            yield value_of(result), where
