"""Share of a GPU's peak that a matrix product reaches: tiles come in whole waves.

A product is cut into tiles of its result, one for each multiprocessor at a time. A partial last
wave takes as long as a full one, and a tile at the edge as long as one inside (NVIDIA, Matrix
Multiplication Background User's Guide). A tile loads its first operands before it computes, and
stores its result afterwards; the shorter the inner dim, the larger the share of these ends. Between
the ends, in full waves, a kernel reaches a fixed share of the peak (`FULL_WAVES`). That share comes
from the best measured products of a device, corrected for waves and ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from autopar.ir.graph import tensors
from autopar.operators.kernels import is_canonical

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
        attention: share of the peak that flash attention reaches, forward and backward together.
        source: origin of the figures.
    """

    processors: int
    full: float
    ends: float
    attention: float
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


_MAMF = "the best bfloat16 products of mamf-finder (github.com/stas00/ml-engineering)"
_FLASH2 = "FlashAttention-2 (arXiv 2307.08691), causal, heads of 128, rows of 2,000 to 4,000"
_FLASH3 = "FlashAttention-3 and cuDNN (arXiv 2407.08608), the same"

# A100 SXM: 271.2 of 312 TFLOP/s at 1024 x 10240 x 5120 (rows, columns, inner; 320 tiles in 3 waves)
# and 267.9 at 6912 x 16384 x 2048 (3456 tiles in 32 waves). H100 SXM: 794.5 of 989 TFLOP/s at
# 2048 x 2048 x 13312 (128 tiles in a wave) and 792.1 at 6144 x 17920 x 2816 (3360 tiles in 26).
# Two equations each for `full` and `ends`.
FULL_WAVES = {
    "A100": GemmWaves(108, 0.895, 85, 0.5, f"{_MAMF}; {_FLASH2}"),
    "H100": GemmWaves(132, 0.83, 43, 0.45, f"{_MAMF}; {_FLASH3}"),
    "H200": GemmWaves(132, 0.83, 43, 0.45, f"as of an H100: {_MAMF}; {_FLASH3}"),
    "V100": GemmWaves(80, 0.85, 85, 0.5, "between A100 and H100, not measured"),
    "4090": GemmWaves(128, 0.85, 85, 0.5, "between A100 and H100, not measured"),
}


def gemm_waves_of(device: str) -> GemmWaves | None:
    """The figures of a GPU by its name; None if unknown."""
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
    return "scaled_dot_product" in str(node.target) or is_canonical(node)


def product_of(node: fx.Node) -> Shape | None:
    """The shape of a matrix product; None for other nodes."""
    packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    plain, added = ("mm", "bmm", "_scaled_mm"), ("addmm", "baddbmm")
    operands = {**dict.fromkeys(plain, (0, 1)), **dict.fromkeys(added, (1, 2))}.get(packet)
    if operands is None:
        return None
    left, right = (tensors(node.args[index])[0].shape for index in operands)  # type: ignore[arg-type]
    return Shape(math.prod(left[:-2]), left[-2], left[-1], right[-1])


def multiplied_bytes(node: fx.Node) -> int:
    """Bytes of a number in the products of an operator: 1 if an operand is float8."""
    operands = [t for source in node.all_input_nodes for t in tensors(source)]
    if any(t.is_floating_point() and t.itemsize == 1 for t in operands):
        return 1
    return max(2, min((t.itemsize for t in tensors(node)), default=4))
