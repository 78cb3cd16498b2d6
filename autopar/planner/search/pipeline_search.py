"""`fastest_pipeline`: the best number of micro-batches, schedule and cut points of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.cost_model.simulator.schedules import in_flight, orders
from autopar.errors import BatchError, CaptureError, CoupledRowsError, StrategyError
from autopar.formatting import human_bytes
from autopar.ir.graph import TrainingGraph
from autopar.ir.mesh_levels import DATA_AXIS
from autopar.passes.communication.bucket_collectives import BucketCollectives
from autopar.passes.communication.schedule_overlap import ScheduleOverlap
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.shard_parameters import ShardParameters
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from autopar.passes.pipeline import build_stage_pipeline
from autopar.passes.pipeline_parallel.stage_dependence import parameter_uses
from autopar.passes.stage_lowering import place_plan_stages
from autopar.plan.partition import rows_of
from autopar.plan.pipeline import Pipeline
from autopar.plan.prediction import RUNNERS_UP, RunnerUp, slower
from autopar.plan.strategy import Strategy
from autopar.planner.evaluate.candidate import Candidate
from autopar.planner.evaluate.cut_points import CutPoints, seconds_of, segments_of
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.evaluate.p2p import P2PCost
from autopar.planner.evaluate.pipeline_evaluator import PipelineEvaluator
from autopar.planner.evaluate.stage_partition import Cuts, Segment, partition_stages
from autopar.planner.search.config_search import search_evaluators
from autopar.planner.search.default_configs import default_config
from autopar.report.plan import Plan

MICRO_BATCHES_PER_RANK = 4
"""Most micro-batches tried per pipeline rank; further ones hardly shrink the bubble."""

DATA_PARALLEL_PASSES = (ShardParameters, SynchronizeGradients, BucketCollectives, ScheduleOverlap)
"""Passes for communication over the data axis, which does not affect the balance of stages."""

FINALISTS = 3
"""Number of pipelines whose remaining choices are searched."""


def capture_micro_batches(
    strategy: Strategy, capture: Callable[[int], TrainingGraph]
) -> dict[int, TrainingGraph]:
    """Captures one micro-batch for each number of micro-batches that the strategy allows.

    Args:
        strategy: choices that the user fixed.
        capture: captures a micro-batch, given their number.

    Raises:
        BatchError: the rows do not divide into the number of micro-batches that the strategy fixes.
    """
    if strategy.micro_batches is not None or strategy.stages == 1:
        count = strategy.micro_batches or 1
        try:
            return {count: capture(count)}
        except CoupledRowsError as error:
            graph = capture(1)
            note = f"one micro-batch instead of {count}: {error}"
            return {1: replace(graph, notes=(*graph.notes, note))}
    found, count = {1: capture(1)}, 2
    while count <= MICRO_BATCHES_PER_RANK * (strategy.pp or 1):
        try:
            found[count] = capture(count)
        except (BatchError, CaptureError, CoupledRowsError):
            break
        count *= 2
    return found


@dataclass(frozen=True)
class PipelineConfig:
    """The choices of a pipeline except its cut points."""

    schedule: str
    micro_batches: int
    stages_per_rank: int


def pipeline_configs(
    strategy: Strategy, micro_batches: int, cut_points: int
) -> Iterator[PipelineConfig]:
    """The pipelines that a strategy leaves open, for one number of micro-batches.

    Args:
        strategy: choices that the user fixed.
        micro_batches: number of micro-batches.
        cut_points: number of segments that the model can be cut into.
    """
    ranks, chunks = strategy.pp or 1, strategy.stages // (strategy.pp or 1)
    if strategy.schedule is not None or chunks > 1 or ranks == 1:
        default = "interleaved" if chunks > 1 else "1f1b"
        yield PipelineConfig(strategy.schedule or default, micro_batches, chunks)
        return
    for schedule in ("1f1b", "gpipe", "zero_bubble"):
        yield PipelineConfig(schedule, micro_batches, 1)
    free = strategy.split_points is None and strategy.stages_per_rank is None
    if free and cut_points >= 2 * ranks:
        yield PipelineConfig("interleaved", micro_batches, 2)


def cut_points_of(strategy: Strategy, model: str, graph: TrainingGraph) -> CutPoints:
    """The points at which a model can be cut.

    Raises:
        StrategyError: there are fewer segments than stages.
    """
    points = CutPoints.of(parameter_uses(graph), graph.parameters)
    if len(points.names) < strategy.stages:
        raise StrategyError(
            f"{model} uses parameters in {len(points.names)} places, so it cannot be cut into "
            f"{strategy.stages} stages: give a smaller pp or stages_per_rank"
        )
    return points


def named_cuts(strategy: Strategy, points: CutPoints) -> Cuts:
    """The cuts at the split points that a strategy names.

    Raises:
        StrategyError: a name is not used by the forward, or the names are out of order.
    """
    cuts: list[int] = []
    for name in strategy.split_points or ():
        uses = [
            index
            for index, used in enumerate(points.names)
            if any(each == name or each.startswith(name + ".") for each in used)
        ]
        if not uses:
            raise StrategyError(
                f"split_points={strategy.split_points!r}: {name!r} is no module or parameter that "
                "the forward uses"
            )
        if uses[0] <= (cuts[-1] if cuts else 0):
            raise StrategyError(
                f"split_points={strategy.split_points!r}: {name!r} is not used after what comes "
                "before it, so a stage would have nothing to do. Name them in the order of "
                "the forward."
            )
        cuts.append(uses[0])
    return tuple(cuts)


@dataclass(frozen=True)
class _PipelineBuilder:
    """Cuts the graph of one micro-batch into balanced stages.

    Attributes:
        evaluator: evaluator of the uncut model.
        strategy: choices that the user fixed.
        model: class name of the model.
        cap: memory cap per rank in bytes, None for no limit.
    """

    evaluator: Evaluator
    strategy: Strategy
    model: str
    cap: int | None

    def candidates(self, micro_batches: int) -> Iterator[PipelineEvaluator]:
        """An evaluator for each pipeline that the strategy leaves open."""
        strategy, setup = self.strategy, self.evaluator.setup
        graph = setup.graph
        points = cut_points_of(strategy, self.model, graph)
        balanced = strategy.split_points is None and strategy.stages > 1
        segments = self._segments(points, micro_batches) if balanced else []
        ranks = strategy.pp or 1
        p2p = P2PCost(setup.cluster, setup.base.mesh)
        for config in pipeline_configs(strategy, micro_batches, len(points.names)):
            order = orders(config.schedule, ranks, micro_batches, config.stages_per_rank)
            stages = range(ranks * config.stages_per_rank)
            flights = [in_flight(order[stage % ranks], stage) for stage in stages]
            cuts: Cuts | None = ()
            if strategy.split_points is not None:
                cuts = named_cuts(strategy, points)
            elif balanced:
                cuts = partition_stages(segments, ranks, flights, p2p.seconds, self.cap)
                cuts = cuts or partition_stages(segments, ranks, flights, p2p.seconds)
            pipeline = Pipeline(
                ranks=ranks,
                schedule=config.schedule,
                micro_batches=micro_batches,
                stages_per_rank=config.stages_per_rank,
                uses=points.stages(cuts or ()),
                rows=rows_of(graph) * micro_batches,
            )
            yield PipelineEvaluator(setup, pipeline)

    def _segments(self, points: CutPoints, micro_batches: int) -> list[Segment]:
        """The model cut at every point, with the cost of each segment."""
        setup = self.evaluator.setup
        _, graph, lowered = cut_everywhere(self.evaluator, self.strategy, points, micro_batches)
        seconds = seconds_of(lowered, points, setup.cluster, setup.operators, DATA_AXIS)
        shards = setup.base.dp_size if self.strategy.zero not in (0, 1, 2) else 1
        copies = (2.0 + setup.base.optimizer_state_ratio) / shards
        return segments_of(graph, points, seconds, copies)


def cut_everywhere(
    evaluator: Evaluator, strategy: Strategy, points: CutPoints, micro_batches: int
) -> tuple[Plan, TrainingGraph, TrainingGraph]:
    """The plan with every segment as a stage, and one micro-batch of it, captured and lowered."""
    setup = evaluator.setup
    blocks = tuple(block for block, _ in setup.base.zero_stages)
    config = default_config(strategy, blocks, 0)
    pipeline = Pipeline(len(points.names), "gpipe", micro_batches, 1, points.uses)
    plan = replace(setup.draft(config), pipeline=pipeline)
    graph = place_plan_stages(setup.graph, plan, 0, setup.op_strategies, micro_batches)
    passes = build_stage_pipeline(plan, 0, setup.comm_backend)
    own = (each for each in passes if not isinstance(each, DATA_PARALLEL_PASSES))
    return plan, graph, run_passes(graph, own)


def unmeasured_pipeline(
    evaluator: Evaluator, strategy: Strategy, model: str, micro_batches: int
) -> PipelineEvaluator:
    """The pipeline of a strategy that leaves only the cut points open.

    Args:
        evaluator: evaluator of the uncut model with modelled times, which balance the stages.
        strategy: choices that the user fixed.
        model: class name of the model.
        micro_batches: number of micro-batches.
    """
    return next(_PipelineBuilder(evaluator, strategy, model, None).candidates(micro_batches))


def fastest_pipeline(
    evaluators: Mapping[int, Evaluator],
    strategy: Strategy,
    model: str,
    cap: int | None,
    incumbent_s: float = math.inf,
) -> Plan:
    """The fastest plan that fits, over micro-batches, schedules and balanced cut points.

    Args:
        evaluators: evaluators of the uncut model by number of micro-batches.
        strategy: choices that the user fixed.
        model: class name of the model.
        cap: memory cap per rank in bytes, None for no limit.
        incumbent_s: best step time found so far, in seconds.

    Raises:
        StrategyError: the model cannot be split into the strategy's stages.
        OutOfMemoryError: nothing fits.
    """
    tried: list[tuple[PipelineEvaluator, Candidate]] = []
    refusals: list[StrategyError] = []
    blocks = tuple(block for block, _ in next(iter(evaluators.values())).setup.base.zero_stages)
    config = default_config(strategy, blocks, 0)

    def rank_of(item: tuple[PipelineEvaluator, Candidate]) -> tuple[bool, float]:
        cost = item[1].prediction
        return cap is not None and cost.needed_bytes > cap, cost.step_s

    for micro_batches, evaluator in evaluators.items():
        builder = _PipelineBuilder(evaluator, strategy, model, cap)
        try:
            for pipeline in builder.candidates(micro_batches):
                tried.append((pipeline, pipeline.evaluate(config)))
                if not evaluator.setup.deadline():
                    break
        except StrategyError as refusal:
            refusals.append(refusal)
    if not tried:
        raise refusals[0]

    tried.sort(key=rank_of)
    finalists = tried[:FINALISTS]
    if cap is not None:
        smallest = min(tried, key=lambda item: item[1].prediction.needed_bytes)
        finalists += [smallest] if smallest not in finalists else []
    best = search_evaluators((each for each, _ in finalists), strategy, blocks, cap, incumbent_s)
    return replace(best, runners_up=_runners_up(best, [e.plan for _, e in tried], cap))


def step_s(plan: Plan) -> float:
    """Predicted step time of a plan in seconds."""
    assert plan.prediction is not None
    return plan.prediction.step_s


def _runners_up(best: Plan, others: list[Plan], cap: int | None) -> tuple[RunnerUp, ...]:
    """Runners-up of the best pipeline, and the other pipelines."""
    found = {other.name: other for other in best.runners_up}
    for plan in others:
        if plan.pipeline != best.pipeline and plan.prediction and best.prediction:
            cost = plan.prediction
            why = slower(cost, best.prediction)
            if cap is not None and cost.needed_bytes > cap:
                why = f"as it is, needs {human_bytes(cost.needed_bytes - cap)} more than the cap"
            found[plan.name] = RunnerUp.of(plan.name, cost, why)
    return tuple(sorted(found.values(), key=lambda other: other.step_s)[:RUNNERS_UP])
