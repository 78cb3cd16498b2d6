"""`solve`: the cheapest operator strategies of a graph along an axis, by integer programming.

- Each strategy of an operator has a 0/1 variable; exactly one strategy per operator is chosen.
- Each value has a variable per redistribution, from a placement of its producer to a placement of
  a reader. All readers share its cost.
- Repeated blocks share variables, so the size of the program does not grow with depth.

The solver is HiGHS (scipy.optimize.milp).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array
from torch import fx

from autopar.errors import PlanError
from autopar.ir.graph import TrainingGraph, Value
from autopar.ir.placement import OpStrategy, Placement, Replicate
from autopar.ir.roles import Gradient, Parameter
from autopar.passes.core.collective_ops import value_of
from autopar.passes.rules.redistribute import redistribute_steps
from autopar.planner.placement.redistributions import PlannedRedistribution, redistributions
from autopar.planner.placement.strategies import StrategyChoices, strategy_choices

Price = Callable[[Value, Placement, Placement], float]
"""Seconds to redistribute a value between two placements; infinite if forbidden."""

Work = Callable[[fx.Node, OpStrategy], float]
"""Seconds of an operator under a strategy."""

GAP = 1e-3
INFEASIBLE = 2  # scipy's status
WHOLE = Replicate()

Wanted = tuple[tuple[Placement, tuple[int, ...]], ...]
"""Strategy variables of a reader, by the placement that they require of a value."""


@dataclass(frozen=True)
class Solution:
    """Chosen strategies of a graph.

    Attributes:
        op_strategies: strategy of every operator and placeholder.
        seconds: predicted seconds of compute and redistributions.
        gap: relative optimality gap.
        took_s: seconds to build and solve the program.
        conversions: redistributions of values.
        nbytes: bytes stored on a rank, counted by `Weight`; 0 without a memory constraint.
    """

    op_strategies: Mapping[fx.Node, OpStrategy]
    seconds: float
    gap: float
    took_s: float
    conversions: tuple[PlannedRedistribution, ...]
    nbytes: float = 0.0


@dataclass(frozen=True)
class Weight:
    """Memory constraint of the program.

    Attributes:
        op_strategy: bytes of an operator or placeholder on a rank under a strategy.
        conversion: bytes of a redistributed value.
        cap: limit of the total bytes; if infeasible, bytes are minimised.
    """

    op_strategy: Work
    conversion: Price
    cap: float


def solve(
    graph: TrainingGraph,
    ranks: int,
    price: Price,
    work: Work,
    *,
    update: Work | None = None,
    pins: Mapping[str, Placement] | None = None,
    weight: Weight | None = None,
    wrapping: float = 0.0,
    time_limit_s: float = 30.0,
) -> Solution:
    """Finds the cheapest strategies.

    Args:
        graph: captured graph, on unsharded tensors.
        ranks: size of the axis.
        price: cost of a redistribution, in seconds.
        work: cost of an operator, in seconds.
        update: cost of the optimizer's step over a parameter, in seconds.
        pins: required placements of parameters, by name.
        weight: memory constraint; None for no limit.
        wrapping: extra seconds of a step if any parameter is sharded.
        time_limit_s: seconds after which the best known solution is used.

    Raises:
        PlanError: No solution was found in time.
    """
    start = time.perf_counter()
    program = _Program(graph, strategy_choices(graph, ranks, pins), price, work, update, wrapping)
    if weight is None:
        result, held = program.run(program.costs, time_limit_s), [0.0]
    else:
        held = program.held(weight)
        result = program.run(program.costs, time_limit_s, held, weight.cap)
        if result.status == INFEASIBLE:
            least = program.run(held, time_limit_s, gap=0.0)
            if least.x is not None:
                result = program.run(program.costs, time_limit_s, held, least.fun * (1 + 1e-6))
    if result.x is None:
        raise PlanError(f"no placements were found in {time_limit_s:g} s: {result.message}")
    return program.solution(result, held, time.perf_counter() - start)


@dataclass
class _Rows:
    """Constraints of the program: rows of a sparse matrix and their bounds."""

    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(
        self, plus: Iterable[int], minus: Iterable[int], low: float, high: float | None = None
    ) -> None:
        """Adds low <= sum(plus) - sum(minus) <= high; `high` defaults to `low`."""
        for sign, columns in ((1.0, plus), (-1.0, minus)):
            for column in columns:
                self.columns.append(column)
                self.values.append(sign)
        self.ends.append(len(self.columns))
        self.low.append(low)
        self.high.append(low if high is None else high)


class _Program:
    """Variables, costs and constraints."""

    def __init__(
        self,
        graph: TrainingGraph,
        found: StrategyChoices,
        price: Price,
        work: Work,
        update: Work | None,
        wrapping: float,
    ) -> None:
        self.graph, self.found, self.price = graph, found, price
        self.count = Counter(found.same.values())
        self.costs: list[float] = []
        self.integral: list[bool] = []
        self.rows = _Rows()
        self.op_strategies: dict[fx.Node, list[int]] = {}
        self.paid: dict[int, PlannedRedistribution] = {}
        for node, op_strategies in found.op_strategies.items():
            seconds = work if node.op == "call_function" else update
            costs = [
                seconds(node, op_strategy) * self.count[node] if seconds else 0.0
                for op_strategy in op_strategies
            ]
            self.op_strategies[node] = [self.variable(cost, True) for cost in costs]
            self.rows.add(self.op_strategies[node], (), 1.0)
        self.wrap(wrapping)
        always = self.variable(0.0, False)
        self.rows.add((always,), (), 1.0)
        for (value, readers), count in self.readers(always).items():
            self.flow(value, readers, count)

    def wrap(self, seconds: float) -> None:
        """Adds a fixed cost if any parameter is sharded."""
        wrapped = self.variable(seconds, False)
        for node, variables in self.op_strategies.items():
            op_strategies = zip(variables, self.found.op_strategies[node], strict=True)
            lies = [
                v
                for v, op_strategy in op_strategies
                if node.op == "placeholder" and op_strategy.results[0] != WHOLE
            ]
            if lies:
                self.rows.add((wrapped,), lies, 0.0, math.inf)

    def variable(self, cost: float, integral: bool) -> int:
        self.costs.append(cost)
        self.integral.append(integral)
        return len(self.costs) - 1

    def readers(self, always: int) -> Counter[tuple[Value, tuple[Wanted, ...]]]:
        """Values with their readers, and the number of equal pairs in repeated blocks."""
        found = self.found
        by_value: dict[Value, dict[Wanted, None]] = {}
        for node, reads in found.reads.items():
            for place, value in enumerate(reads):
                wanted = self.placed(found.same[node], place)
                by_value.setdefault(value, {})[wanted] = None
        inputs = dict(zip(self.graph.inputs, self.graph.placeholders, strict=True))
        whole: Wanted = ((WHOLE, (always,)),)
        for role, result in zip(self.graph.outputs, self.graph.results, strict=True):
            if result is None:
                continue
            wanted = whole
            if isinstance(role, Gradient) and isinstance(role.of, Parameter):
                wanted = self.placed(found.same[inputs[role.of]], None)
            by_value.setdefault(value_of(result), {})[wanted] = None
        return Counter((found.alike(v), tuple(readers)) for v, readers in by_value.items())

    def placed(self, node: fx.Node, place: int | None) -> Wanted:
        """Strategy variables of a node by placement of an operand; None for its own result."""
        wanted: dict[Placement, list[int]] = {}
        for variable, op_strategy in zip(
            self.op_strategies[node], self.found.op_strategies[node], strict=True
        ):
            where = op_strategy.results[0] if place is None else op_strategy.operands[place]
            wanted.setdefault(where, []).append(variable)
        return tuple((p, tuple(v)) for p, v in wanted.items())

    def flow(self, value: Value, readers: Sequence[Wanted], count: int) -> None:
        """Flow constraints from the placement of a value to the placement of each reader."""
        made: dict[Placement, list[int]] = {}
        for variable, op_strategy in zip(
            self.op_strategies[value.node], self.found.op_strategies[value.node], strict=True
        ):
            made.setdefault(op_strategy.results[value.index], []).append(variable)
        paid: dict[tuple[Placement, Placement], int] = {}
        for wanted in readers:
            leaving: dict[Placement, list[int]] = {before: [] for before in made}
            coming: dict[Placement, list[int]] = {after: [] for after, _ in wanted}
            for before in made:
                for after in coming:
                    if redistribute_steps(before, after) is None:
                        continue
                    flow = self.variable(0.0, False)
                    leaving[before].append(flow)
                    coming[after].append(flow)
                    if before != after:
                        once = self.converted(
                            paid, PlannedRedistribution(value, before, after, count)
                        )
                        self.rows.add((once,), (flow,), 0.0, math.inf)
            for before, flows in leaving.items():
                self.rows.add(flows, made[before], 0.0)
            for after, variables in wanted:
                self.rows.add(coming[after], variables, 0.0)

    def converted(
        self, paid: dict[tuple[Placement, Placement], int], conversion: PlannedRedistribution
    ) -> int:
        """Variable of a redistribution, paid once for all readers."""
        key = (conversion.before, conversion.after)
        if key not in paid:
            cost = self.price(conversion.value, *key) * conversion.count
            paid[key] = self.variable(cost, False)
            self.paid[paid[key]] = conversion
        return paid[key]

    def held(self, weight: Weight) -> list[float]:
        """Bytes of every variable."""
        held = [0.0] * len(self.costs)
        for node, variables in self.op_strategies.items():
            for variable, op_strategy in zip(
                variables, self.found.op_strategies[node], strict=True
            ):
                held[variable] = weight.op_strategy(node, op_strategy) * self.count[node]
        for variable, made in self.paid.items():
            held[variable] = weight.conversion(made.value, made.before, made.after) * made.count
        return held

    def run(
        self,
        costs: Sequence[float],
        time_limit_s: float,
        held: Sequence[float] = (),
        cap: float = math.inf,
        gap: float = GAP,
    ) -> OptimizeResult:
        """Minimises `costs` under the constraint that `held` is at most `cap`."""
        rows = self.rows
        shape = (len(rows.low), len(self.costs))
        matrix = csr_array((rows.values, rows.columns, rows.ends), shape=shape)
        constraints = [LinearConstraint(matrix, rows.low, rows.high)]
        if math.isfinite(cap):
            most = max(*held, 1.0)
            constraints.append(LinearConstraint(np.array([held]) / most, -np.inf, cap / most))
        allowed = np.isfinite(self.costs)
        objective = np.where(allowed, costs, 0.0)  # scaled below for HiGHS's absolute tolerances
        scale = objective.max() or 1.0
        result = milp(
            objective / scale,
            constraints=constraints,
            integrality=np.array(self.integral, dtype=int),
            bounds=Bounds(0.0, allowed.astype(float)),
            options={"time_limit": time_limit_s, "mip_rel_gap": gap},
        )
        if result.fun is not None:
            result.fun *= scale
        return result

    def solution(self, result: OptimizeResult, held: Sequence[float], took_s: float) -> Solution:
        """The solution of the chosen variables."""
        chosen = result.x > 0.5
        nbytes = float(sum(h for h, taken in zip(held, chosen, strict=False) if taken))
        op_strategy = {
            node: self.found.op_strategies[node][[chosen[v] for v in variables].index(True)]
            for node, variables in self.op_strategies.items()
        }
        op_strategies = {
            n: op_strategy[stands] for n, stands in self.found.same.items() if stands in op_strategy
        }
        converted = redistributions(self.graph, self.found.same, op_strategies)
        return Solution(
            op_strategies, float(result.fun), result.mip_gap or 0.0, took_s, converted, nbytes
        )
