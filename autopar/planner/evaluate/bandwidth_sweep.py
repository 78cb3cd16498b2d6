"""What a step would take if links were slower or faster, so that a plan can say what would win."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cost import Cost
from autopar.cost_model.group_shape import GroupShape
from autopar.planner.evaluate.candidate import CandidateConfig
from autopar.planner.evaluate.evaluator import Evaluator

RATES = (0.25, 0.5, 2.0, 4.0)
"""Times as many bytes in a second, over every link; what an empty message takes stays."""


@dataclass(frozen=True)
class ScaledBandwidth(Cluster):
    """A cluster whose links carry `rate` times as many bytes in a second as those of `known`."""

    known: Cluster | None = None
    rate: float = 1.0

    @classmethod
    def of(cls, known: Cluster, rate: float) -> ScaledBandwidth:
        """Links so many times as fast as those of a cluster."""
        own = {f.name: getattr(known, f.name) for f in fields(Cluster)}
        return cls(**own, known=known, rate=rate)

    def seconds(
        self, collective: str, nbytes: float, shape: GroupShape, dtype: str = "float32"
    ) -> Cost:
        """The time of one collective, as of a cluster."""
        assert self.known is not None
        whole = self.known.seconds(collective, nbytes, shape, dtype)
        empty = min(whole.seconds, self.known.seconds(collective, 1, shape, dtype).seconds)
        return replace(whole, seconds=empty + (whole.seconds - empty) / self.rate)


def sweep_bandwidth(
    evaluator: Evaluator, choice: CandidateConfig
) -> tuple[tuple[float, float], ...]:
    """What a step of a choice takes over links of each of `RATES`: pairs of a rate and seconds."""
    clusters = [ScaledBandwidth.of(evaluator.setup.cluster, rate) for rate in RATES]
    return tuple(zip(RATES, evaluator.seconds(choice, clusters), strict=True))
