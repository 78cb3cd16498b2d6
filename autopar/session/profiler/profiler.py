"""`Profiler`: records steps of a module and compares them with their prediction.

`autopar profile` sets `AUTOPAR_PROFILE` to the folder for the files of all ranks.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from autopar.core.common.world import rank
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.messages import collective_of
from autopar.core.plan.plan import Plan
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import Measured
from autopar.cost_model.measurement.optimizer_step import Optimizer
from autopar.cost_model.simulator.step import Simulation
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.planner.machine import Machine, measure_machine, ranks_of
from autopar.planner.problem import Graphs, PlanningProblem
from autopar.planner.search.fixed_mesh import plan_fixed_mesh
from autopar.runtime.agreement.consensus import broadcast_from_rank0
from autopar.runtime.codegen.recorder import RecordedStep, Recorder
from autopar.session.profiler.calibration import TimedCollectives, calibrated, issuers, simulated
from autopar.session.profiler.report import Again, Message, Profile, Side

FOLDER, COUNT, REFIT = "AUTOPAR_PROFILE", "AUTOPAR_PROFILE_STEPS", "AUTOPAR_PROFILE_REFIT"
WARM_STEPS = 3


def profiler(optimizer: Optimizer, device: torch.device) -> Profiler | None:
    """The profiler of this process, if `autopar profile` started it."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    kept, count = os.environ.get(REFIT), int(os.environ.get(COUNT, "5"))
    return Profiler(Path(folder), count, optimizer, device, Path(kept) if kept else None)


class Profiler(Recorder):
    """Records steps, then measures the machine on all ranks and writes a Profile.

    Attributes:
        folder: folder for the profiles.
        count: number of steps to record after warmup.
        kept: file for the calibrated cluster; None to discard it.
        planned: planning problems of the module with their captured graphs.
        plan: plan of the module.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        optimizer: Optimizer,
        device: torch.device,
        kept: Path | None = None,
    ) -> None:
        super().__init__(device)
        self.folder, self.count, self.optimizer, self.device = folder, count, optimizer, device
        self.kept, self.done = kept, False
        self.planned: list[tuple[PlanningProblem, Graphs]] = []
        self.plan: Plan | None = None

    def start_step(self, graph: TrainingGraph) -> None:
        """Starts to record a call; compares earlier calls first if there are enough."""
        super().start_step(graph)
        trained = [step for step in self.steps[:-1] if len(step.runs) > 1]
        alike = [step for step in trained if trained and step.graph is trained[-1].graph]
        if not self.done and len(alike) >= WARM_STEPS + self.count:
            self.done = True
            self.clock.synchronize()
            with torch.enable_grad():  # the forward disables grad mode
                made = self.compared(alike[-self.count :])
            made.save(self.folder / f"rank{rank()}.json")
            super().start_step(graph)  # restarts the clock after measuring
        if self.done:
            del self.steps[:-1]

    def compared(self, steps: Sequence[RecordedStep]) -> Profile:
        """Profile of recorded steps, with their prediction and a calibrated plan."""
        graph = steps[0].graph
        machine = measure_machine([graph], self.device, None, self.optimizer, live=True)
        own = TimedCollectives.of(graph, [step.events() for step in steps])
        taken = own.together(ranks_of(live=True))
        again = broadcast_from_rank0(lambda: self.again(graph, machine, taken))
        return replace(compare(steps, machine), again=again)

    def again(self, graph: TrainingGraph, machine: Machine, taken: TimedCollectives) -> Again:
        """Calibration, and the best plan under it; runs on rank 0 only."""
        where = self.plan.model if self.plan is not None else "a model"
        refit = calibrated(machine, graph, taken, where)
        if self.kept is not None:
            refit.machine.cluster.save(self.kept)
            refit.measured().save()
        best_s = now_s = step_seconds(graph, refit.machine)
        found = [
            plan_fixed_mesh(problem, graphs, refit.machine) for problem, graphs in self.planned
        ]
        predicted = [(p.prediction.step_s, p) for p in found if p.prediction is not None]
        least_s, best = min(predicted, key=lambda pair: pair[0], default=(math.inf, None))
        if best is not None and self.plan is not None and chosen(best) != chosen(self.plan):
            best_s = min(now_s, least_s)
        return Again(
            operators=refit.operators,
            collectives=refit.collectives,
            step_s=now_s,
            best="" if best is None else best.name,
            best_s=best_s,
            same=best_s >= now_s,
            kept="" if self.kept is None else str(self.kept),
        )


def chosen(plan: Plan) -> Plan:
    """The decisions of a plan, without its descriptions."""
    return replace(plan, name="", prediction=None, runners_up=(), notes=(), cluster="")


def compare(steps: Sequence[RecordedStep], machine: Machine) -> Profile:
    """Compares recorded steps of one graph with their prediction."""
    graph = steps[0].graph
    cluster, operators = machine.cluster, machine.operators
    faster_curves = {k: _twice_as_fast(e) for k, e in cluster.curves.items()}
    faster_times = {k: replace(t, seconds=t.seconds / 2) for k, t in operators.times.items()}
    faster = {
        "collectives": replace(machine, cluster=replace(cluster, curves=faster_curves)),
        "operators": replace(machine, operators=replace(operators, times=faster_times)),
    }
    result = simulated(graph, machine)
    names = {node.name: str(node.target) for node in graph.calls()}
    wait_of, messages = issuers(graph), tuple(messages_of(graph, cluster))
    kinds = {message.name: message.collective for message in messages}
    waited = {wait: kinds[name] for wait, name in wait_of.items() if name in kinds}
    return Profile(
        rank=rank(),
        steps_s=tuple(step.seconds for step in steps),
        measured=_measured(steps, names, waited),
        predicted=_predicted(result, update_seconds(graph, machine), names),
        messages=messages,
        wait_of=wait_of,
        faster={name: step_seconds(graph, other) for name, other in faster.items()},
        kinds=dict(result.provenance),
        cluster=f"{cluster.name} ({cluster.provenance})",
    )


def messages_of(graph: TrainingGraph, cluster: Cluster) -> Iterator[Message]:
    """Collectives of a graph with their predicted times."""
    for node in graph.calls():
        if collective_of(node) is not None:
            sent = Transfer.of(node, graph.axes, cluster.ranks_per_node)
            kind, cost = sent.collective, cluster.price(sent)
            empty_s = cluster.seconds(kind, 1, sent.shape, sent.dtype).seconds
            yield Message(node.name, kind, sent.nbytes, cost.seconds, empty_s, cost.kind)


def update_seconds(graph: TrainingGraph, machine: Machine) -> float:
    """Time of the optimizer's step over this rank's parameters, in seconds."""
    trained = graph.trained_bytes.values()
    return machine.update.seconds(list(trained), dtensors=bool(graph.layouts)).seconds


def step_seconds(graph: TrainingGraph, machine: Machine) -> float:
    """Simulated time of a step with the optimizer's, in seconds."""
    return simulated(graph, machine).step_s + update_seconds(graph, machine)


