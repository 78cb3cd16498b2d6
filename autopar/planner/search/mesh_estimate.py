"""`MeshEstimate`: step time and memory of a mesh, from one micro-batch lowered with every cut.

The lowering gives the compute, the messages along the model's axes, and the saved and stored
bytes of a micro-batch. A formula extends them to the step of any mesh with this micro-batch. The
estimate orders the meshes; a lower bound excludes some. Chosen plans are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.core.ir.graph import ParameterInfo, TrainingGraph
from autopar.core.ir.mesh_levels import DATA_AXIS, INTER_NODE, INTRA_NODE, Levels, level
from autopar.core.ir.messages import collective_of
from autopar.core.ir.roles import Gradient, Parameter
from autopar.core.plan.strategy import Strategy
from autopar.core.schedules import SPLIT_SCHEDULES
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.simulator.bound import least_seconds
from autopar.cost_model.simulator.step import half_seconds
from autopar.planner.evaluate.cut_points import segments_of
from autopar.planner.evaluate.p2p import P2PCost
from autopar.planner.machine import Machine
from autopar.planner.placement.carry import SolvedAxes
from autopar.planner.problem import PlanningProblem
from autopar.planner.search.build_evaluator import build_evaluator
from autopar.planner.search.pipeline_search import cut_everywhere, cut_points_of

Figures = NDArray[np.float64]
"""Figures that add up over the blocks of a model, in the order of `MicroBatchFigures`."""

FORWARD_SHARE = 1.0 / 3.0
"""Share of the forward in a micro-batch's compute; full checkpointing adds as much again."""

EXPOSED_SHARE = 0.1
"""Share of a collective that the backward cannot hide: the last bucket and the launch."""

MOST_STAGES_PER_RANK = 2
"""Stages of a rank under an interleaved schedule, or in a V."""

CHECKPOINTED_SHARE = 0.1
"""Share of the saved activations that full checkpointing keeps."""


class MicroBatchFigures(NamedTuple):
    """One micro-batch of the whole model on one rank of the model's axes (tp, cp, ep).

    Attributes:
        compute_s: seconds of all operators.
        within_s: exposed seconds of messages along the model's axes.
        parameter_bytes: bytes of the parameters.
        saved_bytes: bytes that the forward saves for the backward.
        crossing_bytes: bytes sent forward and backward across the cut with the least traffic.
        least_s: seconds of all operators with the messages that no schedule can hide.
        summed_bytes: bytes of the parameters whose gradients the ranks of these axes sum, since
            each computes for other rows.
    """

    compute_s: float
    within_s: float
    parameter_bytes: float
    saved_bytes: float
    crossing_bytes: float
    least_s: float
    summed_bytes: float


def interpolate_slices(known: Mapping[int, MicroBatchFigures], slices: int) -> MicroBatchFigures:
    """Figures for a number of slices of the batch, by a power law through two sampled numbers."""
    (one, first), (other, second) = known.items() if len(known) > 1 else [*known.items()] * 2
    if slices == one or one == other:
        return first
    power = math.log(slices / one) / math.log(other / one)
    a, b = np.array(first), np.array(second)
    ratio = np.divide(b, a, out=np.ones_like(a), where=(a > 0) & (b > 0))
    return MicroBatchFigures(*map(float, a * ratio**power))


def micro_batch_figures(
    problem: PlanningProblem, graph: TrainingGraph, machine: Machine, solved: SolvedAxes
) -> MicroBatchFigures:
    """Figures of a captured micro-batch, lowered along the axes of the problem's strategy."""
    evaluator = build_evaluator(problem, graph, machine, carried=solved)
    strategy = problem.strategy
    cut_points = cut_points_of(strategy, problem.model, graph)
    micro_batches = strategy.micro_batches or 1
    whole, lowered = cut_everywhere(evaluator.setup, strategy, cut_points, micro_batches)
    operators = machine.operators.of(lowered)
    compute_s = sum(operators.seconds(node).seconds for node in lowered.calls())
    (halves,) = half_seconds(lowered, [machine.cluster], machine.operators)
    segments = segments_of(whole, cut_points, [0.0] * len(cut_points.names), 1.0)
    return MicroBatchFigures(
        compute_s,
        max(0.0, sum(halves) - compute_s) if strategy.axes else 0.0,
        sum(segment.held_bytes for segment in segments),
        sum(segment.saved_bytes for segment in segments),
        min((s.sent_bytes + s.returned_bytes for s in segments[1:]), default=0),
        least_seconds(lowered, machine.cluster, machine.operators) if strategy.axes else compute_s,
        sum(map(attrgetter("bytes"), summed_parameters(lowered))) if strategy.axes else 0.0,
    )


