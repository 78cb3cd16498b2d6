"""`ExtendedPipelineEvaluator`: a pipeline of many stages, by arithmetic from three of them.

The first stage, one in the middle and the last are lowered and simulated with two blocks each, and
with three. Each further block adds to its stage what the third one adds. The schedule of all stages
is simulated with these figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.core.common.deadline import check_time
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Work
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cost import Cost
from autopar.cost_model.simulator.pipeline import PipelineSimulation, StageCost
from autopar.planner.evaluate.candidate import Candidate, CandidateConfig
from autopar.planner.evaluate.p2p import P2PCost, add_step_boundaries
from autopar.planner.evaluate.pipeline_evaluator import (
    PipelineEvaluator,
    StagedEvaluator,
    most_sent,
    run_schedule,
)
from autopar.planner.evaluate.pipeline_prediction import SimulatedPipeline
from autopar.planner.evaluate.setup import EvaluationSetup
from autopar.planner.evaluate.stage_figures import StageFigures
from autopar.planner.extended.derivation import of_stages
from autopar.planner.extended.extended_evaluator import Class, most_bucket_bytes, reduced_config
from autopar.planner.extended.stage_blocks import FEWEST, ROLES, StageBlocks
from autopar.planner.extended.stage_growth import (
    grown_cost,
    grown_stage,
    mixed,
    mixed_cost,
    mixed_table,
)

MIDDLE = 1
"""Index of the stage in the middle of a reduced pipeline."""


@dataclass(frozen=True)
class ReducedStages:
    """Simulated stages of a reduced pipeline under one configuration.

    Attributes:
        figures: figures of each stage.
        updates: cost of the optimizer's step on each.
        sent: bytes per axis and step of each.
        notes: notes of the plan, and of a device that waits for its host.
    """

    figures: tuple[StageFigures, ...]
    updates: tuple[Cost, ...]
    sent: tuple[Counter[str], ...]
    notes: tuple[str, ...]


@dataclass
class ReducedPipeline:
    """A pipeline of three stages with few blocks, for one number of micro-batches.

    Attributes:
        blocks: name in the whole model of each of its blocks.
    """

    evaluator: PipelineEvaluator
    blocks: Mapping[str, str]
    _known: dict[CandidateConfig, ReducedStages] = field(default_factory=dict)

    def stages(self, config: CandidateConfig) -> ReducedStages:
        """The stages under a configuration of its own blocks."""
        if config not in self._known:
            found, sent = self.evaluator.simulated(config), self.evaluator.sent_by_stage(config)
            notes = max((stage.more.notes() for stage in found.simulations), key=len)
            notes = (*found.plan.notes, *notes)
            self._known[config] = ReducedStages(found.stages, found.updates, tuple(sent), notes)
        return self._known[config]


class ExtendedPipelineEvaluator(StagedEvaluator):
    """Evaluator of a pipeline of the whole model that lowers reduced models only.

    Args:
        setup: setup whose plan and parameters are those of the whole model.
        pipeline: the whole pipeline.
        blocks: blocks of each stage.
        reduced: pipeline with two blocks a stage, and with three.
        work: work of a step.
    """

    def __init__(
        self,
        setup: EvaluationSetup,
        pipeline: Pipeline,
        blocks: StageBlocks,
        reduced: tuple[ReducedPipeline, ReducedPipeline],
        work: Work,
    ) -> None:
        super().__init__(replace(setup, base=replace(setup.base, pipeline=pipeline)))
        self.pipeline, self.blocks, self.work = pipeline, blocks.stages, work
        self.few, self.more = reduced
        self.split = self.few.evaluator.split

    def plan(self, config: CandidateConfig) -> Plan:
        plan = self.setup.draft(config)
        return replace(
            plan,
            name=f"{plan.name}, {self.pipeline}",
            bucket_bytes=(config.gather_bytes, config.reduce_bytes),
        )

    def evaluate(self, config: CandidateConfig) -> Candidate:
        plan, cluster = self.plan(config), self.setup.cluster
        stages = [self._stage(stage, config) for stage in range(self.pipeline.stages)]
        sent = [self._sent(stage, config) for stage in range(self.pipeline.stages)]
        own = self._reduced(self.few, next(self._mixture(0, config))[1], config)
        notes = (*plan.notes, *self.few.stages(own).notes, self._note())
        plan = replace(
            plan,
            sent_bytes=most_sent(self.pipeline, sent),
            notes=tuple(dict.fromkeys(notes)),
        )
        link = P2PCost(cluster, plan.mesh)
        simulated = SimulatedPipeline(
            plan=plan,
            pipeline=self.pipeline,
            stages=tuple(stages),
            orders=self.orders,
            run=self._run([stage.cost for stage in stages], link),
            updates=self._updates(config),
            link=link,
            on_gpus=cluster.on_gpus,
        )
        found = simulated.prediction()
        counts = {kind: round(count) for kind, count in found.provenance.items()}
        prediction = replace(found, work=self.work, events=(), provenance=counts)
        return self.setup.candidate(config, plan, prediction)

    def _note(self) -> str:
        count = sum(map(len, self.blocks))
        return of_stages(self.pipeline.stages, count, (FEWEST, FEWEST + 1))

    def seconds(self, config: CandidateConfig, clusters: Sequence[Cluster]) -> list[float]:
        mesh, updates, found = self.setup.base.mesh, self._updates(config), []
        costs: dict[Class, list[list[list[StageCost]]]] = {}
        for stage in range(self.pipeline.stages):
            for _, own in self._mixture(stage, config):
                if own not in costs:
                    pairs = ((it, self._reduced(it, own, config)) for it in (self.few, self.more))
                    costs[own] = [list(it.evaluator.costs(c, clusters)) for it, c in pairs]
        for index, cluster in enumerate(clusters):
            at = {own: (few[index], more[index]) for own, (few, more) in costs.items()}
            stages = [self._cost(stage, config, at) for stage in range(self.pipeline.stages)]
            ends_s = self._run(stages, P2PCost(cluster, mesh)).ends_s
            found.append(max(e + cost.seconds for e, cost in zip(ends_s, updates, strict=True)))
        return found

    def _run(self, costs: Sequence[StageCost], link: P2PCost) -> PipelineSimulation:
        check_time()
        # Hundreds of stages have 100,000 actions, and no report shows them one by one.
        run = run_schedule(self.setup, self.orders, costs, link, recording=False)
        own = self.few.evaluator
        rank_of = self.pipeline.rank_of
        places = rank_of(0), rank_of(min(1, self.pipeline.stages - 1)), rank_of(len(costs) - 1)
        agreement_s = self.setup.agreement_s
        return add_step_boundaries(run, self.split, own.pipeline, link, agreement_s, places)

    def _role(self, stage: int) -> int:
        """The stage of the reduced pipeline that a stage is like."""
        if stage == self.pipeline.stages - 1:
            return ROLES - 1
        return MIDDLE if stage else 0

    def _count(self, stage: int) -> int:
        """Number of blocks of a stage beyond those of the reduced one."""
        return len(self.blocks[stage]) - FEWEST

    def _stage(self, stage: int, config: CandidateConfig) -> StageFigures:
        parts = []
        for share, own in self._mixture(stage, config):
            few, more = (each.figures[self._role(stage)] for each in self._pair(own, config))
            size = most_bucket_bytes(config, own[0])
            parts.append((share, grown_stage(few, more, self._count(stage), own[0], size)))
        return mixed(parts)

    def _cost(
        self,
        stage: int,
        config: CandidateConfig,
        costs: Mapping[Class, tuple[list[StageCost], list[StageCost]]],
    ) -> StageCost:
        """The cost of a stage, from those of the reduced stages by the class of their blocks."""
        parts = []
        for share, own in self._mixture(stage, config):
            few, more = costs[own]
            one, other = (each[self._role(stage)] for each in (few, more))
            parts.append((share, grown_cost(one, other, self._count(stage))))
        return mixed_cost(parts)

    def _updates(self, config: CandidateConfig) -> tuple[Cost, ...]:
        """Cost of the optimizer's step on each rank."""
        seconds = [0.0] * self.pipeline.ranks
        for stage in range(self.pipeline.stages):
            for share, own in self._mixture(stage, config):
                few, more = self._pair(own, config)
                own_s, more_s = (each.updates[self._role(stage)].seconds for each in (few, more))
                own_s += self._count(stage) * (more_s - own_s)
                seconds[self.pipeline.rank_of(stage)] += share * max(0.0, own_s)
        return tuple(replace(few.updates[MIDDLE], seconds=each) for each in seconds)

    def _sent(self, stage: int, config: CandidateConfig) -> Mapping[str, int]:
        parts = []
        for share, own in self._mixture(stage, config):
            few, more = self._pair(own, config)
            one, other = (each.sent[self._role(stage)] for each in (few, more))
            count, keys = self._count(stage), dict.fromkeys((*one, *other))
            parts.append((share, {k: one[k] + count * (other[k] - one[k]) for k in keys}))
        return {key: max(0, round(size)) for key, size in mixed_table(parts).items()}

    def _mixture(self, stage: int, config: CandidateConfig) -> Iterator[tuple[float, Class]]:
        """Classes of the blocks of a stage, each with its share of them."""
        zero, levels, blocks = dict(config.zero_stages), dict(config.recompute), self.blocks[stage]
        counts = Counter((zero[b], levels[b], b in config.offload) for b in blocks)
        for own, count in counts.items():
            yield count / len(blocks), own

    def _pair(self, own: Class, config: CandidateConfig) -> tuple[ReducedStages, ReducedStages]:
        few, more = (
            item.stages(self._reduced(item, own, config)) for item in (self.few, self.more)
        )
        return few, more

    def _reduced(
        self, item: ReducedPipeline, own: Class, config: CandidateConfig
    ) -> CandidateConfig:
        """The configuration of a reduced model whose repeated blocks are all of one class."""
        repeated = [block for stage in self.blocks for block in stage]
        return reduced_config(config, [repeated], [own], item.evaluator, item.blocks)
