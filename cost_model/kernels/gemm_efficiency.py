"""Share of a GPU's peak that a matrix product reaches: tiles come in whole waves.

A product is cut into tiles of its result, one for each multiprocessor at a time. A partial last
wave takes as long as a full one, and a tile at the edge as long as one inside (NVIDIA, Matrix
Multiplication Background User's Guide). A tile loads its first operands before it computes, and
stores its result afterwards; the shorter the inner dim, the larger the share of these ends. Between
the ends, in full waves, a kernel reaches a fixed share of the peak (`FULL_WAVES`). That share comes
from measured products of a device, corrected for waves and ends. Rows that start anywhere in memory
cost more (`slowdown`), and so does a result that is stored while nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, fx

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


LINE, SECTOR, LOAD = 128, 32, 16
"""Bytes of a cache line, of a part of it that memory moves, and of the widest load of a thread."""


@dataclass(frozen=True)
class Shape:
    """A batch of matrix products: (rows, inner) times (inner, columns).

    `aligned` are the bytes, at most LINE, at whose multiples all rows in memory start.
    """

    batch: int
    rows: int
    inner: int
    columns: int
    aligned: int = LINE


@dataclass(frozen=True)
class GemmWaves:
    """Figures of a GPU for matrix products.

    Attributes:
        processors: number of multiprocessors.
        full: share of the peak in full waves, between the ends of tiles.
        ends: time of the ends of a tile, in elements of the inner dim.
        source: origin of the figures.
        stores: whether its kernels store a result while they compute nothing.
        narrow: time of a product whose rows do not allow the widest loads, over that of others.
        plain: the same of many products at once.
    """

    processors: int
    full: float
    ends: float
    source: str
    stores: bool = False
    narrow: float = 1.0
    plain: float = 1.0

    def share(self, shape: Shape) -> float:
        """Share of the peak that a product reaches, with the best tile, in one part."""
        return self.shares(shape)[1]

    def shares(self, shape: Shape) -> dict[int, float]:
        """Share of the peak that a product reaches, by the number of parts of its inner dim."""
        tiles = [(tile, 1.0) for tile in TILES] + [(tile, SMALL) for tile in HALVED]
        between = shape.inner / (shape.inner + self.ends)
        full = self.full * between / self.slowdown(shape)
        elements, found = shape.batch * shape.rows * shape.columns, {}
        for split in SPLITS:
            if split > 1 and shape.inner < split * LEAST_SPLIT:
                break
            share = 0.0
            for (rows, columns), speed in tiles:
                number = math.ceil(shape.rows / rows) * math.ceil(shape.columns / columns)
                waves = math.ceil(shape.batch * split * number / self.processors)
                filled = elements * split / (waves * self.processors * rows * columns)
                share = max(share, filled * speed)
            found[split] = full * share
        return found

    def stored_bytes(self, shape: Shape, split: int, item_bytes: int) -> int:
        """Bytes that a product moves while it computes nothing.

        Parts are written in float32 and read again by a kernel that adds them up.
        """
        elements = shape.batch * shape.rows * shape.columns
        parts = 2 * 4 * split * elements if split > 1 else 0
        return parts + elements * max(2, item_bytes) * self.stores

    def slowdown(self, shape: Shape) -> float:
        """Time of a product over that of one whose rows start at lines of memory."""
        if shape.aligned < LOAD:
            return self.plain if shape.batch > 1 else self.narrow
        # A line's worth of a row that starts inside a sector touches one sector more.
        return 1.0 if shape.aligned >= SECTOR else 1.0 + SECTOR / LINE


# A GPU under long products runs at its power limit, not at its boost clock, and the more slowly
# the less regular the values are. `full` therefore comes from products of normally distributed
# values, in shapes of language models where known, not from the best product that can be found.
# `ends` comes from the best products of mamf-finder (github.com/stas00/ml-engineering), two of each
# device, as rows, columns and inner dim: A100 SXM 271.2 of 312 TFLOP/s at 1024 x 10240 x 5120 and
# 267.9 at 6912 x 16384 x 2048, H100 SXM 794.5 of 989 at 2048 x 2048 x 13312 and 792.1 at
# 6144 x 17920 x 2816.
_SEMI = "newsletter.semianalysis.com/p/mi300x-vs-h100-vs-h200-benchmark-part-1-training"
# A100: 257.5 TFLOP/s at 8192 x 8192 x 8192 (cuBLAS of 2022), 2 % of it for storing the result.
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

# Rows of 588 elements of 2 bytes, at 1.2 GHz (github.com/m87-labs/kestrel/pull/143): a kernel for
# Ampere with loads of 4 bytes took 130.56 us for 9477 x 1152 x 588 on an H100, one for Hopper 36.96
# us with rows of 592. An A100's tensor cores, as many as an H100 has, would compute it in 63 us.
HOPPER_NARROW, AMPERE_NARROW = 3.53, 2.07
# Batched products of such rows run without tensor cores on an A100: 312 and 19.5 TFLOP/s (data
# sheet). Trials of bigscience show it: heads of 108 elements make a step longer by 42 %.
AMPERE_PLAIN = 312 / 19.5

FULL_WAVES = {
    "H100 96GB HBM2e": GemmWaves(132, 0.6, 43, _H100_500W, False, HOPPER_NARROW, HOPPER_NARROW),
    "A100": GemmWaves(108, 0.852, 85, _A100, True, AMPERE_NARROW, AMPERE_PLAIN),
    "H100": GemmWaves(132, 0.754, 43, _H100, False, HOPPER_NARROW, HOPPER_NARROW),
    "H200": GemmWaves(132, 0.754, 43, _H100, False, HOPPER_NARROW, HOPPER_NARROW),
    "B200": GemmWaves(148, 0.717, 43, _B200, False, HOPPER_NARROW, HOPPER_NARROW),
    "MI300X": GemmWaves(304, 0.503, 43, _H100, False, AMPERE_NARROW, AMPERE_NARROW),
    "L40S": GemmWaves(142, 0.798, 85, _MAMF, False, AMPERE_NARROW, AMPERE_NARROW),
    "V100": GemmWaves(80, 0.758, 85, _MAMF, False, AMPERE_NARROW, AMPERE_NARROW),
    "4090": GemmWaves(128, 0.85, 85, "between A100 and H100", False, AMPERE_NARROW, AMPERE_NARROW),
}

# torch of 2023, cuBLAS 11.11 and 12.0, on an H100 (github.com/pytorch/pytorch/issues/100850): 549.5
# and 542.9 TFLOP/s for 2 and 4 rows of 2048 tokens, 8192 wide; one row alone reached 742.7.
_CUBLAS_11 = "cuBLAS 11 (github.com/pytorch/pytorch/issues/100850)"
FIRST_HOPPER = GemmWaves(132, 0.572, 43, _CUBLAS_11, False, HOPPER_NARROW, HOPPER_NARROW)


def gemm_waves_of(device: str, versions: Mapping[str, str]) -> GemmWaves | None:
    """The figures of a GPU by its name, under the "cuda" of `versions`; None if unknown."""
    if "H100" in device and versions.get("cuda", "").startswith("11"):
        return FIRST_HOPPER
    return next((waves for name, waves in FULL_WAVES.items() if name in device), None)


def aligned_bytes(tensors: Iterable[Tensor]) -> int:
    """Largest power of two, at most LINE, at whose multiples of bytes all rows start."""
    steps = (
        t.itemsize * stride
        for t in tensors
        for size, stride in zip(t.shape, t.stride(), strict=True)
        if size > 1 and stride > 1
    )
    return math.gcd(LINE, *steps)


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
    read = [tensors(node.args[index])[0] for index in operands]  # type: ignore[arg-type]
    left, right = (t.shape for t in read)
    aligned = aligned_bytes([*read, *tensors(node)])
    shape = Shape(math.prod(left[:-2]), left[-2], left[-1], right[-1], aligned)
    return shape if shape.batch * shape.rows * shape.inner * shape.columns else None


def multiplied_bytes(node: fx.Node) -> int:
    """Bytes of a number in the products of an operator: 1 if an operand is float8."""
    operands = [t for source in node.all_input_nodes for t in tensors(source)]
    if any(t.is_floating_point() and t.itemsize == 1 for t in operands):
        return 1
    return max(2, min((t.itemsize for t in tensors(node)), default=4))
