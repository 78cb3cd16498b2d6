"""Pipelines as candidates: plans with stages, priced on what each stage lowers to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from autopar.cost_model.algorithms.wire_bytes import sent_bytes
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.cost import Cost
from autopar.cost_model.simulator.exposure import by_cause, worst
from autopar.cost_model.simulator.pipeline import PipelineSimulation, StageCost, simulate_pipeline
from autopar.cost_model.simulator.schedules import Orders, in_flight, orders, split_orders
from autopar.cost_model.simulator.step import Simulation, half_seconds, simulate
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.ir.graph import TrainingGraph, tensor_bytes, tensors
from autopar.ir.mesh_levels import DATA_AXIS
from autopar.ir.roles import Parameter
from autopar.passes.communication.bucket_collectives import BucketCollectives, propose_buckets
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
from autopar.plan.buckets import Buckets
from autopar.plan.overlap import Overlap
from autopar.plan.pipeline import Pipeline
from autopar.plan.prediction import MOST_EXPOSED, Prediction, StagePrediction
from autopar.plan.report_data import ReportData
from autopar.planner.evaluate.evaluator import Candidate, CandidateConfig, Evaluator
from autopar.planner.evaluate.p2p import P2PCost, framed
from autopar.planner.evaluate.pipeline_report_data import report_data_of_pipeline
from autopar.planner.evaluate.stage_cost import StageSimulation, StageTimes, passed_on
from autopar.planner.evaluate.stage_dedup import StageDedup, renamed
from autopar.planner.evaluate.stage_memory import RankMemory, bytes_between, memory_of_rank
from autopar.report.plan import Plan

Staged = tuple[Plan, list[MicrobatchPrograms], StageDedup]
"""A plan, each stage lowered, and those that are alike."""


@dataclass(frozen=True)
class PipelineEvaluator(Evaluator):
    """Turns choices into plans with stages, and prices them; `base` has the pipeline."""

    cuts: dict[str, PipelineStages] = field(default_factory=dict, compare=False, repr=False)
    known: dict[CandidateConfig, Candidate] = field(default_factory=dict, compare=False, repr=False)
    lowerings: dict[CandidateConfig, Staged] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def pipeline(self) -> Pipeline:
        """The stages."""
        assert self.base.pipeline is not None
        return self.base.pipeline

    def plan(self, choice: CandidateConfig) -> Plan:
        """The plan of a choice, buckets filled in the order of each stage."""
        return self._staged(choice)[0]

    def evaluate(self, choice: CandidateConfig) -> Candidate:
        """Lowers every stage as the plan says, and simulates them, alone and together."""
        if choice not in self.known:
            self.known[choice] = self._evaluated(choice)
        return self.known[choice]

    def _evaluated(self, choice: CandidateConfig) -> Candidate:
        plan, turns, alike = self._staged(choice)
        found = {first: self._lowered(turns[first]) for first in dict.fromkeys(alike.first)}
        stages = [found[first] for first in alike.first]
        order, link = self.orders(self.cuts[DATA_AXIS]), P2PCost(self.cluster, plan.mesh)
        together = self._together([stage.cost for stage in stages], self.cuts[DATA_AXIS], link)
        flights = [in_flight(order[s % len(order)], s) for s in range(len(stages))]
        graphs = [stage.programs.last for stage in stages]
        update = [self._update(plan, alike, graphs, rank) for rank in range(self.pipeline.ranks)]
        memories = self._memory(stages, order)
        prediction = self._prediction(plan, stages, together, flights, update, memories)
        picture = self._picture(plan, stages, together, memories)
        prediction = replace(prediction, report_data=picture)
        return self.evaluated(choice, plan, prediction)

    def _together(
        self, costs: Sequence[StageCost], stages: PipelineStages, link: P2PCost
    ) -> PipelineSimulation:
        """A whole step of all ranks, but for the optimizer's."""
        orders, times = self.orders(stages), (link.issue_s, link.late_s)
        together = self.operators.setting.sharing >= self.base.world_size
        crowding = (
            self.operators.oversubscription if together else 1.0
        )  # else those beside do the same
        run = simulate_pipeline(orders, costs, link.seconds, *times, crowding)
        return framed(run, stages, self.pipeline, link)

    def orders(self, stages: PipelineStages) -> Orders:
        """What each rank does: forwards first, where the loss must be known before a backward."""
        p = self.pipeline
        if stages.can_interleave_backward:
            return orders(p.schedule, p.ranks, p.micro_batches, p.stages_per_rank)
        return tuple(map(tuple.__add__, *split_orders(p.ranks, p.micro_batches, p.stages_per_rank)))

    def _staged(self, choice: CandidateConfig) -> Staged:
        """What a choice lowers to, of which the last is kept."""
        if choice not in self.lowerings:
            self.lowerings.clear()
            self.lowerings[choice] = self._lower(choice)
        return self.lowerings[choice]

    def _lower(self, choice: CandidateConfig) -> Staged:
        """The plan, each stage lowered, those alike once.

        Collectives that are scheduled one by one are known by name, so then all stages are lowered.
        """
        plan, micro = self.draft(choice), self.pipeline.micro_batches
        name = f"{plan.name}, {self.pipeline}"
        if DATA_AXIS not in self.cuts:
            self.cuts[DATA_AXIS] = split_plan_stages(self.graph, plan, 0, self.op_strategies, micro)
        stages = self.cuts[DATA_AXIS].stages
        alike = StageDedup.none(len(stages)) if choice.scheduled else StageDedup.of(stages, plan)
        found, proposed = Buckets(), dict[int, Buckets]()
        for graph, first in zip(stages, alike.first, strict=True):
            if first in proposed:
                own = proposed[first].renamed(renamed(stages[first], graph))
                found = _joined(found, own)
                continue
            passes, _ = build_microbatch_pipelines(
                graph, plan, 0, self.comm_backend, micro_batches=micro
            )
            kinds = [isinstance(item, BucketCollectives) for item in passes]
            if any(kinds):
                graph = run_passes(graph, passes[: kinds.index(True)])
                own = propose_buckets(graph, choice.gather_bytes, choice.reduce_bytes)
                proposed[first], found = own, _joined(found, own)
        compressions = self.compressions(choice, found)
        plan = replace(plan, name=name, buckets=found, compressions=compressions)
        if choice.scheduled:
            plan = replace(plan, overlaps=tuple(self._overlaps(choice, plan, stages)))
        turns: list[MicrobatchPrograms] = []
        notes = dict.fromkeys(plan.notes)
        for stage, graph in enumerate(stages):
            if (first := alike.first[stage]) != stage:
                turns.append(turns[first])
                continue
            both = build_microbatch_pipelines(
                graph, plan, 0, self.comm_backend, micro_batches=micro
            )
            turns.append(lower_stage(graph, both, plan, micro))
            notes |= dict.fromkeys(turns[-1].last.notes)
        sent = tuple(sorted(self._sent(turns).items()))
        return replace(plan, notes=tuple(notes), sent_bytes=sent), turns, alike

    def seconds(self, choice: CandidateConfig, clusters: Sequence[Cluster]) -> list[float]:
        """What a step of a choice takes on each of other clusters."""
        plan, turns, alike = self._staged(choice)
        firsts = dict.fromkeys(alike.first)
        adding = {first: self._adding(turns[first].more) for first in firsts}
        weights = {first: self._weights(turns[first].last)[0] for first in firsts}
        halves = {
            first: turns[first].of_each(lambda g: half_seconds(g, clusters, self.operators))
            for first in firsts
        }
        graphs = [turns[first].last for first in alike.first]
        updates = [self._update(plan, alike, graphs, rank) for rank in range(self.pipeline.ranks)]

        def on(index: int, cluster: Cluster) -> float:
            costs = {}
            for first, (opening, more, last) in halves.items():
                taken = StageTimes(opening[index][0], *more[index], last[index][1])
                costs[first] = taken.cost(turns[first].last, adding[first], weights[first])
            link, cuts = P2PCost(cluster, plan.mesh), self.cuts[DATA_AXIS]
            found = self._together([costs[first] for first in alike.first], cuts, link)
            return max(end + cost.seconds for end, cost in zip(found.ends_s, updates, strict=True))

        return [on(*place) for place in enumerate(clusters)]

    def _overlaps(
        self, choice: CandidateConfig, plan: Plan, stages: Sequence[TrainingGraph]
    ) -> Iterator[Overlap]:
        """When collectives are issued and waited for, in the last micro-batch of each stage."""
        micro = self.pipeline.micro_batches
        for graph in stages:
            last, _ = build_microbatch_pipelines(
                graph, plan, 0, self.comm_backend, micro_batches=micro
            )
            yield from self.overlaps(choice, graph, last)

    def _sent(self, turns: Sequence[MicrobatchPrograms]) -> dict[str, int]:
        """What the rank that sends most does over each axis, in bytes a step."""
        ranks: list[dict[str, int]] = []
        for rank in range(self.pipeline.ranks):
            total: Counter[str] = Counter()
            for stage in self.pipeline.stages_of(rank):
                for graph, times in turns[stage].counted(self.pipeline.micro_batches):
                    for axis, nbytes in sent_bytes(graph, self.comm_backend).items():
                        total[axis] += nbytes * times
                total["pp"] += self.pipeline.micro_batches * sum(
                    passed_on(turns[stage].last, phase) for phase in ("forward", "backward")
                )
            ranks.append({axis: nbytes for axis, nbytes in total.items() if nbytes})
        return max(ranks, key=lambda own: sum(own.values()))

    def _lowered(self, turns: MicrobatchPrograms) -> StageSimulation:
        def simulated(graph: TrainingGraph) -> Simulation:
            return simulate(graph, self.cluster, self.operators, overhead=self.overhead)

        own = self._adding(turns.more), *self._weights(turns.last)
        return StageSimulation(turns, *turns.of_each(simulated), *own)

    def _adding(self, graph: TrainingGraph) -> float:
        """Seconds that a micro-batch takes to add its gradients to those before: all but one do."""
        known, micro = {node.name for node in graph.graph.nodes}, self.pipeline.micro_batches
        if micro == 1:
            return 0.0
        added = [n for n in accumulate_gradients(graph).calls() if n.name not in known]
        seconds = sum(self.operators.seconds(node).seconds for node in added)
        return seconds * (micro - 1) / micro

    def _weights(self, last: TrainingGraph) -> tuple[float, int]:
        """The share of a stage's backward that other stages need not wait for, and what waits."""
        backward = split_forward_backward(last).backward
        if self.pipeline.schedule != "zero_bubble" or backward is None:
            return 0.0, 0
        halves = split_dgrad_wgrad(backward)
        seconds = [
            sum(self.operators.seconds(node).seconds for node in part.calls()) for part in halves
        ]
        share = seconds[1] / sum(seconds) if sum(seconds) else 0.0
        return share, bytes_between(halves[1], last)

    def _update(
        self, plan: Plan, alike: StageDedup, stages: Sequence[TrainingGraph], rank: int
    ) -> Cost:
        """The optimizer's step of a rank."""
        cuts = self.cuts[DATA_AXIS].stages
        held, sizes, wrapped = self.pipeline.held(rank), dict[str, int](), plan.shards_parameters
        for stage in self.pipeline.stages_of(rank):
            graph = stages[stage]
            names = renamed(cuts[alike.first[stage]], cuts[stage])
            for role, node in zip(graph.inputs, graph.placeholders, strict=True):
                if isinstance(role, Parameter) and graph.parameters[role.name].requires_grad:
                    sizes[names[role.name]] = tensor_bytes(tensors(node)[0])
        return self.update.seconds(
            [n for name, n in sizes.items() if name in held], dtensors=wrapped
        )

    def _prediction(
        self,
        plan: Plan,
        stages: Sequence[StageSimulation],
        together: PipelineSimulation,
        flights: Sequence[int],
        update: Sequence[Cost],
        memories: Sequence[RankMemory],
    ) -> Prediction:
        ranks, count = range(self.pipeline.ranks), self.pipeline.micro_batches
        ends = [end + cost.seconds for end, cost in zip(together.ends_s, update, strict=True)]
        slow = max(ranks, key=lambda rank: together.busy_s[rank] + update[rank].seconds)
        own = [stages[stage] for stage in self.pipeline.stages_of(slow)]
        full = max(memories, key=lambda own: own.peak)
        runs = [run for stage in own for run in stage.runs(count)]
        within = sum(times * run.communication_s for run, times in runs)
        link = P2PCost(self.cluster, plan.mesh)
        return Prediction(
            step_s=max(ends),
            update_s=update[slow].seconds,
            compute_s=count * sum(stage.more.compute_s + stage.adding_s for stage in own),
            communication_s=within + together.transfer_s / len(ranks),
            exposed_s=together.exposed_s + sum(times * run.exposed_s for run, times in runs),
            peak_bytes=full.peak,
            memory=full.by_category,
            reserved_bytes=full.reserved,
            context_bytes=stages[0].last.memory.context,
            provenance=self._provenance(stages, update, link),
            waits=_summed((run.waits, times) for run, times in runs),
            causes=_summed((by_cause(run.exposures), times) for run, times in runs),
            exposures=worst((e for stage in own for e in stage.first.exposures), MOST_EXPOSED),
            events=_events(together, update),
            stages=tuple(
                StagePrediction(
                    parameter_bytes=sum(
                        info.bytes for name, info in self.parameters.items()
                        if self.pipeline.owners.get(name) == index
                    ),
                    forward_s=stage.cost.forward_s,
                    backward_s=stage.cost.backward_s,
                    sent_bytes=stage.cost.sent_bytes,
                    returned_bytes=stage.cost.returned_bytes,
                    saved_bytes=stage.memory[0].saved,
                    in_flight=flights[index],
                )
                for index, stage in enumerate(stages)
            ),
            idle=tuple(
                1.0 - (busy + cost.seconds) / max(ends)
                for busy, cost in zip(together.busy_s, update, strict=True)
            ),
        )  # fmt: skip

    def _memory(self, stages: Sequence[StageSimulation], order: Orders) -> list[RankMemory]:
        """Of each rank."""
        return [
            memory_of_rank(
                order[rank], {s: stages[s].memory for s in self.pipeline.stages_of(rank)}
            )
            for rank in range(self.pipeline.ranks)
        ]

    def _picture(
        self,
        plan: Plan,
        stages: Sequence[StageSimulation],
        together: PipelineSimulation,
        memories: Sequence[RankMemory],
    ) -> ReportData:
        """What the rank that needs most memory holds, and what the one that computes most sends."""
        micro, link = self.pipeline.micro_batches, P2PCost(self.cluster, plan.mesh)
        peaks = [memory.peak for memory in memories]
        full, slow = peaks.index(max(peaks)), together.busy_s.index(max(together.busy_s))
        own_rank = (e for e in together.timeline if e.stream == f"rank {full}")
        actions = [event for event in own_rank if event.kind == COMPUTE]
        own, messages = self.pipeline.stages_of(slow), Counter[Transfer]()
        lowered: list[tuple[TrainingGraph, int]] = []
        for stage in (stages[s] for s in own):
            lowered += stage.programs.counted(micro)
            for nbytes in filter(None, (stage.cost.sent_bytes, stage.cost.returned_bytes)):
                messages[link.message(nbytes)] += micro  # one stage alone has no link
        return report_data_of_pipeline(self.cluster, memories[full], actions, lowered, messages)

    def _provenance(
        self, stages: Sequence[StageSimulation], update: Sequence[Cost], link: P2PCost
    ) -> dict[str, int]:
        counts = Counter(cost.kind for cost in update)
        for stage in stages:
            counts.update(stage.last.provenance)
            counts.update(link.cost(n).kind for n in (stage.cost.sent_bytes,) if n)
        return dict(counts)


