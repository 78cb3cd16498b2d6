"""Regret of `offload="auto"`: the plan chosen under a cap beside every fixed combination.

A combination recomputes all or nothing, and has activations, parameters and states on storage or
in memory. One fits a cap if its predicted peak does. Contenders take their steps in turn, and the
regret is the median step of the chosen plan over the least median of the combinations that fit.
The same ratio of CPU time stands beside it, for machines that others load.
Where nothing fits with states in memory, what the error proposes is the choice.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.measurement.storage_bench import measure_storage
from benchmarks.memoize import memoized_capture, memoized_update
from benchmarks.models import Case
from benchmarks.offload.steps import step
from benchmarks.regret.models import CASES
from benchmarks.report import about, save

NAMES = ("deep", "wide", "vocabulary", "encdec", "conv")
SHARES = (0.02, 0.25, 0.5, 0.75)
"""Caps between the least and the most that combinations need."""

WARM = 2
"""Steps that are not counted: they allocate."""

WAYS = ("recompute", "activations", "parameters", "states")
ROOMY = 1 << 40
STORAGE_S = 10.0


@dataclass
class Contender:
    """A compiled model and its optimizer, with wall and CPU seconds of its steps."""

    name: str
    model: Any
    optimizer: Any
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.model.plan.prediction.needed_bytes  # type: ignore[no-any-return]

    @property
    def predicted_s(self) -> float:
        return self.model.plan.prediction.step_s  # type: ignore[no-any-return]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def program(self) -> tuple[Any, ...]:
        """Contenders with equal ones do the same."""
        plan = self.model.plan
        stored = isinstance(self.optimizer, autopar.OffloadedOptimizer)
        return plan.recompute, frozenset(plan.offload), plan.offload_parameters, stored


@dataclass(frozen=True)
class Entrants:
    """Compiles contenders of one model."""

    case: Case
    folder: str
    cluster: Cluster

    def combinations(self) -> Iterator[Contender]:
        for flags in itertools.product((False, True), repeat=len(WAYS)):
            used = [way for way, flag in zip(WAYS, flags, strict=True) if flag]
            stored = [way for way in ("activations", "parameters") if way in used]
            options = {
                "recompute": "full" if "recompute" in used else "none",
                "offload": "+".join(stored) or "none",
            }
            name = " + ".join(used) or "none"
            yield self.compiled(name, ROOMY, states="states" in used, **options)

    def chosen(self, name: str, cap: int) -> Contender | None:
        """The planner's choice under a cap, else its proposal; None if there is neither."""
        try:
            return self.compiled(name, cap, states=False, offload="auto")
        except autopar.OutOfMemoryError as error:
            if not any("OffloadedOptimizer" in change.how for change in error.changes):
                return None
        return self.compiled(name, cap, states=True, offload="auto")

    def compiled(self, name: str, memory: int, *, states: bool, **options: Any) -> Contender:
        torch.manual_seed(0)
        strategy = autopar.Strategy(zero=0, offload_dir=self.folder, **options)
        make = optimizer_of(self.folder, states=states)
        model = autopar.compile(
            self.case.build(),
            strategy=strategy,
            example_inputs=self.case.batch(0),
            optimizer=make,
            memory=memory,
            cluster=self.cluster,
            trials=1,
        )
        return Contender(name, model, make(model.parameters()))


@functools.cache
def optimizer_of(folder: str, *, states: bool) -> Any:
    """AdamW, with its states on storage or not; the blocks are as the planner proposes them."""
    if not states:
        return functools.partial(torch.optim.AdamW, lr=1e-3)
    options = {"folder": folder, "block_bytes": 1 << 20, "lr": 1e-3}
    return functools.partial(autopar.OffloadedOptimizer, torch.optim.AdamW, **options)


def regret(folder: Path, models: Sequence[str], rounds: int, json: Path | None) -> dict[str, Any]:
    """Races of all models; prints each, and writes all so far."""
    warnings.simplefilter("ignore")
    cluster = replace(Cluster.default(1), storage=measure_storage(str(folder), STORAGE_S))
    document: dict[str, Any] = {**about(), "rounds": rounds, "races": {}}
    for name in models:
        with memoized_capture(), memoized_update():
            document["races"][name] = race(Entrants(CASES[name], str(folder), cluster), rounds)
        gc.collect()
        cells = [cell for each in document["races"].values() for cell in each["caps"]]
        for kind in ("regret", "cpu_regret"):
            document[kind] = summary([cell[kind] for cell in cells])
        print(name, document["races"][name], document["regret"], sep="\n", flush=True)
        if json:
            save(json, document)
    return document


def race(entrants: Entrants, rounds: int) -> dict[str, Any]:
    """The steps of all combinations and of the plans chosen under each cap."""
    found = list(entrants.combinations())
    sizes = [each.nbytes for each in found]
    caps = [min(sizes) + int(share * (max(sizes) - min(sizes))) for share in SHARES]
    picked = [entrants.chosen(f"chosen under {cap}", cap) for cap in caps]
    distinct = {each.program: each for each in [*filter(None, picked), *found]}
    run(list(distinct.values()), entrants.case, rounds)
    same = [distinct[each.program] if each else None for each in picked]
    found = [distinct[each.program] for each in found]
    return {
        "combinations": {each.name: figures(each) for each in found},
        "caps": [verdict(found, own, cap) for own, cap in zip(same, caps, strict=True)],
    }


def run(contenders: Sequence[Contender], case: Case, rounds: int) -> None:
    """Steps of all, in an order that turns from round to round."""
    for turn in range(WARM + rounds):
        batch, losses = case.batch(turn), dict[str, float]()
        at = turn % len(contenders)
        for each in (*contenders[at:], *contenders[:at]):
            before = time.process_time()
            took, losses[each.name] = step(each.model, each.optimizer, batch)
            if turn >= WARM:
                each.seconds.append(took)
                each.cpu.append(time.process_time() - before)
        least, most = min(losses.values()), max(losses.values())
        assert math.isclose(least, most, rel_tol=1e-3), losses


def verdict(found: Sequence[Contender], chosen: Contender | None, cap: int) -> dict[str, Any]:
    """The choice under a cap beside the fastest combination that fits it."""
    fitting = [each for each in found if each.nbytes <= cap]
    best = min(fitting, key=lambda each: each.median_s)
    least_cpu = min(statistics.median(each.cpu) for each in fitting)
    return {
        "cap": cap,
        "chosen": chosen and (chosen.model.plan.name, chosen.program[-1]),
        "chosen_figures": chosen and figures(chosen),
        "best": best.name,
        "regret": chosen and round(chosen.median_s / best.median_s, 3),
        "cpu_regret": chosen and round(statistics.median(chosen.cpu) / least_cpu, 3),
    }


def figures(each: Contender) -> Mapping[str, float]:
    """Milliseconds of a step, those of all CPUs, those predicted, and predicted bytes."""
    cpu = round(statistics.median(each.cpu) * 1e3, 1)
    took, expected = round(each.median_s * 1e3, 1), round(each.predicted_s * 1e3, 1)
    return {"ms": took, "cpu_ms": cpu, "predicted_ms": expected, "bytes": each.nbytes}


def is_low(found: Mapping[str, Any]) -> bool:
    """Whether a summary is as promised."""
    return found["median"] <= 1.03 and found["worst"] <= 1.15  # type: ignore[no-any-return]


def summary(regrets: Sequence[float | None]) -> dict[str, Any]:
    """Median and worst; a cap without a choice counts as infinite."""
    known = [math.inf if each is None else each for each in regrets]
    return {"cells": len(known), "median": statistics.median(known), "worst": max(known)}
