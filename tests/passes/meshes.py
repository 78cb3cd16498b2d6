"""All ranks of a plan in one process: programs as emitted, in lockstep, against the plain model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.batch_slices import CaptureCache, capture_of_rank
from autopar.capture.call import BatchShard, batch_shard_of, flattened
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.mesh_levels import DATA_AXIS
from autopar.core.ir.placement import Shard
from autopar.core.ir.roles import (
    Accumulated,
    BatchFraction,
    BatchIndex,
    BatchTotal,
    Buffer,
    Gradient,
    Input,
    InputRole,
    MicrobatchPartial,
    Output,
    Parameter,
    Saved,
    StageInput,
    StageOutput,
    Tangent,
    UnreducedGrad,
    UnshardedParam,
    Update,
)
from autopar.core.plan.layout import Layout
from autopar.core.plan.partition import NodeStrategies, rows_of
from autopar.core.plan.plan import Plan
from autopar.passes.communication.lower_collectives import LowerCollectives
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline import build_pass_pipeline
from autopar.passes.pipeline_parallel.split_stages import PipelineStages
from autopar.passes.rules.proof.oracle import shard_tensor
from autopar.passes.split_forward_backward import Split, split_forward_backward
from autopar.passes.stage_lowering import build_microbatch_pipelines, lower_stage, split_plan_stages
from autopar.passes.tensor_parallel.partition_in_order import partition_in_order
from autopar.runtime.codegen.program import with_axes
from tests.harness.reference import relative_error
from tests.passes.simulated import Results, chunks, run_ranks

Values = dict[InputRole, Tensor]
CPU = torch.device("cpu")


@dataclass
class PlannedRanks:
    """The ranks of a plan, and a model on the CPU whose only output is its loss.

    Attributes:
        captures: captures of the model, shared by plans.
    """

    model: nn.Module
    inputs: Any
    plan: Plan
    captures: CaptureCache = field(default_factory=dict)
    backend: str = "nccl"

    def __post_init__(self) -> None:
        state = (*self.model.named_parameters(), *self.model.named_buffers())
        self.state = {name: tensor.detach().clone() for name, tensor in state}
        self.ranks, pipeline = range(self.plan.world_size), self.plan.pipeline
        self.micro_batches = pipeline.micro_batches if pipeline is not None else 1
        self.at = [Layout(self.plan).coordinate(rank) for rank in self.ranks]
        self.gradients: list[dict[str, Tensor]] = [{} for _ in self.ranks]
        self.outputs: list[Values] = [{} for _ in self.ranks]

    def errors(self) -> dict[str, float]:
        """The error of the loss, of every gradient and of every buffer, over all ranks."""
        want, gradients, buffers = self.plain()
        (self.run_pipeline if self.plan.pipeline is not None else self.run_whole)()
        found: dict[str, float] = {}
        names = {name for own in self.gradients for name in own}
        assert names == set(gradients), names ^ set(gradients)
        for rank in self.ranks:
            for name, value in self.gradients[rank].items():
                target = self.shard(name, gradients[name], rank)
                found[name] = max(found.get(name, 0.0), relative_error(value, target))
            for role, value in self.outputs[rank].items():
                target = want if isinstance(role, Output) else buffers[role.of.name]  # type: ignore
                found[str(role)] = max(
                    found.get(str(role), 0.0), relative_error(value.double(), target.double())
                )
        return found

    def plain(self) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The loss, gradients and new buffers of one device on the whole batch."""
        args, kwargs = torch.utils._pytree.tree_unflatten(*flattened(self.inputs))
        loss = self.model(*args, **kwargs)
        loss.backward()
        gradients = {
            name: p.grad for name, p in self.model.named_parameters() if p.grad is not None
        }
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.state[name])
        return loss.detach(), gradients, buffers

    # Graphs.

    def capture(self, rank: int) -> TrainingGraph:
        """The graph of a rank's first micro-batch."""
        return capture_of_rank(
            self.model,
            self.inputs,
            self.at[rank][DATA_AXIS],
            self.plan.dp_size,
            self.plan.batch,
            micro_batches=self.micro_batches,
            cache=self.captures,
        )

    @cached_property
    def op_strategies(self) -> list[NodeStrategies]:
        """The plan's strategies along each axis; they must be for these graphs."""
        partitions = {partition.axis: partition for partition in self.plan.partitions}

        def find(axis: str, graph: TrainingGraph) -> NodeStrategies:
            found = partitions[axis].strategies_for(graph, rows_of(graph))
            assert found is not None, f"the plan is for another graph along {axis}"
            return found

        graph = with_axes(self.capture(0), self.plan)
        return [own for _, _, own in partition_in_order(partitions, graph, self.at[0], find)]

    # Values.

    def shard(self, name: str, value: Tensor, rank: int) -> Tensor:
        """A rank's shard of a parameter or its gradient between steps."""
        sizes = dict(self.plan.mesh)
        for axis, placement in Layout(self.plan).of(name).items():
            count, index = sizes[axis], self.at[rank][axis]
            if axis == DATA_AXIS and isinstance(placement, Shard):
                value = [*chunks(value, count, placement.dim)][index]  # some may be empty
            else:
                value = shard_tensor(value, placement, count)[index]
        return value

    def batch(self, rank: int, micro: int) -> BatchShard:
        """The rows of a micro-batch."""
        leaves = flattened(self.inputs)
        index, count = self.at[rank][DATA_AXIS], self.plan.dp_size
        shard = batch_shard_of(*leaves, mode="global", rank=index, ranks=count)
        return shard.split_micro_batches(self.micro_batches)[micro]

    def values(self, graph: TrainingGraph, rank: int, micro: int = 0) -> Values:
        """The inputs of a graph that no other graph computes."""
        share = self.batch(rank, micro)
        inputs = dict(zip(share.call.tensor_indices, share.tensors, strict=True))
        found: Values = {}
        for role, node in zip(graph.inputs, graph.placeholders, strict=True):
            match role:
                case Parameter(name):
                    found[role] = self.shard(name, self.state[name], rank).clone()
                case Buffer(name):
                    found[role] = self.state[name].clone()
                case Input(index):
                    found[role] = inputs[index].clone()
                case BatchFraction():
                    found[role] = torch.tensor(share.rows / share.slices.rows, dtype=torch.float64)
                case BatchIndex():
                    found[role] = share.slices.unit_indices()
                case Tangent():
                    fake = node.meta["val"]
                    found[role] = torch.ones(fake.shape, dtype=fake.dtype)
        return found

    # Runs.

    def run_whole(self) -> None:
        """Runs the program of every rank of a plan without pipeline."""
        graphs = [self.program(rank) for rank in self.ranks]
        given = [self.values(graph, rank) for rank, graph in enumerate(graphs)]
        for rank, results in enumerate(run_ranks(graphs, given)):
            self.keep(rank, results)

    def program(self, rank: int) -> TrainingGraph:
        """The program of a rank of a plan without pipeline."""
        strategies = self.op_strategies
        passes = build_pass_pipeline(self.plan, rank, self.backend, op_strategies=strategies)
        return run_passes(with_axes(self.capture(rank), self.plan), passes)

    def keep(self, rank: int, results: Results) -> None:
        """Keeps outputs; adds gradients of stages and micro-batches up."""
        own = self.gradients[rank]
        for role, value in results.items():
            match role:
                case Gradient(Parameter(name)) if value is not None:
                    own[name] = own[name] + value if name in own else value
                case Output() | Update(Buffer()) if value is not None:
                    self.outputs[rank][role] = value  # type: ignore[index]

    def run_pipeline(self) -> None:
        """Runs all forwards of a plan with stages, then all backwards."""
        PipelineRun(self).run()


