"""Relative differences that rounding explains, by dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Relative difference that passes, by dtype."""


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of `expected`; infinite for other shapes or dtypes.

    Elements that are equal, or both not a number, do not count.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if actual.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    one, two = actual.detach().double(), expected.detach().double()
    same = (one == two) | (one.isnan() & two.isnan())
    difference = torch.where(same, 0.0, one - two).norm().item()
    if difference == 0.0:
        return 0.0
    scale = torch.where(two.isfinite(), two, 0.0).norm().item()
    error = difference / scale if scale else difference
    return error if error == error else float("inf")