def _twice_as_fast(entry: Measured) -> Measured:
    half = Curve(entry.curve.bytes, tuple(s / 2 for s in entry.curve.seconds))
    return Measured(half, "modelled by halving what was measured", entry.version)


def _measured(
    steps: Sequence[RecordedStep], names: Mapping[str, str], kinds: Mapping[str, str]
) -> Side:
    """Recorded side, given the operator of each node and the collective of each wait."""
    middle = sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]
    operators, waits = defaultdict[str, float](float), defaultdict[str, float](float)
    for step in steps:
        for event in step.events():
            if event.stream == COMPUTE:
                waited = event.kind == "wait"
                key = kinds[event.name] if waited else names.get(event.name, event.name)
                (waits if waited else operators)[key] += event.seconds / len(steps)
    inside = statistics.mean(step.inside_s for step in steps)
    mean = statistics.mean(step.seconds for step in steps)
    events = tuple(middle.events())
    return Side(middle.seconds, dict(operators), dict(waits), mean - inside, events)


def _predicted(result: Simulation, update_s: float, names: Mapping[str, str]) -> Side:
    operators = defaultdict[str, float](float)
    for event in result.timeline:
        if event.stream == COMPUTE and event.kind == COMPUTE:
            operators[names.get(event.name, event.name)] += event.seconds
    step_s = result.step_s + update_s
    update = Event("optimizer", COMPUTE, result.step_s, step_s, COMPUTE)
    events = (*result.timeline, update)
    return Side(step_s, dict(operators), result.waits, update_s, events, result.memory_curve)
