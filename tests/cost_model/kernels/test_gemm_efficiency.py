"""Matrix products on GPUs that are not here."""

from collections.abc import Iterable
from statistics import mean

import pytest
import torch

from autopar.core.ir.roles import Input
from autopar.cost_model.kernels.gemm_efficiency import (
    FULL_WAVES,
    SHAPES,
    Shape,
    gemm_waves_of,
    multiplied_bytes,
    product_of,
)
from autopar.cost_model.kernels.roofline import Roofline
from autopar.cost_model.kernels.timing import flops_of
from autopar.cost_model.topology.devices import find_device
from tests.cost_model.sketch import Sketch, aten

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def teraflops(name: str, shapes: Iterable[tuple[int, int, int]], **versions: str) -> float:
    device, waves = find_device(name), gemm_waves_of(name, versions)
    assert device is not None
    assert waves is not None
    shares = [waves.share(Shape(1, rows, inner, columns)) for rows, columns, inner in shapes]
    return mean(shares) * device.flops_per_s["bfloat16"] / 1e12


def test_products_reach_what_was_measured() -> None:
    assert teraflops(H100, SHAPES) == pytest.approx(720, rel=0.002)
    assert teraflops(A100, [(8192, 8192, 8192)]) == pytest.approx(257.5, rel=0.002)
    early = [(4096, 8192, 8192), (8192, 8192, 8192)]
    assert teraflops(H100, early, cuda="11.8") == pytest.approx(546.2, rel=0.002)


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
