"""`redistributions`: redistributed values under a choice of strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.core.ir.graph import TrainingGraph, Value, operands
from autopar.core.ir.placement import OpStrategy, Placement, Replicate
from autopar.core.ir.roles import Gradient, Parameter
from autopar.passes.core.collective_ops import is_name, value_of
from autopar.passes.core.untrained_outputs import returned_as, untrained_outputs


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
    """Redistributions of each value to each placement required by a reader."""
    read: dict[tuple[Value, Placement], None] = {}
    for value, node, place in readers(graph):
        read[value, placement_read(value, node, place, op_strategies)] = None
    found: Counter[tuple[Value, Placement, Placement]] = Counter()
    for value, after in read:
        before = op_strategies[value.node].results[value.index]
        if before != after:
            found[Value(same[value.node], value.index), before, after] += 1
    return tuple(PlannedRedistribution(*key, count) for key, count in found.items())


def placement_read(
    value: Value,
    node: fx.Node | None,
    place: int | None,
    op_strategies: Mapping[fx.Node, OpStrategy],
) -> Placement:
    """The placement in which a reader, as of `readers`, takes a value."""
    if node is None:
        return Replicate()
    own = op_strategies[node]
    if node is value.node:
        return returned_as(own.results[value.index])
    return own.results[0] if place is None else own.operands[place]


def readers(graph: TrainingGraph) -> Iterator[tuple[Value, fx.Node | None, int | None]]:
    """Every read value, with its reader and the place of the operand: operators, then results.

    Results have no reader and are replicated, with two exceptions. The reader of a gradient is its
    parameter, whose placement it has; that of an untrained output is the operator that makes it.
    """
    for node in graph.calls():
        if not is_name(node):
            for place, source in enumerate(operands(node)):
                yield value_of(source), node, place
    inputs = dict(zip(graph.inputs, graph.placeholders, strict=True))
    untrained = untrained_outputs(graph)
    for role, result in zip(graph.outputs, graph.results, strict=True):
        if result is not None and role in untrained:
            yield value_of(result), value_of(result).node, None
        elif result is not None:
            of_parameter = isinstance(role, Gradient) and isinstance(role.of, Parameter)
            yield value_of(result), inputs[role.of] if of_parameter else None, None  # type: ignore[union-attr]
