"""One rank of a comparison of plans: measures, plans, builds everyone, then runs them in turn.

Started by `benchmarks.regret.__main__` inside a node; its one argument is the job's folder.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.cost_model.cluster.cluster import Cluster
from benchmarks.contenders import Contender
from benchmarks.launch import Job
from benchmarks.models import Case
from benchmarks.once import captured_once, updates_measured_once
from benchmarks.regret.field import (
    REPLICATED,
    Layout,
    Planned,
    build_plan,
    chosen_name,
    enumeration,
    held_by_caller,
    peers,
)
from benchmarks.worker import Entry, Race

CLUSTER_S = 12.0
"""Seconds to measure a cluster, once for all models."""

LEAST_ROUNDS = 5

SEARCH_S = 60.0
"""Seconds after which the planner looks at no further mesh: as `compile` has them."""

CHOOSING = autopar.Strategy(search=("pp", "tp"))
"""What the planner is told when it chooses: nothing but which axes it may use."""

PLENTY = 1 << 50
"""A cap that nothing meets: under one, what a strategy leaves nothing to choose is priced too."""

Caps = tuple[float | None, ...]
"""Shares of what plain replication needs; None for no cap."""

Cap = Callable[[float | None], int | None]
"""Bytes of a share of what plain replication needs."""


@dataclass(frozen=True)
class RegretJob(Job):
    """A comparison of plans.

    Attributes:
        module: that has the model, in its CASES.
        layout: where the ranks are, such as "2x2".
        caps: what plans are chosen under.
        limit_s: seconds after which no round begins beyond the fifth.
    """

    module: str = ""
    layout: str = ""
    caps: Caps = ()
    limit_s: float = float("inf")


class Comparison(Race):
    """A race of plans and peers in which plans that are the same run once."""

    job: RegretJob
    counted, warm = 3, 1
    reference_threads = 1  # several are slow wherever anything else runs

    def __init__(self, job: RegretJob, folder: Path, case: Case) -> None:
        self.began = time.monotonic()
        self.cluster = autopar.measure(budget_s=CLUSTER_S)
        self.needed: int | None = None
        self.made: dict[str, Planned] = {}
        self.same: dict[str, str] = {}
        super().__init__(job, folder, case, contenders(job, self.cluster, case, self.cap))

    def cap(self, share: float | None) -> int | None:
        """Return the bytes that a share is, once the replicated plan has been made."""
        if share is None:
            return None
        if self.needed is None:
            raise RuntimeError(f"{REPLICATED} was not planned, so there is nothing to cap")
        return int(share * self.needed)

    def prepare(self, entry: Entry) -> None:
        """Build, count bytes, warm up; one whose plan is already in the race goes no further."""
        super().prepare(entry)
        name, made = entry.contender.name, entry.step
        if isinstance(made, Planned):
            if name == REPLICATED and made.plan.prediction is not None:
                self.needed = made.plan.prediction.needed_bytes
            self.made[name] = replace(made, step=None)
            own = what_runs(made.plan)
            twins = (n for n, other in self.made.items() if what_runs(other.plan) == own)
            if (first := next(twins)) != name:
                self.same[name] = first
                entry.step = None

    @property
    def steps(self) -> int:
        """Steps that every contender trains; before each timed one stands one that is not."""
        return super().steps + self.job.rounds

    def time(self, entry: Entry, number: int) -> None:
        """Time a step that comes behind another of the same contender, as in training.

        Behind one of somebody else it would find nothing of its own in the processor's caches.
        """
        first = self.counted + self.warm + 2 * number
        entry.run(self.batches[first])
        dist.barrier(self.control)
        start = time.perf_counter()
        entry.run(self.batches[first + 1])
        entry.seconds.append(time.perf_counter() - start)

    def running(self) -> list[Entry]:
        """Return those that are still in the race, each plan once."""
        return [entry for entry in super().running() if entry.contender.name not in self.same]

    def enough(self, number: int) -> bool:
        """Whether the time is up; rank 0 decides."""
        late = time.monotonic() - self.began > self.job.limit_s
        told = torch.tensor(float(late and number >= LEAST_ROUNDS))
        dist.broadcast(told, 0, group=self.control)
        return bool(told)

    def gather(self, entry: Entry) -> dict[str, Any]:
        """Return what all ranks know of a contender, and what was predicted of it."""
        name = entry.contender.name
        if name in self.same:
            result = {"contender": name, "error": None, "same": self.same[name]}
        else:
            result = super().gather(entry)
        if (made := self.made.get(name)) is not None and made.plan.prediction is not None:
            result["plan"] = made.plan.name
            result["planned_s"] = made.seconds
            result["notes"] = made.plan.notes
            result["predicted_s"] = made.plan.prediction.step_s
            result["predicted_bytes"] = made.plan.prediction.needed_bytes
        if name == REPLICATED:
            result["batch_bytes"] = held_by_caller(self.case)
        return result


def what_runs(plan: autopar.Plan) -> autopar.Plan:
    """Return a plan without what makes no difference to its steps."""
    return replace(
        plan, name="", prediction=None, runners_up=(), notes=(), cluster="", memory_cap=None
    )


def contenders(job: RegretJob, cluster: Cluster, case: Case, cap: Cap) -> list[Contender]:
    """Return everyone: peers, the enumeration, and the plan chosen under each cap."""
    layout, build = Layout.of(job.layout), partial(build_plan, cluster=cluster)
    uncapped = partial(build, memory=lambda: PLENTY)
    plans = [
        Contender(name, partial(uncapped, strategy=strategy))
        for name, strategy in enumeration(case, layout).items()
    ]
    choosing = partial(build, strategy=CHOOSING, time_limit_s=SEARCH_S)
    chosen = [
        Contender(chosen_name(share), partial(choosing, memory=partial(cap, share)))
        for share in job.caps
    ]
    return [*peers(case, layout), *plans, *chosen]


def names(case: Case, layout: Layout, caps: Caps) -> tuple[str, ...]:
    """Return who `contenders` are."""
    own = [contender.name for contender in peers(case, layout)]
    return (*own, *enumeration(case, layout), *map(chosen_name, caps))


def main() -> None:
    """Join the other ranks and run the job."""
    folder = Path(sys.argv[1])
    job = RegretJob.load(folder)
    torch.set_num_threads(job.threads)
    torch.set_flush_denormal(True)  # what takes longer for small numbers is not what is compared
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.patience))
    case = importlib.import_module(job.module).CASES[job.case]
    with captured_once(), updates_measured_once():
        Comparison(job, folder, case).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
