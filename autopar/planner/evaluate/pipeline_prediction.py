"""`SimulatedPipeline`: prediction of a pipelined plan from simulations of its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.core.exposure import by_cause, worst
from autopar.core.ir.graph import TrainingGraph, tensor_bytes, tensors
from autopar.core.ir.roles import StageOutput
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import MOST_EXPOSED, Prediction, StagePrediction
from autopar.core.plan.report_data import ReportData, StageProgram, TimelineEvent
from autopar.core.schedules import Orders, in_flight
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.cost import Cost
from autopar.cost_model.memory.host_memory import HostMemory
from autopar.cost_model.simulator.pipeline import PipelineSimulation, StageCost
from autopar.cost_model.simulator.pipeline_transfers import inputs_ahead, with_transfers
from autopar.cost_model.simulator.step import Simulation
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.passes.stage_lowering import MicrobatchPrograms
from autopar.planner.evaluate.p2p import P2PCost
from autopar.planner.evaluate.report_data import (
    sample_memory,
    stage_program,
    traffic,
    transfers,
)
from autopar.planner.evaluate.setup import timeline_events
from autopar.planner.evaluate.stage_memory import RankMemory, StageMemory, memory_of_rank

Halves = tuple[float, float]
"""Seconds of a forward and of a backward."""


def stage_cost(
    graph: TrainingGraph, halves: tuple[Halves, Halves, Halves], adding_s: float, weights: float
) -> StageCost:
    """Cost of a stage from the times of its first, a middle and its last micro-batch.

    A backward adds its gradients to earlier ones in `adding_s` seconds; `weights` is its fraction
    for parameter gradients only.
    """
    (opening_s, _), (forward_s, backward_s), (_, closing_s) = halves
    return StageCost(
        forward_s=forward_s,
        backward_s=backward_s + adding_s,
        input_s=backward_s * (1.0 - weights),
        weight_s=backward_s * weights + adding_s,
        first_s=max(0.0, opening_s - forward_s),
        last_s=max(0.0, closing_s - backward_s),
        sent_bytes=boundary_bytes(graph, "forward"),
        returned_bytes=boundary_bytes(graph, "backward"),
    )


@dataclass(frozen=True)
class StageSimulation:
    """Programs of a stage, and simulations of its first, a middle and its last micro-batch.

    Attributes:
        adding_s: mean seconds that a backward takes to add gradients to earlier ones.
        weights: fraction of the backward for parameter gradients only.
        split_backward_bytes: bytes kept for that fraction after the rest of the backward.
        pace: seconds of its rank for a second of the mean rank.
    """

    programs: MicrobatchPrograms
    first: Simulation
    more: Simulation
    last: Simulation
    adding_s: float
    weights: float
    split_backward_bytes: int
    pace: float = 1.0

    @cached_property
    def memory(self) -> tuple[StageMemory, StageMemory]:
        """Memory of a micro-batch before the last one, and of the last one."""
        ending = StageMemory.of(self.last, self.programs.last, self.split_backward_bytes)
        same = self.more is self.last
        return ending if same else StageMemory.of(
            self.more, self.programs.more, self.split_backward_bytes
        ), ending

    @property
    def cost(self) -> StageCost:
        first, more, last = (
            (s.forward_s, s.backward_s) for s in (self.first, self.more, self.last)
        )
        own = stage_cost(self.programs.last, (first, more, last), self.adding_s, self.weights)
        return own.at_pace(self.pace)

    def runs(self, micro_batches: int) -> Iterator[tuple[Simulation, int]]:
        yield self.more, micro_batches - 1
        yield self.first, 1


def boundary_bytes(graph: TrainingGraph, phase: str) -> int:
    """Bytes that a stage sends in a phase of one micro-batch."""
    return sum(
        tensor_bytes(tensors(node)[0])
        for role, node in zip(graph.outputs, graph.results, strict=True)
        if isinstance(role, StageOutput) and role.phase == phase and node is not None
    )


@dataclass(frozen=True)
class SimulatedPipeline:
    """A simulated step of all ranks of a pipeline.

    Attributes:
        stages: simulation of each stage alone.
        orders: actions of each rank.
        run: simulation of all stages, without the optimizer's step.
        updates: cost of the optimizer's step on each rank.
        on_gpus: whether the ranks are GPUs.
    """

    plan: Plan
    pipeline: Pipeline
    stages: tuple[StageSimulation, ...]
    orders: Orders
    run: PipelineSimulation
    updates: tuple[Cost, ...]
    link: P2PCost
    on_gpus: bool

    @cached_property
    def memories(self) -> list[RankMemory]:
        found = []
        # gloo sends only what the peer has asked for. So CPUs post receives early, and their
        # buffers take memory from then on.
        actions = with_transfers(self.orders, hoisted=not self.on_gpus)
        for rank, order in enumerate(self.orders):
            own = {stage: self.stages[stage].memory for stage in self.pipeline.stages_of(rank)}
            found.append(memory_of_rank(order, inputs_ahead(actions[rank]), own))
        return found

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
        exposed_s = sum(times * each.exposed_s for each, times in runs)
        return Prediction(
            step_s=step_s,
            update_s=self.updates[slow].seconds,
            compute_s=micro_batches * sum(s.pace * (s.more.compute_s + s.adding_s) for s in own),
            communication_s=within_s + run.transfer_s / len(ranks),
            exposed_s=run.exposed_s + max(0.0, exposed_s - run.hidden_s[slow]),
            peak_bytes=full.peak,
            memory=full.by_category,
            reserved_bytes=full.reserved,
            context_bytes=self.stages[0].last.memory.context,
            host_bytes=max(map(self._host_bytes, ranks)),
            provenance=self._provenance(),
            waits=_summed((each.waits, times) for each, times in runs),
            causes=_summed((by_cause(each.exposures), times) for each, times in runs),
            exposures=worst((e for stage in own for e in stage.first.exposures), MOST_EXPOSED),
            events=self._events(),
            stages=tuple(self._stage(index) for index in range(len(self.stages))),
            idle=tuple(1.0 - seconds / step_s for seconds in busy_s),
            report_data=self._report_data(),
        )

    def _host_bytes(self, rank: int) -> int:
        """Page-locked bytes of a rank, with all micro-batches in flight."""
        found = 0
        for index in self.pipeline.stages_of(rank):
            host = HostMemory.of(self.stages[index].programs.last, on_gpus=self.on_gpus)
            found += host.standing + host.saved * in_flight(self.orders[rank], index)
        return found

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
            counts.update(stage.last.provenance)
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
            stage = self.stages[index]
            for message, _ in self._messages(index, index + 1, index - 1):
                sent[message] += self.pipeline.micro_batches
            for graph, times in stage.programs.counted(self.pipeline.micro_batches):
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
        for index, stage in enumerate(self.stages):
            stages_of.setdefault(id(stage), []).append(index)
        for own in stages_of.values():
            each = self.stages[own[0]]
            yield stage_program(own, each.programs.more, each.more, self.link.cluster, f"F{kinds}")
        for own in stages_of.values():
            each = self.stages[own[0]]
            if each.last is not each.more:
                yield stage_program(own, each.programs.last, each.last, self.link.cluster, kinds)


def _summed(tables: Iterable[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Sum of tables of seconds, each multiplied by its count."""
    total: dict[str, float] = {}
    for table, times in tables:
        for key, seconds in table.items():
            total[key] = total.get(key, 0.0) + times * seconds
    return total
