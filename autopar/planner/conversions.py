"""Which values of a graph are converted, given the way of every operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.graph import Gradient, Parameter, TrainingGraph, Value, operands
from autopar.passes.collectives import is_name, value_of
from autopar.passes.rules.loops import Way
from autopar.placement import Placement, Replicate


@dataclass(frozen=True)
class Conversion:
    """A conversion of a value and of those like it in repeated blocks.

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


def conversions(
    graph: TrainingGraph, same: Mapping[fx.Node, fx.Node], ways: Mapping[fx.Node, Way]
) -> tuple[Conversion, ...]:
    """What is converted, each value once to each placement that it is read in.

    Args:
        graph: as captured, on whole tensors.
        same: by node, the first of those that are chosen alike.
        ways: of every operator and placeholder.
    """
    found: Counter[tuple[Value, Placement, Placement]] = Counter()
    for value, after in dict.fromkeys(_read(graph, ways)):
        before = ways[value.node].results[value.place]
        if before != after:
            found[Value(same[value.node], value.place), before, after] += 1
    return tuple(Conversion(*key, count) for key, count in found.items())


def _read(graph: TrainingGraph, ways: Mapping[fx.Node, Way]) -> Iterator[tuple[Value, Placement]]:
    """Every value that is read, and in which placement: by operators, then by who gets the results.

    What leaves the graph is whole; a gradient lies as its parameter does.
    """
    for node in graph.calls():
        if not is_name(node):
            yield from zip(map(value_of, operands(node)), ways[node].operands, strict=True)
    inputs = dict(zip(graph.inputs, graph.placeholders, strict=True))
    for role, result in zip(graph.outputs, graph.results, strict=True):
        if result is not None:
            of_parameter = isinstance(role, Gradient) and isinstance(role.of, Parameter)
            where = ways[inputs[role.of]].results[0] if of_parameter else Replicate()  # type: ignore[union-attr]
            yield value_of(result), where
