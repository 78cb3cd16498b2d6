"""`Roofline`: the modelled time of an operator that was not timed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.cost_model.kernels.gemm_efficiency import GemmWaves, Shape, gemm_waves_of
from autopar.cost_model.topology.devices import find_device

_CPU_THREAD = (4e10, 4e10, 8e9)  # round figures of one AVX2 core

STREAMED = 0.9
"""Of a data sheet's memory bandwidth, what large operators reach on a GPU: copies through torch
moved 4.3 of 4.8 TB/s on an H200 (8.6 GB, twice, October and November 2026)."""

LAUNCH_S = {"cpu": 5e-6, "cuda": 3e-6}
"""Of an operator that does nothing. On a GPU kernels are queued: what is left between two of them
is that the first drains and the second fills the processors."""

_TOLD = 2.0  # an operator tells a rate if it takes so many times longer than its launch


@dataclass(frozen=True)
class Rates:
    """Work per second by the size of the work: larger operators do better.

    Attributes:
        sizes: floating-point operations, or bytes, ascending.
        rates: of them per second, at each size.
    """

    sizes: tuple[float, ...]
    rates: tuple[float, ...]

    def seconds(self, size: float) -> float:
        """Time for so much work: rates are log-log interpolated, constant outside."""
        if size <= 0:
            return 0.0
        right = bisect_right(self.sizes, size)
        if right == 0 or right == len(self.sizes):
            return size / self.rates[max(0, right - 1)]
        low, high = self.sizes[right - 1], self.sizes[right]
        part = math.log(size / low) / math.log(high / low)
        rate = self.rates[right - 1] ** (1 - part) * self.rates[right] ** part
        return size / rate

    @classmethod
    def of(cls, done: Iterable[tuple[float, float]]) -> Rates | None:
        """The rates reached by operators of so much work and seconds, None if there are none.

        Operators whose sizes are within a factor of two count together.
        """
        totals: dict[int, tuple[float, float]] = {}
        for size, seconds in done:
            bin_ = round(math.log2(size))
            before = totals.get(bin_, (0.0, 0.0))
            totals[bin_] = (before[0] + size, before[1] + seconds)
        if not totals:
            return None
        bins = sorted(totals)
        return cls(tuple(2.0**b for b in bins), tuple(totals[b][0] / totals[b][1] for b in bins))


@dataclass(frozen=True)
class Roofline:
    """seconds = launch + max(floating-point operations / rate, bytes / rate).

    Williams, Waterman & Patterson 2009, with rates that depend on the size of the operator.

    Attributes:
        launch_s: seconds that any operator takes.
        products: floating-point operations per second, in floats of 4 bytes and more.
        half: how many times faster these are in floats of 2 bytes.
        streams: bytes per second read and written.
        source: where these figures come from.
        waves: how much of that a matrix product reaches by its shape; None where sizes tell.
    """

    launch_s: float
    products: Rates
    half: float
    streams: Rates
    source: str
    waves: GemmWaves | None = None

    def seconds(
        self, flops: float, nbytes: float, item_bytes: int = 4, shape: Shape | None = None
    ) -> float:
        """The time of an operator of so many operations and bytes; a matrix product's shape."""
        faster = self.half if item_bytes <= 2 else 1.0
        if self.waves is not None:
            faster *= self.waves.share(shape) if shape is not None else self.waves.full
        return self.launch_s + max(
            self.products.seconds(flops) / faster, self.streams.seconds(nbytes)
        )

    @classmethod
    def default(cls, device: str, threads: int) -> Roofline:
        """The figures of a device by its name ("cpu" or a GPU's), none of them measured here."""
        if device.startswith("cpu"):
            full, half, bandwidth = (threads * figure for figure in _CPU_THREAD)
            products, streams = Rates((1.0,), (full,)), Rates((1.0,), (bandwidth,))
            source = "roofline of an average core"
            return cls(LAUNCH_S["cpu"], products, half / full, streams, source)
        full, half, bandwidth = 1e13, 1e14, 1e12
        source, waves = f"roofline of any GPU, {device} unknown", gemm_waves_of(device)
        if (found := find_device(device)) is not None and waves is not None:
            full = found.flops_per_s["float32"]
            half = found.flops_per_s.get("bfloat16", found.flops_per_s["float16"])
            bandwidth = found.memory_bytes_per_s
            source = f"roofline of {found.name}'s data sheet, products in waves of tiles"
        products, streams = Rates((1.0,), (full,)), Rates((1.0,), (STREAMED * bandwidth,))
        return cls(LAUNCH_S["cuda"], products, half / full, streams, source, waves)

    def fitted(self, timed: Sequence[tuple[float, float, float]], launch_s: float) -> Roofline:
        """These figures replaced by what operators reached, wherever some were large enough.

        Args:
            timed: floating-point operations, bytes and seconds of each.
            launch_s: the time of an operator that does nothing.
        """
        large = [(f, b, s - launch_s) for f, b, s in timed if s > _TOLD * launch_s]
        return replace(
            self,
            launch_s=launch_s,
            products=Rates.of((f, s) for f, _, s in large if f > 0) or self.products,
            streams=Rates.of((b, s) for f, b, s in large if f == 0 and b > 0) or self.streams,
            source="roofline fitted to timed operators, by their sizes",
            waves=None,
        )
