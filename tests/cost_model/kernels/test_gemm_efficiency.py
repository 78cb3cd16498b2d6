"""Matrix products on GPUs that are not here."""

import math
from collections.abc import Iterable
from statistics import mean

import pytest
import torch

from autopar.core.ir.roles import Input
from autopar.cost_model.kernels.gemm_efficiency import (
    FULL_WAVES,
    SHAPES,
    Shape,
    aligned_bytes,
    multiplied_bytes,
    product_of,
)
from autopar.cost_model.kernels.roofline import Roofline
from autopar.cost_model.kernels.timing import flops_of
from tests.cost_model.sketch import Sketch, aten

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def rate(name: str, shape: Shape, **versions: str) -> float:
    """TFLOP/s of a product of numbers of two bytes."""
    line = Roofline.default(name, 1, versions)
    flops = 2.0 * shape.batch * shape.rows * shape.inner * shape.columns
    read = shape.rows * shape.inner + shape.inner * shape.columns
    nbytes = 2 * shape.batch * (read + shape.rows * shape.columns)
    return flops / (line.seconds(flops, nbytes, 2, shape) - line.launch_s) / 1e12


def teraflops(name: str, shapes: Iterable[tuple[int, int, int]], **versions: str) -> float:
    return mean(rate(name, Shape(1, m, k, n), **versions) for m, n, k in shapes)


def test_products_reach_what_was_measured() -> None:
    assert teraflops(H100, SHAPES) == pytest.approx(720, rel=0.002)
    assert teraflops(A100, [(8192, 8192, 8192)]) == pytest.approx(257.5, rel=0.002)
    early = [(4096, 8192, 8192), (8192, 8192, 8192)]
    assert teraflops(H100, early, cuda="11.8") == pytest.approx(546.2, rel=0.002)


def test_an_a100_stores_results_while_it_computes_nothing() -> None:
    # github.com/EleutherAI/cookbook, benchmarks/sizing/sample_results/{transformer,bmm}.out
    measured = {
        Shape(1, 8192, 4096, 12288): 241.6,
        Shape(64, 2048, 256, 2048): 130.2,
        Shape(64, 2048, 2048, 256): 219.0,
        Shape(1, 8192, 4096, 4096): 234.9,
        Shape(1, 8192, 4096, 16384): 241.1,
        Shape(1, 8192, 16384, 4096): 252.8,
        Shape(1, 8192, 4096, 51200): 255.4,
        Shape(128, 1024, 1024, 1024): 227.3,
        Shape(128, 1024, 2048, 1024): 243.3,
    }
    errors = [rate(A100, shape) / known - 1 for shape, known in measured.items()]
    assert mean(map(abs, errors)) < 0.05
    assert max(map(abs, errors)) < 0.09


@pytest.mark.parametrize("device", [A100, H100])
@pytest.mark.parametrize(("odd", "even"), [(50257, 50304), (108, 128), (150, 192), (1800, 1856)])
def test_padding_odd_rows_is_never_slower(device: str, odd: int, even: int) -> None:
    def seconds(batch: int, columns: int) -> float:
        width = math.gcd(128, 2 * columns)
        flops = 2.0 * batch * 2048 * 2048 * columns
        return flops / rate(device, Shape(batch, 2048, 2048, columns, width))

    for batch in (1, 32):
        assert seconds(batch, even) <= seconds(batch, odd)
    assert seconds(32, even) * 1.5 < seconds(32, odd) or odd % 8 == 0


def test_heads_of_108_are_slower_than_one_of_216() -> None:
    """Trials of bigscience: twice as many heads of 108 make a step longer by 42 %."""
    narrow, wide = (
        flops / rate(A100, Shape(heads, 2048, head, 2048, math.gcd(128, 2 * head)))
        for heads, head in ((32, 108), (16, 216))
        for flops in [2.0 * heads * 2048**2 * head]
    )
    assert narrow > 4 * wide


def test_alignment_is_that_of_all_rows_in_memory() -> None:
    def aligned(*strides: int, size: tuple[int, ...] = (4, 64, 64)) -> int:
        t = torch.empty_strided(size, strides, dtype=torch.bfloat16, device="meta")
        return aligned_bytes([t])

    assert aligned(64 * 64, 64, 1) == 128
    assert aligned(64 * 1800, 1800, 1) == aligned(64 * 1800, 1, 1800) == 16
    assert aligned(64 * 108, 108, 1) == 8
    assert aligned(50257 * 64, 50257, 1) == 2
    assert aligned(33, 64, 1, size=(1, 64, 64)) == 128


def test_parts_of_a_product_are_written_and_added_up() -> None:
    a100, few, many = FULL_WAVES["A100"], Shape(1, 512, 8192, 512), Shape(1, 8192, 4096, 4096)
    assert a100.shares(few)[4] > 1.4 * a100.share(few)
    # Two parts would fill the last wave of a larger product, and cost more than that is worth.
    assert a100.stored_bytes(many, 2, 2) == (2 * 2 * 4 + 2) * 8192 * 4096
    assert rate(A100, many) < a100.share(many) * 312 <= a100.shares(many)[2] * 312


def test_the_last_wave_takes_as_long_as_the_others() -> None:
    a100 = FULL_WAVES["A100"]
    full, more = (a100.share(Shape(1, tiles * 128, 1000, 128)) for tiles in (108, 109))
    assert more < 0.6 * full
    assert a100.share(Shape(1, 128, 4096, 128)) < 0.12 * full


def test_a_products_time_is_that_of_its_shape() -> None:
    line = Roofline.default(H100, 1)
    shape = Shape(1, 8192, 8192, 8192)
    flops = 2.0 * 8192**3
    taken = line.seconds(flops, 3 * 8192**2 * 2, 2, shape) - line.launch_s
    assert 0.70 < flops / taken / 989.4e12 < 0.75
    assert line.seconds(flops, 0, 4, shape) > 10 * taken  # without TF32


def test_float8_is_priced_at_its_own_rate() -> None:
    line, size = Roofline.default("NVIDIA H100 80GB HBM3", 1), 8192
    g, shape = Sketch(), Shape(1, size, size, size)
    a, b = g.take(Input(0), size, size), g.take(Input(1), size, size)
    narrow = [g.call(aten._to_copy.default, x, dtype=torch.float8_e4m3fn) for x in (a, b)]
    scale = g.take(Input(2))
    product = g.call(aten._scaled_mm.default, *narrow, scale, scale, None, None, torch.bfloat16)
    assert (multiplied_bytes(product), multiplied_bytes(narrow[0])) == (1, 2)
    assert product_of(product) == shape
    taken = [line.seconds(flops_of(product), 0, n, shape) - line.launch_s for n in (1, 2)]
    assert taken[1] == pytest.approx(2 * taken[0], rel=0.01)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(0, 4, 4), (4, 0, 4), (4, 4, 0)])
def test_a_product_without_elements_takes_a_launch(rows: int, inner: int, columns: int) -> None:
    line, g = Roofline.default(H100, 1), Sketch()
    left, right = g.take(Input(0), rows, inner), g.take(Input(1), inner, columns)
    product = g.call(aten.mm.default, left, right)
    assert line.seconds(flops_of(product), 0, 4, product_of(product)) == line.launch_s
