"""Architectures of transformers, partitioned over real processes, train as on one device.

A few of those that `python -m benchmarks.exactness` sweeps, for fewer steps.
"""

import pytest

pytest.importorskip("transformers", reason="transformers is a test extra: pip install .[test]")

from benchmarks.exactness.parity import measure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setup"),
    [("llama", "tp2"), ("resnet", "tp3"), ("t5", "tp4"), ("mixtral", "tp2xdp2")],
)
def test_they_train_exactly(name: str, setup: str) -> None:
    row = measure(name, setup, steps=3)
    assert row.is_exact(1e-9), row
    assert row.sharded_parameters
