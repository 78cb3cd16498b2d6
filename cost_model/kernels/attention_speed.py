"""`AttentionSpeed`: FLOP/s of flash attention on a GPU by kernel, direction, length and head size.

FLOP/s count the unmasked half of a causal kernel, and five products in the backward for two in the
forward, as the papers do.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.core.ir.graph import tensors
from autopar.core.operators.attention_blocks import BLOCKS
from autopar.cost_model.kernels.gemm_efficiency import (
    FULL_WAVES,
    gemm_waves_of,
    is_causal,
)

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEADS = (64, 128)

# FlashAttention-3 (arXiv 2407.08608), figures 5 and 6: TFLOP/s on an H100 SXM5, at LENGTHS, of
# whole (not causal) attention with heads of HEADS.
FORWARD = {
    "flash-2": ((282, 306, 318, 321, 322, 324), (309, 350, 362, 368, 370, 370)),
    "flash-3": ((333, 392, 460, 476, 496, 497), (467, 565, 625, 638, 646, 648)),
    "cudnn": ((335, 373, 395, 408, 412, 413), (497, 574, 617, 609, 600, 595)),
}
BACKWARD = {
    "flash-2": ((198, 238, 264, 279, 287, 291), (214, 260, 291, 310, 318, 322)),
    "flash-3": ((272, 363, 422, 453, 472, 474), (316, 424, 501, 542, 559, 561)),
    "cudnn": ((266, 348, 395, 417, 432, 433), (305, 408, 465, 499, 518, 516)),
}
# The same, causal forward with heads of 128. Over the whole forward this is the share of its rate
# that a causal kernel keeps; causal backwards are not published, so it serves for these too.
CAUSAL = {
    "flash-2": (191, 260, 298, 319, 333, 335),
    "flash-3": (292, 423, 521, 579, 602, 616),
    "cudnn": (315, 410, 484, 518, 529, 539),
}
KERNEL = "flash-2"  # of scaled_dot_product_attention on a GPU, but for `prefers_cudnn`
OLDER = {"flash-1": ("flash-2", 2.0, 2.0), "flash-1-triton": ("flash-2", 1.4, 2.0)}
"""Kernels that are slower than another, and how many times forward and backward take as long:
FlashAttention 1 "around 2x", in Triton "1.3-1.5x" forward and "around 2x" backward
(FlashAttention-2, arXiv 2307.08691, section 4.1)."""

# FlashAttention-2 (arXiv 2307.08691): 73 % of an A100's peak at best forward and 63 % backward, so
# 228 and 197 TFLOP/s, where an H100 reaches 370 and 322. No newer kernel is for Ampere.
AMPERE = (228 / 370, 197 / 322)


HOPPER = 989.4e12
"""Peak of the H100 that the tables were measured on, in FLOP/s."""


@dataclass(frozen=True)
class AttentionSpeed:
    """Rates of one kernel on one GPU.

    Attributes:
        kernel: "flash-1", "flash-1-triton", "flash-2", "flash-3" or "cudnn".
        forward: rate of the forward over that on an H100.
        backward: rate of the backward over that on an H100.
        blocks: kernel of ring attention's blocks, which need sums over all blocks.
    """

    kernel: str
    forward: float
    backward: float
    blocks: str = KERNEL

    @classmethod
    def of(cls, device: str, peak: float, versions: Mapping[str, str]) -> AttentionSpeed:
        """Rates on a GPU of `peak` dense bfloat16 FLOP/s; `versions` may name the kernel."""
        hopper = any(name in device for name in ("H100", "H200"))
        release = versions.get("torch", torch.__version__)
        default = "cudnn" if hopper and prefers_cudnn(release) else KERNEL
        kernel = versions.get("attention", default)
        if hopper:
            # A lower limit of power lowers the clock, and so the rate of all kernels alike.
            waves = gemm_waves_of(device, {}) or FULL_WAVES["H100"]
            clock = waves.full / FULL_WAVES["H100"].full
            rate = clock * peak / HOPPER
            return cls(kernel, rate, rate, versions.get("attention", KERNEL))
        older = KERNEL if kernel not in OLDER else kernel
        forward, backward = (share * peak / 312e12 for share in AMPERE)
        return cls(older, forward, backward, older)

    def seconds(self, node: fx.Node, flops: float) -> float:
        """Seconds of an attention node of `flops` floating-point operations, causal or whole."""
        if not flops:
            return 0.0  # without tokens there is no rate
        backward = "backward" in str(node.target)
        query = tensors(node.args[1 if backward else 0])[0]  # type: ignore[arg-type]
        length, head = query.shape[-2], query.shape[-1]
        if causal := is_causal(node):
            flops *= 0.5
        speed = replace(self, kernel=self.blocks) if node.target in BLOCKS else self
        return flops / speed.rate(length, head, backward=backward, causal=causal)

    def rate(self, length: int, head: int, *, backward: bool, causal: bool) -> float:
        """FLOP/s at a length in tokens and a head size in elements."""
        kernel, *slower = OLDER.get(self.kernel, (self.kernel, 1.0, 1.0))
        narrow, wide = (_at(length, row) for row in (BACKWARD if backward else FORWARD)[kernel])
        part = min(1.0, max(0.0, (head - HEADS[0]) / (HEADS[1] - HEADS[0])))
        rate = narrow + part * (wide - narrow)
        if causal:
            rate *= _at(length, CAUSAL[kernel]) / _at(length, FORWARD[kernel][1])
        return rate * 1e12 * (self.backward if backward else self.forward) / slower[backward]


def prefers_cudnn(release: str) -> bool:
    """Whether a release of torch runs cuDNN's attention on a Hopper by itself.

    2.5.0 does, 2.5.1 to 2.10 have it last (pytorch/pytorch#138522), and 2.11 comes with the cuDNN
    from which it is first again (huggingface/transformers#48163).
    """
    numbers = [int(part) for part in re.findall(r"\d+", release)[:3]]
    return numbers == [2, 5, 0] or numbers[:2] >= [2, 11]


def _at(length: int, rates: Sequence[float]) -> float:
    """The rate at a length: linear in its logarithm, proportional to it below, constant above."""
    if length <= LENGTHS[0]:
        return rates[0] * length / LENGTHS[0]
    right = bisect_right(LENGTHS, length)
    if right == len(LENGTHS):
        return rates[-1]
    low, high = LENGTHS[right - 1], LENGTHS[right]
    part = math.log(length / low) / math.log(high / low)
    return rates[right - 1] + part * (rates[right] - rates[right - 1])
