"""Are stages balanced, and bubbles as predicted? Against every cut, with stages really timed.

    python -m benchmarks.balance --case vocabulary --case conv --out results.json

For each number of ranks the planner cuts the model. Then every stage that any cut between layers
could have is lowered and timed, in turns, and the slowest stage of the planner's cut is compared
with that of the best cut of all. The bubble is that of a pipeline on two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

import autopar
from autopar.capture.offline import capture_of_rank
from autopar.ir.graph import TrainingGraph
from autopar.ir.roles import Buffer, Input, Parameter, Saved
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline_parallel.stage_dependence import parameter_uses
from autopar.passes.split_forward_backward import split_forward_backward
from autopar.passes.stage_lowering import build_microbatch_pipelines, split_plan_stages
from autopar.plan.pipeline import Pipeline
from autopar.planner.evaluate.cut_points import CutPoints
from autopar.runtime.codegen.program import CompiledGraph, generate
from autopar.runtime.pipeline.stage import Stage
from benchmarks.models import CASES

MICRO_BATCHES = 4
RANKS = (2, 3, 4)
BETWEEN = {
    "vocabulary": r"blocks\.\d+\.norm[12]\.weight|norm\.weight|head\.weight",
    "conv": r"blocks\.\d+\.conv[12]\.weight|head\.weight",
}
"""By the first use of which parameters a stage may begin, of all cuts that are compared."""


@dataclass(frozen=True)
class Timed:
    """A stage by itself.

    Attributes:
        run: its forward and backward, once.
        seconds: what that took, each time.
    """

    run: Callable[[], None]
    seconds: list[float]


def strategy(case: str, ranks: int) -> autopar.Strategy:
    """A pipeline of which only the cuts are open."""
    local = "local" if CASES[case].batch_statistics else "global"
    return autopar.Strategy(
        pp=ranks, micro_batches=MICRO_BATCHES, schedule="1f1b", zero=0, recompute="none",
        batch_semantics=local,  # type: ignore[arg-type]
    )  # fmt: skip


def balance_of(case: str, rounds: int) -> Iterator[dict[str, Any]]:
    """For each number of ranks, the slowest stage of the planner's cut and of the best."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = CASES[case].build(), CASES[case].batch(0)
    plans = {n: autopar.plan(model, n, example_inputs=inputs, strategy=strategy(case, n))
             for n in RANKS}  # fmt: skip
    graph = capture_of_rank(model, inputs, 0, 1, "global", None, None, MICRO_BATCHES)
    places = CutPoints.of(parameter_uses(graph), graph.parameters)
    last = len(places.names)
    wanted = [p for p, names in enumerate(places.names) if p and _begins(case, names)]
    chosen = {n: _cuts(plan, places) for n, plan in plans.items()}
    ends = sorted({0, *wanted, last})
    stages = {run for run in combinations(ends, 2) if run != (0, last)}
    stages |= {run for cuts in chosen.values() for run in pairwise((0, *cuts, last))}
    base = plans[RANKS[0]]
    timed = {run: _timed(graph, base, places, run, model, inputs) for run in sorted(stages)}
    for _ in range(rounds):
        for stage in timed.values():
            begin = time.perf_counter()
            stage.run()
            stage.seconds.append(time.perf_counter() - begin)
    seconds = {run: statistics.median(stage.seconds[1:]) for run, stage in timed.items()}

    def slowest(cuts: tuple[int, ...]) -> float:
        return max(seconds[run] for run in pairwise((0, *cuts, last)))

    for ranks, cuts in chosen.items():
        best = min(combinations(wanted, ranks - 1), key=slowest)
        yield {
            "case": case,
            "ranks": ranks,
            "begins_with": [places.names[place][0] for place in cuts],
            "stages_ms": [seconds[run] * 1e3 for run in pairwise((0, *cuts, last))],
            "best_begins_with": [places.names[place][0] for place in best],
            "best_stages_ms": [seconds[run] * 1e3 for run in pairwise((0, *best, last))],
            "slowest_over_best": slowest(cuts) / slowest(best),
            "cuts_compared": sum(1 for _ in combinations(wanted, ranks - 1)),
        }


def _begins(case: str, names: tuple[str, ...]) -> bool:
    return any(re.fullmatch(BETWEEN[case], name) for name in names)


def _cuts(plan: autopar.Plan, places: CutPoints) -> tuple[int, ...]:
    """The places where a plan's stages begin."""
    assert plan.pipeline is not None
    first: dict[int, int] = {}
    for (name, at), (_, stages) in zip(places.uses, plan.pipeline.uses, strict=True):
        assert name
        for place, stage in zip(at, stages, strict=True):
            first[stage] = min(place, first.get(stage, place))
    return tuple(first[stage] for stage in sorted(first) if stage)


