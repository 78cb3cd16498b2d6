"""Fake statistics of norms have the dtypes of real ones."""

from typing import Any

import pytest
import torch

from autopar._torch import pytree
from autopar.capture.traced_call import TimedFakeMode
from autopar.capture.values.norm_statistics import NORMS

ROWS = torch.randn(4, 6, 5)
CHANNELS = [torch.ones(6) for _ in range(4)]


def arguments(operator: Any, rows: torch.Tensor) -> list[Any]:
    names = [argument.name for argument in operator._schema.arguments]
    values = {
        "input": rows,
        "normalized_shape": [5],
        **dict(zip(("weight", "bias", "running_mean", "running_var"), CHANNELS, strict=True)),
        "N": 4,
        "C": 6,
        "HxW": 5,
        "group": 2,
        "training": True,
        "momentum": 0.1,
        "eps": 1e-5,
    }
    if "normalized_shape" in names:
        values |= {"weight": torch.ones(5), "bias": torch.zeros(5)}
    return [values[name] for name in names]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operator", sorted(NORMS, key=str))
def test_dtypes(operator: Any, dtype: torch.dtype) -> None:
    values = arguments(operator, ROWS.to(dtype))
    want = [result.dtype for result in operator(*values)]
    with TimedFakeMode() as mode:
        fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, values)
        assert [result.dtype for result in operator(*fakes)] == want
