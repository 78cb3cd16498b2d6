"""`SimulatedPipeline`: prediction of a pipelined plan from simulations of its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.core.common.deadline import check_time
from autopar.core.exposure import worst
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import MOST_EXPOSED, Prediction, StagePrediction
from autopar.core.plan.report_data import ReportData, StageProgram, TimelineEvent
from autopar.core.schedules import Orders, in_flight
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.cost import Cost
from autopar.cost_model.simulator.pipeline import PipelineSimulation
from autopar.cost_model.simulator.pipeline_transfers import inputs_ahead, with_transfers
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.planner.evaluate.p2p import P2PCost
from autopar.planner.evaluate.report_data import (
    sample_memory,
    stage_program,
    traffic,
    transfers,
)
from autopar.planner.evaluate.setup import timeline_events
from autopar.planner.evaluate.stage_figures import StageFigures, StageSimulation, summed
from autopar.planner.evaluate.stage_memory import RankMemory, memory_of_rank


@dataclass(frozen=True)
class SimulatedPipeline:
    """A simulated step of all ranks of a pipeline.

    Attributes:
        stages: figures of each stage alone.
        orders: actions of each rank.
        run: simulation of all stages, without the optimizer's step.
        updates: cost of the optimizer's step on each rank.
        on_gpus: whether the ranks are GPUs.
        simulations: simulation of each stage, for the report; empty if figures are arithmetic.
    """

    plan: Plan
    pipeline: Pipeline
    stages: tuple[StageFigures, ...]
    orders: Orders
    run: PipelineSimulation
    updates: tuple[Cost, ...]
    link: P2PCost
    on_gpus: bool
    simulations: tuple[StageSimulation, ...] = ()

    @cached_property
    def memories(self) -> list[RankMemory]:
        found = []
        # gloo sends only what the peer has asked for. So CPUs post receives early, and their
        # buffers take memory from then on.
        actions = with_transfers(self.orders, hoisted=not self.on_gpus)
        for rank, order in enumerate(self.orders):
            check_time()  # thousands of actions take seconds
            own = {stage: self.stages[stage].memory for stage in self.pipeline.stages_of(rank)}
            found.append(memory_of_rank(order, inputs_ahead(actions[rank]), own))
        return found

    def prediction(self) -> Prediction:
        """Times of the rank with the most compute, and memory of the rank with the highest peak."""
        run, ranks = self.run, range(self.pipeline.ranks)
        step_s = max(end + cost.seconds for end, cost in zip(run.ends_s, self.updates, strict=True))
        busy_s = [busy + cost.seconds for busy, cost in zip(run.busy_s, self.updates, strict=True)]
        slow = max(ranks, key=lambda rank: busy_s[rank])
        own = [self.stages[stage] for stage in self.pipeline.stages_of(slow)]
        full = max(self.memories, key=lambda memory: memory.peak)
        within_s = sum(stage.within_s for stage in own)
        exposed_s = max(0.0, sum(stage.exposed_s for stage in own) - run.hidden_s[slow])
        # Figures of stages are of all ranks computing. Those that share cores compute faster while
        # others wait, so the simulated time bounds both.
        compute_s = min(sum(stage.compute_s for stage in own), run.busy_s[slow])
        left_s = max(0.0, run.ends_s[slow] - compute_s)
        return Prediction(
            step_s=step_s,
            update_s=self.updates[slow].seconds,
            compute_s=compute_s,
            communication_s=within_s + run.transfer_s / len(ranks),
            exposed_s=min(left_s, run.exposed_s + exposed_s),
            peak_bytes=full.peak,
            node_bytes=self._node_bytes(),
            memory=full.by_category,
            reserved_bytes=full.reserved,
            context_bytes=self.stages[0].context_bytes,
            host_bytes=max(map(self._host_bytes, ranks)),
            provenance=self._provenance(),
            waits=summed((stage.waits, 1) for stage in own),
            causes=summed((stage.causes, 1) for stage in own),
            exposures=worst((e for stage in own for e in stage.exposures), MOST_EXPOSED),
            events=self._events(),
            stages=tuple(self._stage(index) for index in range(len(self.stages))),
            idle=tuple(1.0 - seconds / step_s for seconds in busy_s),
            report_data=self._report_data() if self.simulations else ReportData(),
        )

    def _host_bytes(self, rank: int) -> int:
        """Page-locked bytes of a rank, with all micro-batches in flight."""
        found = 0
        for index in self.pipeline.stages_of(rank):
            host = self.stages[index].host
            found += host.standing + host.saved * in_flight(self.orders[rank], index)
        return found

    def _node_bytes(self) -> int:
        """Bytes that leave the node that sends most in a step."""
        pipeline, node = self.pipeline, self.link.cluster.ranks_per_node
        stride = self.plan.world_size // pipeline.ranks  # pp is the outermost axis
        if self.plan.world_size <= node:
            return 0
        place = {
            stage: pipeline.rank_of(stage) * stride // node for stage in range(pipeline.stages)
        }
        totals = Counter[int]()
        for index, stage in enumerate(self.stages):
            share, cost = min(stride, node) / node, stage.cost
            totals[place[index]] += round(share * stage.node_bytes)
            for other, nbytes in ((index + 1, cost.sent_bytes), (index - 1, cost.returned_bytes)):
                if place.get(other, place[index]) != place[index]:
                    totals[place[index]] += pipeline.micro_batches * min(stride, node) * nbytes
        return max(totals.values())

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
        for index, stage in enumerate(self.stages):
            counts.update(stage.provenance)
            counts.update(cost.kind for _, cost in self._messages(index, index + 1))
        return dict(counts)

    def _messages(self, stage: int, *others: int) -> Iterator[tuple[Transfer, Cost]]:
        """Messages of a micro-batch from a stage to others, with their costs."""
        cost, rank_of = self.stages[stage].cost, self.pipeline.rank_of
        for other in others:
            nbytes = cost.sent_bytes if other > stage else cost.returned_bytes
            if nbytes and rank_of(other) != rank_of(stage):
                yield self.link.priced(nbytes, rank_of(stage), rank_of(other))

    def _events(self) -> tuple[TimelineEvent, ...]:
        steps = [
            Event("optimizer", f"rank {rank}", end, end + cost.seconds, COMPUTE)
            for rank, (end, cost) in enumerate(zip(self.run.ends_s, self.updates, strict=True))
        ]
        return timeline_events(sorted([*self.run.timeline, *steps], key=lambda e: e.end_s))

    def _report_data(self) -> ReportData:
        """Memory of the rank with the highest peak, messages of the rank with the most compute."""
        peaks, busy_s = [memory.peak for memory in self.memories], self.run.busy_s
        full, slow = peaks.index(max(peaks)), busy_s.index(max(busy_s))
        own = (event for event in self.run.timeline if event.stream == f"rank {full}")
        actions = [event for event in own if event.kind == COMPUTE]
        sent, cluster = Counter[Transfer](), self.link.cluster
        for index in self.pipeline.stages_of(slow):
            for message, _ in self._messages(index, index + 1, index - 1):
                sent[message] += self.pipeline.micro_batches
            for graph, times in self.simulations[index].programs.counted(
                self.pipeline.micro_batches
            ):
                for item in transfers(graph, cluster):
                    sent[item] += times
        memory = self.memories[full]
        spans = ((actions[index], part) for index, part in memory.points[:-1])
        times_s = [*(e.start_s + part * e.seconds for e, part in spans), actions[-1].end_s]
        memory_s, rows = sample_memory(np.array(times_s), memory.table)
        return ReportData(
            ranks_per_node=cluster.ranks_per_node,
            memory_s=memory_s,
            memory=rows,
            traffic=traffic(sent, cluster),
            programs=tuple(self._programs()),
        )

    def _programs(self) -> Iterator[StageProgram]:
        """Programs of a middle micro-batch, then of the last one where they differ."""
        backward = {action.kind for order in self.orders for action in order} - {"F"}
        kinds = "".join(sorted(backward))
        stages_of: dict[int, list[int]] = {}
        for index, stage in enumerate(self.simulations):
            stages_of.setdefault(id(stage), []).append(index)
        for own in stages_of.values():
            each = self.simulations[own[0]]
            yield stage_program(own, each.programs.more, each.more, self.link.cluster, f"F{kinds}")
        for own in stages_of.values():
            each = self.simulations[own[0]]
            if each.last is not each.more:
                yield stage_program(own, each.programs.last, each.last, self.link.cluster, kinds)
