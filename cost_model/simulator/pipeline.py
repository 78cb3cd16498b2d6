"""`simulate_pipeline`: time of a pipeline's step, stage by stage, with waits and transfers.

A rank runs the actions of its order, each as soon as its input has arrived. Transfers overlap with
compute; between two ranks there is one at a time, in the order of issue. Gathers start before the
first input has arrived, and reductions end behind the last gradient's send. Ranks that share too
few cores compute faster while others wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from autopar.core.schedules import Action, Orders, ranks_in
from autopar.cost_model.simulator.streams import COMPUTE, Event

SEND, WAIT = "send", "wait"
Seconds = Callable[[int, int, int], float]
"""Seconds of a transfer by its bytes, its sending and its receiving rank."""


@dataclass(frozen=True)
class StageCost:
    """Seconds and bytes of a stage for one micro-batch.

    `input_s` and `weight_s` are the parts of a backward, where they are computed separately.
    `first_s` are those of messages that its first forward awaits, and that start with the step;
    `last_s` of those that the step awaits after its last backward. `sent_bytes` go to the next
    stage, `returned_bytes` of gradients to the previous one.
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
        kinds = {"F": self.forward_s, "B": self.backward_s, "I": self.input_s, "W": self.weight_s}
        return kinds[action.kind]

    def at_pace(self, pace: float) -> StageCost:
        """The cost on a rank that takes `pace` times as long."""
        names = ("forward_s", "backward_s", "input_s", "weight_s", "first_s", "last_s")
        return replace(self, **{name: pace * getattr(self, name) for name in names})


@dataclass(frozen=True)
class PipelineSimulation:
    """One predicted step of all ranks of a pipeline, without the optimizer's step.

    `ends_s` and `busy_s` are by rank, and so is `hidden_s`: the part of its stages' `first_s` and
    `last_s` that other work or waits cover. `exposed_s` are the seconds that the step would be
    shorter with instant transfers. Streams of the timeline are "rank 0", "rank 0 to 1" and so on.
    """

    step_s: float
    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    hidden_s: tuple[float, ...]
    transfer_s: float
    exposed_s: float
    timeline: tuple[Event, ...] = field(repr=False)


def simulate_pipeline(
    orders: Orders,
    stages: Sequence[StageCost],
    transfer: Seconds,
    issue_s: float = 0.0,
    late_s: float = 0.0,
    oversubscription: float = 1.0,
    *,
    recording: bool = True,
) -> PipelineSimulation:
    """Predicts one step.

    Args:
        orders: the actions of each rank, in order.
        stages: cost of each stage while all ranks compute.
        transfer: seconds of a transfer, by its bytes, its sending and its receiving rank.
        issue_s: seconds that a transfer occupies the computing thread, at either end.
        late_s: extra seconds of a transfer while all ranks but its receiver compute. Where they
            share cores, fewer of them delay it less.
        oversubscription: ranks for each core that they share, at least 1.
        recording: whether the simulation has a timeline.

    Raises:
        ValueError: the orders wait for each other.
    """
    run = _Run(orders, stages, transfer, issue_s, late_s, oversubscription, recording)
    instant = _Run(orders, stages, lambda *transfer: 0.0, 0.0, 0.0, oversubscription, False)
    step_s = max(run.now)
    return PipelineSimulation(
        step_s=step_s,
        ends_s=tuple(run.now),
        busy_s=tuple(run.busy),
        hidden_s=tuple(run.hidden),
        transfer_s=run.transfer_s,
        exposed_s=max(0.0, step_s - max(instant.now)),
        timeline=tuple(run.events),
    )


