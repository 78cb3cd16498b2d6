"""`autopar::checked`: a tensor whose values a program checks when it runs.

Some torch functions read values to refuse them, or to choose the size of their result. Captured
forms of them assume the usual case, and check it at every call.

x of any shape, fails of the same shape -> a copy of x; BatchError if any element fails
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.core.operators.registration import register
from autopar.errors import BatchError

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("checked(Tensor x, Tensor fails, str message) -> Tensor")
checked = torch.ops.autopar.checked.default
"""(x, fails, message) -> a copy of x. Where an element of `fails` is true, its BatchError."""


def _run(x: Tensor, fails: Tensor, message: str) -> Tensor:
    if fails.any():
        raise BatchError(message)
    return x.clone()


def _fake(x: Tensor, fails: Tensor, message: str) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient, None, None


register(_LIBRARY, {"checked": (_run, _fake)})
torch.library.register_autograd("autopar::checked", _backward, lib=_LIBRARY)