def summed_parameters(lowered: TrainingGraph) -> Iterator[ParameterInfo]:
    """Parameters whose gradients end in an all-reduce, with nothing but copies behind it."""
    for role, node in zip(lowered.outputs, lowered.results, strict=True):
        if node is None or not isinstance(role, Gradient) or not isinstance(role.of, Parameter):
            continue
        while collective_of(node) is None and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
        if collective_of(node) == "all_reduce":
            yield lowered.parameters[role.of.name]


@dataclass(frozen=True)
class MeshEstimate:
    """Expected step of a strategy that fixes a mesh and a number of micro-batches.

    Attributes:
        step_s: estimated seconds of a step; infinite if nothing is expected to fit.
        least_s: lower bound of the seconds of a step.
        least_bytes: estimated bytes with the most sharding and checkpointing.
        divides: whether the axes divide more than rows, which data parallelism could divide too.
    """

    strategy: Strategy
    step_s: float
    least_s: float
    least_bytes: float
    divides: bool = True

    @property
    def is_data_parallel(self) -> bool:
        """Whether a plan is expected to fit that the mesh without tp has as well."""
        return not self.divides and math.isfinite(self.step_s)


def estimate_mesh(
    problem: PlanningProblem,
    micro_batch: MicroBatchFigures,
    machine: Machine,
    padding: float = 1.0,
) -> MeshEstimate:
    """Estimates a problem whose strategy fixes mesh and micro-batches.

    `padding` is the ratio of ZeRO's padded shards to the parameters.
    """
    model = _StepModel(problem, micro_batch, machine, padding)
    cap = problem.cap_on(machine.cluster)
    options = [
        (model.step_s(zero, checkpointed), model.nbytes(zero, checkpointed))
        for zero, checkpointed in model.options()
    ]
    fitting = [seconds for seconds, nbytes in options if cap is None or nbytes <= cap]
    least_bytes = min(nbytes for _, nbytes in options)
    return MeshEstimate(problem.strategy, min(fitting, default=np.inf), model.least_s, least_bytes)


