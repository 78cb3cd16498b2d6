"""`EvaluationSetup`: inputs of an evaluator. `ProgramCache`: cache of lowered programs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from autopar.core.ir.graph import ParameterInfo, TrainingGraph
from autopar.core.ir.messages import FROM_HOST, TO_HOST, WRITE
from autopar.core.ir.placement import (
    EVEN_ENOUGH,
    KEPT_EVEN_ENOUGH,
    Placement,
    Replicate,
    Shard,
    shard_dim,
)
from autopar.core.plan.compression import Compressions
from autopar.core.plan.layout import Layout
from autopar.core.plan.overlap import Overlap
from autopar.core.plan.partition import NodeStrategies
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.core.plan.report_data import TimelineEvent
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cost import Cost
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.optimizer_step import UpdateCost
from autopar.cost_model.memory.liveness import Overhead
from autopar.cost_model.simulator.step import Simulation, simulate
from autopar.cost_model.simulator.streams import Event
from autopar.cost_model.storage import UNMEASURED
from autopar.passes.communication.schedule_overlap import ScheduleOverlap
from autopar.passes.core.pass_pipeline import PassPipeline
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.shard_parameters import is_sharded
from autopar.planner.accounts import account_notes
from autopar.planner.evaluate.candidate import Candidate, CandidateConfig
from autopar.planner.evaluate.overlap_scheduler import schedule
from autopar.planner.evaluate.zero_shards import shard_replicated

IN_FLIGHT = 2
"""Reduce-scatters in flight; more would keep more unsharded gradients alive."""

T = TypeVar("T")


class ProgramCache(Generic[T]):
    """Bounded cache of lowered programs, which are large; drops the oldest entry."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._programs: dict[Hashable, T] = {}

    def get(self, key: Hashable, lower: Callable[[], T]) -> T:
        if key not in self._programs:
            while len(self._programs) >= self._size:
                del self._programs[next(iter(self._programs))]
            self._programs[key] = lower()
        return self._programs[key]


