"""Plans for GPUs without one: attention as CUDA's kernels capture it, graphs run in one process.

    python -m benchmarks.emulated --models gpt llama --strategies "tp 2" --json FILE

Each cell plans a model on the meta device for four ranks of a DGX H100, prints one rank's program,
and runs all ranks' graphs, as lowered for NCCL, on real tensors. Attention is computed by its
formula. Loss, gradients and buffers must be those of the plain model in float64.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils import _pytree as pytree

import autopar
from autopar.cost_model.collectives import Link
from autopar.cost_model.kernels import roofline
from autopar.driver.inspect import program_text
from autopar.planner.placement import ilp
from benchmarks.report import about, empty_table, save, wide_console
from tests.harness.architectures import ARCHITECTURES
from tests.harness.cuda_attention import KINDS, MathAttention, cuda_attention
from tests.harness.models import MODELS
from tests.harness.reference import to_dtype
from tests.passes.meshes import PlannedRanks, worst

RANKS, ROWS, TOLERANCE = 4, 8, 1e-9
Make = Callable[[], tuple[nn.Module, Any]]


@dataclass(frozen=True)
class Cell:
    attention: str
    strategy: str
    model: str
    seconds: float
    mesh: str = ""
    solves: int = 0  # integer programs that programs and graphs solved after planning
    error: str = ""  # empty if the cell passed
    worst: float | None = None  # largest relative error of loss, gradients and buffers


def small(name: str) -> tuple[nn.Module, Any]:
    case = MODELS[name]
    args, kwargs = to_dtype(case.batch(ROWS, 0), torch.float64)
    return case.make().double(), kwargs or args


def architecture(name: str) -> tuple[nn.Module, Any]:
    found = ARCHITECTURES[name]
    return found.make(), found.batch(ROWS)


def on_meta(make: Make) -> tuple[nn.Module, Any]:
    """Return the model built on the meta device, so that tied parameters stay tied."""
    with torch.device("meta"):
        model, _ = make()
    return model, pytree.tree_map(lambda x: x.to("meta"), make()[1])


GPU_MODELS: Mapping[str, Make] = {
    "gpt": lambda: small("gpt"),
    "llama": lambda: architecture("llama"),
    "vit": lambda: architecture("vit"),
    "t5": lambda: architecture("t5"),
    "gpt-dropout": lambda: small("dropout"),
}
STEPS: Mapping[str, Any] = {"zero": 0, "micro_batches": 2, "schedule": "1f1b"}
STRATEGIES: Mapping[str, str | autopar.Strategy] = {
    "ddp": "ddp",
    "zero3": "zero3",
    "tp 2": autopar.Strategy(tp=2, zero=0),
    "cp 2": autopar.Strategy(cp=2, zero=0),
    "tp 2 x zero 3": autopar.Strategy(tp=2, zero=3),
    "pp 2": autopar.Strategy(pp=2, **STEPS),
    "pp 2 x tp 2": autopar.Strategy(pp=2, tp=2, **STEPS),
    "auto": "auto",
    "fastest": "fastest",
}


def plan_on_laptop(model: nn.Module, inputs: Any, strategy: str) -> autopar.Plan:
    """Return the plan for a node of GPUs on which launches and links cost nothing.

    The models are so small that nothing would be worth dividing otherwise.
    """
    node = autopar.Cluster.named("dgx-h100", 1)
    free = replace(node, curves={}, topology=None, link=Link(0.0, 0.0, 1e18))
    with patch.dict(roofline.LAUNCH_S, cuda=1e-12):
        return autopar.plan(
            model,
            RANKS,
            example_inputs=inputs,
            strategy=STRATEGIES[strategy],
            cluster=free,
            time_limit_s=5,
        )


def run_cell(kind: str, strategy: str, name: str, captures: dict[Any, Any]) -> Cell:
    """Plan, print and run one cell; what fails is in the result."""
    start, found = time.perf_counter(), dict[str, Any]()
    try:
        found = attempt(kind, strategy, name, captures)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).splitlines()[0] if str(error) else ""
        where = f"{Path(last.filename).name}:{last.lineno}"
        found["error"] = f"{type(error).__name__}: {text[:160]} ({where})"
    return Cell(kind, strategy, name, time.perf_counter() - start, **found)


def attempt(kind: str, strategy: str, name: str, captures: dict[Any, Any]) -> dict[str, Any]:
    model, inputs = GPU_MODELS[name]()
    script = on_meta(GPU_MODELS[name])
    with cuda_attention(kind):
        plan = plan_on_laptop(*script, strategy)
        mesh = ", ".join(f"{axis} {size}" for axis, size in plan.mesh if size > 1)
        with patch.object(ilp, "milp", wraps=ilp.milp) as solver:
            text = program_text(*script, plan=plan)
            assert "c10d" in text, "the program has no collective"
            world = PlannedRanks(
                model, inputs, plan, captures, capturing=partial(cuda_attention, kind)
            )
            assert world.op_strategies is not None
    with MathAttention():
        errors = world.errors()
    bad = worst(errors, TOLERANCE)
    return {
        "mesh": mesh,
        "solves": solver.call_count,
        "error": ", ".join(bad[:3]),
        "worst": max(errors.values()),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulated", description=__doc__)
    parser.add_argument("--attention", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--strategies", nargs="+", choices=[*STRATEGIES], default=[*STRATEGIES])
    parser.add_argument("--models", nargs="+", choices=[*GPU_MODELS], default=[*GPU_MODELS])
    parser.add_argument("--json", type=Path, help="write the cells here")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", autopar.AutoparWarning)
    torch.set_num_threads(1)
    cells, console = list[Cell](), wide_console()
    for kind in options.attention:
        for model in options.models:
            captures: dict[Any, Any] = {}
            for strategy in options.strategies:
                cell = run_cell(kind, strategy, model, captures)
                cells.append(cell)
                verdict = cell.error or f"ok, {cell.worst:.0e}"
                print(
                    f"{kind} {model} {strategy} [{cell.mesh}] {cell.seconds:.1f} s: {verdict}",
                    flush=True,
                )
                if options.json:
                    save(options.json, {**about(), "cells": [asdict(c) for c in cells]})
    table = empty_table("Emulated CUDA attention", "model", options.strategies)
    for model in options.models:
        row = []
        for strategy in options.strategies:
            own = [c for c in cells if (c.model, c.strategy) == (model, strategy)]
            row.append(f"{sum(not c.error for c in own)}/{len(own)}")
        table.add_row(model, *row)
    console.print(table)
    return int(any(cell.error for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
