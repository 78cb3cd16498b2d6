"""Share of a GPU's peak that a matrix product reaches: tiles come in whole waves.

A product is cut into tiles of its result, one for each multiprocessor at a time. A partial last
wave takes as long as a full one, and a tile at the edge as long as one inside (NVIDIA, Matrix
Multiplication Background User's Guide). A tile loads its first operands before it computes, and
stores its result afterwards; the shorter the inner dim, the larger the share of these ends. Between
the ends, in full waves, a kernel reaches a fixed share of the peak (`FULL_WAVES`). That share comes
from measured products of a device, corrected for waves and ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.core.ir.graph import tensors
from autopar.core.operators.attention_blocks import BLOCKS
from autopar.core.operators.kernels import is_canonical

TILES = ((256, 128), (128, 256), (128, 128))
"""Rows and columns of the tiles that reach the peak."""

HALVED = ((128, 64), (64, 128), (64, 64))
"""Smaller tiles, which are limited by reads of operands."""

SMALL = 0.7
"""Share of the peak for these. A tile of 64 x 64 does 32 operations for each byte from the L2
cache, which gives a multiprocessor of an A100 47 bytes a clock (its white paper): 1516 of 2048
operations."""

SPLITS = (1, 2, 4, 8)
"""Numbers of parts of the contracted dim, to make more tiles."""

LEAST_SPLIT = 1024
"""Least contracted elements of a part."""


@dataclass(frozen=True)
class Shape:
    """A batch of matrix products: (rows, inner) times (inner, columns)."""

    batch: int
    rows: int
    inner: int
    columns: int


@dataclass(frozen=True)
class GemmWaves:
    """Figures of a GPU for matrix products.

    Attributes:
        processors: number of multiprocessors.
        full: share of the peak in full waves, between the ends of tiles.
        ends: time of the ends of a tile, in elements of the inner dim.
        source: origin of the figures.
    """

    processors: int
    full: float
    ends: float
    source: str

    def share(self, shape: Shape) -> float:
        """Share of the peak that a product reaches, with the best tile and split."""
        tiles = [(tile, 1.0) for tile in TILES] + [(tile, SMALL) for tile in HALVED]
        splits = [s for s in SPLITS if s == 1 or shape.inner >= s * LEAST_SPLIT]
        between = shape.inner / (shape.inner + self.ends)
        share = 0.0
        for (rows, columns), speed in tiles:
            number = math.ceil(shape.rows / rows) * math.ceil(shape.columns / columns)
            for split in splits:
                waves = math.ceil(shape.batch * split * number / self.processors)
                needed = shape.batch * shape.rows * shape.columns * split
                filled = needed / (waves * self.processors * rows * columns)
                share = max(share, filled * speed)
        return self.full * between * share


# A GPU under long products runs at its power limit, not at its boost clock, and the more slowly
# the less regular the values are. `full` therefore comes from products of normally distributed
# values, in shapes of language models where known, not from the best product that can be found.
# `ends` comes from the best products of mamf-finder (github.com/stas00/ml-engineering), two of each
# device, as rows, columns and inner dim: A100 SXM 271.2 of 312 TFLOP/s at 1024 x 10240 x 5120 and
# 267.9 at 6912 x 16384 x 2048, H100 SXM 794.5 of 989 at 2048 x 2048 x 13312 and 792.1 at
# 6144 x 17920 x 2816.
_SEMI = "newsletter.semianalysis.com/p/mi300x-vs-h100-vs-h200-benchmark-part-1-training"
# A100: 257.5 TFLOP/s at 8192 x 8192 x 8192 (cuBLAS of 2022).
_A100 = "normal values at 8192 x 8192 x 8192 (thonking.ai/p/strangely-matrix-multiplications)"
# H100 and H200: about 720 TFLOP/s, MI300X about 620, in the mean of the five SHAPES.
_H100 = f"normal values in five shapes of a llama of 70B ({_SEMI})"
SHAPES = (
    (16384, 8192, 1280),
    (16384, 1024, 8192),
    (16384, 8192, 7168),
    (16384, 3584, 8192),
    (8192, 8192, 8192),
)
"""Rows, columns and inner dim of the products that `full` of an H100 comes from."""

# B200: 1671.8 TFLOP/s at 8192 x 8192 x 8192, 1517.5 at 16384 x 16384 x 16384.
_B200 = "cuBLAS on two cubes (arXiv 2604.23466, tables III and IV)"
# L40S: 252 TFLOP/s at 4416 x 3776 x 3072. V100: 94 at 17216 x 4096 x 20480.
_MAMF = "best products of mamf-finder (github.com/mag-/gpu_benchmark)"

# H100 of 500 W, as Meta has them: "0.6, quick experimental observation with sample large inputs" in
# torchao's roofline in its older files; others have 0.69 and 0.78.
_H100_500W = "large products on such a GPU (torchao/testing/float8/roofline_utils.py of 2024)"

FULL_WAVES = {
    "H100 96GB HBM2e": GemmWaves(132, 0.6, 43, _H100_500W),
    "A100": GemmWaves(108, 0.836, 85, _A100),
    "H100": GemmWaves(132, 0.742, 43, _H100),
    "H200": GemmWaves(132, 0.742, 43, _H100),
    "B200": GemmWaves(148, 0.713, 43, _B200),
    "MI300X": GemmWaves(304, 0.484, 43, _H100),
    "L40S": GemmWaves(142, 0.732, 85, _MAMF),
    "V100": GemmWaves(80, 0.77, 85, _MAMF),
    "4090": GemmWaves(128, 0.85, 85, "between A100 and H100, not measured"),
}

# torch of 2023, cuBLAS 11.11 and 12.0, on an H100 (github.com/pytorch/pytorch/issues/100850): 549.5
# and 542.9 TFLOP/s for 2 and 4 rows of 2048 tokens, 8192 wide; one row alone reached 742.7.
FIRST_HOPPER = GemmWaves(132, 0.558, 43, "cuBLAS 11 (github.com/pytorch/pytorch/issues/100850)")


def gemm_waves_of(device: str, versions: Mapping[str, str]) -> GemmWaves | None:
    """The figures of a GPU by its name, under the "cuda" of `versions`; None if unknown."""
    if "H100" in device and versions.get("cuda", "").startswith("11"):
        return FIRST_HOPPER
    return next((waves for name, waves in FULL_WAVES.items() if name in device), None)


def is_causal(node: fx.Node) -> bool:
    """Whether a node is causal attention, of which kernels skip the masked half."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "is_causal" not in names:
        return False
    position = names.index("is_causal")
    return bool(node.args[position] if position < len(node.args) else node.kwargs.get("is_causal"))


def is_attention(node: fx.Node) -> bool:
    """Whether a node is attention in one kernel, forward or backward."""
    known = is_canonical(node) or node.target in BLOCKS
    return known or "scaled_dot_product" in str(node.target)


def product_of(node: fx.Node) -> Shape | None:
    """The shape of a matrix product; None for other nodes, and for products without any work."""
    packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    plain, added = ("mm", "bmm", "_scaled_mm"), ("addmm", "baddbmm")
    operands = {**dict.fromkeys(plain, (0, 1)), **dict.fromkeys(added, (1, 2))}.get(packet)
    if operands is None:
        return None
    left, right = (tensors(node.args[index])[0].shape for index in operands)  # type: ignore[arg-type]
    shape = Shape(math.prod(left[:-2]), left[-2], left[-1], right[-1])
    return shape if shape.batch * shape.rows * shape.inner * shape.columns else None


def multiplied_bytes(node: fx.Node) -> int:
    """Bytes of a number in the products of an operator: 1 if an operand is float8."""
    operands = [t for source in node.all_input_nodes for t in tensors(source)]
    if any(t.is_floating_point() and t.itemsize == 1 for t in operands):
        return 1
    return max(2, min((t.itemsize for t in tensors(node)), default=4))
