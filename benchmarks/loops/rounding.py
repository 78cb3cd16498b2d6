"""`OtherRounding`: a plain loop whose operators round otherwise, as those of other ranks do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LAST_BIT = {torch.float64: 2.0**-53, torch.bfloat16: 2.0**-9}
"""Relative noise of a result in the last bit of its dtype."""


class OtherRounding(TorchDispatchMode):
    """Adds noise of the last bit to what operators return; views stay as they are."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = any(returned.alias_info for returned in func._schema.returns)
        if aliases or not isinstance(result, Tensor) or result.dtype not in LAST_BIT:
            return result
        noise = torch.randn(result.shape, generator=self._generator, dtype=torch.float64)
        noise *= LAST_BIT[result.dtype]
        return (result.double() * (1 + noise)).to(result.dtype)
