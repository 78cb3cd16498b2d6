"""`torch_flags`: switches of the process that choose the operators or the dtypes of a graph.

Kernels read other switches as they run, so a graph follows those by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import backends


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set by the newer switches of each backend, which kernels read
        return ""


_READERS: tuple[Callable[[], Any], ...] = (
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    _matmul_precision,
    backends.cuda.flash_sdp_enabled,
    backends.cuda.mem_efficient_sdp_enabled,
    backends.cuda.math_sdp_enabled,
    backends.cuda.cudnn_sdp_enabled,
    backends.mha.get_fastpath_enabled,
    lambda: backends.cudnn.enabled,
    lambda: backends.mkldnn.enabled,
)
if backends.opt_einsum.is_available():  # another order of products, for einsum
    _READERS += (lambda: backends.opt_einsum.enabled, lambda: backends.opt_einsum.strategy)


def torch_flags() -> tuple[Any, ...]:
    """The values of all switches."""
    return tuple([read() for read in _READERS])
