"""`PipelineEvaluator`: plans with pipeline stages, simulated on each stage's lowered programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.buckets import Buckets
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.plan import Plan
from autopar.core.schedules import (
    SPLIT_SCHEDULES,
    Orders,
    orders,
    split_orders,
)
from autopar.cost_model.algorithms.wire_bytes import sent_bytes
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cost import Cost
from autopar.cost_model.simulator.pipeline import PipelineSimulation, StageCost, simulate_pipeline
from autopar.cost_model.simulator.step import half_seconds
from autopar.passes.communication.bucket_collectives import BucketCollectives, propose_buckets
from autopar.passes.core.pass_pipeline import PassPipeline
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline_parallel.accumulate_gradients import accumulate_gradients
from autopar.passes.pipeline_parallel.split_dgrad_wgrad import split_dgrad_wgrad
from autopar.passes.pipeline_parallel.split_stages import PipelineStages
from autopar.passes.split_forward_backward import split_forward_backward
from autopar.passes.stage_lowering import (
    MicrobatchPrograms,
    build_microbatch_pipelines,
    lower_stage,
    split_plan_stages,
)
from autopar.planner.evaluate.candidate import Candidate, CandidateConfig
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.evaluate.p2p import P2PCost, add_step_boundaries
from autopar.planner.evaluate.pipeline_prediction import SimulatedPipeline
from autopar.planner.evaluate.setup import EvaluationSetup, ProgramCache
from autopar.planner.evaluate.stage_dedup import equal_stages, parameter_names
from autopar.planner.evaluate.stage_figures import StageSimulation, boundary_bytes, stage_cost
from autopar.planner.evaluate.stage_memory import split_backward_bytes


@dataclass(frozen=True)
class LoweredPipeline:
    """A plan with buckets, and the lowered programs of its stages.

    Attributes:
        programs: programs of each stage; equal stages share them.
        first: index of the first equal stage, for each stage.
    """

    plan: Plan
    programs: tuple[MicrobatchPrograms, ...]
    first: tuple[int, ...]


class StagedEvaluator(Evaluator):
    """Evaluator of plans with one pipeline.

    Attributes:
        pipeline: its stages and their schedule.
        split: graphs of stages for one micro-batch, with the loss as a whole.
    """

    pipeline: Pipeline
    split: PipelineStages

    @cached_property
    def orders(self) -> Orders:
        """Actions of each rank; all forwards run first if backwards need the loss of the batch."""
        p = self.pipeline
        sizes = p.schedule, p.ranks, p.micro_batches, p.stages_per_rank
        if self.split.can_interleave_backward:
            return orders(*sizes)
        return tuple(map(tuple.__add__, *split_orders(*sizes)))


class PipelineEvaluator(StagedEvaluator):
    """Evaluator of plans with one pipeline; `setup` is of the model without stages.

    It shares the lowered programs of `alike`, whose pipeline differs in its schedule only.
    """

    def __init__(
        self, setup: EvaluationSetup, pipeline: Pipeline, alike: PipelineEvaluator | None = None
    ) -> None:
        # The graph has the rows of one micro-batch, and the caller holds those of all.
        batches = setup.overhead.batches * pipeline.micro_batches
        overhead = replace(setup.overhead, batches=batches)
        base = replace(setup.base, pipeline=pipeline)
        super().__init__(replace(setup, base=base, overhead=overhead))
        self.pipeline = pipeline
        self._lowered = ProgramCache[LoweredPipeline](1)
        self._stages = ProgramCache[LoweredPipeline](1)
        self._splits: dict[bool, PipelineStages] = {}
        if alike is not None:
            self._splits, self._stages = alike._splits, alike._stages
        self._candidates: dict[CandidateConfig, Candidate] = {}

    def plan(self, config: CandidateConfig) -> Plan:
        return self._lower(config).plan

    def evaluate(self, config: CandidateConfig) -> Candidate:
        if config not in self._candidates:
            simulated = self.simulated(config)
            notes = max((stage.more.notes() for stage in simulated.simulations), key=len)
            plan = replace(simulated.plan, notes=(*simulated.plan.notes, *notes))
            found = self.setup.candidate(config, plan, simulated.prediction())
            if len(simulated.stages) == 1:
                found = replace(found, parts=simulated.memories[0].parts(self.orders[0]))
            self._candidates[config] = found
        return self._candidates[config]

    def seconds(self, config: CandidateConfig, clusters: Sequence[Cluster]) -> list[float]:
        plan, updates, found = self._lower(config).plan, self.updates(config), []
        for cluster, costs in zip(clusters, self.costs(config, clusters), strict=True):
            run = self._run(costs, P2PCost(cluster, plan.mesh))
            pairs = zip(run.ends_s, updates, strict=True)
            found.append(max(end + cost.seconds for end, cost in pairs))
        return found

    def costs(
        self, config: CandidateConfig, clusters: Sequence[Cluster]
    ) -> Iterator[list[StageCost]]:
        """Costs of all stages on each cluster."""
        lowered = self._lower(config)
        costs: dict[int, list[StageCost]] = {}
        for first in set(lowered.first):
            programs = lowered.programs[first]
            halves = programs.of_each(lambda g: half_seconds(g, clusters, self.setup.operators))
            more = self._adding_s(programs.more), self._weights(programs.last)[0]
            times = zip(*halves, strict=True)
            costs[first] = [stage_cost(programs.last, each, *more) for each in times]
        for index in range(len(clusters)):
            own = (costs[first][index] for first in lowered.first)
            yield [cost.at_pace(self._pace(stage)) for stage, cost in enumerate(own)]

    def simulated(self, config: CandidateConfig) -> SimulatedPipeline:
        """The simulated step of a configuration."""
        return self._simulate(self._lower(config))

    @property
    def split(self) -> PipelineStages:  # type: ignore[override]
        """Graph of each stage for one micro-batch, with the loss as a whole."""
        return self._split(1)

    def _split(self, loss_chunks: int) -> PipelineStages:
        """Graphs of the stages; a loss in chunks leaves out the logits before the split."""
        in_chunks = loss_chunks > 1
        if in_chunks not in self._splits:
            plan = replace(self.setup.base, loss_chunks=loss_chunks)
            strategies, micro_batches = self.setup.op_strategies, self.pipeline.micro_batches
            self._splits[in_chunks] = split_plan_stages(
                self.setup.graph, plan, 0, strategies, micro_batches
            )
        return self._splits[in_chunks]

    def _simulate(self, lowered: LoweredPipeline) -> SimulatedPipeline:
        distinct = {i: self._simulate_stage(lowered.programs[i]) for i in set(lowered.first)}
        stages = tuple(distinct[first] for first in lowered.first)
        if self.setup.paces:
            stages = tuple(replace(each, pace=self._pace(i)) for i, each in enumerate(stages))
        cluster, backend = self.setup.cluster, self.setup.base.comm_backend
        link = P2PCost(cluster, lowered.plan.mesh)
        figures = {
            id(each): each.figures(self.pipeline.micro_batches, cluster, backend) for each in stages
        }
        return SimulatedPipeline(
            plan=lowered.plan,
            pipeline=self.pipeline,
            stages=tuple(figures[id(each)] for each in stages),
            orders=self.orders,
            run=self._run([stage.cost for stage in stages], link),
            updates=self._updates(lowered),
            link=link,
            on_gpus=cluster.on_gpus,
            simulations=stages,
        )

    def _simulate_stage(self, programs: MicrobatchPrograms) -> StageSimulation:
        costs = self._adding_s(programs.more), *self._weights(programs.last)
        return StageSimulation(programs, *programs.of_each(self.setup.simulate), *costs)

    def _run(self, costs: Sequence[StageCost], link: P2PCost) -> PipelineSimulation:
        run = run_schedule(self.setup, self.orders, costs, link)
        return add_step_boundaries(run, self.split, self.pipeline, link, self.setup.agreement_s)

    def _lower(self, config: CandidateConfig) -> LoweredPipeline:
        return self._lowered.get(config, lambda: self._with_schedule(config))

    def _with_schedule(self, config: CandidateConfig) -> LoweredPipeline:
        lowered = self._stages.get(config, lambda: self._lower_stages(config))
        plan = replace(
            lowered.plan,
            name=f"{lowered.plan.name}, {self.pipeline}",
            pipeline=self.pipeline,
            sent_bytes=most_sent(self.pipeline, [*map(self._sent_by, lowered.programs)]),
        )
        return replace(lowered, plan=plan)

    def _lower_stages(self, config: CandidateConfig) -> LoweredPipeline:
        """Lowers equal stages once, or each stage if collectives are scheduled by name."""
        plan, stages = self.setup.draft(config), self._split(config.loss_chunks).stages
        firsts = tuple(range(len(stages))) if config.scheduled else equal_stages(stages, plan)
        buckets = self._propose_buckets(config, plan, stages, firsts)
        plan = replace(plan, buckets=buckets, compressions=config.compressions(buckets))
        if config.scheduled:
            overlaps = (self.setup.overlaps(config, g, self._passes(g, plan)[0]) for g in stages)
            plan = replace(plan, overlaps=tuple(each for found in overlaps for each in found))
        micro_batches = self.pipeline.micro_batches
        distinct = {
            i: lower_stage(stages[i], self._passes(stages[i], plan), plan, micro_batches)
            for i in dict.fromkeys(firsts)
        }
        programs = tuple(distinct[first] for first in firsts)
        notes = (*plan.notes, *(note for each in distinct.values() for note in each.last.notes))
        plan = replace(plan, notes=tuple(dict.fromkeys(notes)))
        return LoweredPipeline(plan, programs, firsts)

    def _passes(self, graph: TrainingGraph, plan: Plan) -> tuple[PassPipeline, PassPipeline]:
        """Passes of a stage for the last micro-batch, and for earlier ones."""
        micro_batches, backend = self.pipeline.micro_batches, self.setup.base.comm_backend
        return build_microbatch_pipelines(graph, plan, 0, backend, micro_batches=micro_batches)

    def _propose_buckets(
        self,
        config: CandidateConfig,
        plan: Plan,
        stages: Sequence[TrainingGraph],
        firsts: Sequence[int],
    ) -> Buckets:
        """Buckets of all stages; equal stages have equal buckets up to names."""
        total, proposed = Buckets(), dict[int, Buckets]()
        for graph, first in zip(stages, firsts, strict=True):
            if first not in proposed:
                prefix, rest = self._passes(graph, plan)[0].split(BucketCollectives)
                if not rest:
                    continue
                before = run_passes(graph, prefix)
                proposed[first] = propose_buckets(before, config.gather_bytes, config.reduce_bytes)
            total = total.joined(proposed[first].renamed(parameter_names(stages[first], graph)))
        return total

    def sent_by_stage(self, config: CandidateConfig) -> list[Counter[str]]:
        """Bytes per axis and step of each stage."""
        return [self._sent_by(programs) for programs in self._lower(config).programs]

    def _sent_by(self, programs: MicrobatchPrograms) -> Counter[str]:
        """Bytes per axis and step of a stage."""
        micro_batches = self.pipeline.micro_batches
        total: Counter[str] = Counter()
        for graph, times in programs.counted(micro_batches):
            for axis, nbytes in sent_bytes(graph, self.setup.base.comm_backend).items():
                total[axis] += nbytes * times
        for phase in ("forward", "backward"):
            total["pp"] += micro_batches * boundary_bytes(programs.last, phase)
        return total

    def _adding_s(self, graph: TrainingGraph) -> float:
        """Mean seconds that a micro-batch takes to add its gradients to earlier ones."""
        known = {node.name for node in graph.graph.nodes}
        micro_batches = self.pipeline.micro_batches
        if micro_batches == 1:
            return 0.0
        added = [n for n in accumulate_gradients(graph).calls() if n.name not in known]
        # The first micro-batch has no earlier gradients to add to.
        return self._operator_s(added) * (micro_batches - 1) / micro_batches

    def _weights(self, last: TrainingGraph) -> tuple[float, int]:
        """Fraction of a backward for parameter gradients if split, and bytes kept for it."""
        backward = split_forward_backward(last).backward
        if self.pipeline.schedule not in SPLIT_SCHEDULES or backward is None:
            return 0.0, 0
        halves = split_dgrad_wgrad(backward)
        dgrad_s, wgrad_s = (self._operator_s(half.calls()) for half in halves)
        total_s = dgrad_s + wgrad_s
        return wgrad_s / total_s if total_s else 0.0, split_backward_bytes(halves[1], last)

    def _pace(self, stage: int) -> float:
        """Seconds of a stage's rank for a second of the mean rank."""
        return self.setup.paces[self.pipeline.rank_of(stage)] if self.setup.paces else 1.0

    def _operator_s(self, nodes: Iterable[fx.Node]) -> float:
        return sum(self.setup.operators.seconds(node).seconds for node in nodes)

    def updates(self, config: CandidateConfig) -> tuple[Cost, ...]:
        """Cost of the optimizer's step on each rank."""
        return self._updates(self._lower(config))

    def _updates(self, lowered: LoweredPipeline) -> tuple[Cost, ...]:
        stages = self.split.stages
        found = []
        for rank in range(self.pipeline.ranks):
            held, sizes = self.pipeline.held(rank), dict[str, int]()
            for stage in self.pipeline.stages_of(rank):
                names = parameter_names(stages[lowered.first[stage]], stages[stage])
                trained = lowered.programs[stage].last.trained_bytes
                sizes |= {names[name]: nbytes for name, nbytes in trained.items()}
            own = (nbytes for name, nbytes in sizes.items() if name in held)
            cost = self.setup.update_cost(lowered.plan, own)
            found.append(replace(cost, seconds=cost.seconds * self._pace(rank)))
        return tuple(found)


