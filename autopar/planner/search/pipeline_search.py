"""`fastest_pipeline`: the best number of micro-batches, schedule and cut points of a pipeline."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.core.common.deadline import TimeIsOver, arm
from autopar.core.common.notices import warn_once
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.mesh_levels import DATA_AXIS
from autopar.core.plan.partition import rows_of
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import RUNNERS_UP, RunnerUp, slower
from autopar.core.plan.strategy import Strategy
from autopar.core.schedules import (
    V_SCHEDULES,
    in_flight,
    orders,
    stage_ranks,
)
from autopar.errors import (
    AutoparWarning,
    BatchError,
    CaptureError,
    CoupledRowsError,
    StrategyError,
)
from autopar.formatting import human_bytes
from autopar.passes.communication.bucket_collectives import BucketCollectives
from autopar.passes.communication.schedule_overlap import ScheduleOverlap
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.cast_before_gather import CastBeforeGather
from autopar.passes.data_parallel.shard_parameters import ShardParameters
from autopar.passes.data_parallel.shard_replicated import ShardReplicated
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from autopar.passes.pipeline import build_stage_pipeline
from autopar.passes.pipeline_parallel.stage_dependence import parameter_uses
from autopar.passes.stage_lowering import place_plan_stages
from autopar.planner.evaluate.candidate import Candidate, CandidateConfig, default_config
from autopar.planner.evaluate.cut_points import CutPoints, seconds_of, segments_of
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.evaluate.p2p import P2PCost
from autopar.planner.evaluate.pipeline_evaluator import PipelineEvaluator, StagedEvaluator
from autopar.planner.evaluate.setup import EvaluationSetup
from autopar.planner.evaluate.stage_partition import Cuts, Segment, partition_stages
from autopar.planner.search.config_search import search_configs

CaptureMicroBatch = Callable[[int, bool], TrainingGraph]
"""Captures the first of a number of micro-batches; whether all must have as many rows."""

MICRO_BATCHES_PER_RANK = 4
"""Most micro-batches tried per pipeline rank; further ones hardly shrink the bubble."""

APART = 1.5
"""Least ratio of numbers of micro-batches: neighbours idle alike, and each costs a capture."""

UNEVEN = (
    "micro-batches differ by a row, since their number does not divide the rows. They are priced "
    "as if all had as many rows as the first"
)

DATA_PARALLEL_PASSES = (
    ShardReplicated, ShardParameters, CastBeforeGather, SynchronizeGradients, BucketCollectives,
    ScheduleOverlap,
)  # fmt: skip
"""Passes for communication over the data axis, which does not affect the balance of stages."""

FINALISTS = 3
"""Number of pipelines whose remaining choices are searched."""


def capture_micro_batches(
    strategy: Strategy, capture: CaptureMicroBatch
) -> dict[int, TrainingGraph]:
    """Captures the first micro-batch for each number of micro-batches that the strategy allows.

    If it leaves the number open, these are divisors of the rows that lie well apart, and other
    numbers where divisors lie too far apart.

    Raises:
        BatchError: there are fewer rows than micro-batches that the strategy fixes.
    """
    if strategy.micro_batches is not None or strategy.stages == 1:
        count = strategy.micro_batches or 1
        try:
            return {count: _captured(count, capture)}
        except CoupledRowsError as error:
            # Batch norm, for example, reduces over all micro-batches inside the forward.
            graph = capture(1, True)
            note = f"one micro-batch instead of {count}: {error}"
            warn_once(AutoparWarning, f"the pipeline runs {note}")
            return {1: replace(graph, notes=(*graph.notes, note))}
    captures, last = {1: capture(1, True)}, 1
    most = MICRO_BATCHES_PER_RANK * (strategy.pp or 1)
    for count in range(2, most + 1):
        if count < APART * last:
            continue
        try:
            captures[count] = capture(count, True)
        except BatchError:  # it divides no rows, which shows before anything is captured
            continue
        except (CaptureError, CoupledRowsError):
            return captures
        last = count
    for count in _between(list(captures), most):
        with contextlib.suppress(BatchError, CaptureError, CoupledRowsError):
            captures[count] = _captured(count, capture)
    return dict(sorted(captures.items()))


def _captured(count: int, capture: CaptureMicroBatch) -> TrainingGraph:
    """One micro-batch, with a note if others have fewer rows."""
    try:
        return capture(count, True)
    except BatchError:  # it divides no rows, which shows before anything is captured
        graph = capture(count, False)
    return replace(graph, notes=(*graph.notes, UNEVEN))


def _between(divisors: Sequence[int], most: int) -> Iterator[int]:
    """Doubles of each divisor that lie well apart from the next one.

    >>> list(_between([1, 7], 8)), list(_between([1, 2, 3, 5, 10, 15, 30], 32))
    ([2, 4], [])
    """
    for divisor, following in zip(divisors, [*divisors[1:], math.inf], strict=True):
        count = 2 * divisor
        while APART * count <= following and count <= most:
            yield count
            count *= 2


def open_schedules(
    strategy: Strategy, cut_points: int, micro_batches: int
) -> Iterator[tuple[str, int]]:
    """The schedules that a strategy leaves open, and the stages per rank of each."""
    ranks, chunks = strategy.pp or 1, strategy.stages // (strategy.pp or 1)
    if strategy.schedule is not None or chunks > 1 or ranks == 1:
        yield strategy.schedule or ("interleaved" if chunks > 1 else "1f1b"), chunks
        return
    yield "1f1b", 1
    if micro_batches > 1:  # else it is 1F1B
        yield "gpipe", 1
    yield "zero_bubble", 1
    free = strategy.split_points is None and strategy.stages_per_rank is None
    if free and cut_points >= 2 * ranks:
        yield from (("interleaved", 2), ("zbv", 2))
        if micro_batches >= 2 * ranks:  # else it waits longer than ZB-V
            yield "dualpipe_v", 2


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


def _named_cuts(strategy: Strategy, points: CutPoints) -> Cuts:
    """The cuts at the split points that a strategy names; raises StrategyError for bad names."""
    cuts: list[int] = []
    for name in strategy.split_points or ():
        uses = [
            index
            for index, used in enumerate(points.names)
            if any(f"{each}.".startswith(f"{name}.") for each in used)
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


def _segments(
    setup: EvaluationSetup, strategy: Strategy, points: CutPoints, micro_batches: int
) -> list[Segment]:
    graph, lowered = cut_everywhere(setup, strategy, points, micro_batches)
    seconds = seconds_of(lowered, points, setup.cluster, setup.operators, DATA_AXIS)
    shards = setup.base.dp_size * (strategy.cp or 1) if strategy.zero not in (0, 1, 2) else 1
    copies = (2.0 + setup.base.optimizer_state_ratio) / shards
    return segments_of(graph, points, seconds, copies)


def cut_everywhere(
    setup: EvaluationSetup, strategy: Strategy, points: CutPoints, micro_batches: int
) -> tuple[TrainingGraph, TrainingGraph]:
    """One micro-batch with every segment as a stage, captured and lowered."""
    config = default_config(strategy, setup.blocks, 0)
    pipeline = Pipeline(len(points.names), "gpipe", micro_batches, 1, points.uses)
    plan = replace(setup.draft(config), pipeline=pipeline)
    graph = place_plan_stages(setup.graph, plan, 0, setup.op_strategies, micro_batches)
    passes = build_stage_pipeline(plan, 0, setup.base.comm_backend)
    own = (each for each in passes if not isinstance(each, DATA_PARALLEL_PASSES))
    return graph, run_passes(graph, own)


def open_pipelines(
    evaluator: Evaluator, strategy: Strategy, micro_batches: int, cap: int | None = None
) -> Iterator[PipelineEvaluator]:
    """An evaluator for each pipeline that the strategy leaves open, with balanced stages.

    Raises:
        StrategyError: the model cannot be split into the strategy's stages.
    """
    setup, ranks = evaluator.setup, strategy.pp or 1
    points = cut_points_of(strategy, setup.base.model, setup.graph)
    balanced = strategy.split_points is None and strategy.stages > 1
    segments = _segments(setup, strategy, points, micro_batches) if balanced else []
    transfer = P2PCost(setup.cluster, setup.base.mesh).slowest_s
    alike: dict[tuple[object, int], PipelineEvaluator] = {}
    for schedule, stages_per_rank in open_schedules(strategy, len(points.names), micro_batches):
        order = orders(schedule, ranks, micro_batches, stages_per_rank)
        places = stage_ranks(schedule, ranks, stages_per_rank)
        flights = [in_flight(order[rank], stage) for stage, rank in enumerate(places)]
        cuts: Cuts | None = ()
        if strategy.split_points is not None:
            cuts = _named_cuts(strategy, points)
        elif balanced:
            cut = partial(
                partition_stages,
                segments,
                ranks,
                flights,
                transfer,
                paces=setup.paces,
                rank_of=places,
            )
            # Recomputation is not added yet, so cuts above the cap may still fit later.
            cuts = cut(cap) or cut(None)
        uses, rows = points.stages(cuts or ()), rows_of(setup.graph) * micro_batches
        pipeline = Pipeline(ranks, schedule, micro_batches, stages_per_rank, uses, rows)
        key = uses, pipeline.stages
        evaluator = PipelineEvaluator(setup, pipeline, alike.get(key))
        alike[key] = evaluator
        yield evaluator


def fastest_pipeline(
    evaluators: Mapping[int, Evaluator],
    strategy: Strategy,
    cap: int | None,
    incumbent_s: float = math.inf,
    first: CandidateConfig | None = None,
) -> Candidate:
    """The fastest plan that fits, over micro-batches, schedules and balanced cut points.

    Raises:
        StrategyError: the model cannot be split into the strategy's stages.
        OutOfMemoryError: nothing fits.
    """
    tried: list[tuple[PipelineEvaluator, Candidate]] = []
    refusals: list[StrategyError] = []
    for micro_batches, evaluator in evaluators.items():
        config = first or default_config(strategy, evaluator.setup.blocks, 0)
        try:
            for pipeline in open_pipelines(evaluator, strategy, micro_batches, cap):
                tried.append((pipeline, pipeline.evaluate(config)))
                if cap is None or tried[-1][1].needed_bytes <= cap:
                    arm()
                if not evaluator.setup.deadline():
                    break
        except StrategyError as refusal:
            refusals.append(refusal)
        except TimeIsOver:
            if not tried:
                raise
            break
    if not tried:
        raise refusals[0]
    return best_pipeline(tried, strategy, cap, incumbent_s, first)


def best_pipeline(
    tried: Sequence[tuple[StagedEvaluator, Candidate]],
    strategy: Strategy,
    cap: int | None,
    incumbent_s: float = math.inf,
    first: CandidateConfig | None = None,
    *,
    unscheduled: bool = False,
) -> Candidate:
    """The fastest plan that fits, from pipelines with the candidate of their default configuration.

    Raises:
        OutOfMemoryError: nothing fits.
    """
    limit = math.inf if cap is None else cap
    tried = sorted(tried, key=lambda item: (item[1].needed_bytes > limit, item[1].step_s))
    finalists = _without_slower_v(tried)[:FINALISTS]
    if tried[0][1].needed_bytes > limit:
        # Raised blocks may make the smallest pipeline fit where the fastest ones never do.
        smallest = min(tried, key=lambda item: item[1].needed_bytes)
        finalists += [smallest] if smallest not in finalists else []
    evaluators = (each for each, _ in finalists)
    best = search_configs(evaluators, strategy, cap, incumbent_s, first, unscheduled=unscheduled)
    runners_up = _runners_up(best.plan, [e.plan for _, e in tried], cap)
    return best.with_plan(runners_up=runners_up, search=None)  # its bound is that of the finalists


def _without_slower_v(
    ordered: Sequence[tuple[StagedEvaluator, Candidate]],
) -> list[tuple[StagedEvaluator, Candidate]]:
    """Pipelines without the second of two in a V: other choices change them alike."""
    found, seen = [], set[int]()
    for evaluator, candidate in ordered:
        pipeline = evaluator.pipeline
        if pipeline.schedule in V_SCHEDULES:
            if pipeline.micro_batches in seen:
                continue
            seen.add(pipeline.micro_batches)
        found.append((evaluator, candidate))
    return found


def step_s(plan: Plan) -> float:
    """Predicted step time of a plan in seconds."""
    assert plan.prediction is not None
    return plan.prediction.step_s


def _runners_up(best: Plan, others: list[Plan], cap: int | None) -> tuple[RunnerUp, ...]:
    found = {other.name: other for other in best.runners_up}
    for plan in others:
        if plan.pipeline != best.pipeline and plan.prediction and best.prediction:
            cost = plan.prediction
            why = slower(cost, best.prediction)
            if cap is not None and cost.needed_bytes > cap:
                why = f"as it is, needs {human_bytes(cost.needed_bytes - cap)} more than the cap"
            found[plan.name] = RunnerUp.of(plan.name, cost, why)
    return tuple(sorted(found.values(), key=lambda other: other.step_s)[:RUNNERS_UP])
