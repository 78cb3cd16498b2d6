"""`Storage`: times of reads and writes of a rank's storage, and the operators that use it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.cost_model.cost import ClusterError, Cost
from autopar.cost_model.curves.curve import Curve

LANE = "storage"
"""Stream of transfers in a simulated step."""

WRITE, READ = "storage write", "storage read"
_TRANSFERS = {"offload": WRITE, "prefetch": READ, "fetch": READ}
_WAITS = ("offloaded", "prefetched", "fetched")


@dataclass(frozen=True)
class Storage:
    """Times of transfers past the page cache while all ranks of a node use their files.

    Attributes:
        write: seconds of a write by bytes.
        read: seconds of a read by bytes.
        provenance: origin of both.
        folder: folder that was measured; "" for none.
        on_compute: factor on the time of compute beside transfers, at least 1.
        beside_compute: factor on the time of transfers beside compute, at least 1.
    """

    write: Curve
    read: Curve
    provenance: str
    folder: str = ""
    on_compute: float = 1.0
    beside_compute: float = 1.0

    def __post_init__(self) -> None:
        factors = self.on_compute, self.beside_compute
        if not all(math.isfinite(factor) and factor >= 1.0 for factor in factors):
            raise ClusterError(f"factors of slowdown are numbers from 1, not {factors}")

    def seconds(self, kind: str, nbytes: int) -> Cost:
        """The time of a transfer, of kind `WRITE` or `READ`."""
        curve = self.write if kind == WRITE else self.read
        return Cost(curve(nbytes), self.provenance)


UNMEASURED = Storage(
    Curve((1 << 20, 1 << 26), (1.2e-3, 6.8e-2)),
    Curve((1 << 20, 1 << 26), (1.2e-3, 6.8e-2)),
    "modelled by 1 GB/s, because storage was not measured",
)


def transfer_of(node: fx.Node) -> str | None:
    """The kind of transfer that a node begins; None for other nodes."""
    return _TRANSFERS.get(_own_name(node))


def is_storage_wait(node: fx.Node) -> bool:
    """Whether a node waits for a transfer, which its first argument began."""
    return _own_name(node) in _WAITS


def is_stored(node: fx.Node) -> bool:
    """Whether a node is a parameter that lies on storage: it is read from there."""
    reads = (transfer_of(user) == READ for user in node.users)
    return node.op == "placeholder" and any(reads)


def _own_name(node: fx.Node) -> str:
    target: Any = node.target
    own = getattr(target, "namespace", None) == "autopar"
    return target.name().partition("::")[2] if own else ""
