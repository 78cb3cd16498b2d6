"""`StageFigures`: what the step of a pipeline needs to know of a stage, as numbers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.core.exposure import Exposure, by_cause
from autopar.core.ir.graph import TrainingGraph, tensor_bytes, tensors
from autopar.core.ir.roles import StageOutput
from autopar.cost_model.algorithms.wire_bytes import node_bytes
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.memory.host_memory import HostMemory
from autopar.cost_model.simulator.pipeline import StageCost
from autopar.cost_model.simulator.step import Simulation
from autopar.passes.stage_lowering import MicrobatchPrograms
from autopar.planner.evaluate.stage_memory import StageMemory

Halves = tuple[float, float]
"""Seconds of a forward and of a backward."""


@dataclass(frozen=True)
class StageFigures:
    """Figures of a stage, over all micro-batches of a step unless they say otherwise.

    Attributes:
        cost: cost of one micro-batch.
        memory: memory of a micro-batch before the last one, and of the last one.
        compute_s: seconds of all operators.
        within_s: seconds with a collective of the stage in flight.
        exposed_s: seconds of stalls for these collectives.
        waits: these seconds by kind of collective.
        causes: these seconds by cause.
        exposures: exposed collectives of one micro-batch.
        provenance: number of measured, imported and modelled times.
        host: pinned memory of the host.
        context_bytes: modelled bytes of the CUDA context; 0 on a CPU.
        node_bytes: bytes that leave a node whose ranks all run the stage, for its collectives.
    """

    cost: StageCost
    memory: tuple[StageMemory, StageMemory]
    compute_s: float
    within_s: float
    exposed_s: float
    waits: Mapping[str, float]
    causes: Mapping[str, float]
    exposures: tuple[Exposure, ...]
    provenance: Mapping[str, int]
    host: HostMemory
    context_bytes: int
    node_bytes: float


@dataclass(frozen=True)
class StageSimulation:
    """Programs of a stage, and simulations of its first, a middle and its last micro-batch.

    Attributes:
        adding_s: mean seconds that a backward takes to add gradients to earlier ones.
        weights: fraction of the backward for parameter gradients only.
        split_backward_bytes: bytes kept for that fraction after the rest of the backward.
        pace: seconds of its rank for a second of the mean rank.
    """

    programs: MicrobatchPrograms
    first: Simulation
    more: Simulation
    last: Simulation
    adding_s: float
    weights: float
    split_backward_bytes: int
    pace: float = 1.0

    @cached_property
    def memory(self) -> tuple[StageMemory, StageMemory]:
        """Memory of a micro-batch before the last one, and of the last one."""
        ending = StageMemory.of(self.last, self.programs.last, self.split_backward_bytes)
        same = self.more is self.last
        return ending if same else StageMemory.of(
            self.more, self.programs.more, self.split_backward_bytes
        ), ending

    @property
    def cost(self) -> StageCost:
        first, more, last = (
            (s.forward_s, s.backward_s) for s in (self.first, self.more, self.last)
        )
        own = stage_cost(self.programs.last, (first, more, last), self.adding_s, self.weights)
        return own.at_pace(self.pace)

    def figures(self, micro_batches: int, cluster: Cluster, backend: str) -> StageFigures:
        """The figures of a step with so many micro-batches, and a backend of collectives."""
        sent = (
            times * node_bytes(graph, backend, cluster.ranks_per_node)
            for graph, times in self.programs.counted(micro_batches)
        )
        runs = [(self.last, 1)]
        if micro_batches > 1:
            runs += [(self.more, micro_batches - 2), (self.first, 1)]
        closing = {item.name for item in self.last.exposures}
        opening = (item for item in self.first.exposures if item.name not in closing)
        compute_s = sum(times * run.compute_s for run, times in runs)
        return StageFigures(
            cost=self.cost,
            memory=self.memory,
            compute_s=self.pace * (compute_s + micro_batches * self.adding_s),
            within_s=sum(times * run.communication_s for run, times in runs),
            exposed_s=sum(times * run.exposed_s for run, times in runs),
            waits=summed((run.waits, times) for run, times in runs),
            causes=summed((by_cause(run.exposures), times) for run, times in runs),
            exposures=(*self.last.exposures, *opening),
            provenance=self.last.provenance,
            host=HostMemory.of(self.programs.last, on_gpus=cluster.on_gpus),
            context_bytes=self.last.memory.context,
            node_bytes=sum(sent),
        )


def stage_cost(
    graph: TrainingGraph, halves: tuple[Halves, Halves, Halves], adding_s: float, weights: float
) -> StageCost:
    """Cost of a stage from the times of its first, a middle and its last micro-batch.

    A backward adds its gradients to earlier ones in `adding_s` seconds; `weights` is its fraction
    for parameter gradients only.
    """
    (opening_s, _), (forward_s, backward_s), (_, closing_s) = halves
    return StageCost(
        forward_s=forward_s,
        backward_s=backward_s + adding_s,
        input_s=backward_s * (1.0 - weights),
        weight_s=backward_s * weights + adding_s,
        first_s=max(0.0, opening_s - forward_s),
        last_s=max(0.0, closing_s - backward_s),
        sent_bytes=boundary_bytes(graph, "forward"),
        returned_bytes=boundary_bytes(graph, "backward"),
    )


def boundary_bytes(graph: TrainingGraph, phase: str) -> int:
    """Bytes that a stage sends in a phase of one micro-batch."""
    return sum(
        tensor_bytes(tensors(node)[0])
        for role, node in zip(graph.outputs, graph.results, strict=True)
        if isinstance(role, StageOutput) and role.phase == phase and node is not None
    )


def summed(tables: Iterable[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Sum of tables of seconds, each multiplied by its count."""
    total: dict[str, float] = {}
    for table, times in tables:
        for key, seconds in table.items():
            total[key] = total.get(key, 0.0) + times * seconds
    return total
