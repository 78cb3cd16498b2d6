"""`Device`: peak rates of an accelerator, and published figures of known ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.core.common.documents import Positive, Rate
from autopar.cost_model.cost import ClusterError, check_provenance


@dataclass(frozen=True)
class Device:
    """Published or measured figures of a device: bytes of memory, and peaks per second.

    Attributes:
        name: name as of torch.cuda.get_device_name, or a part of it.
        flops_per_s: peak FLOP/s of dense matrix products by dtype ("float32", "bfloat16", ...);
            "tfloat32" is for float32 where torch may round to TF32.
        source: origin of the figures, starting with measured, imported or modelled.
        host_bytes_per_s: nominal rate of its link to host memory one way, in bytes/s; None if
            unknown.
    """

    name: str
    memory_bytes: Positive
    memory_bytes_per_s: Rate
    flops_per_s: Mapping[str, Rate]
    source: str
    host_bytes_per_s: Rate | None = None

    def __post_init__(self) -> None:
        check_provenance(self.source)
        figures = [self.memory_bytes, self.memory_bytes_per_s, *self.flops_per_s.values()]
        figures += [self.host_bytes_per_s] if self.host_bytes_per_s is not None else []
        if not all(isinstance(f, (int, float)) and f > 0 for f in figures):
            raise ClusterError(f"the figures of device {self.name} are not all positive: {figures}")

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "flops_per_s": dict(self.flops_per_s)}


def find_device(name: str) -> Device | None:
    """The published figures of a device such as "NVIDIA H100 80GB HBM3"; None if unknown."""
    plain = _plain(name)
    return next((device for device in DEVICES if _plain(device.name) in plain), None)


def host_link(device: str, figures: Device | None) -> float | None:
    """Nominal bytes per second of a device's link to host memory, one way; None if unknown.

    Published figures of the device stand in where its own `figures` lack the rate.
    """
    known = (one.host_bytes_per_s for one in (figures, find_device(device)) if one is not None)
    return next((rate for rate in known if rate is not None), None)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _device(
    name: str, gigabytes: int, gigabytes_per_s: float, link: float, source: str, **teraflops: float
) -> Device:
    """A device of 1e9 bytes for each gigabyte: it has more, but not all of it is free."""
    peaks = {dtype: value * 1e12 for dtype, value in teraflops.items()}
    nbytes, source = gigabytes * 10**9, f"imported from {source}"
    return Device(name, nbytes, gigabytes_per_s * 1e9, peaks, source, link)


# Links to the host: 16 lanes of PCIe, of the generation in the device's data sheet. Hosts of B200
# have PCIe 5.0 (vengineer.hatenablog.com/entry/2025/04/24). NVLink-C2C of GB200 has 900 GB/s, both
# ways together, for the two GPUs of a Grace (elprocus.com/nvidia-gb200-ai-chip).
_PCIE_3, _PCIE_4, _PCIE_5, _GRACE_C2C = 16e9, 32e9, 64e9, 225e9

_HOPPER = {
    "float64": 67.0,
    "float32": 67.0,
    "tfloat32": 494.7,
    "float16": 989.4,
    "bfloat16": 989.4,
    "float8_e4m3fn": 1978.9,
    "float8_e5m2": 1978.9,
    "int8": 1978.9,
}
_AMPERE = {
    "float64": 19.5,
    "float32": 19.5,
    "tfloat32": 156.0,
    "float16": 312.0,
    "bfloat16": 312.0,
    "int8": 624.0,
}

DEVICES = (
    _device("A100-SXM4-40GB", 40, 1555, _PCIE_4, "NVIDIA A100 data sheet (June 2021)", **_AMPERE),
    _device("A100-SXM4-80GB", 80, 2039, _PCIE_4, "NVIDIA A100 data sheet (June 2021)", **_AMPERE),
    _device(
        "H100 80GB HBM3",
        80,
        3350,
        _PCIE_5,
        "NVIDIA H100 data sheet, SXM5, without sparsity",
        **_HOPPER,
    ),
    _device(
        "H100 96GB HBM2e",
        96,
        2400,
        _PCIE_5,
        "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: SXM5 at 500 W; NVIDIA H100 data "
        "sheet (peaks), without sparsity",
        **_HOPPER,
    ),
    _device(
        "H200", 141, 4800, _PCIE_5, "NVIDIA H200 data sheet, SXM5, without sparsity", **_HOPPER
    ),
    # Before B200, whose name is a part of this one: `find_device` takes the first that fits.
    _device(
        "GB200",
        186,
        7700,
        _GRACE_C2C,
        "glennklockwood.com/garden/processors/B200 (1,200 W), "
        "verda.com/blog/gb300-nvl72-architecture (memory's rate), "
        "MLPerf's system GB200-NVL72 (bytes), without sparsity",
        float64=45.0,
        float32=90.0,
        tfloat32=1250.0,
        float16=2500.0,
        bfloat16=2500.0,
        float8_e4m3fn=5000.0,
        float8_e5m2=5000.0,
        int8=5000.0,
    ),
    _device(
        "B200",
        180,
        7700,
        _PCIE_5,
        "glennklockwood.com/garden/processors/B200 (1,000 W), NVIDIA DGX B200 user guide (bytes), "
        "verda.com/blog/gb300-nvl72-architecture (memory's rate), without sparsity",
        float64=40.0,
        float32=80.0,
        tfloat32=1100.0,
        float16=2250.0,
        bfloat16=2250.0,
        float8_e4m3fn=4500.0,
        float8_e5m2=4500.0,
        int8=4500.0,
    ),
    _device(
        "MI300X",
        192,
        5300,
        _PCIE_5,
        "jaredwatkins.com/research/ai-accelerators/amd-instinct/mi300-series (about 1.3 PFLOP/s)",
        float16=1300.0,
        bfloat16=1300.0,
    ),
    _device(
        "L40S",
        48,
        864,
        _PCIE_4,
        "NVIDIA L40S data sheet (mullet.se/product.html?product_id=355414), without sparsity",
        float32=91.6,
        tfloat32=183.0,
        float16=362.05,
        bfloat16=362.05,
        float8_e4m3fn=733.0,
        float8_e5m2=733.0,
    ),
    _device(
        "V100-SXM2-32GB",
        32,
        900,
        _PCIE_3,
        "NVIDIA V100 data sheet, SXM2",
        float64=7.8,
        float32=15.7,
        float16=125.0,
    ),
    _device(
        "GeForce RTX 4090",
        24,
        1008,
        _PCIE_4,
        "NVIDIA Ada GPU architecture white paper, sums in float32, without sparsity",
        float64=1.29,
        float32=82.6,
        tfloat32=82.6,
        float16=165.2,
        bfloat16=165.2,
        float8_e4m3fn=330.3,
        float8_e5m2=330.3,
        int8=660.6,
    ),
)
