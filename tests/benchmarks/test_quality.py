"""What the trainings of `benchmarks.quality` are given; training is what every run of it tests."""

import pytest
import torch

from benchmarks.quality import LAST_RATE, Row, gratings, share


def test_the_learning_rate_rises_then_falls() -> None:
    rates = [share(step, steps=500) for step in (0, 49, 50, 275, 500)]
    assert rates == pytest.approx([0.02, 1.0, 1.0, (1 + LAST_RATE) / 2, LAST_RATE])


def test_images_are_the_same_wherever_they_are_drawn() -> None:
    x, y = gratings(seed=3)
    again, _ = gratings(seed=3)
    other, _ = gratings(seed=4)
    assert torch.equal(x, again)
    assert not torch.equal(x, other)
    assert x.shape == (64, 3, 16, 16)
    assert set(y.tolist()) == set(range(10))


def test_what_trains_worse_than_it_may_or_resumes_otherwise_fails() -> None:
    assert Row("gpt", "int8", 2.0, worse=0.006, target=0.005).fails
    assert Row("gpt", "topk", 2.0, worse=0.0, target=0.02, resumed=False).fails
    assert not Row("gpt", "int8", 2.0, worse=-0.006, target=0.005, resumed=True).fails
