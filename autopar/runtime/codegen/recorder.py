"""`Recorder`: records when each operator of a module's steps runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autopar.core.ir.aliases import computes
from autopar.core.ir.graph import TrainingGraph
from autopar.cost_model.simulator.chrome_trace import CollectiveIndex
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.runtime.codegen.clocks import DeviceClock, HostClock, clock_of

LAUNCH = "launch"
"""Kind of events on a GPU that include the launch of a kernel, or have none."""

BoxedFunction = Callable[[list[Any]], list[Any]]
"""Takes a list of arguments and empties it."""


@dataclass
class RecordedStep:
    """One step, from a forward to the next.

    Attributes:
        start: mark of its start.
        end: mark of the start of the next forward, None before it.
        runs: for each generated function that ran, its operators, and the marks before each
            operator and after the last.
    """

    graph: TrainingGraph
    clock: HostClock
    start: Any
    end: Any = None
    runs: list[tuple[tuple[str, ...], list[Any]]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Duration, including the caller's work after the backward."""
        assert self.end is not None
        return self.clock.seconds(self.start, self.end)

    @property
    def inside_s(self) -> float:
        """Seconds inside of the generated functions."""
        return sum(self.clock.seconds(marks[0], marks[-1]) for _, marks in self.runs)

    def events(self) -> list[Event]:
        """Events in the form of the simulator's timeline.

        The end of a collective is not observable; its event ends at its await. On a GPU, operators
        that waited for their launch, and calls that start no kernel, are of the kind LAUNCH.
        """
        found: list[Event] = []
        collectives, on_gpu = CollectiveIndex(self.graph), isinstance(self.clock, DeviceClock)
        calls = {node.name for node in self.graph.calls() if on_gpu and not computes(node)}
        for names, marks in self.runs:
            times = [self.clock.seconds(self.start, mark) for mark in marks]
            for name, mark, (start, end) in zip(names, marks[1:], pairwise(times), strict=True):
                kind = collectives.kind(name)
                if kind == COMPUTE and (name in calls or not self.clock.is_pure(mark)):
                    kind = LAUNCH
                found.append(Event(name, COMPUTE, start, end, kind))
                found += collectives.landed(name, start, end)
        return found


class Recorder:
    """Records the steps of a module in the time of its device."""

    def __init__(self, device: torch.device) -> None:
        self.clock = clock_of(device)
        self.steps: list[RecordedStep] = []

    def starting_step(self, graph: TrainingGraph, forward: BoxedFunction) -> BoxedFunction:
        """The forward of a joint graph; each run starts a step."""

        def run(arguments: list[Any]) -> list[Any]:
            self.start_step(graph)
            return forward(arguments)

        return run

    def start_step(self, graph: TrainingGraph) -> None:
        now = self.clock.mark()
        if self.steps and self.steps[-1].end is None:
            self.steps[-1].end = now
        self.steps.append(RecordedStep(graph, self.clock, now))

    def instrument(self, graph: fx.Graph) -> Callable[[BoxedFunction], BoxedFunction]:
        """Inserts a clock after every operator; returns a wrapper for the generated function."""
        calls = [node for node in graph.nodes if node.op == "call_function"]
        for node in calls:
            with graph.inserting_after(node):
                graph.call_function(self._tick)
        names = tuple(node.name for node in calls)

        def record(run: BoxedFunction) -> BoxedFunction:
            def recorded(arguments: list[Any]) -> list[Any]:
                self.steps[-1].runs.append((names, [self.clock.mark()]))
                return run(arguments)

            return recorded

        return record

    def _tick(self) -> None:
        marks = self.steps[-1].runs[-1][1]
        marks.append(self.clock.mark(marks[-1]))
