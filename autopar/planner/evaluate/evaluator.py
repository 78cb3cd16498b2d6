"""`Evaluator`: makes the plan of a configuration, and simulates its lowered programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autopar.core.exposure import by_cause, worst
from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.layout import Layout
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import MOST_EXPOSED, Prediction
from autopar.core.plan.report_data import ReportData
from autopar.cost_model.algorithms.wire_bytes import node_bytes, sent_bytes
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.memory.host_memory import HostMemory
from autopar.cost_model.simulator.step import half_seconds
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.passes.communication.bucket_collectives import BucketCollectives, propose_buckets
from autopar.passes.communication.schedule_overlap import ScheduleOverlap
from autopar.passes.core.pass_pipeline import PassPipeline
from autopar.passes.core.runner import run_passes
from autopar.passes.memory.lower_attention import LowerAttention
from autopar.passes.pipeline import build_pass_pipeline
from autopar.planner.evaluate.candidate import Candidate, CandidateConfig
from autopar.planner.evaluate.report_data import report_data_of
from autopar.planner.evaluate.setup import EvaluationSetup, ProgramCache, timeline_events

CACHED_PROGRAMS, CACHED_PREFIXES = 6, 4


class Evaluator(ABC):
    """Makes and simulates the plan of a configuration."""

    def __init__(self, setup: EvaluationSetup) -> None:
        self.setup = setup

    @abstractmethod
    def plan(self, config: CandidateConfig) -> Plan:
        """The plan of a configuration, with buckets in the order of the graph."""

    @abstractmethod
    def evaluate(self, config: CandidateConfig) -> Candidate:
        """The plan of a configuration and its predicted step."""

    @abstractmethod
    def seconds(self, config: CandidateConfig, clusters: Sequence[Cluster]) -> list[float]:
        """Step time of a configuration on each cluster, in seconds."""


class SpmdEvaluator(Evaluator):
    """Evaluator of plans in which all ranks run one program, without pipeline stages."""

    def __init__(self, setup: EvaluationSetup) -> None:
        super().__init__(setup)
        self._programs = ProgramCache[tuple[Plan, TrainingGraph]](CACHED_PROGRAMS)
        self._prefixes = ProgramCache[TrainingGraph](CACHED_PREFIXES)
        self._divided = ProgramCache[TrainingGraph](1)

    def plan(self, config: CandidateConfig) -> Plan:
        return self._program(config)[0]

    def lowered(self, config: CandidateConfig) -> TrainingGraph:
        """The program of rank 0, which has the largest chunks."""
        return self._program(config)[1]

    def evaluate(self, config: CandidateConfig) -> Candidate:
        setup, (plan, graph) = self.setup, self._program(config)
        result = setup.simulate(graph)
        update = setup.update_cost(plan, graph.trained_bytes.values())
        agreement_s = setup.agreement_s
        end_s = result.step_s + agreement_s + update.seconds
        provenance = Counter(result.provenance)
        provenance[update.kind] += 1
        events = [
            *result.timeline,
            Event("optimizer", COMPUTE, end_s - update.seconds, end_s, COMPUTE),
        ]
        host = HostMemory.of(graph, on_gpus=setup.cluster.on_gpus)
        prediction = Prediction(
            step_s=end_s,
            update_s=update.seconds,
            compute_s=result.compute_s,
            communication_s=result.communication_s,
            exposed_s=result.exposed_s + agreement_s,
            peak_bytes=result.memory.peak,
            node_bytes=node_bytes(graph, setup.base.comm_backend, setup.cluster.ranks_per_node),
            reserved_bytes=result.memory.reserved,
            context_bytes=result.memory.context,
            host_bytes=host.standing + host.saved,
            memory=dict(result.memory.by_category),
            provenance=dict(provenance),
            waits={**result.waits, **({"records": agreement_s} if agreement_s else {})},
            causes=by_cause(result.exposures),
            exposures=worst(result.exposures, MOST_EXPOSED),
            events=timeline_events(events),
            memory_curve=tuple((round(at, 8), nbytes) for at, nbytes in result.memory_curve),
            report_data=(
                report_data_of(graph, setup.cluster, result) if setup.reports else ReportData()
            ),
        )
        plan = replace(plan, notes=(*plan.notes, *result.notes()))
        candidate = setup.candidate(config, plan, prediction)
        return replace(candidate, parts=result.memory.parts)

    def seconds(self, config: CandidateConfig, clusters: Sequence[Cluster]) -> list[float]:
        plan, graph = self._program(config)
        update_s = self.setup.update_cost(plan, graph.trained_bytes.values()).seconds
        halves = half_seconds(graph, clusters, self.setup.operators)
        fixed_s = self.setup.agreement_s + update_s
        return [forward_s + backward_s + fixed_s for forward_s, backward_s in halves]

    def _program(self, config: CandidateConfig) -> tuple[Plan, TrainingGraph]:
        return self._programs.get(config, lambda: self._lower(config))

    def _lower(self, config: CandidateConfig) -> tuple[Plan, TrainingGraph]:
        plan = self.setup.draft(config)
        first, prefix, rest = self._passes(plan)
        # Gradients along tp, cp and ep are bucketed within the prefix. A plan without collectives
        # has all passes in the prefix, offloading too.
        sized = config.reduce_bytes if self.setup.op_strategies else 0
        stored = plan.offload, plan.offload_parameters
        graph = self._prefixes.get(
            (plan.zero_stages, plan.recompute, plan.loss_chunks, stored, sized),
            lambda: run_passes(self._divided_graph(plan, first), prefix),
        )
        plan = replace(plan, notes=(*plan.notes, *graph.notes))
        if rest and isinstance(rest[0], BucketCollectives):
            buckets = propose_buckets(graph, config.gather_bytes, config.reduce_bytes)
            plan = replace(plan, buckets=buckets, compressions=config.compressions(buckets))
        if config.scheduled:
            overlaps = self.setup.overlaps(config, graph, self._passes(plan)[2])
            plan = replace(plan, overlaps=overlaps)
        graph = run_passes(graph, self._passes(plan)[2])
        sent = sent_bytes(graph, self.setup.base.comm_backend)
        return replace(plan, sent_bytes=tuple(sorted(sent.items()))), graph

    def _divided_graph(self, plan: Plan, passes: PassPipeline) -> TrainingGraph:
        """The graph divided over ranks of a model, which most configurations share."""
        axes = Layout(plan).axes
        key = tuple(axes.items()), passes.names
        return self._divided.get(
            key, lambda: run_passes(replace(self.setup.graph, axes=axes), passes)
        )

    def _passes(self, plan: Plan) -> tuple[PassPipeline, PassPipeline, PassPipeline]:
        """Passes that divide the model, others with cached results, and those from buckets on."""
        setup = self.setup
        passes = build_pass_pipeline(
            plan,
            0,
            setup.base.comm_backend,
            op_strategies=setup.op_strategies,
            micro_batches=setup.micro_batches,
        )
        first, others = passes.split(LowerAttention)
        return first, *others.split(BucketCollectives, ScheduleOverlap)
