"""`Prediction`: what a plan is predicted to cost, and what others would have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.common.documents import Count, Duration, Positive, Rate, Seconds
from autopar.cost_model.simulator.exposure import Exposure
from autopar.plan.report_data import ReportData
from autopar.plan.throughput import Work

MOST_EXPOSED = 20
"""Of how many collectives a plan keeps how much they are exposed."""


RUNNERS_UP = 12
"""Of how many other plans a plan keeps what they would have cost."""


TimelineEvent = tuple[str, str, Seconds, Seconds, str]
"""Node name, stream, start in seconds, end in seconds, and kind."""


@dataclass(frozen=True)
class StagePrediction:
    """What a stage of a pipeline is predicted to take.

    Attributes:
        parameter_bytes: of the whole parameters that it holds.
        forward_s: seconds of the forward of one micro-batch.
        backward_s: seconds of its backward.
        sent_bytes: what it sends to the next stage, of one micro-batch.
        returned_bytes: what it sends to the one before it.
        saved_bytes: what is kept of one micro-batch between its forward and its backward.
        in_flight: of how many micro-batches at once.
    """

    parameter_bytes: Count
    forward_s: Seconds
    backward_s: Seconds
    sent_bytes: Count
    returned_bytes: Count
    saved_bytes: Count
    in_flight: Count


@dataclass(frozen=True)
class Prediction:
    """What a plan is predicted to cost, one step, on the most loaded rank.

    Of a pipeline all ranks count for times, and the one that needs most for memory.

    Attributes:
        step_s: seconds of forward, backward and the optimizer's step.
        update_s: seconds of the optimizer's step.
        compute_s: seconds of computation.
        communication_s: seconds in which some collective is under way.
        exposed_s: seconds in which computation waits for one.
        peak_bytes: the most bytes that tensors hold at once.
        node_bytes: what leaves the node that sends most; 0 where there is but one.
        memory: bytes by category at that time.
        reserved_bytes: the most that torch's allocator takes from the device for them.
        context_bytes: what the process takes of a GPU beside that, modelled; 0 on a CPU.
        provenance: how many numbers are measured, imported and modelled.
        waits: seconds that computation stands still for each kind of collective.
        causes: the same seconds by cause: the link, memory, data dependence.
        exposures: the collectives that are exposed most, and why; at most MOST_EXPOSED.
        events: what runs when: name of the node, stream, start, end and kind, times in seconds.
        memory_curve: bytes that tensors hold from each time on.
        stages: what each stage of a pipeline takes; none if there is no pipeline.
        idle: the share of the step in which each rank of the pipeline waits for others.
        picture: what a page draws of the step.
        work: what a step amounts to, None if it was not asked for.
        at_rates: seconds of a step if links were so many times as fast: pairs of both.
    """

    step_s: Duration
    update_s: Seconds
    compute_s: Seconds
    communication_s: Seconds
    exposed_s: Seconds
    peak_bytes: Positive
    node_bytes: Count = 0
    memory: Mapping[str, Count] = field(default_factory=dict)
    reserved_bytes: Count = 0
    context_bytes: Count = 0
    provenance: Mapping[str, Count] = field(default_factory=dict)
    waits: Mapping[str, Seconds] = field(default_factory=dict)
    causes: Mapping[str, float] = field(default_factory=dict)
    exposures: tuple[Exposure, ...] = ()
    events: tuple[TimelineEvent, ...] = field(default=(), repr=False)
    memory_curve: tuple[tuple[Seconds, Count], ...] = field(default=(), repr=False)
    stages: tuple[StagePrediction, ...] = ()
    idle: tuple[float, ...] = ()
    report_data: ReportData = field(default_factory=ReportData, repr=False)
    work: Work | None = None
    at_rates: tuple[tuple[Rate, Seconds], ...] = ()

    @property
    def bubble(self) -> float:
        """The share of the step that ranks of a pipeline wait for others, all together."""
        return sum(self.idle) / len(self.idle) if self.idle else 0.0

    @property
    def needed_bytes(self) -> int:
        """What a cap is held against: bytes reserved on a GPU, those of tensors on a CPU."""
        return self.reserved_bytes if self.context_bytes else self.peak_bytes


@dataclass(frozen=True)
class RunnerUp:
    """A plan that was not chosen, what it was predicted to cost, and why it lost.

    Attributes:
        name: in a few words.
        step_s: seconds of a step.
        peak_bytes: the most bytes that tensors hold at once.
        why: it lost.
        needed_bytes: what a cap is held against.
        at_rates: as of a prediction, of those that were priced so.
    """

    name: str
    step_s: Seconds
    peak_bytes: Count
    why: str
    needed_bytes: Count = 0
    at_rates: tuple[tuple[Rate, Seconds], ...] = ()

    @staticmethod
    def of(name: str, cost: Prediction, why: str) -> RunnerUp:
        """Of a plan that was predicted."""
        return RunnerUp(name, cost.step_s, cost.peak_bytes, why, cost.needed_bytes, cost.at_rates)


def slower(other: Prediction, best: Prediction) -> str:
    """By how much a plan is slower than the best, and what of."""
    parts = {
        "to compute": other.compute_s - best.compute_s,
        "to wait for messages": other.exposed_s - best.exposed_s,
        "for the optimizer's step": other.update_s - best.update_s,
        "idle in the pipeline": other.bubble * other.step_s - best.bubble * best.step_s,
    }
    total = other.step_s - best.step_s
    shown = [(name, s) for name, s in parts.items() if abs(s) > 0.1 * abs(total)]
    texts = [f"{s * 1e3:+.2f} ms {name}" for name, s in sorted(shown, key=lambda part: -part[1])]
    return f"{total * 1e3:.2f} ms slower" + (f": {', '.join(texts)}" if texts else "")