@dataclass
class _Run:
    """A simulated step.

    Ranks that share cores advance at one pace. Actions therefore end in the order of their `work`:
    seconds at the pace of full load.
    """

    orders: Orders
    stages: Sequence[StageCost]
    transfer: Seconds
    issue_s: float
    late_s: float
    oversubscription: float
    recording: bool

    def __post_init__(self) -> None:
        self.ranks = len(self.orders)
        self.queues = [deque(order) for order in self.orders]
        ends = [{action.stage: action for action in order} for order in self.orders]
        self.last_actions = {action for end in ends for action in end.values()}
        self.ready: list[tuple[float, int]] = []  # (seconds at which a rank can go on, rank)
        self.running: list[tuple[float, int]] = []  # (work at which an action ends, rank)
        self.starts: dict[int, float] = {}  # start of the action of each rank that is not idle
        self.arrivals: dict[Action, float] = {}
        self.link_free: dict[tuple[int, int], float] = {}
        self.now = [0.0] * self.ranks  # end of each rank's last action
        self.busy = [0.0] * self.ranks
        self.hidden = [0.0] * self.ranks
        self.reduced = [0.0] * self.ranks  # end of each rank's reductions
        # stages of a rank gather one after the other
        self.rank_of = ranks_in(self.orders)
        gathers = [0.0] * self.ranks
        self.gathered = []
        for stage, rank in zip(self.stages, self.rank_of, strict=True):
            gathers[rank] += stage.first_s
            self.gathered.append(gathers[rank])
        self.events: list[Event] = []
        self.transfer_s = 0.0
        self._run()

    def _run(self) -> None:
        time = work = 0.0
        for rank in range(self.ranks):
            self._schedule(rank)
        while self.ready or self.running:
            share = len(self.running) / self.ranks
            pace = self.oversubscription / max(1.0, self.oversubscription * share)
            end_s = time + (self.running[0][0] - work) / pace if self.running else math.inf
            next_s = min(end_s, self.ready[0][0]) if self.ready else end_s
            next_s = max(next_s, time)
            work += (next_s - time) * pace
            time = next_s
            if end_s <= next_s:
                self._end(heappop(self.running)[1], time)
            else:
                self._begin(heappop(self.ready)[1], work)
        for rank in range(self.ranks):
            self._await_reductions(rank)
        if any(self.queues):
            stuck = ", ".join(str(queue[0]) for queue in self.queues if queue)
            raise ValueError(f"the ranks wait for each other: {stuck}")

    def _schedule(self, rank: int) -> None:
        """Marks an idle rank as ready, once its next input has arrived."""
        queue = self.queues[rank]
        if rank in self.starts or not queue or (arrival := self._arrival(queue[0])) is None:
            return
        start = max(self.now[rank] + self.issue_s * bool(arrival), arrival)
        self.starts[rank] = start
        heappush(self.ready, (start, rank))

    def _arrival(self, action: Action) -> float | None:
        """When the input of an action is on its rank; None if unknown yet."""
        outer = 0 if action.kind == "F" else len(self.stages) - 1
        if action.kind == "W" or action.stage == outer:
            return 0.0
        return self.arrivals.get(_receiver(action))

    def _begin(self, rank: int, work: float) -> None:
        action = self.queues[rank][0]
        stage = self.stages[action.stage]
        left_s = 0.0
        if action.kind == "F" and action.micro == 0:
            left_s = max(0.0, self.gathered[action.stage] - self.starts[rank])
            self.hidden[rank] += max(0.0, stage.first_s - left_s)
        heappush(self.running, (work + left_s + stage.seconds(action), rank))

    def _end(self, rank: int, time: float) -> None:
        action, start = self.queues[rank].popleft(), self.starts.pop(rank)
        stage = self.stages[action.stage]
        self.now[rank] = time
        self.busy[rank] += time - start
        if self.recording:
            self.events.append(Event(str(action), f"rank {rank}", start, time, COMPUTE))
        if action.kind == "F" and action.stage + 1 < len(self.stages):
            self._send(rank, action._replace(stage=action.stage + 1), stage.sent_bytes)
        elif action.kind in ("B", "I") and action.stage:
            self._send(rank, action._replace(stage=action.stage - 1), stage.returned_bytes)
        if action in self.last_actions:
            self.reduced[rank] = max(self.reduced[rank], time) + stage.last_s
            self.hidden[rank] += stage.last_s
        self._schedule(rank)

    def _await_reductions(self, rank: int) -> None:
        start, end = self.now[rank], self.reduced[rank]
        if end > start:
            if self.recording:
                self.events.append(Event("reductions", f"rank {rank}", start, end, WAIT))
            self.hidden[rank] -= end - start
            self.now[rank] = end

    def _send(self, rank: int, receiver: Action, nbytes: int) -> None:
        other = self.rank_of[receiver.stage]
        start = max(self.now[rank], self.link_free.get((rank, other), 0.0))
        seconds = self.transfer(nbytes, rank, other) if other != rank else 0.0
        end = start + seconds
        # A receiver that is late does not occupy the link: the next message may follow.
        late_s = self.late_s * self._crowd(rank)
        self.arrivals[_receiver(receiver)] = end + late_s if seconds else end
        if seconds:
            self.now[rank] += self.issue_s
            self.link_free[rank, other] = end
            self.transfer_s += seconds
            if self.recording:
                stream = f"rank {rank} to {other}"
                self.events.append(Event(str(receiver), stream, start, end, SEND))
        self._schedule(other)

    def _crowd(self, sender: int) -> float:
        """Computing ranks and a receiver beyond the cores, as a fraction of all such ranks."""
        cores = self.ranks / self.oversubscription
        if self.oversubscription <= 1.0:
            return 1.0
        queue, now = self.queues[sender], self.now[sender]
        arrival = self._arrival(queue[0]) if queue else None
        goes_on = arrival is not None and arrival <= now
        computing = len(self.running) + goes_on + 1
        return min(1.0, max(0.0, computing - cores) / (self.ranks - cores))


def _receiver(action: Action) -> Action:
    """The key of an action's input: the same for "B" and "I"."""
    return action._replace(kind="B") if action.kind == "I" else action
