"""What torch's runtime of schedules costs: each schedule as it ran, beside its stages alone.

torchrun --nproc-per-node 2 -m benchmarks.schedules --models gpt,deep --json FILE

The forwards and backwards of stages are timed where they run. The simulation puts what each took
on average in a step into the same order, with transfers that take no time. What that step took
beyond are transfers, what the runtime does between actions, and micro-batches that are not alike.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from autopar.cost_model.simulator.pipeline import StageCost, simulate_pipeline
from autopar.cost_model.simulator.schedules import orders
from autopar.runtime.pipeline.schedule import Schedule
from autopar.runtime.pipeline.stage import Stage
from benchmarks.contenders import build_autopar
from benchmarks.models import CASES
from benchmarks.peers import words
from benchmarks.pipelining import STAGES_PER_RANK, micro_batches
from benchmarks.report import machine, versions

WARM_STEPS = 3
WHOLE = ("schedule", -1)
Span = tuple[tuple[str, int], float, float]
"""What ran, by kind ("F", "I" and "W" as in `cost_model.schedules`) and stage; from when to when,
by this machine's clock."""


@contextmanager
def recorded(spans: list[Span]) -> Iterator[None]:
    """Within, whatever stages and schedules do is recorded."""

    def timed(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(self, *args, **options)
            spans.append(((kind, getattr(self, "index", -1)), start, time.perf_counter()))
            return result

        return run

    with (
        patch.object(Stage, "forward", timed(Stage.forward, "F")),
        patch.object(Stage, "backward", timed(Stage.backward, "I")),
        patch.object(Stage, "finish", timed(Stage.weight_backward, "W")),
        patch.object(Schedule, "run", timed(Schedule.run, "schedule")),
    ):
        yield


def train(model: str, schedule: str, steps: int) -> list[list[Span]]:
    """Trains; returns what this rank did in each step."""
    case = CASES[model]
    torch.manual_seed(0)
    step = build_autopar(
        case,
        strategy=schedule,
        backend="eager",
        statistics="local" if case.batch_statistics else None,
    )
    found = []
    for number in range(WARM_STEPS + steps):
        spans: list[Span] = []
        dist.barrier()
        with recorded(spans):
            step(*case.batch(number))
        found.append(spans)
    return found[WARM_STEPS:]


@dataclass(frozen=True)
class Result:
    """A schedule of a model; medians over the steps.

    Attributes:
        measured_s: from the first rank's start to the last one's end.
        simulated_s: the same, simulated.
        ratio: of the two, step by step.
        idle: the share of the time in which ranks did not compute.
        simulated_idle: the same, simulated.
    """

    model: str
    schedule: str
    world_size: int
    measured_s: float
    simulated_s: float
    ratio: float
    idle: float
    simulated_idle: float


def compare(model: str, schedule: str, every: Sequence[Sequence[Sequence[Span]]]) -> Result:
    """Measured beside simulated, of what each rank did in each step."""
    ranks, chunks = len(every), STAGES_PER_RANK[schedule]  # type: ignore[index]
    order = orders(schedule, ranks, micro_batches(ranks), chunks)
    figures = []
    for spans in (list(chain(*step)) for step in zip(*every, strict=True)):
        costs = [cost(spans, stage) for stage in range(ranks * chunks)]
        simulation = simulate_pipeline(order, costs, lambda nbytes: 0.0)
        whole = [(start, end) for what, start, end in spans if what == WHOLE]
        step_s = max(end for _, end in whole) - min(start for start, _ in whole)
        idle = 1 - sum(simulation.busy_s) / (ranks * step_s)
        ratio = step_s / simulation.step_s
        figures.append((step_s, simulation.step_s, ratio, idle, simulation.bubble))
    return Result(model, schedule, ranks, *map(median, zip(*figures, strict=True)))


def cost(spans: Sequence[Span], stage: int) -> StageCost:
    """What a stage took for a micro-batch, on average of a step."""

    def seconds(kind: str) -> float:
        found = [end - start for what, start, end in spans if what == (kind, stage)]
        return mean(found) if found else 0.0

    forward, inputs, weights = map(seconds, "FIW")
    return StageCost(forward, inputs + weights, inputs, weights)


def main() -> None:
    """Compare all schedules on all models."""
    parser = argparse.ArgumentParser(prog="torchrun ... -m benchmarks.schedules")
    parser.add_argument("--models", type=words, default=["gpt", "deep"], metavar="NAMES")
    parser.add_argument("--schedules", type=words, default=list(STAGES_PER_RANK), metavar="NAMES")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    results = []
    for model in options.models:
        for schedule in options.schedules:
            every: list[list[list[Span]]] = [[] for _ in range(ranks)]
            dist.all_gather_object(every, train(model, schedule, options.steps))
            if dist.get_rank() == 0:
                results.append(compare(model, schedule, every))
                print(results[-1], flush=True)
    if options.json and dist.get_rank() == 0:
        rows = [vars(result) for result in results]
        document = {"machine": machine(), "versions": versions(), "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
