"""Candidates: plans that differ in what may be chosen, and their evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.cost_model.algorithms.wire_bytes import node_bytes, sent_bytes
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cost import Cost
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.optimizer_step import UpdateCost
from autopar.cost_model.memory.liveness import Overhead
from autopar.cost_model.simulator.exposure import by_cause, worst
from autopar.cost_model.simulator.step import Simulation, half_seconds, simulate
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.ir.graph import ParameterInfo, TrainingGraph, tensor_bytes, tensors
from autopar.ir.mesh_levels import DATA_AXIS
from autopar.ir.placement import Replicate, Shard
from autopar.ir.roles import Parameter
from autopar.passes.communication.bucket_collectives import BucketCollectives, propose_buckets
from autopar.passes.communication.schedule_overlap import ScheduleOverlap
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.shard_parameters import is_sharded
from autopar.passes.pipeline import build_pass_pipeline
from autopar.plan.buckets import Buckets
from autopar.plan.compression import Compressions
from autopar.plan.overlap import Overlap
from autopar.plan.partition import NodeStrategies
from autopar.plan.prediction import MOST_EXPOSED, Prediction
from autopar.plan.recompute import Level
from autopar.planner.evaluate.overlap_scheduler import schedule
from autopar.planner.evaluate.report_data import report_data_of
from autopar.report.plan import Plan

IN_FLIGHT = 2
"""Reduce-scatters under way: more would keep more whole gradients alive."""


KEPT = 6
"""Programs that an evaluator keeps."""


@dataclass(frozen=True)
class CandidateConfig:
    """What distinguishes a candidate.

    Attributes:
        stages: ZeRO stage of each block.
        recompute: level of recomputation of each block.
        gather_bytes: size of buckets of gathers.
        reduce_bytes: size of buckets of reductions.
        prefetch: buckets gathered ahead.
        scheduled: whether collectives are scheduled one by one, rather than by `prefetch`.
        room: bytes that these may gather ahead, beside one bucket; None for any.
        compress: how each bucket of gradients is compressed, or one way for all; "" for not at all.
        compress_gathers: how gathered parameters are.
        compress_activations: how what travels between parts and stages of a model is.
        hierarchical: whether large messages go by level.
    """

    zero_stages: tuple[tuple[str, int], ...]
    recompute: tuple[tuple[str, Level], ...]
    gather_bytes: int
    reduce_bytes: int
    prefetch: int
    scheduled: bool = False
    prefetch_budget_bytes: int | None = None
    compress: tuple[str, ...] = ("",)
    compress_gathers: str = ""
    compress_activations: str = ""
    hierarchical: bool = False

    def __str__(self) -> str:
        parts = [_mixed({b: f"zero{s}" if s else "ddp" for b, s in self.zero_stages})]
        if any(level != "none" for _, level in self.recompute):
            parts.append("recompute " + _mixed({b: str(v) for b, v in self.recompute}))
        mb = max(self.gather_bytes, self.reduce_bytes) / 2**20
        parts.append(f"buckets {mb:g} MiB")
        if self.prefetch != 1:
            parts.append(f"prefetch {self.prefetch}")
        if self.scheduled:
            parts.append(
                "scheduled" + (", little ahead" if self.prefetch_budget_bytes is not None else "")
            )
        if any(self.compress):
            parts.append(
                "gradients " + _mixed({str(i): c or "whole" for i, c in enumerate(self.compress)})
            )
        if self.compress_gathers:
            parts.append(f"parameters {self.compress_gathers}")
        if self.compress_activations:
            parts.append(f"activations {self.compress_activations}")
        if self.hierarchical:
            parts.append("by level")
        return ", ".join(parts)


def events_of(
    result: Simulation, update_s: float
) -> tuple[tuple[str, str, float, float, str], ...]:
    """The timeline of a step as a plan keeps it, with the optimizer's step at its end."""
    end_s = result.step_s + update_s
    events = [*result.timeline, Event("optimizer", COMPUTE, result.step_s, end_s, COMPUTE)]
    return tuple((e.name, e.stream, round(e.start_s, 8), round(e.end_s, 8), e.kind) for e in events)


def _mixed(values: Mapping[str, str]) -> str:
    """One value, or each with how many blocks have it."""
    counts: dict[str, int] = {}
    for value in values.values():
        counts[value] = counts.get(value, 0) + 1
    if len(counts) == 1:
        return next(iter(counts))
    return " + ".join(f"{value} x{count}" for value, count in counts.items())


