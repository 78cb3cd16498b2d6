"""`simulate_pipeline`: time of a pipeline's step, stage by stage, with waits and transfers.

A rank runs the actions of its order, each as soon as its input has arrived. Transfers overlap with
compute; between two ranks there is one at a time, in the order of issue. Ranks that share too few
cores compute faster while others wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from autopar.cost_model.simulator.schedules import Action, Orders
from autopar.cost_model.simulator.streams import COMPUTE, Event

SEND = "send"
Seconds = Callable[[int], float]
"""Seconds of a transfer by its bytes."""


@dataclass(frozen=True)
class StageCost:
    """Seconds and bytes of a stage for one micro-batch.

    Attributes:
        forward_s: seconds of its forward.
        backward_s: seconds of its backward.
        input_s: seconds of its input gradients, where these are computed separately.
        weight_s: seconds of its weight gradients, where these are computed separately.
        first_s: seconds once a step, before its first forward.
        last_s: seconds once a step, after its last backward.
        sent_bytes: bytes sent to the next stage.
        returned_bytes: bytes of gradients sent to the previous stage.
    """

    forward_s: float
    backward_s: float
    input_s: float = 0.0
    weight_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    sent_bytes: int = 0
    returned_bytes: int = 0

    def seconds(self, action: Action) -> float:
        """Seconds of an action."""
        kinds = {"F": self.forward_s, "B": self.backward_s, "I": self.input_s, "W": self.weight_s}
        return kinds[action.kind]


@dataclass(frozen=True)
class PipelineSimulation:
    """One predicted step of all ranks of a pipeline, without the optimizer's step.

    Attributes:
        step_s: seconds until the last rank has ended.
        ends_s: end of each rank, in seconds.
        busy_s: seconds of compute of each rank.
        transfer_s: seconds of all transfers, alone.
        exposed_s: seconds that the step would be shorter with instant transfers.
        timeline: events by rank; streams are "rank 0", "rank 0 to 1" and so on.
    """

    step_s: float
    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    transfer_s: float
    exposed_s: float
    timeline: tuple[Event, ...] = field(repr=False)

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of the step without compute, for each rank."""
        return tuple(1.0 - busy / self.step_s if self.step_s else 0.0 for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """Mean share of the step without compute."""
        return sum(self.idle) / len(self.idle)


def simulate_pipeline(
    orders: Orders,
    stages: Sequence[StageCost],
    transfer: Seconds,
    issue_s: float = 0.0,
    late_s: float = 0.0,
    oversubscription: float = 1.0,
) -> PipelineSimulation:
    """Predicts one step.

    Args:
        orders: the actions of each rank, in order.
        stages: cost of each stage while all ranks compute; stage s is on rank s % ranks.
        transfer: seconds of a transfer between neighbouring ranks, by its bytes.
        issue_s: seconds that a transfer occupies the computing thread, at either end.
        late_s: extra seconds of a transfer while ranks compute.
        oversubscription: ranks for each core that they share, at least 1.

    Raises:
        ValueError: the orders wait for each other.
    """
    run = _Run(orders, stages, transfer, issue_s, late_s, oversubscription)
    instant = _Run(orders, stages, lambda nbytes: 0.0, 0.0, 0.0, oversubscription)
    step_s = max(run.now)
    return PipelineSimulation(
        step_s=step_s,
        ends_s=tuple(run.now),
        busy_s=tuple(run.busy),
        transfer_s=run.transfer_s,
        exposed_s=max(0.0, step_s - max(instant.now)),
        timeline=tuple(run.events),
    )


class _Run:
    """A simulated step.

    Ranks that share cores advance at one pace. Actions therefore end in the order of their `work`:
    seconds at the pace of full load.

    Attributes:
        now: end of each rank's last action, in seconds.
        busy: seconds of compute of each rank.
        transfer_s: seconds of all transfers.
        events: intervals that have ended.
    """

    def __init__(
        self,
        orders: Orders,
        stages: Sequence[StageCost],
        transfer: Seconds,
        issue_s: float,
        late_s: float,
        oversubscription: float,
    ) -> None:
        self._ranks, self._stages, self._transfer = len(orders), stages, transfer
        self._issue_s, self._late_s = issue_s, late_s
        self._oversubscription = oversubscription
        self._queues = [deque(order) for order in orders]
        ends = [{action.stage: action for action in order} for order in orders]
        self._last_actions = {action for end in ends for action in end.values()}
        self._ready: list[tuple[float, int]] = []  # (seconds at which a rank can go on, rank)
        self._running: list[tuple[float, int]] = []  # (work at which an action ends, rank)
        self._starts: dict[int, float] = {}  # start of the action of each rank that is not idle
        self._arrivals: dict[Action, float] = {}
        self._link_free: dict[tuple[int, int], float] = {}
        self.now = [0.0] * self._ranks
        self.busy = [0.0] * self._ranks
        self.events: list[Event] = []
        self.transfer_s = 0.0
        self._run()

    def _run(self) -> None:
        time = work = 0.0
        for rank in range(self._ranks):
            self._schedule(rank)
        while self._ready or self._running:
            pace = self._pace
            end_s = time + (self._running[0][0] - work) / pace if self._running else math.inf
            next_s = min(end_s, self._ready[0][0]) if self._ready else end_s
            next_s = max(next_s, time)
            work += (next_s - time) * pace
            time = next_s
            if end_s <= next_s:
                self._end(heappop(self._running)[1], time)
            else:
                self._begin(heappop(self._ready)[1], work)
        if any(self._queues):
            stuck = ", ".join(str(queue[0]) for queue in self._queues if queue)
            raise ValueError(f"the ranks wait for each other: {stuck}")

    @property
    def _pace(self) -> float:
        """Speed of compute now, relative to full load."""
        share = len(self._running) / self._ranks
        return self._oversubscription / max(1.0, self._oversubscription * share)

    def _schedule(self, rank: int) -> None:
        """Marks an idle rank as ready, once its next input has arrived."""
        queue = self._queues[rank]
        if rank in self._starts or not queue or (arrival := self._arrival(queue[0])) is None:
            return
        start = max(self.now[rank] + self._issue_s * bool(arrival), arrival)
        self._starts[rank] = start
        heappush(self._ready, (start, rank))

    def _arrival(self, action: Action) -> float | None:
        """When the input of an action is on its rank; None if unknown yet."""
        outer = 0 if action.kind == "F" else len(self._stages) - 1
        if action.kind == "W" or action.stage == outer:
            return 0.0
        return self._arrivals.get(_receiver(action))

    def _begin(self, rank: int, work: float) -> None:
        """Starts the next action of a rank."""
        action = self._queues[rank][0]
        stage = self._stages[action.stage]
        first = stage.first_s if action.kind == "F" and action.micro == 0 else 0.0
        last = stage.last_s if action in self._last_actions else 0.0
        heappush(self._running, (work + first + stage.seconds(action) + last, rank))

    def _end(self, rank: int, time: float) -> None:
        """Ends the action of a rank and sends its result."""
        action, start = self._queues[rank].popleft(), self._starts.pop(rank)
        stage = self._stages[action.stage]
        self.now[rank] = time
        self.busy[rank] += time - start
        self.events.append(Event(str(action), f"rank {rank}", start, time, COMPUTE))
        if action.kind == "F" and action.stage + 1 < len(self._stages):
            self._send(rank, replace(action, stage=action.stage + 1), stage.sent_bytes)
        elif action.kind in ("B", "I") and action.stage:
            self._send(rank, replace(action, stage=action.stage - 1), stage.returned_bytes)
        self._schedule(rank)

    def _send(self, rank: int, receiver: Action, nbytes: int) -> None:
        """Sends the input of an action to its rank."""
        other = receiver.stage % self._ranks
        start = max(self.now[rank], self._link_free.get((rank, other), 0.0))
        seconds = self._transfer(nbytes) if other != rank else 0.0
        end = start + seconds
        self._arrivals[_receiver(receiver)] = end + self._late_s if seconds else end
        if seconds:
            self.now[rank] += self._issue_s
            self._link_free[rank, other] = end
            self.transfer_s += seconds
            self.events.append(Event(str(receiver), f"rank {rank} to {other}", start, end, SEND))
        self._schedule(other)


def _receiver(action: Action) -> Action:
    """The key of an action's input: the same for "B" and "I"."""
    return replace(action, kind="B") if action.kind == "I" else action
