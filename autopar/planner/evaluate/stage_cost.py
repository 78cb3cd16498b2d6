"""`StageSimulation`: a lowered pipeline stage, and its simulated micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autopar.cost_model.simulator.pipeline import StageCost
from autopar.cost_model.simulator.step import Simulation
from autopar.ir.graph import TrainingGraph, tensor_bytes, tensors
from autopar.ir.roles import StageOutput
from autopar.passes.stage_lowering import MicrobatchPrograms
from autopar.planner.evaluate.stage_memory import StageMemory


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage in isolation.

    Attributes:
        first_s: seconds of the first forward.
        forward_s: seconds of each later forward.
        backward_s: seconds of each backward before the last.
        last_s: seconds of the last backward.
    """

    first_s: float
    forward_s: float
    backward_s: float
    last_s: float

    def cost(self, graph: TrainingGraph, adding_s: float, weights: float) -> StageCost:
        """Cost of the stage in a pipeline.

        Args:
            graph: graph of the stage.
            adding_s: seconds that a backward takes to add gradients to earlier ones.
            weights: fraction of a backward for parameter gradients only.
        """
        return StageCost(
            forward_s=self.forward_s,
            backward_s=self.backward_s + adding_s,
            input_s=self.backward_s * (1.0 - weights),
            weight_s=self.backward_s * weights + adding_s,
            first_s=max(0.0, self.first_s - self.forward_s),
            last_s=max(0.0, self.last_s - self.backward_s),
            sent_bytes=boundary_bytes(graph, "forward"),
            returned_bytes=boundary_bytes(graph, "backward"),
        )


@dataclass(frozen=True)
class StageSimulation:
    """Programs of a stage and their simulations.

    Attributes:
        programs: programs of the micro-batches.
        first: simulation of the first micro-batch.
        more: simulation of a middle micro-batch.
        last: simulation of the last micro-batch.
        adding_s: mean seconds that a backward takes to add gradients to earlier ones.
        weights: fraction of the backward for parameter gradients only.
        split_backward_bytes: bytes kept for that fraction after the rest of the backward.
    """

    programs: MicrobatchPrograms
    first: Simulation
    more: Simulation
    last: Simulation
    adding_s: float = 0.0
    weights: float = 0.0
    split_backward_bytes: int = 0

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
        """Cost of the stage in a pipeline."""
        own = self.first.forward_s, self.more.forward_s, self.more.backward_s, self.last.backward_s
        return StageTimes(*own).cost(self.programs.last, self.adding_s, self.weights)

    def runs(self, micro_batches: int) -> Iterator[tuple[Simulation, int]]:
        """Simulations of micro-batches, and the count of each."""
        yield self.more, micro_batches - 1
        yield self.first, 1


def boundary_bytes(graph: TrainingGraph, phase: str) -> int:
    """Bytes that a stage sends in a phase of one micro-batch."""
    return sum(
        tensor_bytes(tensors(node)[0])
        for role, node in zip(graph.outputs, graph.results, strict=True)
        if isinstance(role, StageOutput) and role.phase == phase and node is not None
    )
