"""`default_pipelines`: the pipelines of a strategy by arithmetic, with their default plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.core.common.deadline import TimeIsOver, arm
from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.partition import rows_of
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.prediction import Work
from autopar.core.plan.strategy import Strategy
from autopar.core.schedules import SPLIT_SCHEDULES, stage_ranks
from autopar.errors import BatchError
from autopar.planner.evaluate.candidate import Candidate, CandidateConfig, default_config
from autopar.planner.evaluate.pipeline_evaluator import PipelineEvaluator
from autopar.planner.evaluate.setup import EvaluationSetup
from autopar.planner.extended.extended_pipeline import (
    MIDDLE,
    ExtendedPipelineEvaluator,
    ReducedPipeline,
)
from autopar.planner.extended.reduced_models import ReducedModels
from autopar.planner.extended.stage_blocks import (
    FEWEST,
    ROLES,
    StageBlocks,
    reduced_stages,
)
from autopar.planner.extended.whole_setup import reduced_work, whole_setup
from autopar.planner.machine import Machine
from autopar.planner.problem import PlanningProblem, SearchContext
from autopar.planner.search.build_evaluator import build_evaluator
from autopar.planner.search.pipeline_search import capture_micro_batches, open_schedules

FEW, MORE = ROLES * FEWEST, ROLES * (FEWEST + 1)
"""Blocks of the two reduced models."""

INTERLEAVED = "interleaved", 2
"""The least of the interleaved schedules."""


def default_pipelines(
    problem: PlanningProblem,
    models: ReducedModels,
    machine: Machine,
    context: SearchContext,
    memory: int | None = None,
) -> Iterator[tuple[ExtendedPipelineEvaluator, Candidate]]:
    """Each pipeline that a strategy leaves open, with the plan of its default configuration.

    They end with the time, but for the first. Partitions hold at most `memory` bytes.

    Raises:
        UnevenStagesError: stages do not follow from few blocks.
        BatchError: the number of micro-batches that the strategy fixes does not divide the rows.
    """
    strategy, blocks = problem.strategy, models.kinds[0]

    def capture(count: int, even: bool) -> TrainingGraph:
        if not even:
            raise BatchError("micro-batches that differ by a row are lowered whole")
        return models.get((FEW,), problem.dp_size, count).graph

    some = False
    for count in capture_micro_batches(strategy, capture):
        reduced = _Reduced(problem, models, machine, context, memory, count)
        for schedule, stages_per_rank in least_idle_first(strategy, len(blocks), count):
            if strategy.pp_size * stages_per_rank > len(blocks):
                continue
            try:
                evaluator = reduced.pipeline(schedule, stages_per_rank)
                candidate = evaluator.evaluate(default_config(strategy, problem.blocks, 0))
            except TimeIsOver:
                if not some:
                    raise
                return
            some = True
            if candidate.fits(problem.cap_on(machine.cluster)):
                arm()
            yield evaluator, candidate
            if not context.deadline():
                return


def least_idle_first(strategy: Strategy, blocks: int, micro_batches: int) -> list[tuple[str, int]]:
    """The schedules that a strategy leaves open, and the stages per rank of each.

    1F1B comes first, so that there is an answer, then those that idle least. Interleaved ones have
    more stages a rank than where models are lowered whole, which takes longer for each.
    """
    schedules = [*open_schedules(strategy, blocks, micro_batches)]
    is_open = strategy.schedule is None and strategy.stages_per_rank is None
    if is_open and INTERLEAVED in schedules:
        depth = 2 * INTERLEAVED[1]
        while depth * strategy.pp_size <= blocks:
            schedules.append((INTERLEAVED[0], depth))
            depth *= 2
    order = ("1f1b", "interleaved", "zbv", "zero_bubble", "dualpipe_v", "gpipe")
    return sorted(schedules, key=lambda item: (order.index(item[0]), -item[1]))


class _Reduced:
    """Reduced models for one number of micro-batches, and the pipelines that follow from them."""

    def __init__(
        self,
        problem: PlanningProblem,
        models: ReducedModels,
        machine: Machine,
        context: SearchContext,
        memory: int | None,
        count: int,
    ) -> None:
        self.problem, self.models, self.machine = problem, models, machine
        self.context, self.count = context, count
        self.solved = models.solved if memory is None else models.leanest[problem.shard_ranks]
        self.memory = memory
        self.models_of = [models.get((n,), problem.dp_size, count) for n in (FEW, MORE)]
        self.setups = [self._setup(index) for index in (0, 1)]
        pairs = zip(self.models_of, self.setups, strict=True)
        self.uses = [reduced_stages(each, setup.graph, models.kinds[0]) for each, setup in pairs]
        self.known: dict[bool, tuple[ReducedPipeline, ReducedPipeline]] = {}

    def _setup(self, index: int) -> EvaluationSetup:
        """The setup of a reduced model."""
        model = self.models_of[index]
        few = replace(self.problem, parameters=model.parameters)
        # Candidates of a reduced model are no plans of the whole one.
        quiet = replace(self.context, baseline=None, on_candidate=None)
        return build_evaluator(
            few,
            model.graph,
            self.machine,
            quiet,
            memory=self.memory,
            carried=self.solved,
            reports=False,
        ).setup

    def pair(self, *, splits: bool) -> tuple[ReducedPipeline, ReducedPipeline]:
        """Both reduced pipelines; `splits` is whether backwards are computed in two parts."""
        if splits not in self.known:
            few, more = (self._reduced(index, splits) for index in (0, 1))
            self.known[splits] = few, more
        return self.known[splits]

    def _reduced(self, index: int, splits: bool) -> ReducedPipeline:
        rows = rows_of(self.setups[index].graph) * self.count
        schedule = "zero_bubble" if splits else "1f1b"
        own = Pipeline(ROLES, schedule, self.count, 1, self.uses[index], rows)
        alike = next((pair[index].evaluator for pair in self.known.values()), None)
        evaluator = PipelineEvaluator(self.setups[index], own, alike)
        return ReducedPipeline(evaluator, self.models_of[index].blocks)

    def pipeline(self, schedule: str, stages_per_rank: int) -> ExtendedPipelineEvaluator:
        """The evaluator of the whole pipeline with a schedule."""
        problem, alike = self.problem, self.models.kinds[0]
        ranks = problem.strategy.pp_size
        few, more = self.pair(splits=schedule in SPLIT_SCHEDULES)
        rank_of = stage_ranks(schedule, ranks, stages_per_rank)
        loads, block_s = self._seconds(few, more, len(rank_of))
        blocks = StageBlocks.balanced(alike, rank_of, loads, block_s)
        uses = blocks.uses(self.models, self.models_of[0], self.uses[0], problem.parameters)
        rows = few.evaluator.pipeline.rows
        pipeline = Pipeline(ranks, schedule, self.count, stages_per_rank, uses, rows)
        whole = whole_setup(problem, self.models, self.models_of[0], self.setups[0], self.context)
        return ExtendedPipelineEvaluator(whole, pipeline, blocks, (few, more), self.work)

    def _seconds(
        self, few: ReducedPipeline, more: ReducedPipeline, stages: int
    ) -> tuple[list[float], float]:
        """Seconds of each stage without its repeated blocks, and of a block."""
        own_s, more_s = (
            [f.cost.forward_s + f.cost.backward_s for f in item.stages(self._plain(item)).figures]
            for item in (few, more)
        )
        block_s = more_s[MIDDLE] - own_s[MIDDLE]
        pairs = zip(own_s, more_s, strict=True)
        without = [max(0.0, one - FEWEST * (other - one)) for one, other in pairs]
        return [without[0], *[without[MIDDLE]] * (stages - 2), without[-1]], block_s

    def _plain(self, item: ReducedPipeline) -> CandidateConfig:
        return default_config(self.problem.strategy, item.evaluator.setup.blocks, 0)

    @property
    def work(self) -> Work:
        """Work of a step of the whole model."""
        one, other = (
            reduced_work(self.problem, each.graph, self.count, self.machine)
            for each in self.models_of
        )
        times = (len(self.models.kinds[0]) - FEW) / (MORE - FEW)
        return replace(
            one,
            flops=one.flops + times * (other.flops - one.flops),
            wide_flops=one.wide_flops + times * (other.wide_flops - one.wide_flops),
        )
