"""`Recorder`: when each operator of a module's steps ran, told by a clock inside the program."""

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
from autopar.runtime.codegen.compile import BoxedFunction


@dataclass
class RecordedStep:
    """One run of a module's forward, to the next.

    Attributes:
        graph: the joint graph of the call.
        start_s: when it started, in seconds of `time.perf_counter`.
        end_s: when the next forward started; None if it has not.
        halves: of each half of the program that ran, the operators and a tick before each, and
            one after the last.
    """

    graph: TrainingGraph
    start_s: float
    end_s: float | None = None
    runs: list[tuple[tuple[str, ...], list[float]]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it took, with what the caller did after its backward."""
        assert self.end_s is not None
        return self.end_s - self.start_s

    def events(self) -> list[Event]:
        """What ran when, in the form of the simulator's timeline.

        When a collective ends cannot be seen: it is taken to be under way until it was waited for.
        """
        found: list[Event] = []
        flights = CollectiveIndex(self.graph)
        for names, ticks in self.runs:
            for name, (start, end) in zip(names, pairwise(ticks), strict=True):
                start, end = start - self.start_s, end - self.start_s
                found.append(Event(name, COMPUTE, start, end, flights.kind(name)))
                found += flights.landed(name, start, end)
        return found


class Recorder:
    """Keeps the steps of a module.

    Attributes:
        steps: since it was made, or `clear`ed by the owner.
    """

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []

    def starting_step(self, graph: TrainingGraph, forward: BoxedFunction) -> BoxedFunction:
        """The forward half of a joint graph, with which a step begins."""

        def run(arguments: list[Any]) -> list[Any]:
            self.start_step(graph)
            return forward(arguments)

        return run

    def start_step(self, graph: TrainingGraph) -> None:
        """A step starts, which runs this graph."""
        now = time.perf_counter()
        if self.steps and self.steps[-1].end_s is None:
            self.steps[-1].end_s = now
        self.steps.append(RecordedStep(graph, now))

    def instrument(self, graph: fx.Graph) -> Callable[[BoxedFunction], BoxedFunction]:
        """Puts a clock behind every operator of a graph; how to wrap the code made from it."""
        calls = [node for node in graph.nodes if node.op == "call_function"]
        for node in calls:
            with graph.inserting_after(node):
                graph.call_function(self._tick)
        names = tuple(node.name for node in calls)

        def wrap(run: BoxedFunction) -> BoxedFunction:
            def recorded(arguments: list[Any]) -> list[Any]:
                self.steps[-1].runs.append((names, [time.perf_counter()]))
                return run(arguments)

            return recorded

        return wrap

    def _tick(self) -> None:
        self.steps[-1].runs[-1][1].append(time.perf_counter())
