"""What a stage of a pipeline was lowered to, and what is predicted of it alone."""

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
    """Seconds of a stage alone.

    Attributes:
        first_s: of the forward of the first micro-batch.
        forward_s: of those behind it.
        backward_s: of a backward but the last.
        last_s: of the last.
    """

    first_s: float
    forward_s: float
    backward_s: float
    last_s: float

    def cost(self, graph: TrainingGraph, adding_s: float, weights: float) -> StageCost:
        """What it takes among others.

        Args:
            graph: of the stage.
            adding_s: seconds in which a backward adds gradients to earlier ones.
            weights: the share of a backward that only gradients of parameters need.
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
    """A stage as it runs, and what is predicted of it.

    Attributes:
        turns: what its micro-batches run.
        first: the first micro-batch, simulated.
        more: one behind it, simulated.
        last: the last, simulated.
        adding_s: seconds of a backward, on average, in which gradients are added to earlier ones.
        weights: the share of the backward that only gradients of parameters need.
        between: bytes that wait for this part when the rest has run.
    """

    programs: MicrobatchPrograms
    first: Simulation
    more: Simulation
    last: Simulation
    adding_s: float = 0.0
    weights: float = 0.0
    between: int = 0

    @cached_property
    def memory(self) -> tuple[StageMemory, StageMemory]:
        """Of a micro-batch before the last, and of the last."""
        ending = StageMemory.of(self.last, self.programs.last, self.between)
        same = self.more is self.last
        return ending if same else StageMemory.of(
            self.more, self.programs.more, self.between
        ), ending

    @property
    def cost(self) -> StageCost:
        """What it takes."""
        own = self.first.forward_s, self.more.forward_s, self.more.backward_s, self.last.backward_s
        return StageTimes(*own).cost(self.programs.last, self.adding_s, self.weights)

    def runs(self, micro_batches: int) -> Iterator[tuple[Simulation, int]]:
        """What its micro-batches are like up to their last sums, and how many each."""
        yield self.more, micro_batches - 1
        yield self.first, 1


def boundary_bytes(graph: TrainingGraph, phase: str) -> int:
    """Bytes that a stage sends to a neighbour, of one micro-batch."""
    return sum(
        tensor_bytes(tensors(node)[0])
        for role, node in zip(graph.outputs, graph.results, strict=True)
        if isinstance(role, StageOutput) and role.phase == phase and node is not None
    )
