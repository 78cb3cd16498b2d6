"""`LivePlanner`: plans the calls of a module on the ranks that train it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from torch import nn

from autopar.core.common.deadline import Deadline
from autopar.core.common.notices import say, warn_once
from autopar.core.environment import PLAIN
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.mesh_levels import DATA_AXIS
from autopar.core.ir.roles import Gradient
from autopar.core.operators.offload import check_lower_level
from autopar.core.plan.partition import NodeStrategies, Partition
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import RING_DECLINED
from autopar.cost_model.measurement.device_memory import DeviceMemory
from autopar.cost_model.measurement.measure import measure
from autopar.errors import AutoparWarning, CaptureError, FallbackWarning, LossyWarning
from autopar.formatting import duration
from autopar.planner.machine import Machine, ranks_of
from autopar.planner.placement.follow import follow
from autopar.planner.placement.unmeasured import repartition
from autopar.planner.problem import Graphs, PlanningProblem
from autopar.planner.search.estimate_captures import MeshEstimator
from autopar.planner.search.measure_problem import (
    GraphStrategies,
    SolvedGraphs,
    measure_programs,
    programs_to_time,
    strategies_to_replay,
)
from autopar.planner.search.mesh_search import EstimateMesh
from autopar.planner.search.oom_advice import plan_or_advise
from autopar.planner.search.pipeline_search import capture_micro_batches
from autopar.report.table import compressed
from autopar.runtime.agreement.captured_graph import agree_on_graph
from autopar.runtime.agreement.consensus import (
    assert_same_across_ranks,
    broadcast_from_rank0,
    gather_objects,
    is_multi_rank,
    run_on_all_ranks,
)
from autopar.runtime.agreement.graph_order import in_order_of_rank0
from autopar.runtime.execution import CaptureFunction
from autopar.runtime.fallback import (
    check_can_fall_back,
    describe_fallback_differences,
    wrap_with_ddp_or_fsdp,
)
from autopar.runtime.module import DistributedModule
from autopar.runtime.process_groups import make_mesh
from autopar.runtime.watch.collective_log import LOG
from autopar.session.balance import balanced, with_speeds
from autopar.session.driver import Driver
from autopar.session.profiler.profiler import Profiler
from autopar.session.select import benchmark_and_pick, num_plans_to_benchmark, plans_to_benchmark

COLLECTIVES_BUDGET_S = 15.0
"""Time to measure the collectives of every mesh, where the mesh is searched."""

MAX_REPLAYED = 3
"""Number of solutions of a mesh whose programs are replayed.

The first is solved before operators are measured, and often another one is chosen then. Operators
that only run by themselves appear too fast for a step.
"""

T = TypeVar("T")


class LiveDriver(Driver):
    """Captures and measures on all ranks at once; rank 0 decides."""

    def __init__(
        self,
        problem: PlanningProblem,
        captured: CaptureFunction,
        deadline: Deadline,
        on_candidate: Callable[[Plan], None] | None,
        recorder: Profiler | None,
    ) -> None:
        super().__init__(problem.strategy, deadline, on_candidate)
        self.captured, self.recorder = captured, recorder

    def capture(self, problem: PlanningProblem) -> Graphs:
        strategy = problem.strategy
        ranks = strategy.model_parallel_size, strategy.pp_size
        graphs = run_on_all_ranks(
            lambda: capture_micro_batches(
                strategy, lambda count, even: self.captured(*ranks, count, even).graph
            )
        )
        graphs = {count: in_order_of_rank0(graph) for count, graph in graphs.items()}
        agree_on_graph(next(iter(graphs.values())), even=False)
        if self.recorder is not None:
            self.recorder.planned.append((problem, graphs))
        return graphs

    def measure(self, problem: PlanningProblem, graphs: Graphs) -> Machine | None:
        """Measures the programs of the strategies that these measurements then lead to."""
        machine: Machine | None = None
        replayed: list[SolvedGraphs] = []
        for _ in range(MAX_REPLAYED):
            solved = broadcast_from_rank0(partial(strategies_to_replay, problem, graphs, machine))
            if solved in replayed:
                break
            replayed.append(solved)
            strategies = self._for_own_rows(problem, graphs, solved)
            # a rank that cannot lower says so before others wait for it in a measurement
            lower = partial(programs_to_time, problem, graphs, strategies, live=True)
            programs = run_on_all_ranks(lower)
            timed = partial(measure_programs, problem, programs, live=True, known=machine)
            machine = run_on_all_ranks(timed)
        return machine

    def _for_own_rows(
        self, problem: PlanningProblem, graphs: Graphs, solved: SolvedGraphs
    ) -> GraphStrategies:
        """Rank 0's strategies for this rank's rows; undivided ones if they fit not every rank's."""
        if not solved:
            return {}
        fitted = run_on_all_ranks(
            lambda: {n: each.for_rows_of(graphs[n], problem) for n, each in solved.items()}
        )
        strategies = {n: each for n, each in fitted.items() if each is not None}
        fits = len(strategies) == len(solved)
        if all(gather_objects(fits)) if is_multi_rank() else fits:
            return strategies
        return {n: each.undivided for n, each in solved.items()}

    def estimator(self, problem: PlanningProblem) -> tuple[PlanningProblem, EstimateMesh]:
        cluster = problem.cluster or measure(device=problem.device, budget_s=COLLECTIVES_BUDGET_S)
        problem, sharing = replace(problem, cluster=cluster), 1
        if problem.device.type == "cpu":
            sharing = run_on_all_ranks(lambda: ranks_of(live=True).sharing)

        def capture_slice(slices: int, _: object) -> TrainingGraph:
            return self.captured(problem.world_size, 1, slices).graph

        return problem, MeshEstimator(problem, capture_slice, sharing=sharing)

    def decide(self, choose: Callable[[], T]) -> T:
        return broadcast_from_rank0(choose)


