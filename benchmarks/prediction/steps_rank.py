"""One rank of part `steps`: measures, predicts, and trains all plans of a model in turn.

python -m benchmarks.prediction.steps_rank RESULT MODEL ROWS CYCLES STEPS   (under torchrun)
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.capture.model_info import describe_parameters
from autopar.capture.offline import capture_of_rank
from autopar.cost_model.measurement.measure import measure
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.optimizer_step import measure_update
from autopar.cost_model.measurement.step_replay import ReplayGroup
from autopar.plan.strategy import Strategy
from autopar.planner.evaluate.candidate import CandidateConfig
from autopar.planner.evaluate.evaluator import SpmdEvaluator
from autopar.planner.search.config_search import first_config
from autopar.planner.search.fixed_mesh import PlanningProblem, evaluator_of
from tests.harness.models import MODELS, Case

COLLECTIVES_S, OPERATORS_S = 2.0, 0.5
"""Seconds for measuring each time, three rounds at least."""

ZERO_STAGES = (0, 1, 2, 3)
LEVELS = ("none", "full")
WARM_STEPS = 2
BATCHES = 4
QUIET_SHARE, MIN_CYCLES = 0.1, 2
"""Cycles in which others took a larger share do not count, if enough are left."""


@dataclass
class PlanCase:
    """A plan, its training step, and their figures.

    Attributes:
        tp: size of the tp axis.
        zero: ZeRO stage.
        recompute: level of recomputation.
        config: configuration of the plan.
        evaluator: evaluator of the configuration, without times.
        step: function that trains one step.
        predicted: predicted step of each cycle, in seconds.
        measured: steps of the slowest rank in each cycle, in seconds.
        parts: parts of each prediction, in seconds.
    """

    tp: int
    zero: int
    recompute: str
    config: CandidateConfig
    evaluator: SpmdEvaluator
    step: Callable[[int], None]
    predicted: list[float] = field(default_factory=list)
    measured: list[list[float]] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)

    def row(self, others: list[float]) -> dict[str, Any]:
        """Return the case in the result, over the cycles in which other processes were quiet.

        Args:
            others: share of the cores' time that other processes took in each cycle.
        """
        quiet = [i for i, share in enumerate(others) if share < QUIET_SHARE]
        chosen = quiet if len(quiet) >= MIN_CYCLES else range(len(others))
        predicted = median(self.predicted[i] for i in chosen)
        measured = median(seconds for i in chosen for seconds in self.measured[i])
        return {
            "tp": self.tp,
            "zero": self.zero,
            "recompute": self.recompute,
            "predicted": predicted,
            "measured": measured,
            "error": abs(predicted / measured - 1),
            "cycles": len(chosen),
            "others": median(others[i] for i in chosen),
            "parts": {name: median(self.parts[i][name] for i in chosen) for name in self.parts[0]},
            "predictions": self.predicted,
            "measurements": self.measured,
        }


class OtherProcesses:
    """Time of the cores that other processes take from now on; used on all ranks at once."""

    def __init__(self) -> None:
        self._before = self._now()

    def share(self) -> float:
        """Return their share, 0 to 1, of the busy time of the cores."""
        local, busy = (b - a for a, b in zip(self._before, self._now(), strict=True))
        total = torch.tensor(local, dtype=torch.float64)
        dist.all_reduce(total)
        return max(0.0, 1 - total.item() / max(busy, total.item()))

    def _now(self) -> tuple[float, float]:
        """Busy seconds of this process, and of all processes."""
        times = os.times()
        user, nice, system = map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
        return times.user + times.system, (user + nice + system) / os.sysconf("SC_CLK_TCK")


def training_step(case: Case, plan: autopar.Plan, rows: int) -> Callable[[int], None]:
    """Return the usual four lines of training, under a plan."""
    batches = [case.batch(rows, seed) for seed in range(BATCHES)]
    model = autopar.compile(case.make(), plan=plan, fallback=False)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        args, kwargs = batches[number % BATCHES]
        loss = case.loss(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plan_cases(case: Case, rows: int) -> list[PlanCase]:
    """Return plans of a model, ready to train: data parallel, and partitioned along tp."""
    world_size = dist.get_world_size()
    return [
        made
        for tp, zero_stages in ((1, ZERO_STAGES), (world_size, (0,)))
        for made in plans_along(case, rows, tp, zero_stages)
    ]


def plans_along(case: Case, rows: int, tp: int, zero_stages: tuple[int, ...]) -> Iterator[PlanCase]:
    """Yield the plans with one size of the tp axis."""
    model = case.make()
    problem = PlanningProblem(
        model=type(model).__name__,
        parameters=describe_parameters(model),
        world_size=dist.get_world_size(),
        strategy=Strategy(tp=tp),
        memory=None,
        batch="global",
        precision=None,
        optimizer=torch.optim.AdamW,
        cluster=None,
        device=torch.device("cpu"),
        comm_backend="gloo",
        live=True,
    )
    args, kwargs = case.batch(rows, 0)
    inputs = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    graph = capture_of_rank(model, inputs, 0, problem.mesh[0][1], "global", None, None)
    evaluator = evaluator_of(problem, graph, None)
    for zero in zero_stages:
        for level in LEVELS:
            strategy = Strategy(zero=zero, recompute=level)  # type: ignore[arg-type]
            config = first_config(strategy, problem.blocks, zero)
            step = training_step(case, evaluator.plan(config), rows)
            yield PlanCase(tp, zero, level, config, evaluator, step)


def predict(cases: list[PlanCase]) -> None:
    """Predict every plan once, from new measurements alone."""
    graphs = [case.evaluator.lowered(case.config) for case in cases]
    world_size, device = dist.get_world_size(), torch.device("cpu")
    cluster = measure(mesh={"dp": world_size}, budget_s=COLLECTIVES_S, cache=False)
    ranks = ReplayGroup.live()
    empty = replace(OperatorTimes.load("cpu", sharing=ranks.sharing), times={})
    operators = empty.measure(graphs, ranks, budget_s=OPERATORS_S)
    mesh = init_device_mesh("cpu", (world_size,))
    update = measure_update(torch.optim.AdamW, device, mesh)
    for case in cases:
        known = {"cluster": cluster, "operators": operators, "update": update}
        evaluator = SpmdEvaluator(replace(case.evaluator.setup, **known))
        prediction = evaluator.evaluate(case.config).prediction
        case.predicted.append(prediction.step_s)
        names = ("compute_s", "communication_s", "exposed_s", "update_s")
        case.parts.append({name: getattr(prediction, name) for name in names})


def train(cases: list[PlanCase], steps: int, cycle: int) -> None:
    """Train steps of every plan in turn, each from a common start to the slowest rank's end."""
    for case in cases:
        case.measured.append([])
    for number in range(steps):
        order = list(cases)
        random.Random(f"{cycle} {number}").shuffle(order)  # the same on all ranks
        for case in order:
            dist.barrier()
            start = time.perf_counter()
            case.step(number)
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            case.measured[-1].append(seconds.item())


def main() -> None:
    """Measure, predict and train; rank 0 writes the cases."""
    result, name, *numbers = sys.argv[1:]
    rows, cycles, steps = map(int, numbers)
    dist.init_process_group("gloo")
    torch.set_flush_denormal(True)  # predictions do not depend on values
    plans = plan_cases(MODELS[name], rows)
    for plan in plans:
        for number in range(WARM_STEPS):
            plan.step(number)
    gc.collect()
    gc.freeze()
    shares = []
    for cycle in range(cycles):
        others = OtherProcesses()
        predict(plans)
        train(plans, steps, cycle)
        shares.append(others.share())
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps([plan.row(shares) for plan in plans]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