def staged(evaluator: Evaluator, pipeline: Pipeline) -> PipelineEvaluator:
    """The evaluator of plans with these stages."""
    own = {f.name: getattr(evaluator, f.name) for f in fields(Evaluator) if f.init}
    overhead = evaluator.overhead
    batches = overhead.batches * pipeline.micro_batches
    own["base"] = replace(evaluator.base, pipeline=pipeline)
    return PipelineEvaluator(**{**own, "overhead": replace(overhead, batches=batches)})


def _joined(one: Buckets, other: Buckets) -> Buckets:
    """The buckets of two stages; a parameter of both travels with those of the first."""

    def join(
        first: tuple[tuple[str, ...], ...], second: tuple[tuple[str, ...], ...]
    ) -> tuple[tuple[str, ...], ...]:
        known = {name for group in first for name in group}
        left = (tuple(n for n in group if n not in known) for group in second)
        return (*first, *(group for group in left if group))

    return Buckets(
        join(one.gather, other.gather),
        join(one.regather, other.regather),
        join(one.reduce, other.reduce),
    )


def _summed(tables: Iterable[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Seconds of tables of them, each so many times."""
    total: dict[str, float] = {}
    for table, times in tables:
        for key, seconds in table.items():
            total[key] = total.get(key, 0.0) + times * seconds
    return total


def _events(
    together: PipelineSimulation, update: Sequence[Cost]
) -> tuple[tuple[str, str, float, float, str], ...]:
    """What all ranks do, and the step of the optimizer on each."""
    ends = zip(together.ends_s, update, strict=True)
    steps = [
        Event("optimizer", f"rank {rank}", end, end + cost.seconds, COMPUTE)
        for rank, (end, cost) in enumerate(ends)
    ]
    found = sorted([*together.timeline, *steps], key=lambda event: event.end_s)
    return tuple((e.name, e.stream, round(e.start_s, 8), round(e.end_s, 8), e.kind) for e in found)
