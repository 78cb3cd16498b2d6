"""Part `attention`: the kernels that torch takes on this GPU beside those that autopar prices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from autopar.cost_model.host import device_name
from autopar.cost_model.kernels.roofline import Roofline
from benchmarks.gpu.setting import Setting

KERNELS = {
    "cudnn": ("cudnn",),
    "flash": ("flash",),
    "efficient": ("fmha", "efficient"),
    "math": ("softmax",),
}
"""Parts of a GPU kernel's name, by the kernel that torch chose; the first that fits counts."""

PRICED_AS = {
    "cudnn": "cudnn",
    **dict.fromkeys(("flash-1", "flash-1-triton", "flash-2", "flash-3"), "flash"),
}


@dataclass(frozen=True)
class Case:
    length: int
    heads: int
    width: int  # of a head
    causal: bool = True
    kv_heads: int = 0  # as many as heads if 0
    dtype: torch.dtype = torch.bfloat16
    masked: bool = False

    @property
    def name(self) -> str:
        groups = f"/{self.kv_heads}" if self.kv_heads else ""
        words = [str(self.dtype)[6:], f"{self.length} x {self.heads}{groups} x {self.width}"]
        return " ".join([*words, "causal" * self.causal, "masked" * self.masked]).strip()


CASES = (
    Case(1024, 12, 64),
    Case(1024, 12, 64, causal=False),
    Case(2048, 16, 128),
    Case(4096, 32, 128),
    Case(4096, 32, 128, causal=False),
    Case(4096, 32, 128, kv_heads=8),
    Case(16384, 32, 128),
    Case(4096, 32, 96),
    Case(4096, 16, 256),
    Case(2048, 16, 128, causal=False, masked=True),
    Case(1024, 12, 64, dtype=torch.float16),
    Case(1024, 12, 64, dtype=torch.float32),
)


def run(setting: Setting) -> None:
    device = "NVIDIA H100 80GB HBM3" if setting.dry else device_name(setting.device)
    for case in CASES:
        with setting.case(case.name):
            measure(setting, case, Roofline.default(device, 1))


def measure(setting: Setting, case: Case, line: Roofline) -> None:
    """Write a row for the forward and one for the backward of a case."""
    length = 32 if setting.dry else case.length
    batch = 1 if setting.dry else max(1, 16384 // case.length)
    query, key, value, mask = tensors(setting, case, batch, length)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=case.causal, enable_gqa=bool(case.kv_heads)
        )

    result = forward()
    gradient = torch.randn_like(result)

    def backward() -> None:
        torch.autograd.grad(result, (query, key, value), gradient, retain_graph=True)

    flops = 4 * batch * case.heads * length**2 * case.width * (0.5 if case.causal else 1.0)
    speed = line.attention
    assert speed is not None
    half = case.dtype.itemsize == 2
    kernel = "cpu" if setting.dry else chosen(forward)
    for direction, call, work in (("forward", forward, 1.0), ("backward", backward, 2.5)):
        device_ms = setting.queued(call)[1]
        rate = speed.rate(length, case.width, backward=direction == "backward", causal=case.causal)
        predicted_ms = 1e3 * work * flops / rate if half else None
        setting.row(
            f"{case.name} {direction}",
            f"torch takes {kernel}, {work * flops / device_ms / 1e9:.0f} TFLOP/s"
            + (f"; priced {speed.kernel}, {rate / 1e12:.0f} TFLOP/s" if half else ""),
            ok=setting.dry or not half or kernel == PRICED_AS[speed.kernel],
            device_ms=device_ms,
            predicted_ms=predicted_ms,
            ratio=predicted_ms and predicted_ms / device_ms,
            kernel=kernel,
        )


def tensors(
    setting: Setting, case: Case, batch: int, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key and value, laid out as a projection leaves them, and the mask."""

    def heads(number: int) -> Tensor:
        shape = (batch, length, number, case.width)
        drawn = torch.randn(shape, dtype=case.dtype, device=setting.device)
        return drawn.transpose(1, 2).requires_grad_()

    mask = None
    if case.masked:
        shape = (batch, 1, length, length)
        mask = torch.ones(shape, dtype=torch.bool, device=setting.device).tril()
    few = case.kv_heads or case.heads
    return heads(case.heads), heads(few), heads(few), mask


def chosen(call: object) -> str:
    """Name the kernel that a call ran on the GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()  # type: ignore[operator]
        torch.cuda.synchronize()
    names = " ".join(_launched(profiler)).lower()
    return next(
        (kernel for kernel, parts in KERNELS.items() if any(part in names for part in parts)),
        names[:80],
    )


def _launched(profiler: profile) -> Iterator[str]:
    for event in profiler.events() or ():
        yield event.name
