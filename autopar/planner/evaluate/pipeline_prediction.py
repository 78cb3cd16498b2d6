"""`SimulatedPipeline`: prediction of a pipelined plan from simulations of its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.cost_model.collectives import Transfer
from autopar.cost_model.cost import Cost
from autopar.cost_model.simulator.exposure import by_cause, worst
from autopar.cost_model.simulator.pipeline import PipelineSimulation
from autopar.cost_model.simulator.schedules import Orders, in_flight
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.ir.graph import TrainingGraph
from autopar.plan.pipeline import Pipeline
from autopar.plan.prediction import (
    MOST_EXPOSED,
    Prediction,
    ReportData,
    StagePrediction,
    TimelineEvent,
)
from autopar.planner.evaluate.p2p import P2PCost
from autopar.planner.evaluate.pipeline_report_data import report_data_of_pipeline
from autopar.planner.evaluate.setup import timeline_events
from autopar.planner.evaluate.stage_cost import StageSimulation
from autopar.planner.evaluate.stage_memory import RankMemory, memory_of_rank
from autopar.report.plan import Plan


@dataclass(frozen=True)
class SimulatedPipeline:
    """A simulated step of all ranks of a pipeline.

    Attributes:
        plan: simulated plan.
        pipeline: pipeline of the plan.
        stages: simulation of each stage alone.
        orders: actions of each rank.
        run: simulation of all stages, without the optimizer's step.
        updates: cost of the optimizer's step on each rank.
        link: cost of messages between neighbouring ranks.
    """

    plan: Plan
    pipeline: Pipeline
    stages: tuple[StageSimulation, ...]
    orders: Orders
    run: PipelineSimulation
    updates: tuple[Cost, ...]
    link: P2PCost

    @cached_property
    def memories(self) -> list[RankMemory]:
        """Memory of each rank."""
        return [
            memory_of_rank(
                self.orders[rank],
                {stage: self.stages[stage].memory for stage in self.pipeline.stages_of(rank)},
            )
            for rank in range(self.pipeline.ranks)
        ]

    def prediction(self) -> Prediction:
        """Times of the rank with the most compute, and memory of the rank with the highest peak."""
        run, micro_batches = self.run, self.pipeline.micro_batches
        ranks = range(self.pipeline.ranks)
        step_s = max(end + cost.seconds for end, cost in zip(run.ends_s, self.updates, strict=True))
        busy_s = [busy + cost.seconds for busy, cost in zip(run.busy_s, self.updates, strict=True)]
        slow = max(ranks, key=lambda rank: busy_s[rank])
        own = [self.stages[stage] for stage in self.pipeline.stages_of(slow)]
        runs = [item for stage in own for item in stage.runs(micro_batches)]
        full = max(self.memories, key=lambda memory: memory.peak)
        within_s = sum(times * each.communication_s for each, times in runs)
        return Prediction(
            step_s=step_s,
            update_s=self.updates[slow].seconds,
            compute_s=micro_batches * sum(s.more.compute_s + s.adding_s for s in own),
            communication_s=within_s + run.transfer_s / len(ranks),
            exposed_s=run.exposed_s + sum(times * each.exposed_s for each, times in runs),
            peak_bytes=full.peak,
            memory=full.by_category,
            reserved_bytes=full.reserved,
            context_bytes=self.stages[0].last.memory.context,
            provenance=self._provenance(),
            waits=_summed((each.waits, times) for each, times in runs),
            causes=_summed((by_cause(each.exposures), times) for each, times in runs),
            exposures=worst((e for stage in own for e in stage.first.exposures), MOST_EXPOSED),
            events=self._events(),
            stages=tuple(self._stage(index) for index in range(len(self.stages))),
            idle=tuple(1.0 - seconds / step_s for seconds in busy_s),
            report_data=self._report_data(),
        )

    def _stage(self, index: int) -> StagePrediction:
        stage, owners = self.stages[index], self.pipeline.owners
        order = self.orders[self.pipeline.rank_of(index)]
        return StagePrediction(
            parameter_bytes=sum(
                nbytes for name, nbytes in self.plan.parameter_bytes if owners.get(name) == index
            ),
            forward_s=stage.cost.forward_s,
            backward_s=stage.cost.backward_s,
            sent_bytes=stage.cost.sent_bytes,
            returned_bytes=stage.cost.returned_bytes,
            saved_bytes=stage.memory[0].saved,
            in_flight=in_flight(order, index),
        )

    def _provenance(self) -> dict[str, int]:
        counts = Counter(cost.kind for cost in self.updates)
        for stage in self.stages:
            counts.update(stage.last.provenance)
            counts.update(self.link.cost(n).kind for n in (stage.cost.sent_bytes,) if n)
        return dict(counts)

    def _events(self) -> tuple[TimelineEvent, ...]:
        """Actions of all ranks, including the optimizer's step."""
        steps = [
            Event("optimizer", f"rank {rank}", end, end + cost.seconds, COMPUTE)
            for rank, (end, cost) in enumerate(zip(self.run.ends_s, self.updates, strict=True))
        ]
        return timeline_events(sorted([*self.run.timeline, *steps], key=lambda e: e.end_s))

    def _report_data(self) -> ReportData:
        """Memory of the rank with the highest peak, messages of the rank with the most compute."""
        peaks, busy_s = [memory.peak for memory in self.memories], self.run.busy_s
        full, slow = peaks.index(max(peaks)), busy_s.index(max(busy_s))
        actions = [
            event
            for event in self.run.timeline
            if event.stream == f"rank {full}" and event.kind == COMPUTE
        ]
        messages: Counter[Transfer] = Counter()
        lowered: list[tuple[TrainingGraph, int]] = []
        for stage in (self.stages[s] for s in self.pipeline.stages_of(slow)):
            lowered += stage.programs.counted(self.pipeline.micro_batches)
            for nbytes in filter(None, (stage.cost.sent_bytes, stage.cost.returned_bytes)):
                messages[self.link.message(nbytes)] += self.pipeline.micro_batches
        cluster = self.link.cluster
        return report_data_of_pipeline(cluster, self.memories[full], actions, lowered, messages)


def _summed(tables: Iterable[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Sum of tables of seconds, each multiplied by its count."""
    total: dict[str, float] = {}
    for table, times in tables:
        for key, seconds in table.items():
            total[key] = total.get(key, 0.0) + times * seconds
    return total
