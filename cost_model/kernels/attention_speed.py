"""`AttentionSpeed`: FLOP/s of flash attention on a GPU by kernel, direction, length and head size.

FLOP/s count the unmasked half of a causal kernel, and five products in the backward for two in the
forward, as the papers do.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.core.ir.graph import tensors
from autopar.cost_model.kernels.gemm_efficiency import is_causal

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
KERNEL = "flash-2"  # of scaled_dot_product_attention on a GPU
OLDER = {"flash-1": ("flash-2", 2.0)}  # "around 2x" slower: FlashAttention-2 (arXiv 2307.08691)

# FlashAttention-2 (arXiv 2307.08691): 73 % of an A100's peak at best forward and 63 % backward, so
# 228 and 197 TFLOP/s, where an H100 reaches 370 and 322. No newer kernel is for Ampere.
AMPERE = (228 / 370, 197 / 322)


HOPPER = 989.4e12
"""Peak of the H100 that the tables were measured on, in FLOP/s."""


@dataclass(frozen=True)
class AttentionSpeed:
    """Rates of one kernel on one GPU.

    Attributes:
        kernel: "flash-1", "flash-2", "flash-3" or "cudnn".
        forward: rate of the forward over that on an H100.
        backward: rate of the backward over that on an H100.
    """

    kernel: str
    forward: float
    backward: float

    @classmethod
    def of(cls, device: str, peak: float, versions: Mapping[str, str]) -> AttentionSpeed:
        """Rates on a GPU of `peak` dense bfloat16 FLOP/s; `versions` may name the kernel."""
        kernel = versions.get("attention", KERNEL)
        if any(name in device for name in ("H100", "H200")):
            return cls(kernel, peak / HOPPER, peak / HOPPER)
        older = KERNEL if kernel not in OLDER else kernel
        return cls(older, *(share * peak / 312e12 for share in AMPERE))

    def seconds(self, node: fx.Node, flops: float) -> float:
        """Seconds of an attention node of `flops` floating-point operations, causal or whole."""
        if not flops:
            return 0.0  # without tokens there is no rate
        backward = "backward" in str(node.target)
        query = tensors(node.args[1 if backward else 0])[0]  # type: ignore[arg-type]
        length, head = query.shape[-2], query.shape[-1]
        if causal := is_causal(node):
            flops *= 0.5
        return flops / self.rate(length, head, backward=backward, causal=causal)

    def rate(self, length: int, head: int, *, backward: bool, causal: bool) -> float:
        """FLOP/s at a length in tokens and a head size in elements."""
        kernel, slower = OLDER.get(self.kernel, (self.kernel, 1.0))
        narrow, wide = (_at(length, row) for row in (BACKWARD if backward else FORWARD)[kernel])
        part = min(1.0, max(0.0, (head - HEADS[0]) / (HEADS[1] - HEADS[0])))
        rate = narrow + part * (wide - narrow)
        if causal:
            rate *= _at(length, CAUSAL[kernel]) / _at(length, FORWARD[kernel][1])
        return rate * 1e12 * (self.backward if backward else self.forward) / slower


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
