"""`sweep_bandwidth`: step times of a plan with slower and faster links."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cost import Cost
from autopar.cost_model.group_shape import GroupShape
from autopar.planner.evaluate.candidate import CandidateConfig
from autopar.planner.evaluate.evaluator import Evaluator

RATES = (0.25, 0.5, 2.0, 4.0)
"""Factors of the bandwidth of every link; latency is unchanged."""


@dataclass(frozen=True)
class ScaledBandwidth(Cluster):
    """A cluster with `rate` times the bandwidth of `known`."""

    known: Cluster | None = None
    rate: float = 1.0

    @classmethod
    def of(cls, known: Cluster, rate: float) -> ScaledBandwidth:
        own = {f.name: getattr(known, f.name) for f in fields(Cluster)}
        return cls(**own, known=known, rate=rate)

    def seconds(
        self, collective: str, nbytes: float, shape: GroupShape, dtype: str = "float32"
    ) -> Cost:
        """Cost of one collective; only the part beyond latency is scaled."""
        assert self.known is not None
        whole = self.known.seconds(collective, nbytes, shape, dtype)
        empty = min(whole.seconds, self.known.seconds(collective, 1, shape, dtype).seconds)
        return replace(whole, seconds=empty + (whole.seconds - empty) / self.rate)


def sweep_bandwidth(
    evaluator: Evaluator, choice: CandidateConfig
) -> tuple[tuple[float, float], ...]:
    """Step seconds of a configuration for each factor in `RATES`."""
    clusters = [ScaledBandwidth.of(evaluator.setup.cluster, rate) for rate in RATES]
    return tuple(zip(RATES, evaluator.seconds(choice, clusters), strict=True))