@dataclass(frozen=True)
class LivePlanner:
    """Plans, fallbacks and strategies for a DistributedModule; all ranks call it at once.

    Attributes:
        plan: plan to follow, None to search for one.
        fallback: whether torch's data parallelism may replace a plan.
        time_limit_s: limit of the search in seconds, None for none.
        trials: number of plans to benchmark, None for the default.
        plain: whether the plain model trains, by torch's data parallelism alone.
    """

    problem: PlanningProblem
    plan: Plan | None
    fallback: bool
    time_limit_s: float | None
    trials: int | None
    recorder: Profiler | None
    plain: bool = False

    def make_plan(self, module: DistributedModule, captured: CaptureFunction, call: Any) -> Plan:
        """Captures, measures, plans and benchmarks a call, unless the plan is fixed.

        Raises:
            CaptureError: the plain model trains, or the model cannot be captured.
        """
        if self.plain:
            raise CaptureError(f"{PLAIN}=1 asks for it")
        if self.plan is not None:
            return self.agreed(self.plan)
        begin = perf_counter()
        is_searched = is_multi_rank() and bool(self.problem.strategy.search)
        if is_searched:
            say(
                f"plans for {self.problem.world_size} ranks: measures this machine, searches and "
                "tries plans. A strategy= leaves less to try."
            )
        with LOG.working("plans"):
            plan = self._searched(module, captured, call)
        if is_searched:
            summary, _, _ = str(plan).partition("\n")
            say(f"{summary} (planned in {duration(perf_counter() - begin)})")
        return plan

    def _searched(self, module: DistributedModule, captured: CaptureFunction, call: Any) -> Plan:
        problem, candidates = with_speeds(self.problem), list[Plan]()
        if problem.device.type == "cuda" and problem.memory is None:
            own = run_on_all_ranks(DeviceMemory.here)
            every = gather_objects(own) if is_multi_rank() else [own]
            problem = replace(problem, device_memory=DeviceMemory.least(every))
        count = num_plans_to_benchmark(self.trials, problem)
        observe = candidates.append if count > 1 else None
        driver = LiveDriver(problem, captured, Deadline(self.time_limit_s), observe, self.recorder)
        best = plan_or_advise(
            problem, driver.plan, recapture=False, deadline=lambda: driver.decide(driver.deadline)
        )
        plans = plans_to_benchmark(problem.device, best, candidates, count)
        chosen = benchmark_and_pick(module, plans, call, problem.optimizer)
        return self.agreed(balanced(chosen, problem))

    def agreed(self, plan: Plan) -> Plan:
        """The plan, after checking that all ranks have it; warns of compression and missing rings.

        Raises:
            DisagreementError: ranks have different plans, or one cannot use its storage.
            OffloadError: this rank cannot.
        """
        assert_same_across_ranks({"plan": plan.digest()}, "Give every rank the same plan.")
        if plan.offload or plan.offload_parameters:
            run_on_all_ranks(lambda: check_lower_level(plan.offload_dir, self.problem.device))
        for line in compressed(plan):
            warn_once(LossyWarning, f"under autopar's plan {line}")
        for note in plan.notes:
            if note.startswith(RING_DECLINED):
                warn_once(AutoparWarning, note)
        if self.recorder is not None:
            self.recorder.plan = plan
        return plan

    def make_fallback(self, model: nn.Module, reason: CaptureError) -> nn.Module:
        """The model under torch's DDP, or fully_shard where whole states exceed the cap.

        Raises:
            CaptureError: fallbacks are not allowed.
            StrategyError: fully_shard cannot take over.
        """
        if not self.fallback:
            raise reason
        problem, ranks = self.problem, self.problem.world_size
        if ranks == 1:
            told = f"autopar runs the model as it is, in plain PyTorch: {reason}"
            warn_once(FallbackWarning, told)
            return model
        held = sum(p.bytes for p in problem.parameters.values())
        needed = held * (2 + problem.state_ratio)
        shard = bool(problem.strategy.zero)
        if problem.strategy.zero is None:
            shard = problem.memory is not None and needed > problem.memory
        check_can_fall_back(model, reason, shard=shard)
        name = "fully_shard" if shard else "DistributedDataParallel"
        divides = problem.strategy.model_parallel_size * problem.strategy.pp_size > 1
        undivided = " and does not divide the model" if divides else ""
        told = f"autopar trains with torch's {name} instead{undivided}: {reason}"
        warn_once(FallbackWarning, f"{told}\n{describe_fallback_differences(model)}")
        mesh = make_mesh(problem.device, ((DATA_AXIS, ranks),))
        assert mesh is not None
        return wrap_with_ddp_or_fsdp(model, mesh, reason, shard=shard)

    @staticmethod
    def make_strategies(graph: TrainingGraph, partition: Partition) -> NodeStrategies:
        """Strategies for a call that the plan was not made for: the planned ones if they fit."""
        followed = broadcast_from_rank0(lambda: follow(graph, partition))
        if followed is not None:
            return followed
        if any(isinstance(role, Gradient) for role in graph.outputs):
            warn_once(AutoparWarning, _another_call(partition.axis))
        return broadcast_from_rank0(lambda: repartition(graph, partition))


def _another_call(axis: str) -> str:
    return (
        f"the plan has no strategies along {axis} for this call: its operators are not those of "
        "the call that was planned. It is partitioned again by the bytes that move, around the "
        "parameters as placed, and its prediction does not hold. Plan with example_inputs like "
        "this call, under the same versions of torch and autopar."
    )
