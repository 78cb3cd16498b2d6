"""Which pipeline: how many micro-batches, which schedule, and where to cut."""

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
from autopar.planner.search.config_search import choose_among, first_config
from autopar.report.plan import Plan

MOST_A_RANK = 4
"""Micro-batches that are tried for each rank of a pipeline: more hide little more of the bubble."""

ONCE_A_STEP = (ShardParameters, SynchronizeGradients, BucketCollectives, ScheduleOverlap)
"""Passes that write and arrange what goes over the axis of the data, which balances nothing."""

FINALISTS = 3
"""Pipelines of which all else is searched."""


def captured_at(
    strategy: Strategy, captured: Callable[[int], TrainingGraph]
) -> dict[int, TrainingGraph]:
    """The graph of one micro-batch, for each number of them that may be chosen.

    Args:
        strategy: what is fixed.
        captured: captures a call in so many micro-batches.

    Raises:
        BatchError: the rows cannot be cut into as many as the strategy says.
    """
    if strategy.micro_batches is not None or strategy.stages == 1:
        count = strategy.micro_batches or 1
        try:
            return {count: captured(count)}
        except CoupledRowsError as error:
            graph = captured(1)
            note = f"one micro-batch instead of {count}: {error}"
            return {1: replace(graph, notes=(*graph.notes, note))}
    found, count = {1: captured(1)}, 2
    while count <= MOST_A_RANK * (strategy.pp or 1):
        try:
            found[count] = captured(count)
        except (BatchError, CaptureError, CoupledRowsError):
            break
        count *= 2
    return found


@dataclass(frozen=True)
class PipelineConfig:
    """What distinguishes pipelines, but for their cuts."""

    schedule: str
    micro_batches: int
    stages_per_rank: int


def pipeline_configs(
    strategy: Strategy, micro_batches: int, places: int
) -> Iterator[PipelineConfig]:
    """The pipelines that a strategy leaves open, at a number of micro-batches."""
    ranks, chunks = strategy.pp or 1, strategy.stages // (strategy.pp or 1)
    if strategy.schedule is not None or chunks > 1 or ranks == 1:
        default = "interleaved" if chunks > 1 else "1f1b"
        yield PipelineConfig(strategy.schedule or default, micro_batches, chunks)
        return
    yield PipelineConfig("1f1b", micro_batches, 1)
    yield PipelineConfig("gpipe", micro_batches, 1)
    yield PipelineConfig("zero_bubble", micro_batches, 1)
    if strategy.split_points is None and strategy.stages_per_rank is None and places >= 2 * ranks:
        yield PipelineConfig("interleaved", micro_batches, 2)


def cut_points_of(strategy: Strategy, model: str, graph: TrainingGraph) -> CutPoints:
    """Where a model may be cut.

    Raises:
        StrategyError: it cannot be cut into as many stages.
    """
    places = CutPoints.of(parameter_uses(graph), graph.parameters)
    if len(places.names) < strategy.stages:
        raise StrategyError(
            f"{model} uses parameters in {len(places.names)} places, so it cannot be cut into "
            f"{strategy.stages} stages: give a smaller pp or stages_per_rank"
        )
    return places


def named_cuts(strategy: Strategy, places: CutPoints) -> Cuts:
    """The places that a strategy names.

    Raises:
        StrategyError: a name is none of the model, or they are not in the order of the forward.
    """
    found: list[int] = []
    for cut in strategy.split_points or ():
        at = [
            place
            for place, names in enumerate(places.names)
            if any(name == cut or name.startswith(cut + ".") for name in names)
        ]
        if not at:
            raise StrategyError(
                f"split_points={strategy.split_points!r}: {cut!r} is no module or parameter that "
                "the forward uses"
            )
        if at[0] <= (found[-1] if found else 0):
            raise StrategyError(
                f"split_points={strategy.split_points!r}: {cut!r} is not used after what comes "
                "before it, so a stage would have nothing to do. Name them in the order of "
                "the forward."
            )
        found.append(at[0])
    return tuple(found)


def _pipeline(
    strategy: Strategy, form: PipelineConfig, graph: TrainingGraph, places: CutPoints, cuts: Cuts
) -> Pipeline:
    return Pipeline(
        ranks=strategy.pp or 1,
        schedule=form.schedule,
        micro_batches=form.micro_batches,
        stages_per_rank=form.stages_per_rank,
        uses=places.stages(cuts),
        rows=rows_of(graph) * form.micro_batches,
    )


