"""`pad_to_bucket` rounds lengths up to a few, and the loss does not change."""

import pickle
from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import autopar
from autopar.errors import BatchError, StrategyError

VALUES = {"ids": 0, "mask": 0, "labels": -100}


class Encoder(nn.Module):
    """Attends in both directions, so that only the mask hides the padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.place = nn.Embedding(11, 8), nn.Embedding(64, 8)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x = self.token(ids) + self.place.weight[: ids.shape[1]]
        x = x + self.mix(x, x, x, key_padding_mask=mask == 0, need_weights=False)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch(rows: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 11, (rows, length))
    mask = (torch.arange(length) < length - torch.arange(rows)[:, None]).long()
    return {"ids": ids, "mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def test_losses_and_gradients_stay_and_lengths_share_programs() -> None:
    plain, other = Encoder().double(), Encoder().double()
    compiled = autopar.compile(other, strategy="ddp")
    for length in (5, 9, 16, 17, 23):
        given = batch(3, length)
        loss = plain(**given)
        ours = compiled(**autopar.pad_to_bucket(given, VALUES))
        torch.testing.assert_close(ours, loss, rtol=1e-12, atol=0)
        loss.backward()
        ours.backward()
    for one, two in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-9, atol=1e-14)
    assert compiled._execution.executor.programs.added == 2, "lengths of one bucket share a program"


class Pair(NamedTuple):
    x: Tensor
    name: str


@pytest.mark.parametrize(
    ("given", "values", "at"),
    [
        (torch.ones(2, 17), {0: 7}, lambda b: b),
        ((torch.ones(2, 17), "kept"), {0: 7}, lambda b: b[0]),
        (Pair(torch.ones(2, 17), "kept"), {0: 7}, lambda b: b.x),
        (UserDict(x=torch.ones(2, 17), y=3), {"x": 7}, lambda b: b["x"]),
    ],
)
def test_batches_keep_their_class_and_other_members(given: Any, values: Any, at: Any) -> None:
    padded = autopar.pad_to_bucket(given, values)
    assert type(padded) is type(given)
    assert at(given).shape == (2, 17), "the batch itself does not change"
    assert at(padded).tolist() == [[1.0] * 17 + [7.0] * 7] * 2
    twice = autopar.pad_to_bucket(padded, values)
    assert at(twice) is at(padded), "a bucket is its own"


def test_buckets_and_dims() -> None:
    lengths = [autopar.pad_to_bucket(torch.ones(1, n), {0: 0}).shape[1] for n in range(1, 200)]
    assert sorted(set(lengths)) == [16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert all(n <= made for n, made in enumerate(lengths, 1))
    images = torch.ones(2, 3, 5, 6)
    assert autopar.pad_to_bucket(images, {0: 0}, buckets=[40, 8], dim=2).shape == (2, 3, 8, 6)
    with pytest.raises(BatchError, match="longest bucket, 8"):
        autopar.pad_to_bucket(torch.ones(2, 9), {0: 0}, buckets=[4, 8])


def test_a_collate_function_pads_every_batch() -> None:
    collate = autopar.pad_to_bucket(torch.utils.data.default_collate, {0: 0, 1: -100})
    data = [(torch.ones(9), torch.ones(9))] * 4
    loader = DataLoader(data, 2, collate_fn=pickle.loads(pickle.dumps(collate)))
    for x, y in loader:
        assert x.shape == y.shape == (2, 16)
        assert y[0, 9:].tolist() == [-100.0] * 7


@pytest.mark.parametrize(
    ("given", "values", "error", "says"),
    [
        ({"x": torch.ones(2, 3)}, {}, StrategyError, "give fill values"),
        ({"x": torch.ones(2, 3)}, {"y": 0}, BatchError, "no tensor 'y'"),
        ({"x": torch.ones(2)}, {"x": 0}, BatchError, "no tensor 'x' with a dim 1"),
        ((torch.ones(2, 3), torch.ones(2, 4)), {0: 0, 1: 0}, BatchError, "lengths of one batch"),
        (3, {0: 0}, BatchError, "class int cannot be padded"),
    ],
)
def test_errors_say_what_to_give(given: Any, values: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        autopar.pad_to_bucket(given, values)
