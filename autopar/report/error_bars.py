"""`PredictionInterval`: ratio of measured to predicted values in past validations.

Intervals span the 5 and 95 % quantiles of the cases in benchmarks/results, extended to include 1; a
test recomputes them. Intervals of modelled figures come from published runs, and intervals of
measured figures from plans trained on the measured machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.core.plan.prediction import Prediction


@dataclass(frozen=True)
class PredictionInterval:
    """Bounds of the ratio of measured to predicted value in 90 % of the cases of `source`."""

    low: float
    high: float
    source: str

    def of(self, value: float) -> tuple[float, float]:
        """Bounds of a predicted value."""
        return value * self.low, value * self.high

    def of_rate(self, value: float) -> tuple[float, float]:
        """Bounds of a rate, which is inversely proportional to the predicted value."""
        return value / self.high, value / self.low


_PUBLISHED = "199 published runs of Megatron and FSDP on A100s and H100s"
_RESERVED = (
    "16 published figures (8 of activations, 8 of what torch reserved), without NCCL's buffers and "
    "the CUDA context"
)
STEPS = {
    "measured": PredictionInterval(0.87, 1.40, "260 plans of 7 models trained on CPUs"),
    "modelled": PredictionInterval(0.93, 1.25, _PUBLISHED),
}
"""Intervals of step time, by the source of most figures."""

MEMORY = {
    "measured": PredictionInterval(1.0, 1.0, "408 plans counted on CPUs"),
    "modelled": PredictionInterval(0.976, 1.158, _RESERVED),
}
"""Intervals of bytes: "measured" on a CPU, where allocations are counted; "modelled" on a GPU."""


def step_interval(p: Prediction) -> PredictionInterval:
    """Interval of the step time."""
    known = p.provenance.get("measured", 0)
    return STEPS["measured" if 2 * known > sum(p.provenance.values()) else "modelled"]


def memory_interval(p: Prediction) -> PredictionInterval:
    """Interval of a rank's memory."""
    return MEMORY["modelled" if p.context_bytes else "measured"]