@dataclass
class _StepModel:
    """Seconds and bytes of a step, by ZeRO stage and checkpointing."""

    problem: PlanningProblem
    micro_batch: MicroBatchFigures
    machine: Machine
    padding: float

    def __post_init__(self) -> None:
        strategy = self.problem.strategy
        self.stages, self.micro_batches = strategy.pp_size, strategy.micro_batches or 1
        self.parameter_bytes = self.micro_batch.parameter_bytes / self.stages
        self.relief = self.machine.operators.relief(self.problem.world_size)
        # sizes of the data axis' levels, if ZeRO shards over the inner one only
        self.levels = Levels(DATA_AXIS, strategy.dp_shard or 1).sizes(self.problem.dp_size)

    def options(self) -> Iterator[tuple[int, bool]]:
        """ZeRO stages that the strategy leaves open, with and without full checkpointing."""
        fixed = self.problem.strategy
        free = (1, 3) if self.levels else (0, 1, 3)
        zero_stages = (fixed.zero,) if isinstance(fixed.zero, int) else free
        levels = (False, True) if fixed.recompute is None else (fixed.recompute != "none",)
        return ((zero, checkpointed) for zero in zero_stages for checkpointed in levels)

    @property
    def least_s(self) -> float:
        """Lower bound in seconds: the longer of all compute and the reduction of all gradients.

        Without stages, compute waits for messages along the model's axes. The update follows. Each
        stage of a pipeline waits for the first micro-batch and after its last one, while the
        other stages compute a forward and a backward without gradients of parameters. Its own such
        gradients may fill the second wait. Two equal stages per rank halve both. Where ranks share
        cores, those that wait free them for others.
        """
        found = self.micro_batch
        each_s = found.least_s if self.stages == 1 else found.compute_s / self.stages
        chunks = max(MOST_STAGES_PER_RANK, self.problem.strategy.stages_per_rank or 1)
        waits = 1 if self.problem.strategy.schedule in (None, *SPLIT_SCHEDULES) else 2
        fill_s = waits * FORWARD_SHARE * (self.stages - 1) * each_s / chunks
        full_s = self.micro_batches * each_s
        compute_s = max(full_s, (full_s + fill_s) / self.relief)
        sums_s = self.scatter_s + self.data_s("all_gather")
        compute_s += min(self.update_s(zero) for zero, _ in self.options())
        # Hybrid sharding excludes stage 0, and with it the plain all-reduce.
        return max(compute_s, sums_s if self.levels else min(self.data_s("all_reduce"), sums_s))

    def step_s(self, zero: int, checkpointed: bool) -> float:
        compute_s = self.micro_batch.compute_s * (1 + FORWARD_SHARE * checkpointed)
        each_s = (compute_s + self.micro_batch.within_s) / self.stages
        sent_s = 0.0
        if self.stages > 1:
            link = P2PCost(self.machine.cluster, self.problem.mesh)
            sent_s = link.slowest_s(round(self.micro_batch.crossing_bytes))
        slots = [self.slot_s(index, each_s) + sent_s for index in range(self.slots)]
        return sum(slots) + self.exposed_s(zero, each_s) + self.update_s(zero)

    @property
    def slots(self) -> int:
        """Micro-batches that a pipeline could compute in the time of a step, one after another."""
        return self.micro_batches + self.stages - 1

    def slot_s(self, index: int, each_s: float) -> float:
        """Seconds of a micro-batch on a stage while the stages of a slot compute at once."""
        # Waiting stages leave shared cores to others. With all counted as busy, a mesh of 103 ms
        # was estimated at 155.6 ms and never planned.
        filling, draining = index + 1, self.slots - index
        busy = min(filling, draining, self.stages, self.micro_batches)
        return each_s * max(1 / self.relief, busy / self.stages)

    def exposed_s(self, zero: int, each_s: float) -> float:
        """Exposed seconds of the data axis, with `each_s` seconds of a micro-batch on a stage."""
        backward_s = each_s * (1 - FORWARD_SHARE)
        if zero == 0:
            return _exposed(self.data_s("all_reduce"), backward_s)
        gather_s, scatter_s = self.data_s("all_gather"), self.scatter_s
        # Stages 1 and 2 gather once a step. Stage 3 gathers in the forward and the backward of
        # every micro-batch.
        if zero < 3:
            return _exposed(scatter_s, backward_s) + _exposed(gather_s, each_s - backward_s)
        return self.micro_batches * _exposed(2 * gather_s + scatter_s, each_s)

    @property
    def scatter_s(self) -> float:
        """Seconds to reduce gradients to shards: over the inner level first, if there is one."""
        inner_s = self.data_s("reduce_scatter")
        return inner_s + self.data_s("all_reduce", INTER_NODE) if self.levels else inner_s

    def data_s(self, collective: str, part: str = INTRA_NODE) -> float:
        """Seconds of a collective of all gradients of a stage, over a level if there are two."""
        cluster, nbytes = self.machine.cluster, self.parameter_bytes
        axis = level(DATA_AXIS, part) if self.levels else DATA_AXIS
        if part == INTER_NODE:
            nbytes /= self.levels[level(DATA_AXIS, INTRA_NODE)]
        mesh = {**dict(self.problem.mesh), **self.levels}
        shape = GroupShape.of_axis(mesh, axis, cluster.ranks_per_node)
        nbytes *= self.sent_share(collective) * (
            1.0 if collective == "all_reduce" else self.padding
        )
        dtype = str(self.problem.dtype).removeprefix("torch.")
        return cluster.seconds(collective, nbytes, shape, dtype).seconds

    def sent_share(self, collective: str) -> float:
        """Bytes sent for each byte of a parameter: those of autocast, or of `reduce_precision`."""
        problem = self.problem
        name = problem.precision if collective == "all_gather" else problem.reduce_precision
        size = self.problem.dtype.itemsize
        return min(size, getattr(torch, name).itemsize) / size if name else 1.0

    def update_s(self, zero: int) -> float:
        ranks = self.problem.shard_ranks if zero else 1
        nbytes = round(self.parameter_bytes * (self.padding if zero else 1.0) / ranks)
        return self.machine.update.seconds([nbytes], dtensors=False).seconds

    def nbytes(self, zero: int, checkpointed: bool) -> float:
        """Bytes of parameters, gradients, optimizer state and saved activations."""
        ranks, state = self.problem.shard_ranks / self.padding, self.problem.state_ratio
        by_stage = {0: 2.0 + state, 1: 2.0 + state / ranks, 2: 1.0 + (1.0 + state) / ranks}
        copies = by_stage.get(zero, (2.0 + state) / ranks)
        in_flight = min(self.stages, self.micro_batches)
        saved = self.micro_batch.saved_bytes / self.stages * in_flight
        return self.parameter_bytes * copies + (CHECKPOINTED_SHARE if checkpointed else 1.0) * saved


def _exposed(seconds: float, hiding_s: float) -> float:
    """Seconds of a collective that `hiding_s` seconds of compute do not hide."""
    return max(seconds - hiding_s, EXPOSED_SHARE * seconds)
