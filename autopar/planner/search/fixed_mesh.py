"""From a captured graph to a plan: measure, then choose."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.kernels.fusion import EAGER
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.memory.allocator import context_bytes
from autopar.cost_model.memory.liveness import Overhead
from autopar.cost_model.memory.optimizer_memory import optimizer_state_ratio
from autopar.errors import StrategyError
from autopar.ir.graph import ParameterInfo, TrainingGraph
from autopar.ir.mesh_levels import DATA_AXIS
from autopar.passes.tensor_parallel.partition_axes import partition_in_order
from autopar.plan.partition import NodeStrategies, Partition, by_node_name
from autopar.plan.prediction import Prediction
from autopar.plan.spec import fingerprint
from autopar.plan.strategy import Strategy
from autopar.plan.throughput import Work
from autopar.planner.evaluate.evaluator import Evaluator, SpmdEvaluator
from autopar.planner.evaluate.hierarchical import levels_of
from autopar.planner.evaluate.setup import EvaluationSetup
from autopar.planner.machine import Machine, absent, measure_machine, time_shards
from autopar.planner.placement.costs import shards_of
from autopar.planner.placement.solve import partition
from autopar.planner.placement.strategies import strategy_choices
from autopar.planner.placement.unmeasured import partition_by_bytes
from autopar.planner.search.config_search import (
    choose,
    choose_among,
    compression_of,
    default_config,
    first_config,
)
from autopar.planner.search.pipeline_search import fastest_pipeline, unmeasured_pipeline
from autopar.report.plan import Plan

Graphs = Mapping[int, TrainingGraph]
"""The graph of one micro-batch, by how many there are of them."""

Drafts = Mapping[int, tuple[NodeStrategies, ...]]
"""How each of these is partitioned along the axes of the model."""


@dataclass(frozen=True)
class PlanningProblem:
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
        incumbent_s: seconds of a step that are known to be possible otherwise.
        backend: of torch.compile, by which the programs are compiled.
        in_time: whether there is time to improve on a plan that fits.
        rivals: where all plans that were looked at are left; None if nobody wants them.
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
    incumbent_s: float = math.inf
    backend: str = EAGER
    deadline: Callable[[], bool] = field(default=lambda: True, compare=False, repr=False)
    autotune_candidates: list[Plan] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.strategy.mesh(self.world_size)
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

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of most bytes of the parameters."""
        sizes = Counter[torch.dtype]()
        for parameter in self.parameters.values():
            sizes[parameter.dtype] += parameter.bytes
        return sizes.most_common(1)[0][0] if sizes else torch.float32

    @cached_property
    def state_ratio(self) -> float:
        """Bytes of optimizer state for each byte of parameter."""
        return optimizer_state_ratio(self.optimizer, self.dtype)

    @property
    def dp_size(self) -> int:
        """Over how many ranks the rows of a batch are divided."""
        return self.base().dp_size

    @property
    def shard_ranks(self) -> int:
        """Over how many of these lies what ZeRO divides."""
        return self.strategy.dp_shard or self.dp_size

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        """The axis of the data, and behind it those of the model."""
        return self.strategy.mesh(self.world_size)

    def base(self) -> Plan:
        """The plan with nothing chosen."""
        ranks = dict(self.mesh)[DATA_AXIS]
        return Plan(
            name="",
            model=self.model,
            fingerprint=fingerprint(self.parameters.values()),
            world_size=self.world_size,
            mesh=self.mesh,
            zero_stages=tuple((block, 0) for block in self.blocks),
            batch=self.batch,
            activation_bytes=self.strategy.activation_bytes,
            batch_semantics=self.strategy.batch_semantics,
            precision=self.precision,
            optimizer=getattr(self.optimizer, "__name__", type(self.optimizer).__name__),
            optimizer_state_ratio=self.state_ratio,
            memory_cap=self.memory,
            hybrid=1 < (self.strategy.dp_shard or 1) < ranks,
            parameter_bytes=tuple((p.name, p.bytes) for p in self.parameters.values()),
            placements=tuple((name, "R") for name in self.parameters),
        )


