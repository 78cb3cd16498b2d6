"""`OtherRounding`: a plain loop whose operators round otherwise, as those of other ranks do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LAST_BIT = 2.0**-53
"""Relative noise of a result in the last bit of float64."""


class OtherRounding(TorchDispatchMode):
    """Adds noise of the last bit to what operators return; views stay as they are."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = any(returned.alias_info for returned in func._schema.returns)
        if aliases or not isinstance(result, Tensor) or result.dtype is not torch.float64:
            return result
        noise = torch.randn(result.shape, generator=self._generator, dtype=torch.float64)
        return result * (1 + LAST_BIT * noise)
