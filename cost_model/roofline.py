"""`Roofline`: the modelled time of an operator that was not timed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# name: (FLOP/s in 4 byte floats, in 2 byte floats, bytes/s). Vendors' data sheets, dense; the
# 4 byte figure is without TF32.
_DEVICES = {
    "H200": (67e12, 989e12, 4.8e12),
    "H100": (67e12, 989e12, 3.35e12),
    "A100": (19.5e12, 312e12, 1.55e12),
    "V100": (15.7e12, 125e12, 0.9e12),
    "4090": (82.6e12, 165e12, 1.0e12),
}
_CPU_THREAD = (4e10, 4e10, 8e9)  # round figures of one AVX2 core
_EFFICIENCY = 0.6  # of a data sheet, that a large operator reaches
_LAUNCH_S = {"cpu": 5e-6, "cuda": 8e-6}
_LARGE_S = 1e-4  # operators at least this slow tell the rates


@dataclass(frozen=True)
class Roofline:
    """seconds = launch + max(floating-point operations / rate, bytes / rate).

    Williams, Waterman & Patterson 2009.

    Attributes:
        launch_s: seconds that any operator takes.
        flops_per_s: operations per second in floats of 4 bytes and more.
        half_flops_per_s: the same in floats of 2 bytes.
        bytes_per_s: bytes per second read and written.
        source: where these figures come from.
    """

    launch_s: float
    flops_per_s: float
    half_flops_per_s: float
    bytes_per_s: float
    source: str

    def seconds(self, flops: float, nbytes: float, item_bytes: int = 4) -> float:
        """The time of an operator of so many operations and bytes."""
        rate = self.half_flops_per_s if item_bytes <= 2 else self.flops_per_s
        return self.launch_s + max(flops / rate, nbytes / self.bytes_per_s)

    @classmethod
    def default(cls, device: str, threads: int) -> Roofline:
        """The figures of a device by its name ("cpu" or a GPU's), none of them measured here."""
        for name, (full, half, bandwidth) in _DEVICES.items():
            if name in device:
                part = _EFFICIENCY
                source = f"roofline of {name}'s data sheet x {part}"
                return cls(_LAUNCH_S["cuda"], part * full, part * half, part * bandwidth, source)
        if device.startswith("cpu"):
            full, half, bandwidth = (threads * figure for figure in _CPU_THREAD)
            return cls(_LAUNCH_S["cpu"], full, half, bandwidth, "roofline of an average core")
        return cls(_LAUNCH_S["cuda"], 1e13, 1e14, 1e12, f"roofline of any GPU, {device} unknown")

    def fitted(self, timed: Iterable[tuple[float, float, float]], launch_s: float) -> Roofline:
        """These figures replaced by what operators reached, wherever some were large enough.

        Args:
            timed: floating-point operations, bytes and seconds of each.
            launch_s: the time of an operator that does nothing.
        """
        large = [row for row in timed if row[2] >= _LARGE_S]
        products = [row for row in large if row[0] > 0]
        others = [row for row in large if row[0] == 0]
        rate, bandwidth = self.flops_per_s, self.bytes_per_s
        if products:
            rate = sum(f for f, _, _ in products) / sum(s for _, _, s in products)
        if others:
            bandwidth = sum(b for _, b, _ in others) / sum(s for _, _, s in others)
        scale = rate / self.flops_per_s
        half = self.half_flops_per_s * scale
        return Roofline(launch_s, rate, half, bandwidth, "roofline fitted to timed operators")
