"""Part `memory`: predicted and counted peak bytes of tensors in a training step.

Models train on 2 and 4 gloo processes under every ZeRO stage, level of recomputation and two
optimizers. Batches do not count. The measured peak is the median of steady steps; gloo threads free
buffers a moment after the wait, so `max_measured` may be larger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

import autopar
from autopar.cost_model.memory.liveness import Overhead
from autopar.cost_model.memory.optimizer_memory import OptimizerMemory
from autopar.cost_model.memory.peak import simulate_memory
from autopar.cost_model.memory.workspace import Workspace
from autopar.runtime.module import DistributedModule
from benchmarks.memoize import memoized_capture
from benchmarks.memory import ProfilerCounter
from benchmarks.models import CASES
from benchmarks.prediction.report import case, summary
from tests.harness.models import MODELS
from tests.harness.worlds import close
from tests.harness.worlds import run as run_world

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}
LEVELS = ("none", "selective", "full")
ZERO_STAGES = (0, 1, 2, 3)
WORLD_SIZES = (2, 4)
QUICK = ("tests/gpt", "tests/conv", "tests/moe")
ROWS = 13  # of a global batch of the parity models: uneven over the ranks


@dataclass(frozen=True)
class Subject:
    make: Callable[[], torch.nn.Module]
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]  # (args, kwargs) of a step
    loss: Callable[[Any], torch.Tensor]  # from the model's output
    bucket_bytes: int
    steps: int  # under each optimizer


def subjects() -> dict[str, Subject]:
    found = {
        f"tests/{name}": Subject(each.make, partial(each.batch, ROWS), each.loss, 1 << 14, 6)
        for name, each in MODELS.items()
    }
    for name, each in CASES.items():
        batch = partial(_arguments, each.batch)
        found[f"benchmarks/{name}"] = Subject(each.build, batch, lambda loss: loss, 1 << 20, 4)
    return found


def _arguments(batch: Callable[[int], tuple[Any, ...]], step: int) -> tuple[Any, dict[str, Any]]:
    return batch(step), {}


def run(options: Any) -> dict[str, Any]:
    """Predict and count every case; `options.quick` takes 2 processes and three models.

    `signed` errors are predicted over measured, less 1, and `worst_under` is the largest shortfall.
    """
    cases: list[dict[str, Any]] = []
    try:
        for world_size in WORLD_SIZES[:1] if options.quick else WORLD_SIZES:
            for name in QUICK if options.quick else subjects():
                print(f"memory: {name} on {world_size} processes", flush=True)
                answers = run_world(measure, world_size, name=name, timeout=3600)
                by_case = zip(*answers, strict=True)
                cases += [max(ranks, key=lambda case: case["error"]) for ranks in by_case]
    finally:
        close()
    worst_under = max([0.0, *(-case["signed"] for case in cases)])
    return {**summary(cases), "worst_under": worst_under}


def measure(rank: int, world_size: int, name: str) -> list[dict[str, Any]]:
    subject = subjects()[name]
    batches = [subject.batch(step) for step in range(subject.steps)]
    needs = {kind: OptimizerMemory.measure(make) for kind, make in OPTIMIZERS.items()}
    workspace = Workspace.load("cpu")
    found = []
    with memoized_capture():
        for zero in ZERO_STAGES:
            for level in LEVELS:
                model, peaks = _train(subject, batches, zero, level)
                graph = next(p.graph for p in model._execution.executor.programs.values())
                workspace = workspace.measure([graph])
                for kind, counted in peaks.items():
                    memory = simulate_memory(graph, Overhead(needs[kind], workspace, batches=0))
                    measured = round(median(counted))
                    facts = {
                        "zero": zero,
                        "recompute": level,
                        "optimizer": kind,
                        "rank": rank,
                        "max_measured": max(counted),
                        "signed": memory.peak / measured - 1,
                        "peak_node": memory.peak_node,
                        "categories": {k: v for k, v in memory.by_category.items() if v},
                    }
                    group = f"{name}, {world_size} processes"
                    found.append(case(group, memory.peak, measured, **facts))
                del model, graph
    workspace.save()
    return found


def _train(
    subject: Subject, batches: list[Any], zero: int, level: Any
) -> tuple[DistributedModule, dict[str, list[int]]]:
    """Train under a plan; return the model, and the peaks of its steps under each optimizer."""
    strategy = autopar.Strategy(
        zero=zero,
        recompute=level,
        gather_bytes=subject.bucket_bytes,
        reduce_bytes=subject.bucket_bytes,
        prefetch=1,
    )
    with ProfilerCounter() as counter:
        model = autopar.compile(subject.make(), strategy=strategy, fallback=False)
        for kind, make in OPTIMIZERS.items():
            optimizer = make(model.parameters())
            for args, kwargs in batches:
                with counter.step(kind):
                    out = model(*args, **kwargs)
                    loss = subject.loss(out)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            del optimizer, out, loss
    return model, counter.peaks()
