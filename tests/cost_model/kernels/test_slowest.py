"""The slowest of many GPUs."""

import numpy as np
import pytest

from autopar.cost_model.kernels.slowest import SPREAD, slowest_of


def test_the_slowest_of_many_is_the_expected_maximum() -> None:
    assert slowest_of(1) == pytest.approx(1.0)
    draws = np.random.default_rng(0).normal(1.0, SPREAD, (4000, 512))
    for gpus in (8, 512):
        assert slowest_of(gpus) == pytest.approx(draws[:, :gpus].max(axis=1).mean(), abs=1e-3)
