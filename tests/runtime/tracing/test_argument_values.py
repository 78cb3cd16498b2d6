"""Forward reads values of arguments in Python, and trains as on one device."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparWarning, CaptureError, FallbackWarning
from tests.harness.training import Pair, fixed
from tests.harness.worlds import run

Call = tuple[Tensor, Tensor, Tensor]


def branch(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return h * 2 if mask.all() else h * mask[:, None]


def repeat(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    for _ in range(int(lengths.max())):
        h = h.tanh()
    return h + sum(lengths[:2].tolist())


def item_in_condition(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return h - 1 if (lengths > 2).any() and lengths.sum().item() > 12 else h


def membership(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return h * 3 if 4 in lengths else h


def written(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """A value that is read was written through a view."""
    copy = lengths.clone()
    first = copy[0]
    first |= ~torch.any(copy > 3)
    copy[mask] = 2
    copy[1:][copy[1:] == 3] += 1
    return h * 5 if copy.sum() > 16 else h * copy[:, None]


def boolean_index(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return h[mask].sum(0) * h


def boolean_store(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    out = h.clone()
    out[mask] = h[mask].flip(0)
    return out


def selected(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return torch.masked_select(h, mask[:, None]).cumsum(0).sum() * h


def places(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    (where,) = mask.nonzero(as_tuple=True)
    return h + h[where].mean() + h[torch.where(lengths > 1)[0]].mean() + len(where)


def repeated(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return torch.repeat_interleave(h, lengths, dim=0).cumsum(0).mean() * h


def split(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    first, *others = torch.tensor_split(h, lengths[:2].cumsum(0))
    return first.sum() + h * sum(each.square().mean() for each in others if len(each))


def sized(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    steps = torch.arange(lengths.max(), device=h.device)
    return h * (steps < lengths[:, None]).sum(1, keepdim=True)


def padded(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    wide = nn.functional.pad(h, (lengths.min(), 0, 1, lengths.max() - lengths.min()), value=2.0)
    return wide.roll(int(lengths[0]), 0).topk(lengths.min(), dim=0)[0].sum() * h


def different(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Groups of equal lengths, and runs of them."""
    groups, group, counts = torch.unique(lengths, return_inverse=True, return_counts=True)
    means = h.new_zeros(len(groups), h.shape[1]).index_add(0, group, h) / counts[:, None]
    runs, run_of = lengths.unique_consecutive(return_inverse=True)
    each = [(h * (group == place)[:, None]).sum(0).tanh() for place in groups.unique()]
    return means[group] * h + h * runs[run_of][:, None] + sum(each)


def nothing(h: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Indices that are empty are compared and select."""
    absent = (lengths > 9).nonzero()
    return h + h[absent[absent[:, 0] == lengths[0]][:, 0]].sum()


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    function.__name__: function
    for function in (
        *(branch, repeat, item_in_condition, membership, written, boolean_index),
        *(boolean_store, selected, places, repeated, split, sized),
        *(padded, different, nothing),
    )
}


class Reader(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name, self.first, self.last = name, nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        return self.last(FUNCTIONS[self.name](self.first(x), mask, lengths)).square().mean()


def batches() -> list[Call]:
    """Three kinds of answers, then the first two again."""
    generator = torch.Generator().manual_seed(3)

    def draw(begin: int) -> Call:
        mask = (
            torch.rand(6, generator=generator) > 0.5 if begin else torch.ones(6, dtype=torch.bool)
        )
        mask[0] = True
        lengths = torch.randint(1, 3 + begin, (6,), generator=generator)
        return torch.rand(6, 4, generator=generator, dtype=torch.float64), mask, lengths

    drawn = [draw(0), draw(1), draw(2)]
    return [*drawn, *((torch.rand_like(x), *others) for x, *others in drawn[:2])]


def train(rank: int, world_size: int, name: str, strategy: dict[str, int]) -> None:
    options: dict[str, Any] = dict(strategy)
    pair = Pair(lambda: Reader(name), strategy=fixed(options.pop("zero", 0), **options))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for batch in batches():
            losses = [model(*batch) for model in pair.models]
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=0)
            for loss in losses:
                loss.backward()
            pair.step()
    pair.check_state()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_process(name: str) -> None:
    run(train, 1, name=name, strategy={})


@pytest.mark.parametrize("strategy", [{}, {"zero": 3}, {"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("name", ["written", "places", "different"])
def test_ranks(name: str, strategy: dict[str, int]) -> None:
    run(train, 2, name=name, strategy=strategy)


def test_arguments_are_not_changed_by_reading() -> None:
    model = autopar.compile(Reader("written").double(), fallback=False)
    x, mask, lengths = batches()[2]
    before = mask.clone(), lengths.clone()
    for _ in range(2):
        model(x, mask, lengths).backward()
    assert torch.equal(mask, before[0])
    assert torch.equal(lengths, before[1])


def test_state_that_a_reading_depends_on() -> None:
    class Threshold(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.limit = nn.Linear(4, 4).double(), 2

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            h = self.layer(x)
            return h.mean() if lengths.max() > self.limit else h.sum()

    plain = Threshold()
    model = autopar.compile(plain, fallback=False)
    x, lengths = torch.rand(4, 4, dtype=torch.float64), torch.tensor([1, 2, 3, 3])
    for limit in (2, 3, 2):
        model.limit = limit
        h = plain.layer(x)
        torch.testing.assert_close(model(x, lengths), h.mean() if limit == 2 else h.sum())


def test_values_of_parameters_are_still_refused() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            h = self.layer(x)
            return h.mean() if lengths.max() > 1 and h.sum() > 0 else h.sum()

    model = autopar.compile(Reads(), fallback=False)
    with pytest.raises(CaptureError, match="needs the value of a tensor"):
        model(torch.rand(4, 4), torch.tensor([1, 2, 3, 3]))


def test_many_answers_are_told() -> None:
    model = autopar.compile(Reader("repeat").double(), fallback=False)
    x, mask, _ = batches()[0]
    with pytest.warns(AutoparWarning, match="values of arguments"):
        model(x, mask, torch.arange(6))
