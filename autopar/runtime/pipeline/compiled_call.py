"""What a rank runs for one kind of call: its stages, and their schedules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import distributed as dist

from autopar.cost_model.simulator.schedules import Orders, forward_orders, orders, split_orders
from autopar.ir.graph import tensors
from autopar.ir.roles import Gradient, MicrobatchPartial, Parameter
from autopar.report.plan import Plan
from autopar.runtime.pipeline.schedule import Schedule
from autopar.runtime.pipeline.stage import Stage
from autopar.runtime.pipeline.stage_program import PipelineProgram


@dataclass(frozen=True)
class CompiledPipelineCall:
    """What a rank runs for one kind of call.

    Attributes:
        program: its stages.
        plan: under which.
        rank: this rank in the world.
        device: of tensors.
        group: the process group along the stages; None if this rank has all of them.
    """

    program: PipelineProgram
    plan: Plan
    rank: int
    device: torch.device
    group: dist.ProcessGroup | None

    @cached_property
    def stages(self) -> dict[int, Stage]:
        """The stages of this rank."""
        return {index: Stage(index, p) for index, p in self.program.stages.items()}

    @cached_property
    def mesh_coordinate(self) -> dict[str, int]:
        """Where this rank stands on each axis."""
        return self.plan.mesh_coordinate(self.rank)

    @property
    def pp_rank(self) -> int:
        """Where it stands among the ranks of the pipeline."""
        return self.mesh_coordinate.get("pp", 0)

    @cached_property
    def tangents(self) -> frozenset[int]:
        """The outputs that gradients may enter by."""
        return self.program.split.tangents

    @cached_property
    def fused_backward(self) -> bool:
        """Whether backwards can run among the forwards: of one loss, whose gradient is known."""
        return self.program.split.can_interleave_backward

    @cached_property
    def fake_partials(self) -> dict[int, torch.Tensor]:
        """The fake tensor of each part of a total that stages yield."""
        return {
            role.index: tensors(node)[0]
            for graph in self.program.split.stages
            for role, node in zip(graph.outputs, graph.results, strict=True)
            if isinstance(role, MicrobatchPartial) and node is not None
        }

    def schedule(self, which: Orders) -> Schedule:
        """Orders as they are run here."""
        return Schedule(self.stages, which, self.program.micro_batches, self.device, self.group)

    @cached_property
    def fused_schedule(self) -> Schedule:
        """Forwards and backwards."""
        p = self.plan.pipeline
        assert p is not None
        count = self.program.micro_batches
        return self.schedule(orders(p.schedule, p.ranks, count, p.stages_per_rank))

    @cached_property
    def split_schedules(self) -> tuple[Schedule, Schedule]:
        """Forwards, and the backwards for when the gradients of what they returned are known."""
        p = self.plan.pipeline
        assert p is not None
        first, second = split_orders(p.ranks, self.program.micro_batches, p.stages_per_rank)
        return self.schedule(first), self.schedule(second)

    @cached_property
    def forward_schedule(self) -> Schedule:
        """Forwards alone."""
        p = self.plan.pipeline
        assert p is not None
        count = self.program.micro_batches
        return self.schedule(forward_orders(p.ranks, count, p.stages_per_rank))

    @cached_property
    def tied_params(self) -> list[tuple[str, int, list[int]]]:
        """Parameters used on other ranks than their own: name, rank that holds, ranks that use."""
        pipeline, found = self.plan.pipeline, []
        assert pipeline is not None
        for name, stage in pipeline.owners.items():
            owner = pipeline.rank_of(stage)
            users = {pipeline.rank_of(s) for s in self.program.users_of(name)} - {owner}
            if users:
                found.append((name, owner, sorted(users)))
        return found

    def trains(self, name: str, rank: int) -> bool:
        """Whether the stages of a rank of the pipeline have a gradient of a parameter."""
        assert self.plan.pipeline is not None
        graphs = (self.program.split.stages[s] for s in self.plan.pipeline.stages_of(rank))
        return any(graph.result(Gradient(Parameter(name))) is not None for graph in graphs)

    def fake_param(self, name: str) -> torch.Tensor:
        """The fake tensor of this rank's part of a parameter."""
        role = Parameter(name)
        halves = (program.forward for program in self.program.stages.values())
        return next(half.fake_tensors[role] for half in halves if role in half.fake_tensors)
