"""Planning time: from a model to its plan for machines that are not here.

    PYTHONPATH=FOLDER python -m benchmarks.planning --models gpt2-1.5b-128 --before
    python -m benchmarks.planning --models --commands --json FILE

`seconds` runs from the model, built on the meta device in a process of its own, to the plan, and
`cpu_seconds` is process time of the same span. `peak_bytes` is the process's peak, torch included.
`first_seconds` ends at the first plan. `bound` is the proven lower bound of a step in seconds,
`gap` the fraction of the step above it, `looked` the number of meshes that were planned.
With `--clock cpu` limits count process time, so that runs on busy cores repeat. `--commands` runs
`autopar plan` as a user does, and keeps exit status, seconds and the first lines of each output.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import multiprocessing
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.core.common.deadline import Deadline
from autopar.session import offline
from benchmarks.before import NAME
from benchmarks.planning import models as planning_models
from benchmarks.report import about, save


@dataclass(frozen=True)
class Case:
    make: Callable[[], tuple[nn.Module, Any]]  # bfloat16 model and global batch, on meta
    cluster: str
    gpus: int
    strategy: Mapping[str, Any]
    memory: str = "1000GB"  # of each GPU
    limit_s: float | None = None  # budget of the whole plan in seconds


PIPELINE = {
    "tp": 8,
    "pp": 4,
    "micro_batches": 32,
    "schedule": "1f1b",
    "zero": 1,
    "recompute": "selective",
    "prefetch": 1,
    "gather_bytes": 2**26,
    "reduce_bytes": 2**26,
}
FASTEST = {"search": ("pp", "tp", "dp_shard")}  # Strategy.of("fastest")


def question(
    make: Callable[[], planning_models.Made], cluster: str, gpus: int, memory: str = "80GB"
) -> Case:
    """A model under "fastest" and the limit of `autopar plan`."""
    return Case(make, cluster, gpus, FASTEST, memory, 60.0)


CASES: Mapping[str, Case] = {
    "gpt2-1.5b": Case(partial(planning_models.gpt2, 64), "dgx-a100", 16, {}, "80GB"),
    "gpt2-1.5b-128": Case(partial(planning_models.gpt2, 128), "dgx-h100", 128, {}, "80GB"),
    "llama-70b-1024": Case(partial(planning_models.llama, "70b", 1024), "dgx-h100", 1024, PIPELINE),
    "gpt2-1.5b-16": question(partial(planning_models.gpt2, 64), "dgx-a100", 16),
    "llama-7b-8": question(partial(planning_models.llama, "7b", 32), "dgx-h100", 8),
    "llama-7b-128": question(partial(planning_models.llama, "7b", 1024), "dgx-h100", 128),
    "llama-70b-64": question(partial(planning_models.llama, "70b", 256), "dgx-h100", 64),
    "llama-70b-1024-searched": question(
        partial(planning_models.llama, "70b", 1024), "dgx-h100", 1024
    ),
    "llama-405b-1024": question(partial(planning_models.llama, "405b", 1024), "dgx-h100", 1024),
    "mixtral-8x7b-16": question(partial(planning_models.mixtral, 64), "dgx-a100", 16),
    "mixtral-8x7b-16-40gb": question(partial(planning_models.mixtral, 64), "dgx-a100", 16, "40GB"),
    "mixtral-8x7b-256": question(partial(planning_models.mixtral, 1024), "dgx-h100", 256),
    "resnet50-8": question(partial(planning_models.resnet, 50, 2048), "dgx-h100", 8),
    "vit-large-32": question(partial(planning_models.vit_large, 4096), "dgx-h100", 32),
    "t5-xxl-64": question(partial(planning_models.t5_xxl, 512), "dgx-h100", 64),
    "gpt-300m-2gib": question(partial(planning_models.gpt_300m, 64), "dgx-h100", 8, "2GiB"),
}


COMMANDS: Mapping[str, str] = {
    "70B on 64 H100": "--cluster dgx-h100 --nodes 8 -- llama-70b 256",
    "Mixtral on 16 A100": "--cluster dgx-a100 --nodes 2 -- mixtral 64",
    "ResNet-34 on 8 H100": "--cluster dgx-h100 --nodes 1 -- resnet34 2048",
    "300M GPT under 2 GiB": "--cluster dgx-h100 --nodes 1 --memory 2GiB -- gpt-300m 64",
    "7B on 8 4090": "--cluster 8x4090-pcie -- llama-7b 32",
    "7B on 128 H100": "--cluster dgx-h100 --nodes 16 -- llama-7b 1024",
    "no cluster": "--world-size 8 -- gpt-300m 64",
}
"""Arguments of `autopar plan`, by the question."""

FIRST_LINES = 6


def command_row(name: str) -> dict[str, Any]:
    """Exit status, seconds and output of one command."""
    told = f"autopar plan benchmarks.planning.models:asked --backend inductor {COMMANDS[name]}"
    start = time.perf_counter()
    code = "import sys; from autopar.cli.main import main; sys.exit(main())"
    process = subprocess.run(
        [sys.executable, "-c", code, *told.split()[1:]],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    taken = time.perf_counter() - start
    errors = [line for line in process.stderr.splitlines() if line.isupper() or "rror" in line]
    output = [line for line in process.stdout.splitlines() if line.strip()]
    return {
        "model": name,
        "command": told,
        "exit": process.returncode,
        "seconds": taken,
        "output": [*output[:FIRST_LINES], *errors[-2:]],
    }


def complete_plan(name: str, package: str = "autopar", clock: str = "wall") -> dict[str, Any]:
    """Make one plan with a package; for a process of its own."""
    torch.set_num_threads(2)
    if clock == "cpu":
        offline.Deadline = partial(Deadline, clock=time.process_time)  # type: ignore[misc,assignment]
    now = time.process_time if clock == "cpu" else time.perf_counter
    case, planner = CASES[name], importlib.import_module(package)
    cluster = planner.Cluster.named(case.cluster)
    model, inputs = case.make()
    nodes = max(1, case.gpus // cluster.ranks_per_node)
    first_s, error = [0.0], ""
    start, begun = now(), time.process_time()

    def note_first(search: Any) -> None:
        if search.best_s and not first_s[0]:
            first_s[0] = now() - start

    made = None
    try:
        made = planner.plan(
            model,
            case.gpus,
            example_inputs=inputs,
            strategy=planner.Strategy(**case.strategy),
            cluster=planner.Cluster.named(case.cluster, nodes),
            memory=case.memory,
            backend="inductor",
            time_limit_s=case.limit_s,
            progress=note_first,
        )
    except planner.AutoparError as failure:
        error = f"{type(failure).__name__}: {failure}"
    taken, computed = now() - start, time.process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    label = name if package == "autopar" else f"{name} before"
    row = {
        "model": label,
        "seconds": taken,
        "cpu_seconds": computed,
        "first_seconds": first_s[0] or taken,
        "peak_bytes": peak,
        "error": error,
    }
    return row | (answer(made) if made is not None else {})


def answer(made: Any) -> dict[str, Any]:
    """Figures of a plan: the search's extent and bound are 0 for packages that lack them."""
    found, step_s = getattr(made, "search", None), made.prediction.step_s
    return {
        "plan": made.name,
        "axes": ", ".join(f"{axis}={size}" for axis, size in made.mesh if size > 1),
        "step_s": step_s,
        "bound": found.bound_s if found else 0.0,
        "gap": found.gap(step_s) if found else 1.0,
        "gain": found.gain(step_s) if found else None,
        "looked": found.looked if found else 0,
        "left_out": found.left_out if found else 0,
        "whole": not getattr(made, "bucket_bytes", ()),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=[*CASES], default=[*CASES])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--before", action="store_true", help="plan with autopar_before too")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="of the limits")
    parser.add_argument("--commands", action="store_true", help="run the commands, too")
    parser.add_argument("--note", default="", help="conditions of the run, for the JSON file")
    options = parser.parse_args(arguments)
    rows = []
    packages = ("autopar", NAME) if options.before else ("autopar",)
    jobs = [(complete_plan, job) for job in
            itertools.product(options.models, packages, [options.clock])]  # fmt: skip
    jobs += [(command_row, (name,)) for name in COMMANDS if options.commands]
    for run, job in jobs:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(run, job)
        rows.append(row)
        print(f"{row['model']}: {line_of(row)}", flush=True)
        if options.json:
            save(options.json, {**about(), "note": options.note, "rows": rows})
    return 0


def line_of(row: Mapping[str, Any]) -> str:
    if "exit" in row:
        lines = "\n    ".join(row["output"])
        return f"{row['seconds']:.1f} s, exit status {row['exit']}\n    {lines}"
    spent = f"{row['seconds']:.1f} s, {row['cpu_seconds']:.1f} computed, first plan after "
    spent += f"{row['first_seconds']:.1f} s, {row['peak_bytes'] / 2**30:.2f} GiB"
    if row["error"]:
        return f"{spent}: {row['error'][:200]}"
    return f"{spent}: {row['axes']}, {row['step_s']:.3f} s a step, gap {row['gap']:.0%}"


if __name__ == "__main__":
    sys.exit(main())
