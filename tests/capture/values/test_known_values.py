"""Static arguments, whose values forward reads in Python."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import BatchError, CaptureError, StrategyError
from tests.harness.training import fixed, whole
from tests.harness.worlds import run

LENGTHS = ([1, 3, 4, 2], [5, 1, 1, 3])


class Packed(nn.Module):
    """Rows beside sequences that lie one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.out = nn.Linear(4, 6), nn.Linear(4, 6)
        self.double()

    def forward(self, x: Tensor, packed: Tensor, *, lengths: Tensor) -> Tensor:
        ends = lengths.cumsum(0)
        sizes = torch.diff(ends, prepend=torch.zeros_like(ends[:1])).tolist()
        means = [part.mean(0) for part in self.up(packed).split(sizes)]
        places = torch.cat([torch.arange(size) for size in sizes])
        weights = (1.0 + places.to(packed)) / lengths.sum()
        scale = (self.up(packed).sum(1) * weights).sum()
        return (self.out(x) * torch.stack(means)).square().mean() + scale


def inputs(lengths: list[int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(lengths[0])
    x, packed = (torch.rand(n, 4, generator=generator).double() for n in (4, sum(lengths)))
    return {"x": x, "packed": packed, "lengths": torch.tensor(lengths)}


def gradients(model: Any, lengths: list[int]) -> list[Tensor]:
    model.zero_grad()
    loss = model(**inputs(lengths))
    loss.backward()
    return [loss.detach(), *(whole(p.grad) for p in model.parameters())]


def on_rank(rank: int, world_size: int, zero: int) -> list[list[Tensor]]:
    model = autopar.compile(Packed(), strategy=fixed(zero), static=["lengths"], fallback=False)
    return [gradients(model, lengths) for lengths in (*LENGTHS, LENGTHS[0])]


@pytest.mark.parametrize("zero", [0, 3])
def test_each_value_of_a_static_argument_has_a_program(zero: int) -> None:
    plain = [gradients(Packed(), lengths) for lengths in (*LENGTHS, LENGTHS[0])]
    for answers in run(on_rank, 2, zero=zero):
        for got, want in zip(answers, plain, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


class Writes(Packed):
    def forward(self, x: Tensor, packed: Tensor, *, lengths: Tensor) -> Tensor:
        lengths[0] = packed.argmax()
        return super().forward(x, packed, lengths=lengths)


class Divides(Packed):
    def forward(self, x: Tensor, packed: Tensor, *, lengths: Tensor) -> Tensor:
        lengths //= packed.argmax() + 1
        return super().forward(x, packed, lengths=lengths)


def refused_on_rank(rank: int, world_size: int) -> None:
    for model, change, error, match in (
        (Writes(), {"static": ["lengths"]}, CaptureError, "writes computed values"),
        (Divides(), {"static": ["lengths"]}, CaptureError, "writes computed values"),
        (Packed(), {"static": ["packed"]}, BatchError, "at most 4096 integers"),
        (Packed(), {"static": "lengths"}, StrategyError, "static='lengths'"),
    ):
        with pytest.raises(error, match=match):
            autopar.compile(
                model,
                strategy="ddp",
                example_inputs=inputs(LENGTHS[0]),
                fallback=False,
                **change,
            )


def test_other_values_are_refused() -> None:
    run(refused_on_rank, 1)
