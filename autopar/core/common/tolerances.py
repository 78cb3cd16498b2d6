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
    difference = differences(actual, expected).norm().item()
    if difference == 0.0:
        return 0.0
    two = real_numbers(expected)
    scale = torch.where(two.isfinite(), two, 0.0).norm().item()
    error = difference / scale if scale else difference
    return error if error == error else float("inf")


def differences(actual: Tensor, expected: Tensor) -> Tensor:
    """Differences of two tensors of one shape, in float64; 0 where both are not a number.

    A complex number counts as two.
    """
    one, two = real_numbers(actual), real_numbers(expected)
    equal = (one == two) | (one.isnan() & two.isnan())
    return torch.where(equal, 0.0, one - two)


def real_numbers(tensor: Tensor) -> Tensor:
    """A tensor's numbers in float64; a complex one has a further dim of size 2."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.detach().double()
