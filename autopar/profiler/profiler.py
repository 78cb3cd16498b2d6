"""`Profiler`: records steps of a module and compares them with their prediction.

`autopar profile` sets `AUTOPAR_PROFILE` to the folder for the files of all ranks.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer, collective_of, is_wait, issuer
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.optimizer_step import Optimizer
from autopar.cost_model.simulator.step import Simulation, simulate
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.ir.graph import TrainingGraph
from autopar.planner.machine import Machine, measure_machine, ranks_of
from autopar.planner.problem import Graphs, PlanningProblem
from autopar.planner.search.fixed_mesh import plan_fixed_mesh
from autopar.profiler.calibration import TimedCollectives, calibrated
from autopar.profiler.report import Again, Message, Profile, Side
from autopar.report.plan import Plan
from autopar.runtime.agreement.consensus import broadcast_from_rank0
from autopar.runtime.codegen.recorder import RecordedStep, Recorder
from autopar.runtime.process_groups import rank

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
        optimizer: optimizer class or factory of the module.
        device: device of the module.
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
        super().__init__()
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
        taken = TimedCollectives.of(graph, [step.events() for step in steps]).together(
            ranks_of(live=True)
        )
        again = broadcast_from_rank0(lambda: self.again(graph, machine, taken))
        return replace(compare(steps, machine), again=again)

    def again(self, graph: TrainingGraph, machine: Machine, taken: TimedCollectives) -> Again:
        """Calibration, and the best plan under it; runs on rank 0 only."""
        where = self.plan.model if self.plan is not None else "a model"
        refit = calibrated(machine, graph, taken, where)
        if self.kept is not None:
            refit.machine.cluster.save(self.kept)
            refit.measured().save()
        now_s = _step(graph, refit.machine)
        found = [
            plan_fixed_mesh(problem, graphs, refit.machine) for problem, graphs in self.planned
        ]
        best = min((plan for plan in found if plan.prediction), key=_predicted_s, default=None)
        wins = best is not None and self.plan is not None and chosen(best) != chosen(self.plan)
        best_s = min(now_s, _predicted_s(best)) if best is not None and wins else now_s
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


def _predicted_s(plan: Plan) -> float:
    return plan.prediction.step_s if plan.prediction is not None else math.inf


def compare(steps: Sequence[RecordedStep], machine: Machine) -> Profile:
    """Compares recorded steps of one graph with their prediction."""
    graph = steps[0].graph
    result = simulate(graph, machine.cluster, machine.operators, overhead=machine.overhead)
    update_s = update_seconds(graph, machine)
    names = {node.name: str(node.target) for node in graph.calls()}
    wait_of = {
        node.name: source.name
        for node in graph.calls()
        if is_wait(node) and (source := issuer(node)) is not None
    }
    messages = tuple(messages_of(graph, machine.cluster))
    return Profile(
        rank=rank(),
        steps_s=tuple(step.seconds for step in steps),
        measured=_measured(steps, names, wait_of, {m.name: m.collective for m in messages}),
        predicted=_predicted(result, update_s, names),
        messages=messages,
        wait_of=wait_of,
        faster={
            "collectives": _step(graph, replace(machine, cluster=halved(machine.cluster))),
            "operators": _step(graph, replace(machine, operators=_halved(machine.operators))),
        },
        kinds=dict(result.provenance),
        cluster=f"{machine.cluster.name} ({machine.cluster.provenance})",
    )


def messages_of(graph: TrainingGraph, cluster: Cluster) -> list[Message]:
    """Collectives of a graph with their predicted times."""
    found = []
    for node in graph.calls():
        if collective_of(node) is None:
            continue
        sent = Transfer.of(node, graph.axes, cluster.ranks_per_node)
        cost = cluster.price(sent)
        empty = cluster.seconds(sent.collective, 1, sent.shape, sent.dtype)
        found.append(
            Message(node.name, sent.collective, sent.nbytes, cost.seconds, empty.seconds, cost.kind)
        )
    return found


def update_seconds(graph: TrainingGraph, machine: Machine) -> float:
    """Time of the optimizer's step over this rank's parameters, in seconds."""
    trained = graph.trained_bytes.values()
    return machine.update.seconds(list(trained), dtensors=bool(graph.layouts)).seconds


def halved(cluster: Cluster) -> Cluster:
    """The same cluster with collectives twice as fast."""

    def faster(entry: Measured) -> Measured:
        curve = entry.curve
        half = Curve(curve.bytes, tuple(s / 2 for s in curve.seconds))
        return Measured(half, "modelled by halving what was measured", entry.version)

    curves: Mapping[CurveKey, Measured] = {k: faster(e) for k, e in cluster.curves.items()}
    return replace(cluster, curves=curves)


def _halved(operators: OperatorTimes) -> OperatorTimes:
    times = {key: replace(t, seconds=t.seconds / 2) for key, t in operators.times.items()}
    return replace(operators, times=times)


def _step(graph: TrainingGraph, machine: Machine) -> float:
    result = simulate(graph, machine.cluster, machine.operators, overhead=machine.overhead)
    return result.step_s + update_seconds(graph, machine)


def _measured(
    steps: Sequence[RecordedStep],
    names: Mapping[str, str],
    wait_of: Mapping[str, str],
    collective: Mapping[str, str],
) -> Side:
    middle = sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]
    operators: dict[str, float] = {}
    waits: dict[str, float] = {}
    for step in steps:
        for event in step.events():
            if event.stream != COMPUTE:
                continue
            share = event.seconds / len(steps)
            if event.kind == "wait":
                kind = collective[wait_of[event.name]]
                waits[kind] = waits.get(kind, 0.0) + share
            else:
                target = names.get(event.name, event.name)
                operators[target] = operators.get(target, 0.0) + share
    inside = statistics.mean(sum(t[-1] - t[0] for _, t in step.runs) for step in steps)
    mean = statistics.mean(step.seconds for step in steps)
    return Side(middle.seconds, operators, waits, mean - inside, tuple(middle.events()))


def _predicted(result: Simulation, update_s: float, names: Mapping[str, str]) -> Side:
    operators: dict[str, float] = {}
    for event in result.timeline:
        if event.stream == COMPUTE and event.kind == COMPUTE:
            target = names.get(event.name, event.name)
            operators[target] = operators.get(target, 0.0) + event.seconds
    step_s = result.step_s + update_s
    update = Event("optimizer", COMPUTE, result.step_s, step_s, COMPUTE)
    events = (*result.timeline, update)
    return Side(step_s, operators, result.waits, update_s, events, result.memory_curve)