def _timed(
    graph: TrainingGraph,
    plan: autopar.Plan,
    places: CutPoints,
    run: tuple[int, int],
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
) -> Timed:
    """The stage from one place up to another."""
    inner = tuple(place for place in run if 0 < place < len(places.names))
    pipeline = Pipeline(len(inner) + 1, "gpipe", MICRO_BATCHES, 1, places.stages(inner))
    plan = replace(plan, pipeline=pipeline, mesh=(("pp", len(inner) + 1), ("dp", 1)))
    own = split_plan_stages(graph, plan, 0, (), MICRO_BATCHES).stages[1 if run[0] else 0]
    passes, _ = build_microbatch_pipelines(own, plan, 0, "gloo", micro_batches=MICRO_BATCHES)
    split = split_forward_backward(run_passes(own, passes))
    halves = [
        CompiledGraph(g, generate(g, {}, "eager")) for g in (split.forward, split.backward) if g
    ]
    given = [_given(half, model, inputs) for half in halves]

    def once() -> None:
        kept: list[torch.Tensor] = []
        for half, values in zip(halves, given, strict=True):
            saved = iter(kept)
            arguments = [
                next(saved) if isinstance(role, Saved) else value
                for role, value in zip(half.inputs, values, strict=True)
            ]
            pairs = zip(half.outputs, half.run(arguments), strict=True)
            kept = [value for role, value in pairs if isinstance(role, Saved)]

    return Timed(once, [])


def _given(
    half: CompiledGraph, model: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> list[torch.Tensor | None]:
    """Arguments like those of a step."""
    found: list[torch.Tensor | None] = []
    for role in half.inputs:
        like = half.fake_tensor(role)
        match role:
            case Parameter(name):
                found.append(model.get_parameter(name).detach())
            case Buffer(name):
                found.append(model.get_buffer(name))
            case Input(index):
                found.append(inputs[index][: like.shape[0]])
            case Saved():
                found.append(None)
            case _:
                value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
                found.append(value.normal_() if like.is_floating_point() else value.zero_())
    return found


def bubble_of(case: str, steps: int) -> dict[str, Any]:
    """What share of a step each rank waits, as predicted and as it is; every rank calls it."""
    torch.manual_seed(0)
    kind, ranks = CASES[case], int(os.environ["WORLD_SIZE"])
    fixed = strategy(case, ranks)
    model = autopar.compile(kind.build(), strategy=fixed, example_inputs=kind.batch(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=kind.learning_rate)
    busy = _watch()
    shares, taken = [], []
    for step in range(steps):
        x, y = kind.batch(step)
        dist.barrier()
        busy[0], begin = 0.0, time.perf_counter()
        model(x, y).backward()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        busy[0] += time.perf_counter() - middle
        dist.barrier()
        taken.append(time.perf_counter() - begin)
        shares.append(1.0 - busy[0] / taken[-1])
    every: list[float] = [0.0] * ranks
    dist.all_gather_object(every, statistics.median(shares[steps // 3 :]))
    prediction = model.plan.prediction
    return {
        "case": case,
        "ranks": ranks,
        "step_ms": statistics.median(taken[steps // 3 :]) * 1e3,
        "predicted_step_ms": prediction.step_s * 1e3,
        "bubble": sum(every) / ranks,
        "predicted_bubble": prediction.bubble,
        "idle": every,
        "predicted_idle": list(prediction.idle),
    }


def _watch() -> list[float]:
    """Adds up the seconds in which this rank's stages run."""
    busy = [0.0]

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return run(*given, **named)
            finally:
                busy[0] += time.perf_counter() - begin

        return inner

    for name in ("forward", "backward", "finish"):
        setattr(Stage, name, timed(getattr(Stage, name)))
    return busy


def _launched(case: str, steps: int, port: int) -> dict[str, Any]:
    """`bubble_of` on two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               "--master-port", str(port), "-m", "benchmarks.balance",
               "--worker", "--case", case, "--steps", str(steps)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads(lines[-1])


def main() -> None:
    """Run what the command line asks for, print it and keep it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.balance")
    parser.add_argument("--case", action="append", choices=sorted(BETWEEN))
    parser.add_argument("--rounds", type=int, default=7, help="of timing every stage")
    parser.add_argument("--steps", type=int, default=30, help="of training for the bubble")
    parser.add_argument("--port", type=int, default=29771)
    parser.add_argument("--only", choices=("balance", "bubble"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = options.case or sorted(BETWEEN)
    if options.worker:
        found = bubble_of(cases[0], options.steps)
        if dist.get_rank() == 0:
            print(json.dumps(found))
        return
    results: dict[str, list[dict[str, Any]]] = {"balance": [], "bubble": []}
    for case in cases:
        if options.only != "bubble":
            for row in balance_of(case, options.rounds):
                print(json.dumps(row), flush=True)
                results["balance"].append(row)
        if options.only != "balance":
            results["bubble"].append(_launched(case, options.steps, options.port))
            print(json.dumps(results["bubble"][-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
