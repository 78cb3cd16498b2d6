"""What codecs write can be read: alone, at any width, and whatever is in it."""

import pytest
import torch

from autopar.core.plan.compression import METHODS, Compression
from autopar.passes.compression.codecs import Codec, codec, random_places

CODED = [m for m in METHODS if m not in ("powersgd", "randomk")]
WIDTHS = (1, 7, 256, 1000, 2**16 + 3)


def named(text: str) -> Codec:
    return codec(Compression.of(text))


@pytest.mark.parametrize("method", CODED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_totals_are_the_sums_of_what_messages_say(method: str, dtype: torch.dtype) -> None:
    it = named(method)
    for width in map(it.fit, WIDTHS):
        table = torch.randn(3, width, dtype=dtype, generator=torch.Generator().manual_seed(width))
        messages = it.encode(table)
        read = it.decode(messages, width, dtype)
        assert (read.shape, read.dtype) == (table.shape, dtype)
        assert torch.allclose(it.total(messages, width, dtype), read.sum(0), atol=1e-5)
        assert it.lost(table, messages).equal(table - read)
        alone = torch.cat([it.decode(it.encode(row[None]), width, dtype) for row in table])
        assert alone.equal(read)


BOUNDS = {"bf16": 2**-8, "fp16": 2**-10, "int8": 0.5 / 127, "topk(density=1.0)": 2**-8}
"""Of the error, relative to the largest element of a block."""


@pytest.mark.parametrize(("method", "bound"), BOUNDS.items())
def test_what_is_read_is_near_what_was_written(method: str, bound: float) -> None:
    table = torch.randn(2, 512)
    read = named(method).decode(named(method).encode(table), 512, torch.float32)
    largest = table.view(2, 2, 256).abs().amax(-1, keepdim=True)
    assert ((read - table).view(2, 2, 256).abs() / largest).max() <= bound


def test_signs_are_kept_at_the_mean_magnitude() -> None:
    table = torch.randn(2, 256)
    read = named("sign").decode(named("sign").encode(table), 256, torch.float32)
    assert read.sign().equal(table.sign())
    assert torch.allclose(read.abs(), table.abs().mean(1, keepdim=True).expand(2, 256))


def test_top_k_finds_the_largest_and_the_threshold_withholds_small_ones() -> None:
    table = torch.zeros(1, 2**16 * 2)
    table[0, [5, 70000, 131071]] = torch.tensor([3.0, -2.0, 0.5])
    for method, kept in (("topk", 3), ("threshold(threshold=1.0)", 2)):
        read = named(method).decode(named(method).encode(table), table.shape[1], torch.float32)
        assert read.count_nonzero() == kept
        assert read[0, [5, 70000]].tolist() == [3, -2]


@pytest.mark.parametrize("density", [0.001, 0.01, 0.2])
def test_top_k_keeps_what_is_largest_of_each_row(density: float) -> None:
    table = torch.randn(1, 2**17, generator=torch.Generator().manual_seed(0))
    it = named(f"topk(density={density})")
    read = it.decode(it.encode(table), table.shape[1], torch.float32).view(2, -1)
    rows, count = table.view(2, -1).abs(), round(density * 2**16)
    least = rows.topk(count).values[:, -1:]
    assert (read != 0).equal(rows >= least)


RATIOS = {"bf16": 2, "fp16": 2, "int8": 3.8, "sign": 28, "topk": 99, "threshold": 99}


@pytest.mark.parametrize(("method", "ratio"), RATIOS.items())
def test_messages_are_small(method: str, ratio: float) -> None:
    table = torch.randn(2, named(method).fit(2**16 + 100))
    message = named(method).encode(table)
    assert table.nbytes / message.nbytes >= ratio


@pytest.mark.parametrize("method", CODED)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_hidden(method: str, value: float) -> None:
    for width in map(named(method).fit, (1, 1000)):
        table = torch.randn(2, width)
        table[1, width // 2] = value
        read = named(method).decode(named(method).encode(table), width, torch.float32)
        assert read[0].isfinite().all()
        assert not read[1, width // 2].isfinite()


@pytest.mark.parametrize("method", CODED)
def test_nothing_is_read_out_of_zeros(method: str) -> None:
    it = named(method)
    read = it.decode(it.encode(torch.zeros(2, 1024)), 1024, torch.float32)
    assert read.count_nonzero() == 0


def test_random_places_are_one_of_every_stretch_and_change() -> None:
    places = [random_places(torch.tensor(count), 1050, 0.01) for count in range(300)]
    for own in places:
        assert (own // 100).equal(torch.arange(11))
        assert own.max() < 1050
    assert not places[0].equal(places[1])
    seen = torch.cat(places)[torch.cat(places) < 1000].bincount(minlength=1000)
    assert seen.max() < 20  # 3 on average
