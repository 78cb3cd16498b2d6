"""`simulate_pipeline`: how long the stages of a pipeline take together, and who waits for whom.

A rank does what its order says, one action after the other, each as soon as what it reads has come.
Transfers run beside compute; of one rank to another there is one at a time, in the order of issue.
Where ranks share too few cores, those that compute have those of the ones that wait.
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
"""The seconds of a transfer of so many bytes."""


@dataclass(frozen=True)
class StageCost:
    """What a stage takes for one micro-batch.

    Attributes:
        forward_s: seconds of its forward.
        backward_s: seconds of its backward.
        input_s: of that, the gradients of what entered it, where they are computed apart.
        weight_s: the same for those of its parameters.
        first_s: seconds once a step, before its first forward.
        last_s: seconds once a step, after its last backward.
        sent_bytes: what it sends to the next stage.
        returned_bytes: what it sends to the one before it, gradients.
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
        """How long an action takes."""
        kinds = {"F": self.forward_s, "B": self.backward_s, "I": self.input_s, "W": self.weight_s}
        return kinds[action.kind]


@dataclass(frozen=True)
class PipelineSimulation:
    """One predicted step of all ranks of a pipeline, without the optimizer's own step.

    Attributes:
        step_s: seconds until the last rank has ended.
        ends_s: when each rank has ended.
        busy_s: seconds in which each computes.
        transfer_s: seconds of all transfers, alone.
        exposed_s: by how much the step would be shorter if transfers took no time.
        timeline: what runs when, by rank; streams are "rank 0", "rank 0 to 1" and so on.
    """

    step_s: float
    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    transfer_s: float
    exposed_s: float
    timeline: tuple[Event, ...] = field(repr=False)

    @property
    def idle(self) -> tuple[float, ...]:
        """The share of the step in which each rank does not compute."""
        return tuple(1.0 - busy / self.step_s if self.step_s else 0.0 for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """The same, of all ranks."""
        return sum(self.idle) / len(self.idle)


def simulate_pipeline(
    orders: Orders,
    stages: Sequence[StageCost],
    transfer: Seconds,
    issue_s: float = 0.0,
    late_s: float = 0.0,
    oversubscription: float = 1.0,
) -> PipelineSimulation:
    """Predict one step.

    Args:
        orders: what each rank does, in order.
        stages: what each stage takes, all ranks computing; stage s is on rank s % ranks.
        transfer: the seconds of a transfer between neighbouring ranks, by its bytes.
        issue_s: for how long a transfer keeps the thread that computes, where it is issued and
            where it comes.
        late_s: how much later than over a quiet link it comes.
        crowding: how many of these ranks there are for each core that they share, where there are
            more: while some of them wait the others compute faster.

    Raises:
        ValueError: the orders wait for each other.
    """
    run = _Run(orders, stages, transfer, issue_s, late_s, oversubscription).run()
    free = _Run(orders, stages, lambda nbytes: 0.0, 0.0, 0.0, oversubscription).run()
    step_s = max(run.now)
    return PipelineSimulation(
        step_s=step_s,
        ends_s=tuple(run.now),
        busy_s=tuple(run.busy),
        transfer_s=run.transfer_s,
        exposed_s=max(0.0, step_s - max(free.now)),
        timeline=tuple(run.events),
    )


class _Run:
    """A step under way.

    Ranks that share cores advance alike, so what is under way ends in the order in which it would
    if each second were as long as it takes: `work` counts these seconds.
    """

    def __init__(
        self,
        orders: Orders,
        stages: Sequence[StageCost],
        transfer: Seconds,
        issue_s: float,
        late_s: float,
        crowding: float,
    ) -> None:
        self.ranks = len(orders)
        self.stages, self.transfer = stages, transfer
        self.issue_s, self.late_s, self.crowding = issue_s, late_s, crowding
        self.queues = [deque(order) for order in orders]
        ends = [{action.stage: action for action in order} for order in orders]
        self.last = {action for found in ends for action in found.values()}
        self.time = self.work = 0.0
        self.ready: list[tuple[float, int]] = []  # when a rank can go on
        self.running: list[tuple[float, int]] = []  # up to which work an action runs, and its rank
        self.begun: dict[int, float] = {}  # when it began; of ranks that are not idle
        self.now = [0.0] * self.ranks
        self.busy = [0.0] * self.ranks
        self.come: dict[Action, float] = {}
        self.free: dict[tuple[int, int], float] = {}
        self.events: list[Event] = []
        self.transfer_s = 0.0

    def run(self) -> _Run:
        for rank in range(self.ranks):
            self.line_up(rank)
        while self.ready or self.running:
            pace = self.pace
            end_s = (
                self.time + (self.running[0][0] - self.work) / pace if self.running else math.inf
            )
            next_s = min(end_s, self.ready[0][0]) if self.ready else end_s
            next_s = max(next_s, self.time)
            self.work += (next_s - self.time) * pace
            self.time = next_s
            if end_s <= next_s:
                self.end(heappop(self.running)[1])
            else:
                self.begin(heappop(self.ready)[1])
        if any(self.queues):
            stuck = ", ".join(str(queue[0]) for queue in self.queues if queue)
            raise ValueError(f"the ranks wait for each other: {stuck}")
        return self

    @property
    def pace(self) -> float:
        """How much faster than with all of them ranks compute now."""
        share = len(self.running) / self.ranks
        return self.crowding / max(1.0, self.crowding * share)

    def line_up(self, rank: int) -> None:
        """Says when a rank that is idle can go on, if that is known."""
        queue = self.queues[rank]
        if rank in self.begun or not queue or (come := self.arrival(queue[0])) is None:
            return
        self.begun[rank] = start = max(self.now[rank] + self.issue_s * bool(come), come)
        heappush(self.ready, (start, rank))

    def arrival(self, action: Action) -> float | None:
        """When what an action reads is on its rank; None if that is not known yet."""
        outer = 0 if action.kind == "F" else len(self.stages) - 1
        if action.kind == "W" or action.stage == outer:
            return 0.0
        return self.come.get(_arriving(action))

    def begin(self, rank: int) -> None:
        """Start the next action of a rank."""
        action = self.queues[rank][0]
        stage = self.stages[action.stage]
        first = stage.first_s if action.kind == "F" and action.micro == 0 else 0.0
        last = stage.last_s if action in self.last else 0.0
        heappush(self.running, (self.work + first + stage.seconds(action) + last, rank))

    def end(self, rank: int) -> None:
        """End the action that a rank is at, and send on what it has made."""
        action, start = self.queues[rank].popleft(), self.begun.pop(rank)
        stage = self.stages[action.stage]
        self.now[rank] = self.time
        self.busy[rank] += self.time - start
        self.events.append(Event(str(action), f"rank {rank}", start, self.time, COMPUTE))
        if action.kind == "F" and action.stage + 1 < len(self.stages):
            self.send(rank, replace(action, stage=action.stage + 1), stage.sent_bytes)
        elif action.kind in ("B", "I") and action.stage:
            self.send(rank, replace(action, stage=action.stage - 1), stage.returned_bytes)
        self.line_up(rank)

    def send(self, rank: int, to: Action, nbytes: int) -> None:
        """Put what an action has made on its way to the one that reads it."""
        other = to.stage % self.ranks
        start = max(self.now[rank], self.free.get((rank, other), 0.0))
        seconds = self.transfer(nbytes) if other != rank else 0.0
        end = start + seconds
        self.come[_arriving(to)] = end + self.late_s if seconds else end
        if seconds:
            self.now[rank] += self.issue_s
            self.free[rank, other] = end
            self.transfer_s += seconds
            self.events.append(Event(str(to), f"rank {rank} to {other}", start, end, SEND))
        self.line_up(other)


def _arriving(action: Action) -> Action:
    """What is sent to an action, whether its backward is done at once or not."""
    return replace(action, kind="B") if action.kind == "I" else action