def run_schedule(
    setup: EvaluationSetup,
    orders: Orders,
    costs: Sequence[StageCost],
    link: P2PCost,
    *,
    recording: bool = True,
) -> PipelineSimulation:
    """The step of all ranks, without what comes before and after the schedule.

    It has a timeline if `recording`.
    """
    operators = setup.operators
    # Times are of all ranks computing. In a bubble, those that wait free shared cores.
    slowdown = operators.relief(setup.base.world_size)
    own = link.cluster.slowdown
    issue_s = operators.thread_cost(own.issue_s, own.provenance).seconds
    return simulate_pipeline(
        orders, costs, link.seconds, issue_s, own.late_s, slowdown, recording=recording
    )


def most_sent(
    pipeline: Pipeline, stages: Sequence[Mapping[str, int]]
) -> tuple[tuple[str, int], ...]:
    """Bytes per axis and step on the rank that sends most, given those of each stage."""
    ranks: list[dict[str, int]] = []
    for rank in range(pipeline.ranks):
        total: Counter[str] = Counter()
        for stage in pipeline.stages_of(rank):
            total.update(stages[stage])
        ranks.append({axis: nbytes for axis, nbytes in total.items() if nbytes})
    return tuple(sorted(max(ranks, key=lambda sent: sum(sent.values())).items()))
