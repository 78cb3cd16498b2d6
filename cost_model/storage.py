"""`Storage`: times of transfers to a lower level of memory, and the operators that begin them.

A lower level is files on storage, or host memory under a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.core.ir.messages import FROM_HOST, READ, TO_HOST, WRITE
from autopar.cost_model.cost import ClusterError, Cost
from autopar.cost_model.curves.curve import Curve

DOWN = (WRITE, TO_HOST)
"""Kinds of transfers to a lower level; others come back."""

COPIES = (TO_HOST, FROM_HOST)
"""Kinds of transfers between a GPU and host memory, which run both ways at once."""

LANES = {WRITE: "storage", READ: "storage", TO_HOST: "to host", FROM_HOST: "from host"}
"""Stream of a simulated step for each kind of transfer; its transfers follow one another."""

UNKNOWN_LINK_BYTES_PER_S = 16e9
"""Nominal bytes per second of PCIe 3.0 x16, for devices whose link is unknown."""

_SIZES = tuple(1 << power for power in range(12, 31, 2))

# nvbandwidth on 8 x A100-SXM4-80GB, whose links are PCIe 4.0 x16: 24.8 GB/s either way, 24 and
# 11 GB/s both ways at once (forums.developer.nvidia.com/t/352186).
_SUSTAINED, _BOTH_WAYS = 24.8 / 32, round((24.8 + 24.8) / (24 + 11), 2)
_COPY_S = 1e-5  # launch and start of a copy, about as of a kernel


@dataclass(frozen=True)
class Storage:
    """Times of transfers to and from a lower level of memory: files, or host memory under a GPU.

    Those of files are past the page cache, while all ranks of a node use their files. Those of
    host memory are of pinned memory.

    Attributes:
        write: seconds of a transfer to the lower level by bytes.
        read: seconds of a transfer from it by bytes.
        provenance: origin of both.
        folder: folder that was measured; "" for none.
        on_compute: factor on the time of compute beside transfers, at least 1.
        beside_compute: factor on the time of transfers beside compute, at least 1.
        both_ways: factor on the time of a copy while another moves the other way, at least 1.
    """

    write: Curve
    read: Curve
    provenance: str
    folder: str = ""
    on_compute: float = 1.0
    beside_compute: float = 1.0
    both_ways: float = 1.0

    def __post_init__(self) -> None:
        factors = self.on_compute, self.beside_compute, self.both_ways
        if not all(math.isfinite(factor) and factor >= 1.0 for factor in factors):
            raise ClusterError(f"factors of slowdown are numbers from 1, not {factors}")

    def seconds(self, kind: str, nbytes: int) -> Cost:
        """The time of a transfer alone, whose kind is a key of `LANES`."""
        curve = self.write if kind in DOWN else self.read
        return Cost(curve(nbytes), self.provenance)


UNMEASURED = Storage(
    Curve((1 << 20, 1 << 26), (1.2e-3, 6.8e-2)),
    Curve((1 << 20, 1 << 26), (1.2e-3, 6.8e-2)),
    "modelled by 1 GB/s, because storage was not measured",
)


def copies_over(link_bytes_per_s: float | None) -> Storage:
    """Modelled copies between a GPU and host memory, over a link of this nominal rate.

    The rate is in bytes per second one way; None if unknown.
    """
    rate = _SUSTAINED * (link_bytes_per_s or UNKNOWN_LINK_BYTES_PER_S)
    curve = Curve(_SIZES, tuple(_COPY_S + size / rate for size in _SIZES))
    origin = f"modelled by {rate / 1e9:.3g} GB/s, because host copies were not measured"
    if link_bytes_per_s is None:
        origin = "modelled by PCIe 3.0 x16, because the device is unknown"
    return Storage(curve, curve, origin, both_ways=_BOTH_WAYS)


def transfer_times(
    files: Storage | None, host: Storage | None, link_bytes_per_s: float | None, *, on_gpu: bool
) -> Mapping[str, Storage]:
    """Times of each kind of transfer; those that were not measured are modelled.

    A value that a GPU keeps in a file crosses host memory too.
    """
    host, files = host or copies_over(link_bytes_per_s), files or UNMEASURED
    files = _through(files, host) if on_gpu else files
    return {kind: host if kind in COPIES else files for kind in LANES}


def _through(files: Storage, host: Storage) -> Storage:
    """Times of files whose values cross host memory: of a copy and a file's transfer in turn.

    Threads that move files do not slow a GPU down, but copies do.
    """
    origins = sorted({files.provenance, host.provenance}, reverse=True)  # modelled, then measured
    return replace(
        host,
        write=_sum(files.write, host.write),
        read=_sum(files.read, host.read),
        provenance="; ".join(origins),
        folder=files.folder,
    )


def _sum(one: Curve, other: Curve) -> Curve:
    sizes = sorted({*one.bytes, *other.bytes})
    return Curve.smooth(sizes, [one(size) + other(size) for size in sizes])
