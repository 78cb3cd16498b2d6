"""`register`: implementations of defined operators, for tensors and for fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Implementation = Callable[..., Any]


def register(
    library: torch.library.Library, operators: Mapping[str, tuple[Implementation, Implementation]]
) -> None:
    """Registers functions for tensors and for fake tensors by names of operators of `autopar`.

    They run on every device, below autograd.
    """
    for name, (run, fake) in operators.items():
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"autopar::{name}", fake, lib=library)