@dataclass(frozen=True)
class _Cutter:
    """Finds the cuts of a graph of one micro-batch."""

    evaluator: Evaluator
    strategy: Strategy
    model: str
    cap: int | None

    def candidates(self, micro_batches: int) -> Iterator[PipelineEvaluator]:
        """An evaluator of each pipeline."""
        base, graph = self.evaluator.setup.base, self.evaluator.setup.graph
        places = cut_points_of(self.strategy, self.model, graph)
        whole = self.strategy.stages == 1
        free = self.strategy.split_points is None and not whole
        segments = self._segments(places, micro_batches) if free else []
        ranks, link = self.strategy.pp or 1, P2PCost(self.evaluator.setup.cluster, base.mesh)
        for form in pipeline_configs(self.strategy, micro_batches, len(places.names)):
            order = orders(form.schedule, ranks, micro_batches, form.stages_per_rank)
            count = ranks * form.stages_per_rank
            flights = [in_flight(order[stage % ranks], stage) for stage in range(count)]
            cuts: Cuts | None = ()
            if self.strategy.split_points is not None:
                cuts = named_cuts(self.strategy, places)
            elif not whole:
                cuts = partition_stages(segments, ranks, flights, link.seconds, self.cap)
                cuts = cuts or partition_stages(segments, ranks, flights, link.seconds)
            pipeline = _pipeline(self.strategy, form, graph, places, cuts or ())
            yield PipelineEvaluator(self.evaluator.setup, pipeline)

    def _segments(self, places: CutPoints, micro_batches: int) -> list[Segment]:
        """What there is to balance: the model with every place a stage of its own."""
        base = self.evaluator.setup.base
        _, whole, lowered = at_cut_points(self.evaluator, self.strategy, places, micro_batches)
        cluster, operators = self.evaluator.setup.cluster, self.evaluator.setup.operators
        taken = seconds_of(lowered, places, cluster, operators, DATA_AXIS)
        divided = base.dp_size if self.strategy.zero not in (0, 1, 2) else 1
        copies = (2.0 + base.optimizer_state_ratio) / divided
        return segments_of(whole, places, taken, copies)


def at_cut_points(
    evaluator: Evaluator, strategy: Strategy, places: CutPoints, micro_batches: int
) -> tuple[Plan, TrainingGraph, TrainingGraph]:
    """The plan with every place a stage of its own; a micro-batch of it, captured and lowered."""
    setup = evaluator.setup
    zero = first_config(strategy, tuple(block for block, _ in setup.base.zero_stages), 0)
    each = Pipeline(len(places.names), "gpipe", micro_batches, 1, places.uses)
    plan = replace(setup.draft(zero), pipeline=each)
    whole = place_plan_stages(setup.graph, plan, 0, setup.op_strategies, micro_batches)
    passes = build_stage_pipeline(plan, 0, setup.comm_backend)
    return plan, whole, run_passes(whole, (p for p in passes if not isinstance(p, ONCE_A_STEP)))


def unmeasured_pipeline(
    evaluator: Evaluator, strategy: Strategy, model: str, micro_batches: int
) -> PipelineEvaluator:
    """The pipeline of a strategy that leaves nothing open but its cuts.

    Args:
        evaluator: of the model as it is, with modelled figures: cuts are balanced by these.
        strategy: what is fixed.
        model: its name.
        micro_batches: number of micro-batches of a rank.
    """
    cutter = _Cutter(evaluator, strategy, model, None)
    return next(cutter.candidates(micro_batches))


def fastest_pipeline(
    evaluators: Mapping[int, Evaluator],
    strategy: Strategy,
    model: str,
    cap: int | None,
    incumbent_s: float = math.inf,
) -> Plan:
    """The fastest plan that fits, of all numbers of micro-batches, schedules and balanced cuts.

    Args:
        evaluators: of the model as it is, for each number of micro-batches.
        strategy: what is fixed.
        model: its name.
        cap: bytes for each rank; None for any number.
        incumbent_s: seconds of a step; what could not be faster is not looked at further.

    Raises:
        StrategyError: the model cannot be cut as the strategy says.
        OutOfMemoryError: nothing fits.
    """
    tried: list[tuple[PipelineEvaluator, Candidate]] = []
    refusals: list[StrategyError] = []
    blocks = tuple(block for block, _ in next(iter(evaluators.values())).setup.base.zero_stages)
    first = first_config(strategy, blocks, 0)

    def merit(item: tuple[PipelineEvaluator, Candidate]) -> tuple[bool, float]:
        cost = item[1].prediction
        return cap is not None and cost.needed_bytes > cap, cost.step_s

    for micro_batches, evaluator in evaluators.items():
        try:
            for candidate in _Cutter(evaluator, strategy, model, cap).candidates(micro_batches):
                tried.append((candidate, candidate.evaluate(first)))
                if not evaluator.setup.deadline():
                    break
        except StrategyError as refusal:
            refusals.append(refusal)
    if not tried:
        raise refusals[0]

    tried.sort(key=merit)
    finalists = tried[:FINALISTS]
    if cap is not None:
        smallest = min(tried, key=lambda item: item[1].prediction.needed_bytes)
        finalists += [smallest] if smallest not in finalists else []
    best = choose_among(
        (evaluator for evaluator, _ in finalists), strategy, blocks, cap, incumbent_s
    )
    return replace(best, runners_up=_runners_up(best, [e.plan for _, e in tried], cap))


def step_s(plan: Plan) -> float:
    """What the step of a plan that was predicted takes."""
    assert plan.prediction is not None
    return plan.prediction.step_s


def _runners_up(best: Plan, others: list[Plan], cap: int | None) -> tuple[RunnerUp, ...]:
    """Those of the best pipeline, and the other pipelines."""
    found = {other.name: other for other in best.runners_up}
    for plan in others:
        if plan.pipeline != best.pipeline and plan.prediction and best.prediction:
            cost = plan.prediction
            why = slower(cost, best.prediction)
            if cap is not None and cost.needed_bytes > cap:
                why = f"as it is, needs {human_bytes(cost.needed_bytes - cap)} more than the cap"
            found[plan.name] = RunnerUp.of(plan.name, cost, why)
    return tuple(sorted(found.values(), key=lambda other: other.step_s)[:RUNNERS_UP])
