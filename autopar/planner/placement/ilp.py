"""`solve`: the cheapest operator strategies of a graph along an axis, by integer programming.

- Each strategy of an operator has a 0/1 variable; exactly one strategy per operator is chosen.
- Each value has a variable per redistribution, from a placement of its producer to a placement of
  a reader. All readers share its cost.
- Repeated blocks share variables, so the size of the program does not grow with depth.

The solver is HiGHS (scipy.optimize.milp).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import fx

from autopar.core.common.deadline import check_time, remaining_s
from autopar.core.ir.graph import TrainingGraph, Value
from autopar.core.ir.placement import OpStrategy, Placement, Replicate
from autopar.errors import PlanError
from autopar.passes.core.untrained_outputs import returned_as
from autopar.passes.rules.operators.attention import ties_backward
from autopar.passes.rules.redistribute import redistribute_steps
from autopar.planner.placement.redistributions import (
    PlannedRedistribution,
    readers,
    redistributions,
)
from autopar.planner.placement.strategies import StrategyChoices, strategy_choices

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

Price = Callable[[Value, Placement, Placement], float]
"""Seconds to redistribute a value between two placements; infinite if forbidden."""

Work = Callable[[fx.Node, OpStrategy], float]
"""Seconds of an operator under a strategy."""

TIME_LIMIT_S = 120.0
"""Seconds after which the best known solution is used.

