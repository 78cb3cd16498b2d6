"""Relations between modelled times of kernels, over random sizes and GPUs."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from autopar.cost_model.kernels.attention_speed import AttentionSpeed
from autopar.cost_model.kernels.gemm_efficiency import Shape
from autopar.cost_model.kernels.roofline import Rates, Roofline
from autopar.cost_model.measurement.optimizer_step import UpdateCost
from autopar.cost_model.topology.devices import find_device

GENERATIONS = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA B200")
HALF = 2
"""Bytes of an element of bfloat16."""
SPLIT = 1.1
"""Most that four times the inner dim speeds a product up: from 1024 elements it is cut in parts."""
PUBLISHED = 1.06
"""Most that published rates of attention fall with the length, or rise from forward to backward."""

each_gpu = pytest.mark.parametrize("gpu", GENERATIONS)


def products(seed: str, least: int = 6, count: int = 100) -> Iterator[Shape]:
    """Random products whose sizes are from a power of two on."""
    draw = random.Random(seed)
    for _ in range(count):
        rows, inner, columns = (2 ** draw.randint(least, 13) for _ in range(3))
        yield Shape(2 ** draw.randint(0, 3), rows, inner, columns)


def seconds(line: Roofline, shape: Shape, item_bytes: int = HALF) -> float:
    """Seconds of a product whose operands are read and whose result is written once."""
    flops = 2.0 * shape.batch * shape.rows * shape.inner * shape.columns
    rows, inner, columns = shape.rows, shape.inner, shape.columns
    numel = shape.batch * (rows * inner + inner * columns + rows * columns)
    return line.seconds(flops, item_bytes * numel, item_bytes, shape)


@each_gpu
def test_a_product_takes_as_long_as_each_of_its_limits(gpu: str) -> None:
    """Never less than its FLOPs at the data sheet's peak, nor than its bytes at the memory's."""
    line, device = Roofline.default(gpu, 1), find_device(gpu)
    assert device is not None
    for shape in products(gpu):
        flops = 2.0 * shape.batch * shape.rows * shape.inner * shape.columns
        took = seconds(line, shape)
        assert took >= line.launch_s + flops / device.flops_per_s["bfloat16"]
        assert took >= line.launch_s + HALF * shape.batch * shape.rows * shape.inner / (
            device.memory_bytes_per_s
        )


@each_gpu
def test_a_larger_product_is_never_quicker(gpu: str) -> None:
    """Four times any of its sizes, but for a long inner dim, whose parts fill more processors."""
    line = Roofline.default(gpu, 1)
    for shape in products(gpu):
        for name in ("batch", "rows", "inner", "columns"):
            larger = replace(shape, **{name: 4 * getattr(shape, name)})
            assert SPLIT * seconds(line, larger) >= seconds(line, shape)


@each_gpu
def test_products_in_a_batch_are_never_slower_than_one_by_one(gpu: str) -> None:
    """They launch once and share waves."""
    line = Roofline.default(gpu, 1)
    for shape in products(gpu):
        alone = replace(shape, batch=1)
        assert seconds(line, shape) <= shape.batch * seconds(line, alone) * (1 + 1e-9)


def test_a_later_gpu_is_never_slower_at_large_products() -> None:
    """A100, H100, B200, where tiles fill all of their processors."""
    lines = [Roofline.default(gpu, 1) for gpu in GENERATIONS]
    for shape in products("generations", least=11):
        times = [seconds(line, shape) for line in lines]
        assert times == sorted(times, reverse=True)


def test_a_later_gpu_is_never_slower_at_pointwise_operators() -> None:
    """A100, H100, B200 at any number of bytes."""
    draw, lines = random.Random(0), [Roofline.default(gpu, 1) for gpu in GENERATIONS]
    for _ in range(100):
        nbytes = 2 ** draw.uniform(4, 34)
        times = [line.seconds(0.0, nbytes) for line in lines]
        assert times == sorted(times, reverse=True)


@each_gpu
def test_narrower_elements_are_never_slower(gpu: str) -> None:
    """Bytes and tensor cores both gain."""
    line = Roofline.default(gpu, 1)
    for shape in products(gpu):
        times = [seconds(line, shape, item_bytes) for item_bytes in (4, 2, 1)]
        assert times == sorted(times, reverse=True)


@each_gpu
def test_a_slower_pace_slows_products_alone(gpu: str) -> None:
    """Twice the pace at most doubles a product, and changes no pointwise operator."""
    line, slow = Roofline.default(gpu, 1), Roofline.default(gpu, 1, pace=2.0)
    for shape in products(gpu):
        assert seconds(line, shape) <= seconds(slow, shape) <= 2 * seconds(line, shape)
    assert slow.seconds(0.0, 1e9) == line.seconds(0.0, 1e9)


def test_more_threads_are_never_slower() -> None:
    """Twice the threads of a CPU halve what is beyond the launch."""
    draw = random.Random(0)
    for _ in range(100):
        flops, nbytes, threads = draw.uniform(0, 1e10), draw.uniform(0, 1e9), draw.randint(1, 16)
        few, many = (Roofline.default("cpu", n) for n in (threads, 2 * threads))
        assert few.launch_s == many.launch_s
        beyond = [line.seconds(flops, nbytes) - line.launch_s for line in (few, many)]
        assert beyond[0] == pytest.approx(2 * beyond[1])


def test_rates_of_more_work_never_take_less_time() -> None:
    """Fitted rates that rise with the size, as timed operators give."""
    draw = random.Random(0)
    for _ in range(100):
        sizes = sorted(2.0 ** draw.randint(4, 34) for _ in range(4))
        times = sorted(draw.uniform(1e-6, 1e-1) for _ in sizes)
        rates = Rates.of(zip(sizes, times, strict=True))
        assert rates is not None
        rising = Rates(rates.sizes, tuple(sorted(rates.rates)))
        asked = sorted(2 ** draw.uniform(2, 36) for _ in range(30))
        slower = replace(rising, rates=tuple(rate / 2 for rate in rising.rates))
        for size in asked:
            assert slower.seconds(size) == pytest.approx(2 * rising.seconds(size))
            assert rising.seconds(2 * size) <= 2.0 * rising.seconds(size) * (1 + 1e-9)


@each_gpu
@pytest.mark.parametrize("kernel", ["flash-1", "flash-2", "flash-3", "cudnn"])
def test_attention_speeds_up_with_length_and_width(gpu: str, kernel: str) -> None:
    """Longer rows and wider heads never lower a rate; masks and backwards never raise it."""
    draw, device = random.Random(kernel), find_device(gpu)
    assert device is not None
    peak = device.flops_per_s["bfloat16"]
    speed = AttentionSpeed.of(gpu, peak, {"attention": kernel})
    for _ in range(100):
        length, head = draw.randint(64, 32768), draw.randint(32, 256)
        backward, causal = draw.random() < 0.5, draw.random() < 0.5
        rate = speed.rate(length, head, backward=backward, causal=causal)
        longer = speed.rate(2 * length, head, backward=backward, causal=causal)
        wider = speed.rate(length, head + 32, backward=backward, causal=causal)
        back = speed.rate(length, head, backward=True, causal=causal)
        masked = speed.rate(length, head, backward=backward, causal=True)
        assert max(rate / longer, rate / wider, back / rate, masked / rate) <= PUBLISHED
        assert rate < peak


@each_gpu
def test_an_optimizer_that_keeps_more_is_never_quicker(gpu: str) -> None:
    """AdamW beside SGD, over random parameters; twice the parameters take twice as long."""
    draw, line = random.Random(gpu), Roofline.default(gpu, 1)
    for _ in range(30):
        sizes = [round(2 ** draw.uniform(6, 30)) for _ in range(draw.randint(1, 20))]
        adam, sgd = (UpdateCost.modelled(line, ratio) for ratio in (2.0, 0.0))
        took = adam.seconds(sizes, dtensors=False).seconds
        assert sgd.seconds(sizes, dtensors=False).seconds <= took
        assert adam.seconds(2 * sizes, dtensors=False).seconds == pytest.approx(2 * took)
        halves = adam.seconds([size // 2 for size in sizes], dtensors=False).seconds
        assert took / 2 * (1 - 1e-6) <= halves + 1e-9 <= took + 1e-9
