"""One rank of a race of plans: measures, plans, builds all contenders, then runs them in turn.

Started by `benchmarks.regret.__main__` on a node; its one argument is the job's folder.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from benchmarks.contenders import Contender, PlannedStep, build_planned
from benchmarks.launch import Job
from benchmarks.memoize import memoized_capture, memoized_update
from benchmarks.models import Case
from benchmarks.regret.plans import PEERS, REPLICATED, Layout, chosen_name, enumeration
from benchmarks.worker import Entry, Race, main

CLUSTER_S = 12.0  # seconds for measuring a cluster, once for all models
SEARCH_S = 60.0  # seconds after which the search tries no further mesh, the default of `compile`

PLENTY = 1 << 50  # a cap above every need: with a cap, fixed strategies have a predicted cost too
Caps = tuple[float | None, ...]  # shares of the memory of `REPLICATED`; None for no cap


@dataclass(frozen=True)
class RegretJob(Job):
    module: str = ""  # module with the model in its CASES
    layout: str = ""  # layout of the ranks, such as "2x2"
    caps: Caps = ()  # memory caps of chosen plans


class RegretRace(Race):
    """A race of plans and peers in which equal plans run once."""

    job: RegretJob
    counted, warm = 3, 1
    reference_threads = 1  # several are slow beside other processes

    def __init__(self, job: RegretJob, folder: Path) -> None:
        case = importlib.import_module(job.module).CASES[job.case]
        self.cluster = autopar.measure(budget_s=CLUSTER_S)
        self.replicated_bytes: int | None = None
        self.planned: dict[str, PlannedStep] = {}
        self.same: dict[str, str] = {}
        super().__init__(job, folder, case, self.contenders(job, case))

    def contenders(self, job: RegretJob, case: Case) -> list[Contender]:
        """Return peers, the enumeration, and the plan chosen under each cap."""
        build = partial(build_planned, cluster=self.cluster, time_limit_s=None, memory=PLENTY)
        strategies = enumeration(case, Layout.of(job.layout))
        plans = [Contender(name, partial(build, strategy=it)) for name, it in strategies.items()]
        chosen = [Contender(chosen_name(it), partial(self.choose, share=it)) for it in job.caps]
        return [*PEERS, *plans, *chosen]

    def choose(self, case: Case, share: float | None) -> PlannedStep:
        """Search a plan under a share of the bytes of the replicated plan, once that exists."""
        if share is not None and self.replicated_bytes is None:
            raise RuntimeError(f"there is no plan {REPLICATED} for a cap to refer to")
        cap = None if share is None else int(share * (self.replicated_bytes or 0))
        strategy = autopar.Strategy(search=case.search)
        options = {"strategy": strategy, "memory": cap, "time_limit_s": SEARCH_S}
        return build_planned(case, cluster=self.cluster, **options)

    def prepare(self, entry: Entry) -> None:
        """Build, count bytes, warm up; release an entry with the plan of another one.

        Plans are made before bytes are counted: beside the counter's profiler the planner cannot
        measure workspaces of operators.
        """
        name = entry.contender.name
        if entry.contender not in PEERS:
            searched = replace(entry.contender.build(self.case), step=None)
            follow = partial(follow_plan, searched=searched)
            entry.contender = replace(entry.contender, build=follow)
        super().prepare(entry)
        made = entry.step
        if isinstance(made, PlannedStep):
            if name == REPLICATED and made.plan.prediction is not None:
                self.replicated_bytes = made.plan.prediction.needed_bytes
            self.planned[name] = replace(made, step=None)
            program = executed_part(made.plan)
            first = next(n for n, p in self.planned.items() if executed_part(p.plan) == program)
            if first != name:
                self.same[name] = first
                entry.step = None

    @property
    def steps(self) -> int:
        """Number of steps of every contender, with an untimed one before each timed one."""
        return super().steps + self.job.rounds

    def time(self, entry: Entry, number: int) -> None:
        """Time a step after another one of the same contender, as in training.

        After a step of another contender the processor's caches would be cold.
        """
        first = self.counted + self.warm + 2 * number
        entry.run(self.batches[first])
        dist.barrier(self.control)
        start = time.perf_counter()
        entry.run(self.batches[first + 1])
        entry.seconds.append(time.perf_counter() - start)

    def running(self) -> list[Entry]:
        """Return the entries that are still in the race, each plan once."""
        return [entry for entry in super().running() if entry.contender.name not in self.same]

    def gather(self, entry: Entry) -> dict[str, Any]:
        """Return figures over all ranks, and predictions."""
        name = entry.contender.name
        if name in self.same:
            result = {"contender": name, "error": None, "same": self.same[name]}
        else:
            result = super().gather(entry)
        planned = self.planned.get(name)
        if planned is not None and planned.plan.prediction is not None:
            result["plan"] = planned.plan.name
            result["planning_s"] = planned.seconds
            result["notes"] = planned.plan.notes
            result["predicted_s"] = planned.plan.prediction.step_s
            result["predicted_bytes"] = planned.plan.prediction.needed_bytes
        if name == REPLICATED:  # predictions of memory include the batch, counts do not
            result["batch_bytes"] = sum(tensor.nbytes for tensor in self.case.batch(0))
        return result


def follow_plan(case: Case, searched: PlannedStep) -> PlannedStep:
    """Build the step of a plan that was searched before."""
    made = build_planned(case, plan=searched.plan)
    return replace(searched, step=made.step)


def executed_part(plan: autopar.Plan) -> autopar.Plan:
    """Return a plan without the fields that do not affect its steps."""
    return replace(
        plan, name="", prediction=None, runners_up=(), notes=(), cluster="", memory_cap=None
    )


def names(case: Case, layout: Layout, caps: Caps) -> tuple[str, ...]:
    """Return the names of `contenders`."""
    peers = [contender.name for contender in PEERS]
    return (*peers, *enumeration(case, layout), *map(chosen_name, caps))


if __name__ == "__main__":
    torch.set_flush_denormal(True)  # slow denormal numbers are not part of the comparison
    with memoized_capture(), memoized_update():
        main(RegretJob, RegretRace)
