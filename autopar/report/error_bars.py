"""`PredictionInterval`: the ratio of measured to predicted values in past validations.

Each bar holds nine in ten of the cases kept in benchmarks/results (their quantiles of 5 and 95 %),
and what was predicted; a test computes them anew from there. Of figures that are modelled,
published runs tell; of figures measured on the machine at hand, steps that were trained there.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.plan.prediction import Prediction


@dataclass(frozen=True)
class PredictionInterval:
    """The interval of nine in ten measured cases, relative to the prediction.

    Attributes:
        low: what came true, by what was predicted, at the lower end.
        high: the same at the upper end.
        source: of which cases.
    """

    low: float
    high: float
    source: str

    def of(self, value: float) -> tuple[float, float]:
        """Bounds of a predicted value."""
        return value * self.low, value * self.high

    def of_rate(self, value: float) -> tuple[float, float]:
        """Bounds of a rate, which is inverse to the predicted value."""
        return value / self.high, value / self.low


STEPS = {
    "measured": PredictionInterval(0.87, 1.40, "260 plans of 7 models trained on CPUs"),
    "modelled": PredictionInterval(
        0.94, 1.26, "19 published runs of Megatron-LM on A100s and H100s"
    ),
}
"""Intervals of step seconds, by the source of most figures."""

MEMORY = {
    "measured": PredictionInterval(1.0, 1.0, "408 plans counted on CPUs"),
    "modelled": PredictionInterval(0.977, 1.0, "8 published figures of activations alone"),
}
"""Intervals of bytes: measured on a CPU, where allocations are counted; modelled for a GPU."""


def step_interval(p: Prediction) -> PredictionInterval:
    """Interval of the seconds of a step."""
    known = p.provenance.get("measured", 0)
    return STEPS["measured" if 2 * known > sum(p.provenance.values()) else "modelled"]


def memory_interval(p: Prediction) -> PredictionInterval:
    """Interval of the bytes of a rank."""
    return MEMORY["modelled" if p.context_bytes else "measured"]
