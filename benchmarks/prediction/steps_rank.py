"""One rank of part `steps`: measures, predicts and trains all plans of a model, in turn.

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
from autopar.planner.evaluate.evaluator import CandidateConfig, Evaluator
from autopar.planner.search.config_search import first_config
from autopar.planner.search.fixed_mesh import PlanningProblem, evaluator_of
from tests.harness.models import MODELS, Case

COLLECTIVES_S, OPERATORS_S = 2.0, 0.5
"""Seconds to spend each time; three rounds at least."""

STAGES = (0, 1, 2, 3)
LEVELS = ("none", "full")
WARM_STEPS = 2
BATCHES = 4
QUIET, LEAST_CYCLES = 0.1, 2
"""Cycles in which others took more than this do not count, if so many are left."""


@dataclass
class Contender:
    """A plan, the step that trains under it, and what is known of both.

    Attributes:
        tp: over how many ranks the model itself is partitioned.
        evaluator: what makes the plan of `choice`; it knows of no times.
        predicted: seconds of a step, by each cycle's measurements.
        measured: of each cycle, seconds of the slowest rank's steps.
        parts: what each prediction is made of.
    """

    tp: int
    zero: int
    recompute: str
    choice: CandidateConfig
    evaluator: Evaluator
    step: Callable[[int], None]
    predicted: list[float] = field(default_factory=list)
    measured: list[list[float]] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)

    def row(self, others: list[float]) -> dict[str, Any]:
        """The case in the result, of the cycles in which other processes left the cores alone.

        Args:
            others: of each cycle, the part of the time of the cores that other processes took.
        """
        quiet = [i for i, part in enumerate(others) if part < QUIET]
        chosen = quiet if len(quiet) >= LEAST_CYCLES else range(len(others))
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


class Others:
    """How much of the cores other processes take from now on; made and asked on all ranks."""

    def __init__(self) -> None:
        self._before = self._now()

    def share(self) -> float:
        """Their part, 0 to 1, of all the time that the cores were busy."""
        own, busy = (b - a for a, b in zip(self._before, self._now(), strict=True))
        total = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(total)
        return max(0.0, 1 - total.item() / max(busy, total.item()))

    def _now(self) -> tuple[float, float]:
        """Seconds that this process has computed, and that any process has."""
        own = os.times()
        user, nice, system = map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
        return own.user + own.system, (user + nice + system) / os.sysconf("SC_CLK_TCK")


def trainer(case: Case, plan: autopar.Plan, rows: int) -> Callable[[int], None]:
    """The four lines that every user writes, under a plan."""
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


def contenders(case: Case, rows: int) -> list[Contender]:
    """Plans of a model, ready to train: divided by rows, and the model itself partitioned."""
    world_size = dist.get_world_size()
    return [
        made
        for tensor_ranks, stages in ((1, STAGES), (world_size, (0,)))
        for made in divided(case, rows, tensor_ranks, stages)
    ]


def divided(
    case: Case, rows: int, tensor_ranks: int, stages: tuple[int, ...]
) -> Iterator[Contender]:
    """The plans over so many ranks of the model's axis."""
    model = case.make()
    problem = PlanningProblem(
        model=type(model).__name__,
        parameters=describe_parameters(model),
        world_size=dist.get_world_size(),
        strategy=Strategy(tp=tensor_ranks),
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
    for zero in stages:
        for level in LEVELS:
            strategy = Strategy(zero=zero, recompute=level)  # type: ignore[arg-type]
            choice = first_config(strategy, problem.blocks, zero)
            step = trainer(case, evaluator.plan(choice), rows)
            yield Contender(tensor_ranks, zero, level, choice, evaluator, step)


def predict(field: list[Contender]) -> None:
    """One prediction of every plan, from new measurements alone."""
    graphs = [contender.evaluator.lowered(contender.choice) for contender in field]
    world_size, device = dist.get_world_size(), torch.device("cpu")
    cluster = measure(mesh={"dp": world_size}, budget_s=COLLECTIVES_S, cache=False)
    ranks = ReplayGroup.live()
    unknown = replace(OperatorTimes.load("cpu", sharing=ranks.sharing), times={})
    operators = unknown.measure(graphs, ranks, budget_s=OPERATORS_S)
    mesh = init_device_mesh("cpu", (world_size,))
    update = measure_update(torch.optim.AdamW, device, mesh)
    for contender in field:
        evaluator = replace(
            contender.evaluator, cluster=cluster, operators=operators, update=update
        )
        made = evaluator.evaluate(contender.choice).prediction
        contender.predicted.append(made.step_s)
        names = ("compute_s", "communication_s", "exposed_s", "update_s")
        contender.parts.append({name: getattr(made, name) for name in names})


def train(field: list[Contender], steps: int, cycle: int) -> None:
    """Some steps of every plan, in turn, each from a common start to the slowest rank's end."""
    for contender in field:
        contender.measured.append([])
    for number in range(steps):
        order = list(field)
        random.Random(f"{cycle} {number}").shuffle(order)  # alike on all ranks
        for contender in order:
            dist.barrier()
            start = time.perf_counter()
            contender.step(number)
            own = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(own, dist.ReduceOp.MAX)
            contender.measured[-1].append(own.item())


def main() -> None:
    """Measure, predict and train; rank 0 writes the cases."""
    result, name, *numbers = sys.argv[1:]
    rows, cycles, steps = map(int, numbers)
    dist.init_process_group("gloo")
    torch.set_flush_denormal(True)  # a GPT's small gradients made steps 2.3 times longer
    field = contenders(MODELS[name], rows)
    for contender in field:
        for number in range(WARM_STEPS):
            contender.step(number)
    gc.collect()
    gc.freeze()
    shares = []
    for cycle in range(cycles):
        others = Others()
        predict(field)
        train(field, steps, cycle)
        shares.append(others.share())
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps([contender.row(shares) for contender in field]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