def needs_machine(problem: PlanningProblem) -> bool:
    """Whether anything is left to choose, to check against a cap, or to say of a given cluster."""
    if not problem.live and problem.cluster is not None and problem.cluster.curves:
        return True
    fixed = default_config(problem.strategy, problem.blocks) is not None
    nodes = problem.strategy.hierarchical is True and not problem.base().hybrid
    return not fixed or problem.memory is not None or nodes


def provisional_strategies(problem: PlanningProblem, graphs: Graphs) -> Drafts:
    """How each graph is partitioned along the axes of the model where nothing was measured.

    One rank finds that for all: on loaded cores the solver may find another solution as good on
    each, and they would time programs that differ.
    """
    if not needs_machine(problem) or not problem.strategy.axes:
        return {}
    return {
        count: evaluator_of(problem, graph, None).setup.op_strategies
        for count, graph in graphs.items()
    }


def measured(
    problem: PlanningProblem, graphs: Graphs, drafts: Drafts | None = None
) -> Machine | None:
    """The machine, its operators timed at the shapes of these graphs; every rank calls it.

    Args:
        problem: what is fixed.
        graphs: the same on every rank.
        drafts: what `provisional_strategies` found on one rank, if there are several.
    """
    if not needs_machine(problem):
        return None
    if not problem.live and absent(problem.device, problem.cluster):
        return _machine(problem, ())
    stages = (0, 3) if problem.dp_size > 1 else (0,)
    tried = [first_config(problem.strategy, problem.blocks, stage) for stage in stages]
    if problem.strategy.compress is None:
        methods = [(compression_of(method),) for method in problem.strategy.lossy]
        tried += [
            replace(choice, compress=op_strategy) for choice in tried for op_strategy in methods
        ]
    lowered, nodes, drafts = [], dict[str, fx.Node](), drafts or {}
    for count, graph in graphs.items():
        evaluator = evaluator_of(problem, graph, None, drafts=drafts.get(count))
        lowered += [evaluator.lowered(choice) for choice in dict.fromkeys(tried)]
        setup = evaluator.setup
        for done in range(len(setup.op_strategies)):  # replicated along the next axis, for costs
            partial = replace(setup, op_strategies=setup.op_strategies[:done])
            lowered.append(SpmdEvaluator(partial).lowered(tried[0]))
        if problem.strategy.axes:
            nodes |= _shards(problem, graph, evaluator.setup.op_strategies)
    machine = _machine(problem, lowered)
    if problem.strategy.axes and machine.operators.present:
        machine = time_shards(machine, nodes, live=problem.live)
    return machine


def _machine(problem: PlanningProblem, lowered: Sequence[TrainingGraph]) -> Machine:
    return measure_machine(
        lowered,
        problem.device,
        problem.cluster,
        problem.optimizer,
        live=problem.live,
        backend=problem.backend,
        dtype=problem.dtype,
    )


def _shards(
    problem: PlanningProblem, graph: TrainingGraph, op_strategies: Sequence[NodeStrategies]
) -> Mapping[str, fx.Node]:
    """The operators worth timing on shards along each axis, by signature."""
    axes = problem.strategy.axes
    decided = dict(zip(axes, op_strategies, strict=True))
    graph, first = replace(graph, axes=dict(problem.mesh)), dict.fromkeys(axes, 0)
    nodes: dict[str, fx.Node] = {}
    for axis, before, _ in partition_in_order(axes, graph, first, lambda axis, _: decided[axis]):
        nodes |= shards_of(strategy_choices(before, axes[axis]).op_strategies, axes[axis])
    return nodes


