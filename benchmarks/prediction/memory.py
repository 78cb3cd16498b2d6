"""Part `memory`: predicted against counted peak bytes of tensors, over a training step.

Every model of the parity tests and of `benchmarks.models` trains on 2 and 4 gloo processes under
every ZeRO stage and level of recomputation, with SGD with momentum and with AdamW. The batches are
not counted on either side: the caller holds them. What is counted is the peak of a middling steady
step, from the forward to `zero_grad`. A thread of gloo lets go of what it sent a moment after the
wait for it; where that moment falls into the peak of a step, `most` is above `measured`.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import autopar
from autopar.cost_model.memory.liveness import Overhead
from autopar.cost_model.memory.optimizer_memory import OptimizerMemory
from autopar.cost_model.memory.peak import Memory, simulate_memory
from autopar.cost_model.memory.workspace import Workspace
from autopar.runtime.module import DistributedModule
from benchmarks.counting import counter
from benchmarks.models import CASES
from benchmarks.once import captured_once
from tests.harness.models import MODELS
from tests.harness.worlds import close
from tests.harness.worlds import run as run_world

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}
LEVELS = ("none", "selective", "full")
STAGES = (0, 1, 2, 3)
WORLDS = (2, 4)
QUICK = ("tests/gpt", "tests/conv", "tests/moe")
ROWS = 13  # of a global batch of the parity models: uneven over the ranks


@dataclass(frozen=True)
class Subject:
    """A model and how it is trained.

    Attributes:
        make: makes it.
        batch: the (args, kwargs) of a step.
        loss: where the loss is in what it returns.
        bucket_bytes: size of buckets.
        steps: under each optimizer.
    """

    make: Callable[[], torch.nn.Module]
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any], torch.Tensor]
    bucket_bytes: int
    steps: int


def subjects() -> dict[str, Subject]:
    """All models by name."""
    found = {
        f"tests/{name}": Subject(
            case.make, partial(case.batch, ROWS), case.loss, bucket_bytes=1 << 14, steps=6
        )
        for name, case in MODELS.items()
    }
    for name, case in CASES.items():
        found[f"benchmarks/{name}"] = Subject(
            case.build, partial(_called, case.batch), _itself, bucket_bytes=1 << 20, steps=4
        )
    return found


def _called(batch: Callable[[int], tuple[Any, ...]], step: int) -> tuple[Any, dict[str, Any]]:
    return batch(step), {}


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def run(options: Any) -> dict[str, Any]:
    """Predict and count every case.

    Args:
        options: of the command line: `quick` leaves out 4 processes and all but three models.

    Returns:
        `signed` errors are of predicted over measured, less 1; `worst_under` is the worst of those
        below.
    """
    quick = getattr(options, "quick", False)
    cases: list[dict[str, Any]] = []
    try:
        for world_size in WORLDS[:1] if quick else WORLDS:
            for name in QUICK if quick else subjects():
                print(f"memory: {name} on {world_size} processes", flush=True)
                answers = run_world(measure, world_size, name=name, timeout=3600)
                cases += [worst_rank(ranks) for ranks in zip(*answers, strict=True)]
    finally:
        close()
    return summary(cases)


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst of some cases."""
    errors = [case["error"] for case in cases]
    return {
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "worst_under": max(0.0, *(-case["signed"] for case in cases)),
        "cases": cases,
    }


def worst_rank(ranks: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One case from what all ranks found: that of the rank predicted worst."""
    return max(ranks, key=lambda case: case["error"])


def measure(rank: int, world_size: int, name: str) -> list[dict[str, Any]]:
    """What one rank predicts and counts for a model; what is captured is captured once."""
    subject = subjects()[name]
    batches = [subject.batch(step) for step in range(subject.steps)]
    needs = {kind: OptimizerMemory.measure(make) for kind, make in OPTIMIZERS.items()}
    scratch = Workspace.load("cpu")
    found = []
    with captured_once():
        for zero in STAGES:
            for level in LEVELS:
                model, peaks = _train(subject, batches, zero, level)
                graph = next(p.graph for p in model._executor.programs.values())
                scratch = scratch.measure([graph])
                for kind, counted in peaks.items():
                    overhead = Overhead(needs[kind], scratch, batches=0)
                    memory = simulate_memory(graph, overhead)
                    facts = {"model": name, "zero": zero, "recompute": level, "optimizer": kind}
                    where = {"world_size": world_size, "rank": rank}
                    group = {"group": f"{name}, {world_size} processes"}
                    found.append({**group, **facts, **where, **_compared(memory, counted)})
                del model, graph
    scratch.save()
    return found


def _compared(memory: Memory, counted: list[int]) -> dict[str, Any]:
    measured = round(statistics.median(counted))
    signed = memory.peak / measured - 1
    return {
        "predicted": memory.peak,
        "measured": measured,
        "most": max(counted),
        "error": abs(signed),
        "signed": signed,
        "peak_node": memory.peak_node,
        "categories": {k: v for k, v in memory.by_category.items() if v},
    }


def _train(
    subject: Subject, batches: list[Any], zero: int, level: Any
) -> tuple[DistributedModule, dict[str, list[int]]]:
    """A model trained under a plan, and the peaks of its steps under each optimizer."""
    strategy = autopar.Strategy(
        zero=zero,
        recompute=level,
        gather_bytes=subject.bucket_bytes,
        reduce_bytes=subject.bucket_bytes,
        prefetch=1,
    )
    gc.collect()
    with counter() as counting:
        model = autopar.compile(subject.make(), strategy=strategy, fallback=False)
        for kind, make in OPTIMIZERS.items():
            _steps(model, make(model.parameters()), subject, batches, partial(counting.step, kind))
    return model, counting.peaks()


def _steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    subject: Subject,
    batches: list[Any],
    step: Callable[[], contextlib.AbstractContextManager[object]],
) -> None:
    """The loop that everyone writes."""
    for args, kwargs in batches:
        with step():
            out = model(*args, **kwargs)
            loss = subject.loss(out)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
