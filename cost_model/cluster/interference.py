"""`Slowdown`: slowdown of compute and collectives by each other."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.core.common.documents import Amount, Positive
from autopar.cost_model.cost import ClusterError, check_provenance


@dataclass(frozen=True)
class Slowdown:
    """Slowdown of concurrent compute and collectives.

    Attributes:
        bytes: measured message sizes, ascending.
        compute: factor on the time of compute beside collectives of each size, at least 1.
        communication: factor on the time of such collectives beside compute, at least 1.
        issue_s: thread seconds of issuing a collective.
        wait_s: thread seconds of waiting for a collective that has ended.
        provenance: origin of the figures.
        late_s: extra seconds of a message of any size between two ranks while others compute:
            where ranks share cores, the receiver first has to get one.
        record_s: seconds by which an exchange of records between all ranks lengthens compute.
    """

    bytes: tuple[Positive, ...]
    compute: tuple[Amount, ...]
    communication: tuple[Amount, ...]
    issue_s: Amount
    wait_s: Amount
    provenance: str
    late_s: Amount = 0.0
    record_s: Amount = 0.0

    def __post_init__(self) -> None:
        check_provenance(self.provenance)
        factors = (*self.compute, *self.communication)
        if not len(self.bytes) == len(self.compute) == len(self.communication) > 0:
            raise ClusterError("a slowdown has two factors for each size, and one size at least")
        if not all(math.isfinite(f) and f >= 1 for f in factors):
            raise ClusterError(f"factors of slowdown are numbers from 1, not {factors}")
        if min(self.issue_s, self.wait_s, self.late_s, self.record_s) < 0 or list(
            self.bytes
        ) != sorted(set(self.bytes)):
            raise ClusterError("a slowdown has ascending sizes, and times that are not negative")

    @classmethod
    def modelled(cls, compute: float, communication: float, why: str) -> Slowdown:
        """Equal factors at every size, and calls that take no time."""
        return cls((1,), (compute,), (communication,), 0.0, 0.0, f"modelled by {why}")

    def of_compute(self, nbytes: float) -> float:
        return _between(self.bytes, self.compute, nbytes)

    def of_communication(self, nbytes: float) -> float:
        return _between(self.bytes, self.communication, nbytes)


NO_SLOWDOWN = Slowdown.modelled(1.0, 1.0, "nothing that they share")
SHARED_CORES = Slowdown.modelled(2.0, 2.0, "equal parts of the cores for both")
SHARED_GPU = Slowdown.modelled(
    1.13, 1.0, "13 % slower kernels beside NCCL's (vTrain's and Galvatron's default)"
)


def _between(sizes: Sequence[int], factors: Sequence[float], nbytes: float) -> float:
    """Linear in the logarithm of the size, constant outside of the measured sizes."""
    right = bisect_right(sizes, nbytes)
    if right == 0 or right == len(sizes):
        return factors[max(0, right - 1)]
    low, high = sizes[right - 1], sizes[right]
    part = math.log(nbytes / low) / math.log(high / low)
    return factors[right - 1] + part * (factors[right] - factors[right - 1])
