"""`Recorder`: records when each operator of a module's steps runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import fx

from autopar.cost_model.simulator.chrome_trace import CollectiveIndex
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.ir.graph import TrainingGraph

BoxedFunction = Callable[[list[Any]], list[Any]]
"""Takes a list of arguments and empties it."""


@dataclass
class RecordedStep:
    """One step, from a forward to the next.

    Attributes:
        start_s: start, in seconds of `time.perf_counter`.
        end_s: start of the next forward in seconds, None before it.
        runs: for each generated function that ran, its operators, and the times before each
            operator and after the last.
    """

    graph: TrainingGraph
    start_s: float
    end_s: float | None = None
    runs: list[tuple[tuple[str, ...], list[float]]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Duration, including the caller's work after the backward."""
        assert self.end_s is not None
        return self.end_s - self.start_s

    def events(self) -> list[Event]:
        """Events in the form of the simulator's timeline.

        The end of a collective is not observable; its event ends at its await.
        """
        found: list[Event] = []
        collectives = CollectiveIndex(self.graph)
        for names, times in self.runs:
            for name, (start, end) in zip(names, pairwise(times), strict=True):
                start, end = start - self.start_s, end - self.start_s
                found.append(Event(name, COMPUTE, start, end, collectives.kind(name)))
                found += collectives.landed(name, start, end)
        return found


class Recorder:
    """Records the steps of a module."""

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []

    def starting_step(self, graph: TrainingGraph, forward: BoxedFunction) -> BoxedFunction:
        """The forward of a joint graph; each run starts a step."""

        def run(arguments: list[Any]) -> list[Any]:
            self.start_step(graph)
            return forward(arguments)

        return run

    def start_step(self, graph: TrainingGraph) -> None:
        now = time.perf_counter()
        if self.steps and self.steps[-1].end_s is None:
            self.steps[-1].end_s = now
        self.steps.append(RecordedStep(graph, now))

    def instrument(self, graph: fx.Graph) -> Callable[[BoxedFunction], BoxedFunction]:
        """Inserts a clock after every operator; returns a wrapper for the generated function."""
        calls = [node for node in graph.nodes if node.op == "call_function"]
        for node in calls:
            with graph.inserting_after(node):
                graph.call_function(self._tick)
        names = tuple(node.name for node in calls)

        def record(run: BoxedFunction) -> BoxedFunction:
            def recorded(arguments: list[Any]) -> list[Any]:
                self.steps[-1].runs.append((names, [time.perf_counter()]))
                return run(arguments)

            return recorded

        return record

    def _tick(self) -> None:
        self.steps[-1].runs[-1][1].append(time.perf_counter())
