"""Plans for GPUs without one: attention as CUDA's kernels capture it, graphs run in one process.

    python -m benchmarks.emulated --models gpt llama --strategies "tp 2" --json FILE

Each cell plans a model on the meta device for four ranks of a DGX H100, prints one rank's program,
and runs all ranks' graphs, as lowered for NCCL, on real tensors. Attention is computed by its
formula. Loss, gradients and buffers must be those of the plain model in float64.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from scipy.optimize import milp
from torch import nn
from torch.utils import _pytree as pytree

import autopar
from autopar.cost_model.collectives import Link
from autopar.cost_model.kernels import roofline
from autopar.session.inspect import program_text
from benchmarks.report import about, empty_table, save, wide_console
from tests.harness.architectures import ARCHITECTURES
from tests.harness.cuda_kernels import KINDS, MathAttention, called_by_models, cuda_kernels
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
    kernels: tuple[str, ...] = ()  # of attention, as they ran

    @property
    def verdict(self) -> str:
        return self.error or f"ok, {self.worst:.0e}, {self.seconds:.0f} s"


def small(name: str) -> tuple[nn.Module, Any]:
    case = MODELS[name]
    args, kwargs = to_dtype(case.batch(ROWS, 0), torch.float64)
    model = case.make().double()
    return model, dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


def architecture(name: str) -> tuple[nn.Module, Any]:
    found = ARCHITECTURES[name]
    return found.make(), found.batch(ROWS)


def on_meta(make: Make) -> tuple[nn.Module, Any]:
    """Return the model built on the meta device, so that tied parameters stay tied."""
    with torch.device("meta"):
        model, _ = make()
    return model, pytree.tree_map(lambda x: x.to("meta"), make()[1])


GPU_MODELS: Mapping[str, Make] = {
    "gpt": partial(small, "gpt"),
    "llama": partial(architecture, "llama"),
    "vit": partial(architecture, "vit"),
    "t5": partial(architecture, "t5"),
    "gpt-dropout": partial(small, "dropout"),
}
PLANNED: Mapping[str, Make] = {
    **{name: partial(small, name) for name in ("gpt", "dropout", "encoder", "encdec", "moe")},
    **{name: partial(architecture, name) for name in ("llama", "bert", "t5", "vit", "qwen3")},
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


def plan_on_laptop(
    model: nn.Module, inputs: Any, strategy: str, time_limit_s: float | None = 5
) -> autopar.Plan:
    """Return the plan for a node of GPUs on which launches and links cost nothing.

    The models are so small that nothing would be worth dividing otherwise. Plans that are
    compared need a search without a limit of time.
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
            time_limit_s=time_limit_s,
        )


@dataclass
class Shared:
    """A model, with what its cells share: plans by strategy, and captures."""

    name: str
    plans: dict[str, autopar.Plan] = field(default_factory=dict)
    captures: dict[Any, Any] = field(default_factory=dict)

    def run_cell(self, kind: str, strategy: str) -> Cell:
        """Plan, print and run one cell; what fails is in the result."""
        start, found = time.perf_counter(), dict[str, Any]()
        try:
            found = self.attempt(kind, strategy)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).splitlines()[0] if str(error) else ""
            where = f"{Path(last.filename).name}:{last.lineno}"
            found["error"] = f"{type(error).__name__}: {text[:160]} ({where})"
        return Cell(kind, strategy, self.name, round(time.perf_counter() - start, 1), **found)

    def attempt(self, kind: str, strategy: str) -> dict[str, Any]:
        script = on_meta(GPU_MODELS[self.name])
        if strategy not in self.plans:
            self.plans[strategy] = plan_on_laptop(*script, strategy)
        plan = self.plans[strategy]
        world = PlannedRanks(*GPU_MODELS[self.name](), plan, self.captures)
        with cuda_kernels(kind), patch("scipy.optimize.milp", wraps=milp) as solver:
            text = program_text(*script, plan=plan)
            with MathAttention() as math:
                errors = world.errors()
        assert "c10d" in text, "the program has no collective"
        assert bool(math.kernels) == ("scaled_dot_product" in text), "attention was not run"
        assert all(kind in name or "efficient" in name for name in math.kernels), math.kernels
        return {
            "mesh": ", ".join(f"{axis} {size}" for axis, size in plan.mesh if size > 1),
            "kernels": tuple(sorted(math.kernels)),
            "solves": solver.call_count,
            "error": ", ".join([*worst(errors, TOLERANCE)][:3]),
            "worst": max(errors.values()),
        }


@dataclass(frozen=True)
class Replay:
    """Plans of one model, made where attention is a kernel of CUDA and where it is torch's own."""

    model: str
    same: tuple[str, ...]  # kernels under which the plan is the laptop's, byte by byte
    solves: int  # integer programs solved while planning
    again: int  # integer programs solved while the loaded plan was lowered for every rank
    error: str = ""

    @property
    def verdict(self) -> str:
        failed = self.error or self.again or {*self.same} != {*KINDS}
        return f"FAILED, {self}" if failed else f"same plan, {self.solves} solved, none again"


def replay(name: str) -> Replay:
    """Plan a model with each kernel, then lower the plan from its file for every rank."""
    same, solves, again = [], 0, 0
    try:
        script = on_meta(PLANNED[name])
        with patch("scipy.optimize.milp", wraps=milp) as solver:
            plan = plan_on_laptop(*script, "tp 2 x zero 3", None)
            solves = solver.call_count
            for kind in KINDS:
                with called_by_models(kind):
                    other = plan_on_laptop(*on_meta(PLANNED[name]), "tp 2 x zero 3", None)
                same += [kind] if other.to_json() == plan.to_json() else []
            solver.reset_mock()
            with called_by_models("flash"):
                loaded = autopar.Plan.from_dict(json.loads(plan.to_json()))
                world = PlannedRanks(*PLANNED[name](), loaded)
                for rank in world.ranks:
                    world.program(rank)
                    program_text(*script, plan=loaded, rank=rank)
            again = solver.call_count
    except Exception as error:
        return Replay(name, tuple(same), solves, again, f"{type(error).__name__}: {error}"[:200])
    return Replay(name, tuple(same), solves, again)


def compare_plans(names: list[str], path: Path | None) -> int:
    found = []
    for name in names:
        found.append(replay(name))
        print(f"{name}: {found[-1].verdict}", flush=True)
    if path:
        save(path, {**about(), "plans": [asdict(each) for each in found]})
    return int(any(each.verdict.startswith("FAILED") for each in found))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulated", description=__doc__)
    parser.add_argument("--attention", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--strategies", nargs="+", choices=[*STRATEGIES], default=[*STRATEGIES])
    parser.add_argument("--models", nargs="+", choices=[*GPU_MODELS], default=[*GPU_MODELS])
    parser.add_argument("--plans", nargs="*", choices=[*PLANNED], help="compare plans instead")
    parser.add_argument("--json", type=Path, help="write the cells here")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", autopar.AutoparWarning)
    torch.set_num_threads(1)
    if options.plans is not None:
        return compare_plans(options.plans or [*PLANNED], options.json)
    cells, console = list[Cell](), wide_console()
    for model, shared in ((name, Shared(name)) for name in options.models):
        for strategy, kind in itertools.product(options.strategies, options.attention):
            cell = shared.run_cell(kind, strategy)
            cells.append(cell)
            print(f"{model}, {strategy} [{cell.mesh}], {kind}: {cell.verdict}", flush=True)
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
