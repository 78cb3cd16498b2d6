"""`redistributions`: redistributed values under a choice of strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.graph import TrainingGraph, Value, operands
from autopar.ir.placement import OpStrategy, Placement, Replicate
from autopar.ir.roles import Gradient, Parameter
from autopar.passes.core.collective_ops import is_name, value_of


@dataclass(frozen=True)
class PlannedRedistribution:
    """Redistribution of a value, and of equal values in repeated blocks.

    Attributes:
        value: first of the equal values.
        before: placement of the producer's result.
        after: placement required by the reader.
        count: number of equal values.
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
    """Redistributions of each value to each placement required by a reader.

    Args:
        graph: captured graph, on unsharded tensors.
        same: representative of each node (`repeated`).
        op_strategies: strategy of every operator and placeholder.
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
    """Every read value and its required placement: reads of operators, then results.

    Results are replicated, except gradients, which have the placement of their parameter.
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