@dataclass
class PipelineRun:
    """One step of a pipeline: forwards stage by stage, then backwards.

    Attributes:
        totals: batch totals by rank and index.
        saved: saved tensors by rank, stage and micro-batch.
        unreduced: sums of unreduced gradients by rank and stage.
        unsharded: gathered parameters by rank and stage.
    """

    world: PlannedRanks
    totals: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    saved: dict[Any, Values] = field(default_factory=dict)
    unreduced: dict[Any, dict[str, Tensor]] = field(default_factory=dict)
    unsharded: dict[Any, Values] = field(default_factory=dict)

    def run(self) -> None:
        world, plan = self.world, self.world.plan
        assert plan.pipeline is not None
        self.split = [self.stages(rank) for rank in world.ranks]
        micros, stages = range(world.micro_batches), range(plan.pipeline.stages)
        prologues = [self.lowered(own.prologue, r) for r, own in enumerate(self.split)]
        for micro in micros:
            self.together(0, prologues, micro)
        self.add_up()
        programs = [[self.programs(rank, stage) for rank in world.ranks] for stage in stages]
        for micro in micros:
            sent: dict[int, Values] = {}
            for stage in stages:
                graphs = [own[micro].forward if own else None for own in programs[stage]]
                sent = self.together(stage, graphs, micro, sent)
        self.add_up()
        for micro in micros:
            sent = {}
            for stage in reversed(stages):
                graphs = [own[micro].backward if own else None for own in programs[stage]]
                sent = self.together(stage, graphs, micro, sent)
        epilogues = [self.lowered(own.epilogue, r) for r, own in enumerate(self.split)]
        for stage in range(plan.pipeline.ranks):
            self.together(stage, epilogues, 0)
        self.move_tied_gradients()

    def move_tied_gradients(self) -> None:
        """Adds gradients of parameters that several ranks use to those of their owners."""
        world, pipeline = self.world, self.world.plan.pipeline
        assert pipeline is not None
        ranks = {tuple(sorted(at.items())): rank for rank, at in enumerate(world.at)}
        for rank, own in enumerate(world.gradients):
            for name in [*own]:
                at = world.at[rank] | {"pp": pipeline.rank_of(pipeline.owners[name])}
                owner = ranks[tuple(sorted(at.items()))]
                if owner != rank:
                    world.keep(owner, {Gradient(Parameter(name)): own.pop(name)})

    def stages(self, rank: int) -> PipelineStages:
        """The graphs of all stages, partitioned for a rank."""
        world = self.world
        graph, found = world.capture(rank), world.op_strategies
        return split_plan_stages(graph, world.plan, rank, found, world.micro_batches)

    def lowered(self, graph: TrainingGraph | None, rank: int) -> TrainingGraph | None:
        """A graph that runs once a step, as the runtime lowers it."""
        if graph is None:
            return None
        plan, backend = self.world.plan, self.world.backend
        axes = [axis for axis, size in plan.mesh if size > 1 and axis != "pp"]
        passes = [LowerCollectives(backend, self.world.at[rank][axis], axis) for axis in axes]
        return run_passes(graph, passes)

    def programs(self, rank: int, stage: int) -> list[Split]:
        """The forward and backward of each micro-batch of a stage."""
        world, count = self.world, self.world.micro_batches
        if world.plan.pipeline.rank_of(stage) != world.at[rank].get("pp", 0):  # type: ignore
            return []
        graph = self.split[rank].stages[stage]
        passes = build_microbatch_pipelines(
            graph, world.plan, rank, world.backend, micro_batches=count
        )
        first, more, last = lower_stage(graph, passes, world.plan, count).of_each(
            split_forward_backward
        )
        if count == 1:
            return [last]
        forwards = [first.forward, *[more.forward] * (count - 1)]
        backwards = [*[more.backward] * (count - 1), last.backward]
        return [Split(*both) for both in zip(forwards, backwards, strict=True)]

    def together(
        self,
        stage: int,
        graphs: Sequence[TrainingGraph | None],
        micro: int,
        received: Mapping[int, Values] = MappingProxyType({}),
    ) -> dict[int, Values]:
        """Runs the ranks of a stage, each its graph; what arrives at the ranks of the next.

        Ranks of a stage are numbered in their order in the world. Without graphs nothing runs.
        """
        pipeline = self.world.plan.pipeline
        assert pipeline is not None
        here = pipeline.rank_of(stage)
        ranks = [r for r in self.world.ranks if self.world.at[r].get("pp", 0) == here]
        programs = [graph for r in ranks if (graph := graphs[r]) is not None]
        if not programs:
            return {}
        given = [
            self.given(graph, rank, stage, micro, received.get(place, {}))
            for place, (rank, graph) in enumerate(zip(ranks, programs, strict=True))
        ]
        found = zip(ranks, run_ranks(programs, given), strict=True)
        return {
            place: self.take(rank, stage, micro, results)
            for place, (rank, results) in enumerate(found)
        }

    def given(
        self, graph: TrainingGraph, rank: int, stage: int, micro: int, received: Values
    ) -> Values:
        key, found = (rank, stage), self.world.values(graph, rank, micro)
        known = received | self.saved.get((*key, micro), {}) | self.unsharded.get(key, {})
        for role in graph.inputs:
            match role:
                case BatchTotal(index):
                    found[role] = self.totals[index, self.model_rank(rank)]  # type: ignore[index]
                case Accumulated(name):
                    found[role] = self.unreduced[key].pop(name)
                case StageInput() | Saved() | UnshardedParam():
                    found[role] = known[role]
        return found

    def take(self, rank: int, stage: int, micro: int, results: Results) -> Values:
        """Keeps what a graph returns; what it sends to its neighbour."""
        key, sent = (rank, stage), dict[InputRole, Tensor]()
        for role, value in results.items():
            match role:
                case StageOutput(number, phase):
                    sent[StageInput(number, phase)] = value  # type: ignore[assignment]
                case Saved():
                    self.saved.setdefault((*key, micro), {})[role] = value  # type: ignore
                case UnshardedParam():
                    self.unsharded.setdefault(key, {})[role] = value  # type: ignore[assignment]
                case UnreducedGrad(name):
                    own = self.unreduced.setdefault(key, {})
                    own[name] = own[name] + value if name in own else value  # type: ignore
                case MicrobatchPartial(index):
                    fixed = index in self.split[rank].replicated_partials
                    known = self.parts.get((index, rank))
                    adds = known is not None and not fixed
                    self.parts[index, rank] = known + value if adds else value  # type: ignore
        self.world.keep(rank, results)
        return sent

    def add_up(self) -> None:
        """Sums partials over all ranks with the same model-parallel coordinate."""
        totals: dict[Any, Tensor] = {}
        for (index, rank), part in self.parts.items():
            key = index, self.model_rank(rank)
            if index in self.split[rank].replicated_partials:
                totals[key] = part
            else:
                totals[key] = totals[key] + part if key in totals else part
        self.totals |= totals  # type: ignore[arg-type]
        self.parts.clear()

    def model_rank(self, rank: int) -> int:
        return rank % self.world.plan.model_parallel_size


def worst(errors: dict[str, float], tolerance: float) -> Iterable[str]:
    """Errors beyond a tolerance as text, largest first; NaN counts."""
    bad = {name: error for name, error in errors.items() if not error <= tolerance}
    return [f"{name} {error:.1e}" for name, error in sorted(bad.items(), key=lambda i: -i[1])]