@dataclass(frozen=True)
class Candidate:
    """A candidate, the plan it makes, and what the simulator says of it."""

    config: CandidateConfig
    plan: Plan
    prediction: Prediction


@dataclass(frozen=True)
class Evaluator:
    """Turns choices into plans and prices them on what lowering emits.

    Attributes:
        graph: the captured graph with the size of its data-parallel axis.
        parameters: the model's parameters.
        base: the plan with all that is not chosen.
        cluster: times of collectives.
        operators: times of operators.
        update: time of the optimizer's step.
        overhead: bytes that are allocated beside the graph's tensors.
        comm_backend: what collectives are lowered for.
        op_strategies: of the graph before each axis that the model is partitioned along.
        note: is told of every plan that was priced.
        in_time: whether there is time for another that need not be.
        done: the last plans and programs that were made, by choice.
        begun: the last graph before its collectives were put into buckets, by what made it.
    """

    graph: TrainingGraph
    parameters: Mapping[str, ParameterInfo]
    base: Plan
    cluster: Cluster
    operators: OperatorTimes
    update: UpdateCost
    overhead: Overhead
    comm_backend: str
    op_strategies: tuple[NodeStrategies, ...] = ()
    note: Callable[[Plan], None] = field(default=lambda plan: None, compare=False, repr=False)
    deadline: Callable[[], bool] = field(default=lambda: True, compare=False, repr=False)
    lowered_cache: dict[CandidateConfig, tuple[Plan, TrainingGraph]] = field(
        init=False, compare=False, repr=False, default_factory=dict
    )
    prefix_cache: dict[Any, TrainingGraph] = field(
        init=False, compare=False, repr=False, default_factory=dict
    )

    def plan(self, choice: CandidateConfig) -> Plan:
        """The plan of a choice, buckets filled in the order of the graph."""
        return self._made(choice)[0]

    def lowered(self, choice: CandidateConfig) -> TrainingGraph:
        """The program of rank 0, whose chunks are the largest."""
        return self._made(choice)[1]

    def _made(self, choice: CandidateConfig) -> tuple[Plan, TrainingGraph]:
        """Both, of which a few are kept: they are large."""
        if choice not in self.lowered_cache:
            while len(self.lowered_cache) >= KEPT:
                del self.lowered_cache[next(iter(self.lowered_cache))]
            self.lowered_cache[choice] = self._plan(choice)
        return self.lowered_cache[choice]

    def evaluate(self, choice: CandidateConfig) -> Candidate:
        """Transforms the graph as the plan says, and simulates it."""
        plan, graph = self._made(choice)
        result = simulate(graph, self.cluster, self.operators, overhead=self.overhead)
        update = self.update_cost(plan, graph)
        provenance = dict(result.provenance)
        provenance[update.kind] = provenance.get(update.kind, 0) + 1
        prediction = Prediction(
            step_s=result.step_s + update.seconds,
            update_s=update.seconds,
            compute_s=result.compute_s,
            communication_s=result.communication_s,
            exposed_s=result.exposed_s,
            peak_bytes=result.memory.peak,
            node_bytes=node_bytes(graph, self.comm_backend, self.cluster.ranks_per_node),
            reserved_bytes=result.memory.reserved,
            context_bytes=result.memory.context,
            memory=dict(result.memory.by_category),
            provenance=provenance,
            waits=dict(result.waits),
            causes=by_cause(result.exposures),
            exposures=worst(result.exposures, MOST_EXPOSED),
            events=events_of(result, update.seconds),
            memory_curve=tuple((round(at, 8), nbytes) for at, nbytes in result.memory_curve),
            report_data=report_data_of(graph, self.cluster, result),
        )
        return self.evaluated(choice, plan, prediction)

    def evaluated(self, choice: CandidateConfig, plan: Plan, prediction: Prediction) -> Candidate:
        """The candidate with what was predicted of it."""
        notes = (*plan.notes, *self.overhead.gaps())
        plan = replace(plan, prediction=prediction, notes=notes)
        self.note(plan)
        return Candidate(choice, plan, prediction)

    def seconds(self, choice: CandidateConfig, clusters: Sequence[Cluster]) -> list[float]:
        """What a step of a choice takes on each of other clusters."""
        plan, graph = self._made(choice)
        update_s = self.update_cost(plan, graph).seconds
        halves = half_seconds(graph, clusters, self.operators)
        return [forward_s + backward_s + update_s for forward_s, backward_s in halves]

    def update_cost(self, plan: Plan, graph: TrainingGraph) -> Cost:
        """Time of the optimizer's step over this rank's parts of the trained parameters."""
        trained = [
            tensor_bytes(tensors(node)[0])
            for role, node in zip(graph.inputs, graph.placeholders, strict=True)
            if isinstance(role, Parameter) and graph.parameters[role.name].requires_grad
        ]
        return self.update.seconds(trained, dtensors=plan.shards_parameters)

    def draft(self, choice: CandidateConfig) -> Plan:
        """The plan of a choice, but for its buckets."""
        stages = dict(choice.zero_stages)
        ranks = self.base.dp_size
        others = (f"{name}{size}" for name, size in self.base.mesh if name != DATA_AXIS)
        return replace(
            self.base,
            partitions=tuple(
                replace(p, bucket_bytes=choice.reduce_bytes) for p in self.base.partitions
            ),
            name=", ".join([*others, str(choice)]),
            levels=tuple(
                own if choice.hierarchical else replace(own, from_bytes=())
                for own in self.base.levels
            ),
            zero_stages=choice.zero_stages,
            recompute=choice.recompute,
            compressions=Compressions(activations=choice.compress_activations),
            prefetch=choice.prefetch,
            in_flight=IN_FLIGHT if any(stages.values()) else 0,
            placements=tuple(
                (
                    name,
                    str(Shard(0) if ranks > 1 and self._shards(p, stages) else Replicate()),
                )
                for name, p in self.parameters.items()
            ),
        )

    def _shards(self, info: ParameterInfo, stages: Mapping[str, int]) -> bool:
        """Whether a parameter is sharded between steps; what forward changes is not."""
        return info.name in self.graph.parameters and is_sharded(info, stages[info.block])

    @staticmethod
    def compressions(choice: CandidateConfig, buckets: Buckets) -> Compressions:
        """How each bucket is compressed."""
        given = choice.compress
        reduce = given * len(buckets.reduce) if len(given) == 1 else given
        return Compressions(
            gather=(choice.compress_gathers,) * len(buckets.gather),
            regather=(choice.compress_gathers,) * len(buckets.regather),
            reduce=reduce,
            activations=choice.compress_activations,
        )

    def overlaps(
        self, choice: CandidateConfig, graph: TrainingGraph, passes: Sequence[Pass]
    ) -> tuple[Overlap, ...]:
        """When each collective is issued and waited for, of a graph and the passes left to run."""
        kinds = [isinstance(p, ScheduleOverlap) for p in passes]
        if not any(kinds):
            return ()
        first = kinds.index(True)
        graph = run_passes(graph, passes[:first])
        lowered = run_passes(graph, passes[first:])
        return (
            schedule(graph, lowered, self.cluster, self.operators, choice.prefetch_budget_bytes),
        )

    def _plan(self, choice: CandidateConfig) -> tuple[Plan, TrainingGraph]:
        plan = self.draft(choice)
        graph = replace(self.graph, axes=plan.axes)
        passes = build_pass_pipeline(plan, 0, self.comm_backend, op_strategies=self.op_strategies)
        kinds = [isinstance(p, (BucketCollectives, ScheduleOverlap)) for p in passes]
        first = kinds.index(True) if any(kinds) else len(passes)
        key = (plan.zero_stages, plan.recompute, choice.reduce_bytes if self.op_strategies else 0)
        if key not in self.prefix_cache:
            self.prefix_cache.clear()
            self.prefix_cache[key] = run_passes(graph, passes[:first])
        graph = self.prefix_cache[key]
        plan = replace(plan, notes=(*plan.notes, *graph.notes))
        if first < len(passes) and isinstance(passes[first], BucketCollectives):
            buckets = propose_buckets(graph, choice.gather_bytes, choice.reduce_bytes)
            plan = replace(plan, buckets=buckets, compressions=self.compressions(choice, buckets))
        rest = build_pass_pipeline(plan, 0, self.comm_backend, op_strategies=self.op_strategies)[
            first:
        ]
        if choice.scheduled:
            plan = replace(plan, overlaps=self.overlaps(choice, graph, rest))
            rest = build_pass_pipeline(
                plan, 0, self.comm_backend, op_strategies=self.op_strategies
            )[first:]
        graph = run_passes(graph, rest)
        sent = sent_bytes(graph, self.comm_backend)
        return replace(plan, sent_bytes=tuple(sorted(sent.items()))), graph
