"""Three steps of an architecture under a plan on two processes, beside the plain model."""

from __future__ import annotations

import functools
import math
import time
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import autopar
from autopar.errors import AutoparError, FallbackWarning, NumericsWarning
from benchmarks.architectures.table import ARCHITECTURES
from tests.harness.architectures import Loss
from tests.harness.reference import Reference, snapshot, worst_error, worst_loss
from tests.harness.training import fixed, whole_state
from tests.harness.worlds import RankError, run

ROWS, STEPS, RANKS = 4, 3, 2
TOLERANCE = 1e-9
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)

PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"zero": 0},
    "zero3": {"zero": 3},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "schedule": "1f1b", "micro_batches": 2},
    "ep2": {"ep": 2},
}
STATIC = ("image_grid_thw",)
COLUMNS = ("ddp", "zero3", "tp2", "pp2")


@dataclass(frozen=True)
class Row:
    """What came of one architecture under one plan.

    Attributes:
        outcome: "exact", "told" (a warning or an error of autopar says what differs), "silent"
            (differs without a warning) or "failed" (any other error, or the time limit).
        error: largest relative difference of a loss or a tensor of the final state.
        compile_s: seconds from the model to the first step's end.
        why: what was told, or how it failed.
    """

    name: str
    kind: str
    plan: str
    outcome: str
    error: float | None = None
    compile_s: float | None = None
    why: str = ""


class Trained(NamedTuple):
    """What one rank has after its steps."""

    reference: Reference
    compile_s: float
    told: list[str]


def measure(name: str, plan: str, limit_s: float) -> Row:
    """Trains an architecture under a plan, and compares with the plain model."""
    architecture = ARCHITECTURES[name]
    row = functools.partial(Row, name, architecture.kind, plan)
    want = plain(name)
    try:
        answers = run(train_on_rank, RANKS, timeout=limit_s, name=name, plan=plan)
    except RankError as failure:
        return row(*_failed(failure))
    worst = max(_difference(answer.reference, want) for answer in answers)
    told = answers[0].told
    known = {True: "exact", False: "silent"}[worst <= TOLERANCE]
    fell_back = any("FallbackWarning" in text for text in told)
    outcome = "told" if fell_back or (told and known == "silent") else known
    error = worst if math.isfinite(worst) else None
    seconds = round(answers[0].compile_s, 1)
    return row(outcome, error, seconds, "" if outcome == "exact" else "; ".join(told)[:300])


def _difference(got: Reference, want: Reference) -> float:
    return max(worst_loss(got, want), worst_error(got.state, want.state)[0])


def _failed(failure: RankError) -> tuple[str, None, None, str]:
    trace = failure.errors[min(failure.errors)]
    lines = [line for line in trace.splitlines() if line[:1].isalpha() and ": " in line]
    last = next((line for line in reversed(lines) if "Error" in line.split(": ")[0]), "")
    kind = last.split(":")[0].split(".")[-1]
    told = isinstance(getattr(autopar.errors, kind, None), type) and issubclass(
        getattr(autopar.errors, kind), AutoparError
    )
    return "told" if told else "failed", None, None, (last or trace[-200:])[:300]


@functools.cache
def plain(name: str) -> Reference:
    """The plain model on this process."""
    torch.set_num_threads(1)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = Loss(ARCHITECTURES[name].make())
        losses = _train(model, name, [])
    return Reference(losses, snapshot(model.state_dict()))


def train_on_rank(rank: int, world_size: int, name: str, plan: str) -> Trained:
    """Trains under a plan on one rank, and keeps what autopar warned of."""
    start = time.perf_counter()
    times: list[float] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Loss(ARCHITECTURES[name].make())
        compiled = autopar.compile(model, strategy=fixed(**PLANS[plan]), static=STATIC)
        losses = _train(compiled, name, times)
        state: dict[str, Tensor] = whole_state(compiled)
    kinds = (NumericsWarning, FallbackWarning)
    told = [
        f"{each.category.__name__}: {each.message}"
        for each in caught
        if issubclass(each.category, kinds)
    ]
    return Trained(Reference(losses, state), times[0] - start, told)


def _train(model: Any, name: str, times: list[float]) -> list[float]:
    optimizer = SGD(model.parameters())
    losses = []
    for step in range(STEPS):
        loss = model(**ARCHITECTURES[name].batch(ROWS, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter())
    return losses