@dataclass(frozen=True)
class EvaluationSetup:
    """Inputs that all configurations of one evaluator share.

    Attributes:
        graph: captured graph, with the size of the data axis.
        base: plan without the choices of a configuration.
        overhead: bytes allocated in addition to the graph's tensors.
        op_strategies: strategies of the graph along each model-parallel axis.
        micro_batches: number of micro-batches of a rank, of which the graph computes one.
        paces: seconds of each pipeline rank for a second of the mean rank; () if equal.
        reports: whether predictions hold what the HTML report draws.
        note: callback for every simulated plan.
        deadline: callback; returns whether there is time for another candidate.
    """

    graph: TrainingGraph
    parameters: Mapping[str, ParameterInfo]
    base: Plan
    cluster: Cluster
    operators: OperatorTimes
    update: UpdateCost
    overhead: Overhead
    op_strategies: tuple[NodeStrategies, ...] = ()
    micro_batches: int = 1
    paces: tuple[float, ...] = ()
    reports: bool = True
    note: Callable[[Plan], None] = field(default=lambda plan: None, compare=False, repr=False)
    deadline: Callable[[], bool] = field(default=lambda: True, compare=False, repr=False)

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(block for block, _ in self.base.zero_stages)

    def draft(self, config: CandidateConfig) -> Plan:
        """The plan of a configuration, without buckets."""
        zero = dict(config.zero_stages)
        sharded = [
            info
            for name, info in self.parameters.items()
            if name in self.graph.parameters  # not changed by forward
            and is_sharded(info, zero[info.block])
        ]
        partitions = shard_replicated(self.base.partitions, sharded)
        layout = Layout(replace(self.base, partitions=partitions))
        placements: dict[str, Placement] = dict.fromkeys(self.parameters, Replicate())
        if self.base.dp_size > 1:
            for info in sharded:
                shape = layout.model_parallel_shape(info)
                even_enough = EVEN_ENOUGH if zero[info.block] == 3 else KEPT_EVEN_ENOUGH
                dim = shard_dim(shape, layout.shard_ranks, even_enough)
                placements[info.name] = Shard(dim)
        return replace(
            self.base,
            partitions=tuple(
                replace(partition, bucket_bytes=config.reduce_bytes) for partition in partitions
            ),
            name=config.named(dict(self.base.mesh)),
            levels=tuple(
                # Hybrid sharding needs the levels even if no collective is hierarchical.
                levels if config.hierarchical else replace(levels, from_bytes=())
                for levels in self.base.levels
            ),
            zero_stages=config.zero_stages,
            recompute=config.recompute,
            offload=config.offload,
            offload_parameters=config.offload_parameters,
            loss_chunks=config.loss_chunks,
            compressions=Compressions(activations=config.compress_activations),
            prefetch=config.prefetch,
            # Stage 0 keeps whole gradients anyway, so a limit would free nothing.
            in_flight=IN_FLIGHT if any(zero.values()) else 0,
            placements=tuple(placements.items()),
        )

    def simulate(self, graph: TrainingGraph) -> Simulation:
        return simulate(graph, self.cluster, self.operators, overhead=self.overhead)

    def update_cost(self, plan: Plan, trained_bytes: Iterable[int]) -> Cost:
        """The time of the optimizer's step; offloaded parameters are written, too.

        Those of GPUs lie in host memory, where the optimizer's kernels read and write them.
        """
        sizes = list(trained_bytes)
        cost = self.update.seconds(sizes, dtensors=Layout(plan).shards_parameters)
        if not plan.offload_parameters:
            return cost
        kinds = (FROM_HOST, TO_HOST) if self.cluster.on_gpus else (WRITE,)
        costs = (self.cluster.transfers(k).seconds(k, nbytes) for k in kinds for nbytes in sizes)
        return replace(cost, seconds=cost.seconds + sum(each.seconds for each in costs))

    @property
    def agreement_s(self) -> float:
        """Seconds of a step in which ranks exchange records, before forward and backward."""
        several = self.base.world_size > 1 and self.operators.on_host
        return 2 * self.cluster.slowdown.record_s if several else 0.0

    def overlaps(
        self, config: CandidateConfig, graph: TrainingGraph, passes: PassPipeline
    ) -> tuple[Overlap, ...]:
        """Start and wait of each collective of a graph; `passes` are yet to run on it."""
        before, rest = passes.split(ScheduleOverlap)
        if not rest:
            return ()
        graph = run_passes(graph, before)
        lowered = run_passes(graph, rest)
        budget = config.prefetch_budget_bytes
        return (schedule(graph, lowered, self.cluster, self.operators, budget),)

    def candidate(self, config: CandidateConfig, plan: Plan, prediction: Prediction) -> Candidate:
        """The candidate of a plan and its prediction, which must add up; calls `note`."""
        notes = (*plan.notes, *self.overhead.gaps(), *self._unmeasured_tiers(plan))
        notes = (*notes, *account_notes(plan, prediction))
        plan = replace(plan, prediction=prediction, notes=notes)
        self.note(plan)
        return Candidate(config, plan, prediction, self._host_bytes)

    @property
    def _host_bytes(self) -> int | None:
        """Bytes of host memory for each GPU; None if unknown, or on CPUs."""
        whole = self.cluster.host_memory_bytes if self.cluster.on_gpus else None
        return None if whole is None else whole // self.cluster.ranks_per_node

    def _unmeasured_tiers(self, plan: Plan) -> Iterator[str]:
        """Notes on lower levels of memory that a plan uses and nobody measured."""
        if not (plan.offload or plan.offload_parameters):
            return
        on_gpus, cluster = self.cluster.on_gpus, self.cluster
        in_files = not on_gpus or (plan.offload and plan.offload_dir)
        if in_files and cluster.storage is None:
            yield f"storage: {UNMEASURED.provenance}; autopar measure --offload-dir times it"
        if on_gpus and cluster.host is None:
            origin = cluster.transfers(TO_HOST).provenance
            yield f"host memory: {origin}; autopar measure times it"


def timeline_events(events: Iterable[Event]) -> tuple[TimelineEvent, ...]:
    """Simulated events in the form of a plan document."""
    return tuple((e.name, e.stream, round(e.start_s, 8), round(e.end_s, 8), e.kind) for e in events)
