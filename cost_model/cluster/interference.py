"""`Slowdown`: how much compute and collectives slow each other down while both run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.common.documents import Amount, Positive
from autopar.cost_model.cost import ClusterError, check_provenance


@dataclass(frozen=True)
class Slowdown:
    """What running beside each other costs compute and collectives.

    Attributes:
        bytes: message sizes at which it was measured, ascending.
        compute: at each, how many times longer compute takes while such collectives run; >= 1.
        communication: how many times longer these take while there is compute; >= 1.
        issue_s: seconds that issuing a collective keeps the computing thread.
        wait_s: seconds that waiting for one that has ended keeps it.
        provenance: where this comes from.
        late_s: by how many seconds a message between two ranks comes later than when nobody
            computes, however large: where ranks share cores, who waits for it has to get one.
    """

    bytes: tuple[Positive, ...]
    compute: tuple[Amount, ...]
    communication: tuple[Amount, ...]
    issue_s: Amount
    wait_s: Amount
    provenance: str
    late_s: Amount = 0.0

    def __post_init__(self) -> None:
        check_provenance(self.provenance)
        factors = (*self.compute, *self.communication)
        if not len(self.bytes) == len(self.compute) == len(self.communication) > 0:
            raise ClusterError("a slowdown has two factors for each size, and one size at least")
        if not all(math.isfinite(f) and f >= 1 for f in factors):
            raise ClusterError(f"factors of slowdown are numbers from 1, not {factors}")
        if min(self.issue_s, self.wait_s, self.late_s) < 0 or list(self.bytes) != sorted(
            set(self.bytes)
        ):
            raise ClusterError("a slowdown has ascending sizes, and times that are not negative")

    @classmethod
    def modelled(cls, compute: float, communication: float, why: str) -> Slowdown:
        """The same factors at every size, and calls that take no time."""
        return cls((1,), (compute,), (communication,), 0.0, 0.0, f"modelled by {why}")

    def of_compute(self, nbytes: float) -> float:
        """The factor on compute beside collectives of this size."""
        return _between(self.bytes, self.compute, nbytes)

    def of_communication(self, nbytes: float) -> float:
        """The factor on collectives of this size beside compute."""
        return _between(self.bytes, self.communication, nbytes)


NO_SLOWDOWN = Slowdown.modelled(1.0, 1.0, "nothing that they share")
SHARED_CORES = Slowdown.modelled(2.0, 2.0, "equal parts of the cores for both")
SHARED_GPU = Slowdown.modelled(
    1.13, 1.0, "13 % slower kernels beside NCCL's (vTrain's and Galvatron's default)"
)


def _between(sizes: Sequence[int], factors: Sequence[float], nbytes: float) -> float:
    """Linear in the logarithm of the size, constant outside of what was measured."""
    right = bisect_right(sizes, nbytes)
    if right == 0 or right == len(sizes):
        return factors[max(0, right - 1)]
    low, high = sizes[right - 1], sizes[right]
    part = math.log(nbytes / low) / math.log(high / low)
    return factors[right - 1] + part * (factors[right] - factors[right - 1])
