"""Outlines: what a mesh can be expected to do, from a look at the model cut everywhere.

One lowering of a micro-batch, with a cut at every place, says what it computes, sends along the
model's own axes, saves and holds. From these figures the step of any mesh with that micro-batch
follows by arithmetic: an estimate, by which meshes are looked at in order, and what the step cannot
be shorter than, by which they are left out. What is chosen is simulated, whatever its outline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.simulator.step import half_seconds
from autopar.ir.graph import TrainingGraph
from autopar.ir.mesh_levels import DATA_AXIS, INTER_NODE, INTRA_NODE, Levels, level
from autopar.plan.strategy import Strategy
from autopar.planner.evaluate.cut_points import segments_of
from autopar.planner.evaluate.p2p import P2PCost
from autopar.planner.machine import Machine
from autopar.planner.search.fixed_mesh import PlanningProblem, cap_of, evaluator_of
from autopar.planner.search.pipeline_search import at_cut_points, cut_points_of

Figures = NDArray[np.float64]
"""What adds up over the blocks of a model."""

AGAIN = 1.0 / 3.0
"""Of what a micro-batch computes, the forward: so much more is it with all recomputed."""

EXPOSED = 0.1
"""Of a sum that the backward could hide, what it does not: the last bucket, and what is issued."""


@dataclass(frozen=True)
class MicroBatch:
    """What one micro-batch of the whole model takes on a rank of its own axes (tp, cp, ep).

    Attributes:
        compute_s: seconds of all operators.
        within_s: seconds in which it waits for what is sent along those axes.
        parameter_bytes: of the parameters there.
        saved_bytes: what the backward reads of the forward.
        crossing_bytes: what is sent on and back where least crosses a cut.
    """

    compute_s: float
    within_s: float
    parameter_bytes: float
    saved_bytes: float
    crossing_bytes: float

    @staticmethod
    def of(figures: Figures) -> MicroBatch:
        """The same by name."""
        return MicroBatch(*map(float, figures))

    @property
    def figures(self) -> Figures:
        """The same as what can be added up over blocks."""
        return np.array(astuple(self))


def between(known: Mapping[int, MicroBatch], slices: int) -> MicroBatch:
    """What one of so many slices of a batch takes, from two numbers of them.

    What it takes goes with a power of its rows; that of parameters is 0.
    """
    (one, first), (other, second) = known.items() if len(known) > 1 else [*known.items()] * 2
    if slices == one or one == other:
        return first
    power = math.log(slices / one) / math.log(other / one)
    a, b = first.figures, second.figures
    grows = (a > 0) & (b > 0)
    ratio = np.divide(b, a, out=np.ones_like(a), where=grows)
    return MicroBatch.of(a * ratio**power)


def micro_batch_of(problem: PlanningProblem, graph: TrainingGraph, machine: Machine) -> MicroBatch:
    """Looks at a captured micro-batch along the axes of a strategy."""
    evaluator = evaluator_of(problem, graph, machine)
    places = cut_points_of(problem.strategy, problem.model, graph)
    count = problem.strategy.micro_batches or 1
    _, whole, lowered = at_cut_points(evaluator, problem.strategy, places, count)
    operators = machine.operators.of(lowered)
    computed = sum(operators.seconds(node).seconds for node in lowered.calls())
    (halves,) = half_seconds(lowered, [machine.cluster], machine.operators)
    within = max(0.0, sum(halves) - computed) if problem.strategy.axes else 0.0
    segments = segments_of(whole, places, [0.0] * len(places.names), 1.0)
    crossing = (each.sent_bytes + each.returned_bytes for each in segments[1:])
    return MicroBatch(
        computed,
        within,
        sum(each.held_bytes for each in segments),
        sum(each.saved_bytes for each in segments),
        min(crossing, default=0),
    )


@dataclass(frozen=True)
class MeshEstimate:
    """What a strategy with a mesh and a number of micro-batches can be expected to do.

    Attributes:
        strategy: with `micro_batches`.
        step_s: seconds of a step, if it fits; infinite where nothing seems to.
        least_s: seconds that no step of it is shorter than.
        least_bytes: of memory, if all that can be is divided and computed again.
    """

    strategy: Strategy
    step_s: float
    least_s: float
    least_bytes: float


def estimate_mesh(problem: PlanningProblem, micro: MicroBatch, machine: Machine) -> MeshEstimate:
    """The outline of a question whose strategy fixes mesh and micro-batches."""
    it = _Arithmetic(problem, micro, machine)
    cap = cap_of(problem, machine.cluster)
    options = [(it.step_s(zero, again), it.nbytes(zero, again)) for zero, again in it.options()]
    fitting = [seconds for seconds, nbytes in options if cap is None or nbytes <= cap]
    least = min(nbytes for _, nbytes in options)
    return MeshEstimate(problem.strategy, min(fitting, default=np.inf), it.least_s, least)


@dataclass(frozen=True)
class _Arithmetic:
    """Seconds and bytes of a step."""

    problem: PlanningProblem
    micro: MicroBatch
    machine: Machine

    @property
    def stages(self) -> int:
        return self.problem.strategy.pp_size

    @property
    def count(self) -> int:
        return self.problem.strategy.micro_batches or 1

    @property
    def own_bytes(self) -> float:
        """Of the parameters of a stage."""
        return self.micro.parameter_bytes / self.stages

    def options(self) -> Iterator[tuple[int, bool]]:
        """ZeRO stages, and whether everything is computed again."""
        fixed = self.problem.strategy
        free = (1, 3) if self.levels else (0, 1, 3)
        stages = (fixed.zero,) if isinstance(fixed.zero, int) else free
        levels = (False, True) if fixed.recompute is None else (fixed.recompute != "none",)
        return ((zero, again) for zero in stages for again in levels)

    @property
    def least_s(self) -> float:
        """Computing alone, on ranks that never wait; or the sums of gradients alone."""
        computed = self.count * self.micro.compute_s / self.stages
        sums = self.scatter_s + self.data_s("all_gather")
        return max(computed, sums if self.levels else min(self.data_s("all_reduce"), sums))

    def step_s(self, zero: int, again: bool) -> float:
        """An estimate of a step."""
        micro = self.micro
        each = (micro.compute_s * (1 + AGAIN * again) + micro.within_s) / self.stages
        sent = self.crossing_s if self.stages > 1 else 0.0
        busy = (self.count + self.stages - 1) * (each + sent)
        return busy + self.exposed_s(zero, each) + self.update_s(zero)

    @property
    def crossing_s(self) -> float:
        """Of what crosses a cut, there and back."""
        link = P2PCost(self.machine.cluster, self.problem.mesh)
        return link.seconds(round(self.micro.crossing_bytes))

    def exposed_s(self, zero: int, each: float) -> float:
        """What the axis of the data adds."""
        backward = each * (1 - AGAIN)
        if zero == 0:
            return _beyond(self.data_s("all_reduce"), backward)
        gather, scatter = self.data_s("all_gather"), self.scatter_s
        if zero < 3:
            return _beyond(scatter, backward) + _beyond(gather, each - backward)
        return self.count * _beyond(2 * gather + scatter, each)

    @cached_property
    def levels(self) -> dict[str, int]:
        """Of the axis of the data, where shards are kept over neighbours only."""
        neighbours = self.problem.strategy.dp_shard or 1
        return Levels(DATA_AXIS, neighbours).sizes(self.problem.dp_size)

    @property
    def scatter_s(self) -> float:
        """Of sums of which a rank keeps its shard: over neighbours first, if these share them."""
        own = self.data_s("reduce_scatter")
        return own + self.data_s("all_reduce", INTER_NODE) if self.levels else own

    def data_s(self, collective: str, part: str = INTRA_NODE) -> float:
        """Of one collective of all gradients of a stage, over the ranks of the data.

        Where shards are kept over neighbours, over these, or of one rank's shards over the others.
        """
        cluster, nbytes = self.machine.cluster, self.own_bytes
        axis = level(DATA_AXIS, part) if self.levels else DATA_AXIS
        if part == INTER_NODE:
            nbytes /= self.levels[level(DATA_AXIS, INTRA_NODE)]
        mesh = {**dict(self.problem.mesh), **self.levels}
        shape = GroupShape.of_axis(mesh, axis, cluster.ranks_per_node)
        dtype = str(self.problem.dtype).removeprefix("torch.")
        return cluster.seconds(collective, nbytes, shape, dtype).seconds

    def update_s(self, zero: int) -> float:
        """Of the optimizer's step."""
        ranks = self.problem.shard_ranks if zero else 1
        return self.machine.update.seconds([round(self.own_bytes / ranks)], dtensors=False).seconds

    def nbytes(self, zero: int, again: bool) -> float:
        """Of parameters, gradients, states, and what micro-batches under way save."""
        ranks, state = self.problem.shard_ranks, self.problem.state_ratio
        parts = {0: 2.0 + state, 1: 2.0 + state / ranks, 2: 1.0 + (1.0 + state) / ranks}
        copies = parts.get(zero, (2.0 + state) / ranks)
        saved = self.micro.saved_bytes / self.stages * min(self.stages, self.count)
        return self.own_bytes * copies + (0.1 if again else 1.0) * saved


def _beyond(seconds: float, hiding: float) -> float:
    """What is not hidden of something behind something else."""
    return max(seconds - hiding, EXPOSED * seconds)
