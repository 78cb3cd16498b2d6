"""Part `rates`: matrix products and memory-bound operators beside the curves of the data sheet."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.cost_model.host import device_name
from autopar.cost_model.kernels.gemm_efficiency import Shape
from autopar.cost_model.kernels.roofline import Roofline
from benchmarks.gpu.setting import Setting

PRODUCTS = (
    (8192, 8192, 8192),
    (16384, 8192, 1280),
    (16384, 1024, 8192),
    (16384, 3584, 8192),
    (8192, 2304, 768),
    (8192, 768, 3072),
    (8192, 50304, 768),
    (1024, 3072, 768),
    (4096, 1800, 4096),  # 14,400 / 8 columns: no multiple of 64
    (4096, 1728, 4096),
    (4096, 1793, 4096),
    (256, 4096, 4096),
)
"""Rows, columns and inner dim."""


def run(setting: Setting) -> None:
    device = "NVIDIA H100 80GB HBM3" if setting.dry else device_name(setting.device)
    line = Roofline.default(device, 1)
    for dtype in (torch.bfloat16, torch.float32):
        for sizes in PRODUCTS if dtype == torch.bfloat16 else PRODUCTS[:6]:
            name = f"{str(dtype)[6:]} {' x '.join(map(str, sizes))}"
            with setting.case(name):
                product(setting, name, sizes, dtype, line)
    for name, (call, nbytes) in streams(setting).items():
        with setting.case(name):
            device_ms = setting.queued(call)[1]
            write(setting, name, device_ms, line.seconds(0.0, nbytes), nbytes / 1e9, "GB/s")


def product(
    setting: Setting, name: str, sizes: tuple[int, int, int], dtype: torch.dtype, line: Roofline
) -> None:
    rows, columns, inner = (max(1, size // 64) for size in sizes) if setting.dry else sizes
    left = torch.randn(rows, inner, device=setting.device).to(dtype)
    right = torch.randn(inner, columns, device=setting.device).to(dtype)
    device_ms = setting.queued(lambda: left @ right)[1]
    flops = 2.0 * rows * columns * inner
    nbytes = dtype.itemsize * (rows * inner + inner * columns + rows * columns)
    priced_s = line.seconds(flops, nbytes, dtype.itemsize, Shape(1, rows, inner, columns))
    write(setting, name, device_ms, priced_s, flops / 1e12, "TFLOP/s")


def write(
    setting: Setting, name: str, device_ms: float, priced_s: float, work: float, unit: str
) -> None:
    """Write a row; `work` over seconds is its rate in the unit."""
    rates = [1e3 * work / device_ms, work / priced_s]
    setting.row(
        name,
        f"{rates[0]:.0f} {unit}, priced {rates[1]:.0f}",
        device_ms=device_ms,
        predicted_ms=1e3 * priced_s,
        ratio=1e3 * priced_s / device_ms,
    )


def streams(setting: Setting) -> Mapping[str, tuple[Callable[[], Tensor], int]]:
    """Memory-bound operators of a transformer, with the bytes that each must move."""
    rows, width = (64, 128) if setting.dry else (16384, 4096)
    x = torch.randn(rows, width, device=setting.device, dtype=torch.bfloat16)
    whole = x.float()
    weight = torch.ones(width, device=setting.device, dtype=torch.bfloat16)
    nbytes = x.numel() * x.itemsize
    return {
        "copy bf16": (x.clone, 2 * nbytes),
        "add bf16": (lambda: x + x, 2 * nbytes),
        "cast to fp32": (x.float, 3 * nbytes),
        "gelu bf16": (lambda: F.gelu(x), 2 * nbytes),
        "layer norm bf16": (lambda: F.layer_norm(x, (width,), weight, weight), 2 * nbytes),
        "softmax fp32": (lambda: whole.softmax(-1), 4 * nbytes),
        "sum of rows fp32": (lambda: whole.sum(0), 2 * nbytes),
        "transposed copy bf16": (lambda: x.t().contiguous(), 2 * nbytes),
    }