256 experts take 8 s to solve, and half a minute beside other work, which must not be an error.
"""

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
        nbytes: bytes stored on a rank, counted by `Weight`; 0 without a memory constraint.
    """

    op_strategies: Mapping[fx.Node, OpStrategy]
    seconds: float
    gap: float
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
    ring: bool | None = False,
    route: bool | None = None,
) -> Solution:
    """Finds the strategies with the fewest seconds, under a memory constraint if given.

    A step takes `wrapping` more seconds if any parameter is sharded. `ring` and `route` are as
    for `strategy_choices`.

    Raises:
        PlanError: No solution was found in time.
    """
    choices = strategy_choices(graph, ranks, pins, ring=ring, route=route)
    program = _Program(graph, choices, price, work, update, wrapping)
    if weight is None:
        result, held = program.run(program.costs), [0.0]
    else:
        held = program.held(weight)
        result = program.run(program.costs, held, weight.cap)
        if result.status == INFEASIBLE:
            least = program.run(held, gap=0.0)
            if least.x is not None:
                # The exact minimum as a cap could be infeasible within the solver's tolerances.
                result = program.run(program.costs, held, least.fun * (1 + 1e-6))
    if result.x is None:
        check_time()
        raise PlanError(f"no placements were found in {TIME_LIMIT_S:g} s: {result.message}")
    return program.solution(result, held)


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
        self.choices: dict[fx.Node, list[tuple[int, OpStrategy]]] = {}
        self.paid: dict[int, PlannedRedistribution] = {}
        for node, op_strategies in found.op_strategies.items():
            check_time()
            seconds, count = work if node.op == "call_function" else update, self.count[node]
            self.choices[node] = [
                (self.variable(seconds(node, each) * count if seconds else 0.0, True), each)
                for each in op_strategies
            ]
            self.rows.add((variable for variable, _ in self.choices[node]), (), 1.0)
        wrapped = self.variable(wrapping, False)
        for node, choices in self.choices.items():
            lies = [v for v, each in choices if each.results and each.results[0] != WHOLE]
            if node.op == "placeholder" and lies:
                self.rows.add((wrapped,), lies, 0.0, math.inf)
        always = self.variable(0.0, False)
        self.rows.add((always,), (), 1.0)
        for (value, wanted), count in self.wanted(always).items():
            self.flow(value, wanted, count)

    def variable(self, cost: float, integral: bool) -> int:
        self.costs.append(cost)
        self.integral.append(integral)
        return len(self.costs) - 1

    def wanted(self, always: int) -> Counter[tuple[Value, tuple[Wanted, ...]]]:
        """Values with their readers, and the number of equal pairs in repeated blocks."""
        by_value: dict[Value, dict[Wanted, None]] = {}
        for value, node, place in readers(self.graph):
            wanted: Wanted = ((WHOLE, (always,)),)
            if node is not None:
                stands = self.found.same[node]
                is_own = node is value.node
                wanted = self.made(stands, value.index) if is_own else self.placed(stands, place)
            by_value.setdefault(value, {})[wanted] = None
        alike = self.found.alike
        # Blocks count together only if their readers want the same. Charging all of them for what
        # the last one's readers want made two blocks cost more per layer than one or four.
        return Counter((alike(value), tuple(wanted)) for value, wanted in by_value.items())

    def placed(self, node: fx.Node, place: int | None) -> Wanted:
        """Strategy variables of a node by placement of an operand; None for its own result."""
        wanted: dict[Placement, list[int]] = {}
        for variable, op_strategy in self.choices[node]:
            where = op_strategy.results[0] if place is None else op_strategy.operands[place]
            wanted.setdefault(where, []).append(variable)
        return tuple((p, tuple(v)) for p, v in wanted.items())

    def made(self, node: fx.Node, index: int) -> Wanted:
        """Strategy variables of a node by the placement in which its result is returned."""
        wanted: dict[Placement, list[int]] = {}
        for variable, op_strategy in self.choices[node]:
            wanted.setdefault(returned_as(op_strategy.results[index]), []).append(variable)
        return tuple((p, tuple(v)) for p, v in wanted.items())

    def flow(self, value: Value, read: Sequence[Wanted], count: int) -> None:
        """Flow constraints from the placement of a value to the placement of each reader."""
        made: dict[Placement, list[int]] = {}
        for variable, op_strategy in self.choices[value.node]:
            made.setdefault(op_strategy.results[value.index], []).append(variable)
        paid: dict[tuple[Placement, Placement], int] = {}
        for wanted in read:
            leaving: dict[Placement, list[int]] = {before: [] for before in made}
            coming: dict[Placement, list[int]] = {after: [] for after, _ in wanted}
            for before in made:
                for after in coming:
                    if redistribute_steps(before, after) is None:
                        continue
                    if before != after and ties_backward(value):
                        continue
                    # Integral anyway: one placement is made and one is read, so one flow is 1.
                    flow = self.variable(0.0, False)
                    leaving[before].append(flow)
                    coming[after].append(flow)
                    if before == after:
                        continue
                    if (key := (before, after)) not in paid:  # once for all readers
                        paid[key] = self.variable(self.price(value, *key) * count, False)
                        self.paid[paid[key]] = PlannedRedistribution(value, *key, count)
                    self.rows.add((paid[key],), (flow,), 0.0, math.inf)
            # Equalities at both ends make the relaxation tight. Without them the gap was 11 % after
            # 30 s; with them a GPT's program is solved in half a second.
            for before, flows in leaving.items():
                self.rows.add(flows, made[before], 0.0)
            for after, variables in wanted:
                self.rows.add(coming[after], variables, 0.0)

    def held(self, weight: Weight) -> list[float]:
        held = [0.0] * len(self.costs)
        for node, choices in self.choices.items():
            for variable, op_strategy in choices:
                held[variable] = weight.op_strategy(node, op_strategy) * self.count[node]
        for variable, made in self.paid.items():
            held[variable] = weight.conversion(made.value, made.before, made.after) * made.count
        return held

    def run(
        self,
        costs: Sequence[float],
        held: Sequence[float] = (),
        cap: float = math.inf,
        gap: float = GAP,
    ) -> OptimizeResult:
        """Minimises `costs` under the constraint that `held` is at most `cap`."""
        # Importing scipy.optimize is slow, and most ranks and commands never solve a program.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        check_time()
        rows = self.rows
        shape = (len(rows.low), len(self.costs))
        matrix = csr_array((rows.values, rows.columns, rows.ends), shape=shape)
        constraints = [LinearConstraint(matrix, rows.low, rows.high)]
        if math.isfinite(cap):
            most = max(*held, 1.0)
            constraints.append(LinearConstraint(np.array([held]) / most, -np.inf, cap / most))
        # milp refuses infinite costs, so forbidden variables get an upper bound of 0 instead.
        allowed = np.isfinite(self.costs)
        objective = np.where(allowed, costs, 0.0)  # scaled below for HiGHS's absolute tolerances
        scale = objective.max() or 1.0
        result = milp(
            objective / scale,
            constraints=constraints,
            integrality=np.array(self.integral, dtype=int),
            bounds=Bounds(0.0, allowed.astype(float)),
            options={"time_limit": min(TIME_LIMIT_S, remaining_s()), "mip_rel_gap": gap},
        )
        if result.fun is not None:
            result.fun *= scale
        return result

    def solution(self, result: OptimizeResult, held: Sequence[float]) -> Solution:
        chosen = result.x > 0.5
        nbytes = float(sum(h for h, taken in zip(held, chosen, strict=False) if taken))
        op_strategy = {
            node: next(each for variable, each in choices if chosen[variable])
            for node, choices in self.choices.items()
        }
        op_strategies = {
            n: op_strategy[stands] for n, stands in self.found.same.items() if stands in op_strategy
        }
        converted = redistributions(self.graph, self.found.same, op_strategies)
        return Solution(op_strategies, float(result.fun), result.mip_gap or 0.0, converted, nbytes)
