"""The placement program: of all ways to lay a graph along an axis, the cheapest.

A 0/1 program. A variable for each way of each operator, of which one is chosen; for each value,
each placement that somebody reads it in and each that it may be made in, a variable for the
conversion between the two, paid once however many read it. Repeated blocks share their variables,
so that size does not grow with depth. HiGHS solves it (scipy.optimize.milp).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import fx

from autopar.errors import PlanError
from autopar.graph import Gradient, Parameter, TrainingGraph
from autopar.passes.rules.conversions import steps
from autopar.passes.rules.loops import Way
from autopar.placement import Placement, Replicate
from autopar.planner.ways import Choices, Value, choices, value_of

Price = Callable[[Value, Placement, Placement], float]
"""Seconds to convert a value from one placement to another."""

Work = Callable[[fx.Node, Way], float]
"""Seconds of an operator computed in some way."""


@dataclass(frozen=True)
class Solution:
    """Where everything lies.

    Attributes:
        ways: the way of every operator and placeholder.
        seconds: predicted time of computation and conversions, in seconds.
        gap: by which fraction a better one could exist.
        took_s: seconds that the solver took.
        conversions: value, from, to of every conversion.
    """

    ways: Mapping[fx.Node, Way]
    seconds: float
    gap: float
    took_s: float
    conversions: tuple[tuple[Value, Placement, Placement], ...]


def solve(
    graph: TrainingGraph, ranks: int, price: Price, work: Work, *, time_limit_s: float = 30.0
) -> Solution:
    """The cheapest placements.

    Args:
        graph: captured, on whole tensors.
        ranks: of the axis.
        price: of a conversion.
        work: of an operator.
        time_limit_s: after which the best known is taken.

    Raises:
        PlanError: nothing was found in time.
    """
    return _Program(graph, choices(graph, ranks), price, work).solve(time_limit_s)


class _Program:
    def __init__(self, graph: TrainingGraph, found: Choices, price: Price, work: Work) -> None:
        self.graph, self.found, self.price, self.work = graph, found, price, work
        self.count = Counter(found.same.values())
        self.costs: list[float] = []
        self.integral: list[int] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self.way: dict[tuple[fx.Node, int], int] = {}
        self.paid: dict[tuple[Value, Placement, Placement], int] = {}
        self.edges: set[object] = set()
        for node in self.count:
            self.choose(node)
        for node in found.ways:
            self.read(node)
        self.end()

    def variable(self, cost: float, integral: bool) -> int:
        self.costs.append(cost)
        self.integral.append(int(integral))
        return len(self.costs) - 1

    def choose(self, node: fx.Node) -> None:
        """One way of each operator."""
        ways = self.found.ways.get(node)
        if ways is None:
            return
        for place, way in enumerate(ways):
            cost = self.work(node, way) * self.count[node] if way.operands else 0.0
            self.way[node, place] = self.variable(cost, True)
        self.rows.append(({self.way[node, i]: 1.0 for i in range(len(ways))}, 1.0, 1.0))

    def read(self, node: fx.Node) -> None:
        """Each operand is converted to where the chosen way wants it."""
        stands = self.found.same[node]
        for place, value in enumerate(self.found.reads.get(node, ())):
            wanted: dict[Placement, list[int]] = {}
            for number, way in enumerate(self.found.ways[stands]):
                wanted.setdefault(way.operands[place], []).append(self.way[stands, number])
            self.edge(value, wanted)

    def edge(self, value: Value, wanted: Mapping[Placement, Sequence[int]]) -> None:
        """What is made in one placement flows to where it is wanted, at the price of the way.

        Args:
            value: what is read.
            wanted: the variables of the reader's ways by the placement that they want.
        """
        stands = Value(self.found.same[value.node], value.place)
        key = (stands, tuple((p, tuple(v)) for p, v in wanted.items()))
        if key in self.edges:
            return  # of a repeated block
        self.edges.add(key)
        made: dict[Placement, list[int]] = {}
        for number, way in enumerate(self.found.ways[stands.node]):
            made.setdefault(way.results[stands.place], []).append(self.way[stands.node, number])
        leaving: dict[Placement, dict[int, float]] = {
            p: dict.fromkeys(v, -1.0) for p, v in made.items()
        }
        coming: dict[Placement, dict[int, float]] = {
            p: dict.fromkeys(v, -1.0) for p, v in wanted.items()
        }
        for before in made:
            for after in wanted:
                if steps(before, after) is None:
                    continue
                flow = self.variable(0.0, False)
                leaving[before][flow] = coming[after][flow] = 1.0
                if before != after:
                    once = self.converted(stands, before, after)
                    self.rows.append(({once: 1.0, flow: -1.0}, 0.0, np.inf))
        for row in (*leaving.values(), *coming.values()):
            self.rows.append((row, 0.0, 0.0))

    def converted(self, value: Value, before: Placement, after: Placement) -> int:
        """The variable of a conversion, paid once for all its readers."""
        key = (value, before, after)
        if key not in self.paid:
            cost = self.price(value, before, after) * self.count[value.node]
            self.paid[key] = self.variable(cost, False)
        return self.paid[key]

    def end(self) -> None:
        """What leaves the graph is whole; a gradient lies as its parameter does."""
        inputs = dict(zip(self.graph.inputs, self.graph.placeholders, strict=True))
        always = self.variable(0.0, False)
        self.rows.append(({always: 1.0}, 1.0, 1.0))
        for role, node in zip(self.graph.outputs, self.graph.results, strict=True):
            if node is None:
                continue
            wanted: dict[Placement, list[int]] = {Replicate(): [always]}
            if isinstance(role, Gradient) and isinstance(role.of, Parameter):
                parameter = self.found.same[inputs[role.of]]
                ways = self.found.ways[parameter]
                wanted = {w.results[0]: [self.way[parameter, i]] for i, w in enumerate(ways)}
            self.edge(value_of(node), wanted)

    def solve(self, time_limit_s: float) -> Solution:
        entries = [(i, j, v) for i, (row, _, _) in enumerate(self.rows) for j, v in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        shape = (len(self.rows), len(self.costs))
        matrix = coo_array((values, (rows, columns)), shape=shape).tocsr()
        low = np.array([low for _, low, _ in self.rows])
        high = np.array([high for _, _, high in self.rows])
        scale = max(self.costs) or 1.0
        start = time.perf_counter()
        result = milp(
            np.array(self.costs) / scale,
            constraints=LinearConstraint(matrix, low, high),
            integrality=np.array(self.integral),
            bounds=Bounds(0.0, 1.0),
            options={"time_limit": time_limit_s, "mip_rel_gap": 1e-3},
        )
        if result.x is None:
            raise PlanError(f"no placements were found in {time_limit_s:g} s: {result.message}")
        took = time.perf_counter() - start
        ways = {
            node: self.found.ways[stands][number]
            for node, stands in self.found.same.items()
            if stands in self.found.ways
            for number in range(len(self.found.ways[stands]))
            if result.x[self.way[stands, number]] > 0.5
        }
        converted = tuple(k for k, v in self.paid.items() if result.x[v] > 0.5)
        return Solution(ways, result.fun * scale, result.mip_gap or 0.0, took, converted)