def plan_fixed_mesh(problem: PlanningProblem, graphs: Graphs, machine: Machine | None) -> Plan:
    """The plan; rank 0 calls it."""
    strategy, model = problem.strategy, problem.model
    fixed = default_config(strategy, problem.blocks)
    if machine is None:
        assert fixed is not None
        ((count, graph),) = graphs.items()
        evaluator = evaluator_of(problem, graph, None)
        if strategy.pipelined:
            modelled = _modelled(problem, evaluator)
            return unmeasured_pipeline(modelled, strategy, model, count).plan(fixed)
        return evaluator.plan(fixed)
    cap, seen = cap_of(problem, machine.cluster), list[Plan]()
    own = (
        replace(problem, autotune_candidates=seen)
        if problem.autotune_candidates is not None
        else problem
    )
    if strategy.pipelined:
        evaluators = {m: evaluator_of(own, g, machine) for m, g in graphs.items()}
        plan = fastest_pipeline(evaluators, strategy, model, cap, problem.incumbent_s)
    else:
        plan = fastest(own, graphs[1], machine, cap)

    def whole(plan: Plan) -> Plan:
        plan = replace(plan, prediction=_with_work(problem, plan, graphs, machine.cluster))
        cluster = f"{machine.cluster.name} ({machine.cluster.provenance})"
        return replace(plan, memory_cap=cap, cluster=cluster)

    if problem.autotune_candidates is not None:
        problem.autotune_candidates.extend(map(whole, seen))
    return whole(plan)


def cap_of(problem: PlanningProblem, cluster: Cluster | None) -> int | None:
    """The most bytes that a rank may need: what was asked for, or what the device has."""
    if problem.memory is not None or cluster is None or cluster.device_memory_bytes is None:
        return problem.memory
    return cluster.device_memory_bytes - context_bytes(cluster.device)


def _with_work(
    problem: PlanningProblem, plan: Plan, graphs: Graphs, cluster: Cluster
) -> Prediction | None:
    """What a plan is predicted to cost, with what a step of it amounts to."""
    if plan.prediction is None:
        return None
    count = plan.pipeline.micro_batches if plan.pipeline is not None else 1
    dtype = problem.precision or str(problem.dtype).removeprefix("torch.")
    work = Work.of(graphs[count], count * plan.dp_size, cluster, dtype)
    return replace(plan.prediction, work=work)


def _modelled(problem: PlanningProblem, evaluator: Evaluator) -> SpmdEvaluator:
    """The evaluator with figures of no machine in particular."""
    kind = problem.device.type
    cluster = problem.cluster or Cluster.default(problem.world_size, kind)
    operators = replace(OperatorTimes.load(kind), times={}, alone={})
    return SpmdEvaluator(replace(evaluator.setup, cluster=cluster, operators=operators))


LEANER = (0.75, 0.0)
"""Parts of the cap that parameters, what belongs to them and saved activations may take in
partitions that are tried where the fastest does not fit as it is; the last holds the least."""


def fastest(
    problem: PlanningProblem, graph: TrainingGraph, machine: Machine, cap: int | None
) -> Plan:
    """The fastest plan that fits, of the fastest partition and, if that is pressed, leaner ones.

    Raises:
        OutOfMemoryError: nothing fits.
    """
    strategy, blocks = problem.strategy, problem.blocks
    evaluator = evaluator_of(problem, graph, machine)
    if not strategy.axes or cap is None or _fits(evaluator, problem, cap):
        return choose(evaluator, strategy, blocks, cap, incumbent_s=problem.incumbent_s)
    leaner = [evaluator_of(problem, graph, machine, int(cap * share)) for share in LEANER]
    best = choose_among((evaluator, *leaner), strategy, blocks, cap, problem.incumbent_s)
    if best.partitions == evaluator.setup.base.partitions:
        return best
    note = "more is divided than were fastest, to fit under the cap"
    return replace(best, notes=(*best.notes, note))


def _fits(evaluator: Evaluator, problem: PlanningProblem, cap: int) -> bool:
    """Whether a partition needs neither ZeRO stages nor recomputation to fit."""
    plain = first_config(problem.strategy, problem.blocks, 0)
    return evaluator.evaluate(plain).prediction.needed_bytes <= cap


