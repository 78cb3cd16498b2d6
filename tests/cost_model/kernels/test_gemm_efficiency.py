"""Matrix products on GPUs that are not here."""

import pytest
import torch

from autopar.cost_model.kernels.gemm_efficiency import (
    FULL_WAVES,
    Shape,
    gemm_waves_of,
    multiplied_bytes,
    product_of,
)
from autopar.cost_model.kernels.roofline import Roofline
from autopar.cost_model.kernels.timing import flops_of
from autopar.cost_model.topology.devices import find_device
from autopar.ir.roles import Input
from tests.cost_model.sketch import Sketch, aten

# Rows, columns, inner dim and TFLOP/s of the best bfloat16 products that mamf-finder found.
FOUND = {
    "A100-SXM4-80GB": [(1024, 10240, 5120, 271.2), (6912, 16384, 2048, 267.9)],
    "H100 80GB HBM3": [(2048, 2048, 13312, 794.5), (6144, 17920, 2816, 792.1)],
}


@pytest.mark.parametrize("name", FOUND)
def test_products_reach_what_was_measured(name: str) -> None:
    device, waves = find_device(name), gemm_waves_of(name)
    assert device is not None
    assert waves is not None
    for rows, columns, inner, measured in FOUND[name]:
        share = waves.share(Shape(1, rows, inner, columns))
        assert share * device.flops_per_s["bfloat16"] / 1e12 == pytest.approx(measured, rel=0.02)


def test_the_last_wave_takes_as_long_as_the_others() -> None:
    a100 = FULL_WAVES["A100"]
    full, more = (a100.share(Shape(1, tiles * 128, 1000, 128)) for tiles in (108, 109))
    assert more < 0.6 * full
    assert a100.share(Shape(1, 128, 4096, 128)) < 0.12 * full


def test_a_products_time_is_that_of_its_shape() -> None:
    line = Roofline.default("NVIDIA H100 80GB HBM3", 1)
    shape = Shape(1, 8192, 8192, 8192)
    flops = 2.0 * 8192**3
    taken = line.seconds(flops, 3 * 8192**2 * 2, 2, shape) - line.launch_s
    assert 0.75 < flops / taken / 989.4e12 < 0.83
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
