"""`CompiledPipelineCall`: the stages of a rank and their schedules for one kind of call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import distributed as dist

from autopar.cost_model.simulator.schedules import Orders, forward_orders, orders, split_orders
from autopar.ir.graph import tensors
from autopar.ir.roles import Gradient, MicrobatchPartial, Parameter
from autopar.plan.pipeline import Pipeline
from autopar.report.plan import Plan
from autopar.runtime.pipeline.schedule import Schedule
from autopar.runtime.pipeline.stage import Stage
from autopar.runtime.pipeline.stage_program import PipelineProgram


@dataclass(frozen=True)
class TiedParam:
    """A parameter that stages of several ranks use.

    Attributes:
        name: name of the parameter.
        owner: pipeline rank that holds and updates it.
        users: other pipeline ranks that use it.
    """

    name: str
    owner: int
    users: tuple[int, ...]


@dataclass(frozen=True)
class CompiledPipelineCall:
    """The stages of a rank and their schedules for one kind of call.

    Attributes:
        program: the generated code.
        plan: the plan, with a pipeline.
        rank: rank in the world.
        device: device of the tensors.
        group: process group along the pipeline, None if this rank has all stages.
    """

    program: PipelineProgram
    plan: Plan
    rank: int
    device: torch.device
    group: dist.ProcessGroup | None

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the plan."""
        assert self.plan.pipeline is not None
        return self.plan.pipeline

    @cached_property
    def stages(self) -> dict[int, Stage]:
        """The stages of this rank."""
        return {index: Stage(index, p) for index, p in self.program.stages.items()}

    @cached_property
    def mesh_coordinate(self) -> dict[str, int]:
        """This rank's index on each mesh axis."""
        return self.plan.mesh_coordinate(self.rank)

    @property
    def pp_rank(self) -> int:
        """This rank's index along the pipeline."""
        return self.mesh_coordinate.get("pp", 0)

    @cached_property
    def fake_partials(self) -> dict[int, torch.Tensor]:
        """The fake tensor of each partial sum that stages return."""
        return {
            role.index: tensors(node)[0]
            for graph in self.program.graphs.stages
            for role, node in zip(graph.outputs, graph.results, strict=True)
            if isinstance(role, MicrobatchPartial) and node is not None
        }

    def _schedule(self, actions: Orders) -> Schedule:
        return Schedule(self.stages, actions, self.program.micro_batches, self.device, self.group)

    @cached_property
    def interleaved_schedule(self) -> Schedule:
        """The schedule of forwards and backwards together."""
        p, count = self.pipeline, self.program.micro_batches
        return self._schedule(orders(p.schedule, p.ranks, count, p.stages_per_rank))

    @cached_property
    def split_schedules(self) -> tuple[Schedule, Schedule]:
        """The schedules of all forwards, and of all backwards after them."""
        p, count = self.pipeline, self.program.micro_batches
        forward, backward = split_orders(p.ranks, count, p.stages_per_rank)
        return self._schedule(forward), self._schedule(backward)

    @cached_property
    def forward_schedule(self) -> Schedule:
        """The schedule of forwards without backwards."""
        p, count = self.pipeline, self.program.micro_batches
        return self._schedule(forward_orders(p.ranks, count, p.stages_per_rank))

    @cached_property
    def tied_params(self) -> list[TiedParam]:
        """Parameters that ranks other than their owner use too."""
        found = []
        for name, stage in self.pipeline.owners.items():
            owner = self.pipeline.rank_of(stage)
            users = {self.pipeline.rank_of(s) for s in self.program.users_of(name)} - {owner}
            if users:
                found.append(TiedParam(name, owner, tuple(sorted(users))))
        return found

    def trains(self, name: str, pp_rank: int) -> bool:
        """Whether the stages of a pipeline rank return a gradient of a parameter."""
        graphs = (self.program.graphs.stages[s] for s in self.pipeline.stages_of(pp_rank))
        return any(graph.result(Gradient(Parameter(name))) is not None for graph in graphs)

    def fake_param(self, name: str) -> torch.Tensor:
        """The fake tensor of this rank's part of a parameter."""
        role = Parameter(name)
        forwards = (program.forward.fake_tensors for program in self.program.stages.values())
        return next(fakes[role] for fakes in forwards if role in fakes)
