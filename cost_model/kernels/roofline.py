"""`Roofline`: the modelled time of an operator that was not timed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost_model.kernels.attention_speed import AttentionSpeed
from autopar.cost_model.kernels.gemm_efficiency import GemmWaves, Shape, gemm_waves_of
from autopar.cost_model.topology.devices import find_device

_CPU_THREAD = (4e10, 4e10, 8e9)  # round figures of one AVX2 core

STREAMED = {"A100": 0.78, "": 0.9}
"""Share of a data sheet's memory bandwidth that large pointwise operators reach, by GPU.

Copies through torch moved 4.3 of 4.8 TB/s on an H200 (8.6 GB, twice, October and November 2026).
Additions and copies: 3.06 and 3.00 of 3.35 TB/s on an H100, 1.5 of 1.94 on an A100
(github.com/gpu004/napkin-math-gpu)."""

ROW_WISE = 0.76 / 0.9
"""Rate of norms and softmaxes in eager mode over that of pointwise operators: layer norms of torch
reach 2.42 to 2.70 of an H100's 3.35 TB/s (github.com/pauliano22/triton-gpu-kernels)."""

LAUNCH_S = {"cpu": 5e-6, "cuda": 3e-6}
"""Seconds of an empty operator. On a GPU kernels are queued, so only the time between two kernels
remains: the first drains and the second fills the processors."""

NEWEST: Mapping[str, str] = {}
"""Software that nobody named."""

_LEAST_LAUNCHES = 2.0  # least time of an operator that tells a rate, in launch times


@dataclass(frozen=True)
class Rates:
    """Work per second by the size of the work: larger operators are faster.

    `sizes` are floating-point operations or bytes, ascending; `rates` are per second.
    """

    sizes: tuple[float, ...]
    rates: tuple[float, ...]

    def seconds(self, size: float) -> float:
        """Seconds of work of a size: rates are log-log interpolated, constant outside."""
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
    def of(cls, operators: Iterable[tuple[float, float]]) -> Rates | None:
        """The rates of operators from their (work, seconds); None without any.

        Operators with sizes within a factor of two are merged.
        """
        totals: dict[int, tuple[float, float]] = {}
        for size, seconds in operators:
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
        launch_s: seconds of an empty operator.
        products: floating-point operations per second, in floats of 4 bytes and more.
        half: speedup of floats of 2 bytes.
        quarter: speedup of floats of 1 byte.
        streams: bytes per second read and written.
        waves: share of `products` that a matrix product reaches by its shape; None where `products`
            depends on the size.
        attention: rates of flash attention; None where it is priced as products are.
    """

    launch_s: float
    products: Rates
    half: float
    quarter: float
    streams: Rates
    source: str
    waves: GemmWaves | None = None
    attention: AttentionSpeed | None = None

    def seconds(
        self, flops: float, nbytes: float, item_bytes: int = 4, shape: Shape | None = None
    ) -> float:
        """Seconds of an operator; `shape` is that of a matrix product."""
        faster = {1: self.quarter, 2: self.half}.get(item_bytes, 1.0)
        product_s = self.products.seconds(flops) / faster
        if (waves := self.waves) is not None:
            if shape is None:
                product_s /= waves.full
            else:
                product_s = min(
                    product_s / share
                    + self.streams.seconds(waves.stored_bytes(shape, split, item_bytes))
                    for split, share in waves.shares(shape).items()
                )
        return self.launch_s + max(product_s, self.streams.seconds(nbytes))

    @classmethod
    def default(
        cls,
        device: str,
        threads: int,
        versions: Mapping[str, str] = NEWEST,
        pace: float = 1.0,
    ) -> Roofline:
        """Published figures of a device by its name, "cpu" or a GPU's.

        Of a GPU's software, `versions` may name "cuda" and the kernel of "attention". Its products
        take `pace` times as long.
        """
        if device.startswith("cpu"):
            full, half, bandwidth = (threads * figure for figure in _CPU_THREAD)
            products, streams = Rates((1.0,), (full,)), Rates((1.0,), (bandwidth,))
            source = "roofline of an average core"
            faster = half / full, half / full
            return cls(LAUNCH_S["cpu"], products, *faster, streams, source)
        full, half, quarter, bandwidth = 1e13, 1e14, 1e14, 1e12
        streamed = next(share for name, share in STREAMED.items() if name in device)
        source, waves = f"roofline of any GPU, {device} unknown", gemm_waves_of(device, versions)
        attention = None
        if (found := find_device(device)) is not None and waves is not None:
            full = found.flops_per_s.get("float32", found.flops_per_s["float16"])
            half = found.flops_per_s.get("bfloat16", found.flops_per_s["float16"])
            quarter = found.flops_per_s.get("float8_e4m3fn", half)
            full, half, quarter = full / pace, half / pace, quarter / pace
            bandwidth = found.memory_bytes_per_s
            source = f"roofline of {found.name}'s data sheet, products in waves of tiles"
            attention = AttentionSpeed.of(device, half, versions)
        products, streams = Rates((1.0,), (full,)), Rates((1.0,), (streamed * bandwidth,))
        faster = half / full, quarter / full
        return cls(LAUNCH_S["cuda"], products, *faster, streams, source, waves, attention)

    def fitted(self, timed: Sequence[tuple[float, float, float]], launch_s: float) -> Roofline:
        """The roofline with rates of timed operators, where some were large enough.

        `timed` has the floating-point operations, bytes and seconds of each operator. `launch_s`
        are the seconds of an empty one.
        """
        large = [(f, b, s - launch_s) for f, b, s in timed if s > _LEAST_LAUNCHES * launch_s]
        return replace(
            self,
            launch_s=launch_s,
            products=Rates.of((f, s) for f, _, s in large if f > 0) or self.products,
            streams=Rates.of((b, s) for f, b, s in large if f == 0 and b > 0) or self.streams,
            source="roofline fitted to timed operators, by their sizes",
            waves=None,
            attention=None,
        )