def strategies_along(
    problem: PlanningProblem,
    axis: str,
    graph: TrainingGraph,
    machine: Machine | None,
    memory: int | None = None,
) -> NodeStrategies:
    """How the model is partitioned along an axis: at real prices where there is a machine."""
    mesh, pins = dict(problem.mesh), problem.strategy.pins(axis, graph.parameters)
    if machine is None:
        return partition_by_bytes(graph, mesh[axis], pins)
    whole = problem.parameters
    sharded = any(p.shape != whole[name].shape for name, p in graph.parameters.items())
    divided = problem.shard_ranks if problem.strategy.zero != 0 else 1
    solution = partition(
        graph,
        mesh[axis],
        machine,
        mesh=mesh,
        axis=axis,
        pins=pins,
        memory=memory,
        copies=(2.0 + problem.state_ratio) / divided,
        wrapped=sharded or divided > 1,
        as_placed=problem.strategy.keep_sharded,
        sequence=problem.strategy.sequence_parallel,
    )
    return by_node_name(solution.op_strategies)


def evaluator_of(
    problem: PlanningProblem,
    graph: TrainingGraph,
    machine: Machine | None,
    memory: int | None = None,
    drafts: Sequence[NodeStrategies] | None = None,
) -> SpmdEvaluator:
    """What turns choices into plans and, if there is a machine, prices them.

    Args:
        problem: what is fixed.
        graph: as captured.
        machine: as measured.
        memory: bytes that a partition may hold on a rank over a step.
        drafts: the ways along each axis of the model, if they are known.
    """
    batches = problem.dp_size if problem.batch == "global" else 1
    base, axes, found = problem.base(), problem.strategy.axes, []
    base = replace(base, levels=levels_of(base, problem.strategy, machine, problem.comm_backend))
    if problem.strategy.hierarchical and not base.levels:
        note = "nothing goes by level: ranks of the data are not several on each of several nodes"
        base = replace(base, notes=(*base.notes, note))
    base = replace(base, changed=tuple(n for n in problem.parameters if n not in graph.parameters))
    if base.changed and problem.strategy.zero != 0:
        more = f" and {len(base.changed) - 1} more" if len(base.changed) > 1 else ""
        note = f"{base.changed[0]}{more} stay whole on every rank: forward changes them"
        base = replace(base, notes=(*base.notes, note))
    whole, first = replace(graph, axes=dict(problem.mesh)), dict.fromkeys(axes, 0)
    given = dict(zip(axes, drafts, strict=True)) if drafts is not None else None

    def along(axis: str, graph: TrainingGraph) -> NodeStrategies:
        return given[axis] if given else strategies_along(problem, axis, graph, machine, memory)

    turns = partition_in_order(axes, whole, first, along)
    for axis, before, op_strategies in turns:
        found.append(op_strategies)
        partition = Partition.of(axis, axes[axis], before, op_strategies)
        base = replace(base, partitions=(*base.partitions, partition))
        if not op_strategies:
            note = f"nothing is worth dividing over {axis}: each rank of it does the same"
            base = replace(base, notes=(*base.notes, note))
    setup = EvaluationSetup(
        graph=graph,
        parameters=problem.parameters,
        base=base,
        op_strategies=tuple(found),
        cluster=machine.cluster if machine else None,  # type: ignore[arg-type]
        operators=machine.operators if machine else None,  # type: ignore[arg-type]
        update=machine.update if machine else None,  # type: ignore[arg-type]
        overhead=replace(machine.overhead if machine else Overhead(), batches=batches),
        comm_backend=problem.comm_backend,
        deadline=problem.deadline,
        note=(lambda plan: None)
        if problem.autotune_candidates is None
        else problem.autotune_candidates.append,
    )
    return SpmdEvaluator(setup)
