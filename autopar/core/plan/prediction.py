"""`Prediction`: predicted cost and work of a plan. `RunnerUp`: cost of a plan that lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.core.common.documents import Amount, Count, Duration, Positive, Rate, Seconds
from autopar.core.exposure import Exposure
from autopar.core.plan.report_data import ReportData, TimelineEvent
from autopar.formatting import duration

MOST_EXPOSED = 20
"""Number of exposed collectives that a plan stores."""

RUNNERS_UP = 12
"""Number of other plans that a plan stores."""

NARROW = ("bfloat16", "float16")
"""Dtypes whose products run on tensor cores."""

WIDE_SHARE = 0.1
"""Share of the FLOPs in float32 from which a plan says so."""


@dataclass(frozen=True)
class Work:
    """Work of one step of all ranks.

    Attributes:
        rows: rows of the global batch.
        tokens: elements of the first two-dimensional integer input; 0 without one.
        flops: floating-point operations of matrix products, convolutions and attention, forward
            and backward, without recomputation; causal attention counts like full attention.
        peak: peak FLOP/s of one rank's device; 0 if unknown.
        dtype: dtype of the products.
        wide_flops: those of `flops` that run in float32 though `dtype` is narrower.
        wide_peak: peak FLOP/s of one rank's device in float32; 0 if unknown.
    """

    rows: Count
    tokens: Count
    flops: Amount
    peak: Amount
    dtype: str
    wide_flops: Amount = 0.0
    wide_peak: Amount = 0.0

    def note(self, ranks: int) -> str | None:
        """A note on products in float32 where others are narrower; None if they are few.

        Autocast leaves some products in the dtype of their weights, such as those of experts.
        """
        if self.wide_flops < WIDE_SHARE * self.flops or not self.wide_peak:
            return None
        took = duration(self.wide_flops / ranks / self.wide_peak)
        return (
            f"{self.wide_flops / self.flops:.0%} of the FLOPs run in float32, where autocast keeps "
            f"the dtype of the weights: {took} of a step at the peak of the device. Parameters in "
            f"{self.dtype} run them on tensor cores"
        )

    def utilisation(self, step_s: float, ranks: int) -> float:
        """Fraction of the peak FLOP/s of all ranks; 0 if unknown."""
        return self.flops / (step_s * ranks * self.peak) if self.peak and step_s else 0.0


@dataclass(frozen=True)
class StagePrediction:
    """Predicted cost of one pipeline stage.

    Attributes:
        parameter_bytes: bytes of unsharded parameters.
        forward_s: seconds of the forward of one micro-batch.
        backward_s: seconds of the backward of one micro-batch.
        sent_bytes: bytes sent to the next stage for one micro-batch.
        returned_bytes: bytes sent to the previous stage for one micro-batch.
        saved_bytes: bytes saved between forward and backward of one micro-batch.
        in_flight: maximum number of micro-batches in flight.
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
    """Predicted cost of one step on the most loaded rank.

    In a pipeline, memory is of the rank with the highest peak.

    Attributes:
        step_s: seconds of forward, backward and the optimizer's step.
        update_s: seconds of the optimizer's step.
        compute_s: seconds of computation.
        communication_s: seconds with a collective in flight.
        exposed_s: seconds of stalls for collectives.
        peak_bytes: peak bytes of tensors.
        node_bytes: bytes that leave the node that sends most; 0 for one node.
        memory: bytes by category at the peak.
        reserved_bytes: peak bytes reserved by torch's allocator.
        context_bytes: modelled bytes of the CUDA context; 0 on a CPU.
        host_bytes: pinned bytes of host memory that a rank takes.
        provenance: number of measured, imported and modelled figures.
        waits: seconds of stalls, by kind of collective.
        causes: seconds of stalls, by cause: link, memory, data dependence.
        exposures: most exposed collectives and their causes, at most MOST_EXPOSED.
        events: timeline of the step.
        memory_curve: times in seconds, and bytes of tensors from each time on.
        stages: cost of each pipeline stage; empty without a pipeline.
        idle: fraction of the step that each pipeline rank waits for others.
        report_data: data of the HTML report.
        work: rows, tokens and FLOPs of a step; None if unknown.
        at_rates: factors of link bandwidth, and step time in seconds at each.
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
    host_bytes: Count = 0
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
    def idle_s(self) -> float:
        """Seconds in which the rank has nothing to do: it waits for other stages or its host.

        With computation, waits for messages and the optimizer's step they make up the step.
        """
        return max(0.0, self.step_s - self.compute_s - self.exposed_s - self.update_s)

    @property
    def bubble(self) -> float:
        """Mean fraction of the step that pipeline ranks wait for others."""
        return sum(self.idle) / len(self.idle) if self.idle else 0.0

    @property
    def needed_bytes(self) -> int:
        """Bytes to compare with a memory cap: reserved bytes on a GPU, tensor bytes on a CPU."""
        # torch's CUDA allocator keeps freed blocks reserved. Blocks of a CPU are freed at once.
        return self.reserved_bytes if self.context_bytes else self.peak_bytes

    def fits(self, cap: int | None) -> bool:
        """Whether a rank needs at most `cap` bytes; None for no cap."""
        return cap is None or self.needed_bytes <= cap


@dataclass(frozen=True)
class RunnerUp:
    """A plan that was not chosen, and its predicted cost.

    Attributes:
        name: short description.
        step_s: seconds of a step.
        peak_bytes: peak bytes of tensors.
        why: reason for the loss.
        needed_bytes: bytes to compare with a memory cap.
        at_rates: factors of link bandwidth, and step time in seconds at each; may be empty.
    """

    name: str
    step_s: Seconds
    peak_bytes: Count
    why: str
    needed_bytes: Count = 0
    at_rates: tuple[tuple[Rate, Seconds], ...] = ()

    @staticmethod
    def of(name: str, cost: Prediction, why: str) -> RunnerUp:
        """The runner-up of a predicted plan."""
        return RunnerUp(name, cost.step_s, cost.peak_bytes, why, cost.needed_bytes, cost.at_rates)


def slower(other: Prediction, best: Prediction) -> str:
    """Text of a plan's extra time over the best plan, by part of the step."""
    parts = {
        "to compute": other.compute_s - best.compute_s,
        "to wait for messages": other.exposed_s - best.exposed_s,
        "for the optimizer's step": other.update_s - best.update_s,
        "idle": other.idle_s - best.idle_s,
    }
    total = other.step_s - best.step_s
    shown = [(name, s) for name, s in parts.items() if abs(s) > 0.1 * abs(total)]
    texts = [f"{_signed(s)} {name}" for name, s in sorted(shown, key=lambda part: -part[1])]
    word = "slower" if total >= 0.0 else "faster"
    return f"{duration(abs(total))} {word}" + (f": {', '.join(texts)}" if texts else "")


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "") + duration(seconds)
