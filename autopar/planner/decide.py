"""From a captured graph to a plan: measure, then choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.cost_model.allocator import context_bytes
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.liveness import Overhead
from autopar.cost_model.optimizer import optimizer_state_ratio
from autopar.errors import StrategyError
from autopar.graph import ParameterInfo, TrainingGraph
from autopar.partition import Partition, Ways, named
from autopar.plan import Plan, Strategy, fingerprint
from autopar.planner.candidates import Evaluator
from autopar.planner.machine import Machine, measure_machine, time_shards
from autopar.planner.partitions import partition_by_bytes
from autopar.planner.placements import AXIS as TENSOR_AXIS
from autopar.planner.placements import partition
from autopar.planner.prices import shards_of
from autopar.planner.search import choose, default_choice, first_choice
from autopar.planner.ways import choices


@dataclass(frozen=True)
class Question:
    """All that a plan depends on beside the graph and the machine.

    Attributes:
        model: class of the model.
        parameters: its parameters.
        world_size: number of ranks.
        strategy: what is fixed.
        memory: cap in bytes per rank, None for what the device has.
        batch: "global" or "local".
        precision: name of the autocast dtype, or None.
        optimizer: class or factory of the optimizer.
        cluster: the cluster to plan for, None for the one that is running.
        device: the device that operators run on.
        comm_backend: what collectives are lowered for.
        live: whether the ranks of the plan are running.
    """

    model: str
    parameters: Mapping[str, ParameterInfo]
    world_size: int
    strategy: Strategy
    memory: int | None
    batch: str
    precision: str | None
    optimizer: Callable[..., Any]
    cluster: Cluster | None
    device: torch.device
    comm_backend: str
    live: bool

    def __post_init__(self) -> None:
        if self.world_size % self.strategy.tensor_ranks:
            raise StrategyError(
                f"tp={self.strategy.tp} does not divide {self.world_size} ranks: choose one of "
                f"{[n for n in range(2, self.world_size + 1) if self.world_size % n == 0]}"
            )
        zero = self.strategy.zero
        strange = sorted(set(zero) - set(self.blocks)) if isinstance(zero, Mapping) else []
        if strange:
            raise StrategyError(
                f"zero names blocks that {self.model} does not have: {strange}. It has "
                f"{list(self.blocks)}, where '' is all outside of blocks."
            )

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks that have parameters, "" first."""
        return ("", *dict.fromkeys(p.block for p in self.parameters.values() if p.block))

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        """The axis of the data, and behind it that of the model, if there is one."""
        ranks = self.strategy.tensor_ranks
        data = ("dp_replicate", self.world_size // ranks)
        return (data, (TENSOR_AXIS, ranks)) if ranks > 1 else (data,)

    def base(self) -> Plan:
        """The plan with nothing chosen."""
        ratio = optimizer_state_ratio(self.optimizer)
        return Plan(
            name="",
            model=self.model,
            fingerprint=fingerprint(self.parameters.values()),
            world_size=self.world_size,
            mesh=self.mesh,
            stages=tuple((block, 0) for block in self.blocks),
            batch=self.batch,
            activation_bytes=self.strategy.activation_bytes,
            batch_statistics=self.strategy.batch_statistics,
            precision=self.precision,
            optimizer=getattr(self.optimizer, "__name__", type(self.optimizer).__name__),
            optimizer_state_ratio=ratio,
            memory_cap=self.memory,
            parameter_bytes=tuple((p.name, p.bytes) for p in self.parameters.values()),
            placements=tuple((name, "R") for name in self.parameters),
        )


def needs_machine(question: Question) -> bool:
    """Whether anything is left to choose, or to check against a cap."""
    fixed = default_choice(question.strategy, question.blocks) is not None
    return not fixed or question.memory is not None


def measured(question: Question, graph: TrainingGraph) -> Machine | None:
    """The machine, its operators timed at the shapes of this graph; every rank calls it."""
    if not needs_machine(question):
        return None
    evaluator = evaluator_of(question, graph, None)
    stages = (0, 3) if question.mesh[0][1] > 1 else (0,)
    tried = [first_choice(question.strategy, question.blocks, stage) for stage in stages]
    graphs = [evaluator.lowered(choice) for choice in dict.fromkeys(tried)]
    if question.strategy.tensor_ranks > 1:
        graphs.append(replace(evaluator, ways=()).lowered(tried[0]))
    machine = measure_machine(
        graphs, question.device, question.cluster, question.optimizer, live=question.live
    )
    ranks = question.strategy.tensor_ranks
    if ranks > 1 and machine.operators.present:
        nodes = shards_of(choices(graph, ranks).ways, ranks)
        machine = time_shards(machine, nodes, live=question.live)
    return machine


def decide(question: Question, graph: TrainingGraph, machine: Machine | None) -> Plan:
    """The plan; rank 0 calls it."""
    evaluator = evaluator_of(question, graph, machine)
    fixed = default_choice(question.strategy, question.blocks)
    if machine is None:
        assert fixed is not None
        return evaluator.plan(fixed)
    cap = question.memory
    if cap is None and machine.cluster.device_memory_bytes is not None:
        cap = machine.cluster.device_memory_bytes - context_bytes(machine.cluster.device)
    plan = choose(evaluator, question.strategy, question.blocks, cap)
    return replace(plan, cluster=f"{machine.cluster.name} ({machine.cluster.provenance})")


def ways_of(question: Question, graph: TrainingGraph, machine: Machine | None) -> Ways:
    """How the model is partitioned: at real prices where there is a machine."""
    ranks, pins = question.strategy.tensor_ranks, question.strategy.placements
    if ranks == 1:
        return ()
    if machine is None:
        return partition_by_bytes(graph, ranks, pins)
    solution = partition(
        graph,
        ranks,
        machine,
        mesh=dict(question.mesh),
        axis=TENSOR_AXIS,
        pins=pins,
        wrapped=question.mesh[0][1] > 1 and question.strategy.zero != 0,
    )
    return named(solution.ways)


def evaluator_of(question: Question, graph: TrainingGraph, machine: Machine | None) -> Evaluator:
    """What turns choices into plans and, if there is a machine, prices them."""
    batches = question.mesh[0][1] if question.batch == "global" else 1
    ways = ways_of(question, graph, machine)
    base = question.base()
    for axis, size in question.mesh[1:]:
        base = replace(base, partition=Partition.of(axis, size, graph, ways))
        if not ways:
            note = f"nothing is worth dividing over {axis}: each rank of it does the same"
            base = replace(base, notes=(*base.notes, note))
    return Evaluator(
        graph=graph,
        parameters=question.parameters,
        base=base,
        ways=ways,
        cluster=machine.cluster if machine else None,  # type: ignore[arg-type]
        operators=machine.operators if machine else None,  # type: ignore[arg-type]
        update=machine.update if machine else None,  # type: ignore[arg-type]
        overhead=replace(machine.overhead if machine else Overhead(), batches=batches),
        comm_backend=question.comm_backend,
    )
