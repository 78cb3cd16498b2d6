"""`build_evaluator`: partitions a captured graph along the model-parallel axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from autopar.core.ir.graph import TrainingGraph, source_line
from autopar.core.ir.mesh_levels import Levels
from autopar.core.operators.attention import attention
from autopar.core.plan.partition import NodeStrategies, Partition, by_node_name
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import RING_DECLINED, UNUSED
from autopar.cost_model.memory.liveness import Overhead
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.lowerings.ring_attention import RING, without_ring
from autopar.passes.rules.routed_rows import AXIS as EXPERT_AXIS
from autopar.passes.tensor_parallel.partition_in_order import partition_in_order
from autopar.planner.evaluate.evaluator import SpmdEvaluator
from autopar.planner.evaluate.hierarchical import levels_of, neighbours
from autopar.planner.evaluate.setup import EvaluationSetup
from autopar.planner.machine import Machine
from autopar.planner.placement.carry import SolvedAxes
from autopar.planner.placement.dispatch import Dispatch, dispatch_along
from autopar.planner.placement.solve import costs_along, partition
from autopar.planner.placement.unmeasured import partition_by_bytes
from autopar.planner.problem import PlanningProblem, SearchContext

ROUTED = frozenset({"experts", "experts_outer"})
"""Lowerings that give a rank the tokens of its own experts."""

EVEN_EXPERTS = (
    "experts: the busiest rank of {} is priced with 1.0 times an even share of the tokens, as "
    "under a balanced router"
)
"""Note of a plan that divides the experts to which a router sends tokens."""


def build_evaluator(
    problem: PlanningProblem,
    graph: TrainingGraph,
    machine: Machine | None,
    context: SearchContext | None = None,
    *,
    memory: int | None = None,
    op_strategies: Sequence[NodeStrategies] | None = None,
    carried: SolvedAxes | None = None,
    reports: bool = True,
) -> SpmdEvaluator:
    """Builds the evaluator of a captured graph, which predicts nothing without a machine.

    The partition holds at most `memory` bytes per rank over a step. Strategies along the
    model-parallel axes are solved for unless given, or taken from `carried`. Without `reports`,
    predictions lack what the HTML report draws.
    """
    context, axes = context or SearchContext(), problem.strategy.axes
    if machine is not None and problem.state_block_bytes:
        machine = machine.with_stored_states(
            problem.state_block_bytes, problem.strategy.offload_dir or ""
        )
    base = problem.base()
    base = replace(
        base,
        levels=levels_of(base, problem.strategy, machine, problem.comm_backend),
        changed=tuple(name for name in problem.parameters if name not in graph.parameters),
    )
    known = dict(zip(axes, op_strategies, strict=True)) if op_strategies is not None else None

    def strategies_along(axis: str, graph: TrainingGraph) -> NodeStrategies:
        if known:
            return known[axis]
        solve = partial(solve_axis, problem, axis, graph, machine, memory)
        if carried is None:
            return solve()
        return carried.get(axis, axes, graph, problem.strategy.pins(axis, graph.parameters), solve)

    whole = replace(graph, axes=dict(problem.mesh))
    solved = list(partition_in_order(axes, whole, dict.fromkeys(axes, 0), strategies_along))
    partitions = [
        with_dispatch(problem, Partition.of(axis, axes[axis], before, found), before, machine)
        for axis, before, found in solved
    ]
    base = replace(base, levels=with_dispatch_levels(base.levels, partitions))
    unused = [axis for axis, _, found in solved if not found]
    routed = [axis for axis, _, found in solved if any(own.lowering in ROUTED for _, own in found)]
    base = replace(base, partitions=tuple(partitions))
    notes = (*base.notes, *_notes(problem, base, unused, routed))
    if problem.strategy.ring_attention:
        for _, before, found in (item for item in solved if item[0] == "cp"):
            notes += tuple(_ring_notes(before, axes["cp"], found))
    base = replace(base, notes=notes)
    # Under batch='global' the caller on each rank holds the rows of all ranks.
    batches = problem.dp_size if problem.batch == "global" else 1
    setup = EvaluationSetup(
        graph=graph,
        parameters=problem.parameters,
        base=base,
        op_strategies=tuple(found for _, _, found in solved),
        cluster=machine.cluster if machine else None,  # type: ignore[arg-type]
        operators=machine.operators if machine else None,  # type: ignore[arg-type]
        update=machine.update if machine else None,  # type: ignore[arg-type]
        overhead=replace(machine.overhead if machine else Overhead(), batches=batches),
        paces=problem.stage_paces,
        reports=reports,
        deadline=context.deadline,
        note=context.note,
    )
    return SpmdEvaluator(setup)


def _notes(
    problem: PlanningProblem, base: Plan, unused: Sequence[str], routed: Sequence[str]
) -> Iterator[str]:
    """Notes on choices of the user that the plan cannot follow, and on what prices assume."""
    if problem.strategy.hierarchical and not base.levels:
        yield "nothing goes by level: ranks of the data are not several on each of several nodes"
    if base.changed and problem.strategy.zero != 0:
        more = f" and {len(base.changed) - 1} more" if len(base.changed) > 1 else ""
        yield f"{base.changed[0]}{more} stay whole on every rank: forward changes them"
    for axis in unused:
        yield UNUSED.format(axis)
    if routed:
        yield EVEN_EXPERTS.format(" x ".join(routed))
    for own in base.partitions:
        if own.once:
            place = f"node of {own.once} ranks" if own.once > 1 else "rank"
            yield f"experts: a token goes once to each {place} that has some of its experts"


def _ring_notes(graph: TrainingGraph, ranks: int, found: NodeStrategies) -> Iterator[str]:
    """A note for each reason why some attention of a forward does not go round the ranks of cp."""
    lowerings, reasons = {name: own.lowering for name, own in found}, dict[str, str]()
    for node in graph.calls():
        if node.target is attention and lowerings.get(node.name) != RING:
            reason = without_ring(Operator.of(node), ranks) or "another way was chosen"
            reasons.setdefault(reason, source_line(node))
    for reason, line in reasons.items():
        where = f" ({line})" if line else ""
        yield f"{RING_DECLINED}{where}: {reason}. It is divided in another way"


def solve_axis(
    problem: PlanningProblem,
    axis: str,
    graph: TrainingGraph,
    machine: Machine | None,
    memory: int | None = None,
) -> NodeStrategies:
    """Strategies of least cost along one axis, or of fewest bytes without a measured machine."""
    mesh, pins = dict(problem.mesh), problem.strategy.pins(axis, graph.parameters)
    ring = problem.strategy.ring_attention if axis == "cp" else False
    if machine is None:
        keep = problem.strategy.keep_sharded
        ways = {"ring": ring, "route": problem.strategy.route_experts}
        return partition_by_bytes(graph, mesh[axis], pins, keep_sharded=keep, **ways)
    unsharded = problem.parameters
    # Parameters that nothing shards stay plain. Charging each the overhead of a DTensor made a deep
    # GPT come out 27 % too slow where tp divides rows.
    sharded = any(p.shape != unsharded[name].shape for name, p in graph.parameters.items())
    shards = problem.shard_ranks if problem.strategy.zero != 0 else 1
    dispatch = dispatch_of(problem, axis, graph, machine)
    levels = Levels(axis, dispatch.once).sizes(mesh[axis]) if dispatch.once else {}
    solution = partition(
        graph,
        mesh[axis],
        machine,
        mesh=mesh | levels,
        axis=axis,
        pins=pins,
        memory=memory,
        copies=2.0 + problem.state_ratio,
        shards=shards,
        wrapped=sharded or shards > 1,
        keep_sharded=problem.strategy.keep_sharded,
        sequence=problem.strategy.sequence_parallel,
        ring=ring,
        route=problem.strategy.route_experts,
        dispatch=dispatch,
    )
    return by_node_name(solution.op_strategies)


def dispatch_of(
    problem: PlanningProblem, axis: str, graph: TrainingGraph, machine: Machine | None
) -> Dispatch:
    """The cheapest dispatch of tokens along an axis before which a graph stands."""
    if axis != EXPERT_AXIS or problem.strategy.route_experts is False:
        return Dispatch()
    mesh, strategy = dict(problem.mesh), problem.strategy
    cluster = machine.cluster if machine is not None else None
    near = neighbours(axis, problem.base(), strategy, cluster)
    prices = None
    if machine is not None:
        mesh |= Levels(axis, near).sizes(mesh[axis])
        prices = costs_along(mesh[axis], machine, mesh=mesh, axis=axis)
    by_level = None if strategy.hierarchical is None else bool(strategy.hierarchical)
    return dispatch_along(graph, mesh[axis], prices, near, by_level)


def with_dispatch(
    problem: PlanningProblem, own: Partition, graph: TrainingGraph, machine: Machine | None
) -> Partition:
    """A partition with the choice of where its tokens go once."""
    return replace(own, once=dispatch_of(problem, own.axis, graph, machine).once * own.routes)


def with_dispatch_levels(
    levels: tuple[Levels, ...], partitions: Iterable[Partition]
) -> tuple[Levels, ...]:
    """Levels with those of axes along which a token goes to each node once."""
    there = {own.axis for own in levels}
    more = (own for own in partitions if own.once > 1 and own.axis not in there)
    return (*levels, *(Levels(own.axis, own.once) for own in more))
