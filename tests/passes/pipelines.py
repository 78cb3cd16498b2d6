"""All stages and micro-batches of a pipeline in one process, against the plain model."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from autopar.capture.batch_slices import capture_slice
from autopar.core.ir.batch_slicing import BATCH
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import (
    BatchTotal,
    Gradient,
    InputRole,
    MicrobatchPartial,
    Output,
    OutputRole,
    Parameter,
    Saved,
    StageInput,
    StageOutput,
    Update,
)
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline_parallel.accumulate_micro_batches import AccumulateMicroBatches
from autopar.passes.pipeline_parallel.place_stages import PlaceStages
from autopar.passes.pipeline_parallel.split_dgrad_wgrad import split_dgrad_wgrad
from autopar.passes.pipeline_parallel.split_stages import PipelineStages, split_stages
from autopar.passes.pipeline_parallel.stage_dependence import parameter_uses
from autopar.passes.split_forward_backward import split_forward_backward
from tests.harness.reference import relative_error
from tests.passes.parity import World
from tests.passes.simulated import run_ranks

Uses = tuple[tuple[str, tuple[int, ...]], ...]


def cut_at(graph: TrainingGraph, places: Sequence[int]) -> Uses:
    """The stage of each use of each parameter, a stage beginning at each of some users."""
    table: dict[str, list[int]] = {name: [] for name in graph.parameters}
    order = {node: number for number, node in enumerate(users(graph))}
    for use in parameter_uses(graph):
        table[use.name].append(sum(order[use.node] >= place for place in places))
    return tuple((name, tuple(stages) or (0,)) for name, stages in table.items())


def users(graph: TrainingGraph) -> list[fx.Node]:
    """The operators of the forward that read parameters."""
    return list(dict.fromkeys(use.node for use in parameter_uses(graph)))


def cut(world: World, places: Sequence[int]) -> PipelineStages:
    """The world's model in stages, its ranks being the micro-batches."""
    share = world.share(0)
    slices = replace(share.slices, over_time=True)
    graph = capture_slice(world.attempt, share.call, slices).graph
    graph = replace(graph, axes={BATCH: world.ranks})
    count = len(places) + 1
    passes = [PlaceStages(cut_at(graph, places), count)]
    if world.ranks > 1:
        passes += [AccumulateMicroBatches()]  # type: ignore
    return split_stages(run_passes(graph, passes), count)


@dataclass
class Pipeline:
    """Stages with what travels between them."""

    world: World
    stages: PipelineStages
    in_two: bool = False
    totals: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[int, Tensor] = field(default_factory=dict)
    results: dict[OutputRole, list[Tensor]] = field(default_factory=dict)
    saved: dict[tuple[int, int], dict[InputRole, Tensor]] = field(default_factory=dict)

    def run(self) -> dict[OutputRole, float]:
        """Runs everything; the error of each output and gradient."""
        micros = range(self.world.ranks)
        self.halves = [split_forward_backward(graph) for graph in self.stages.stages]
        if self.stages.prologue is not None:
            for micro in micros:
                self.call(self.stages.prologue, micro, {})
            self.totals |= self.parts
        for micro in micros:
            sent: dict[InputRole, Tensor] = {}
            for stage, half in enumerate(self.halves):
                sent = self.call(half.forward, micro, sent, stage)
        self.totals |= self.parts
        for micro in micros:
            sent = {}
            for stage, half in reversed(list(enumerate(self.halves))):
                if half.backward is not None:
                    sent = self.backward(half.backward, micro, sent, stage)
        self.call(self.stages.epilogue, 0, {})
        return self.errors()

    def backward(
        self, graph: TrainingGraph, micro: int, came: dict[InputRole, Tensor], stage: int
    ) -> dict[InputRole, Tensor]:
        if not self.in_two:
            return self.call(graph, micro, came, stage)
        first, second = split_dgrad_wgrad(graph)
        sent = self.call(first, micro, came, stage)
        assert not self.call(second, micro, came, stage)
        return sent

    def call(
        self, graph: TrainingGraph, micro: int, came: dict[InputRole, Tensor], stage: int = -1
    ) -> dict[InputRole, Tensor]:
        """Runs a graph on a micro-batch; what it sends, as it arrives."""
        known = self.world.values(graph, micro) | came | self.saved.get((stage, micro), {})
        known |= {
            role: self.totals[role.index] for role in graph.inputs if isinstance(role, BatchTotal)
        }
        (results,) = run_ranks([graph], [{role: known[role] for role in graph.inputs}])
        sent: dict[InputRole, Tensor] = {}
        for role, value in results.items():
            match role:
                case StageOutput(number, phase):
                    assert value is not None
                    sent[StageInput(number, phase)] = value
                case Saved():
                    self.saved.setdefault((stage, micro), {})[role] = value  # type: ignore
                case MicrobatchPartial(index):
                    fixed = index in self.stages.replicated_partials and index in self.parts
                    self.parts[index] = value if fixed else self.parts.get(index, 0) + value  # type: ignore
                case _ if value is not None:
                    self.results.setdefault(role, []).append(value)
        return sent

    def errors(self) -> dict[OutputRole, float]:
        want, found = self.world.plain(), {}
        for role, values in self.results.items():
            match role:
                case Gradient(Parameter(name)):
                    found[role] = relative_error(torch.stack(values).sum(0), want.gradients[name])
                case Output(index):
                    got = values[0] if len(values) == 1 else torch.cat(values)
                    found[role] = relative_error(got, want.outputs[index])
                case Update(of):
                    found[role] = relative_error(values[0], want.buffers[of.name])  # type: ignore
        gradients = {r.of.name for r in found if isinstance(r, Gradient)}  # type: ignore
        assert gradients == set(want.gradients)
        return found
