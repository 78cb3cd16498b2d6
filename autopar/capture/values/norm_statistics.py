"""`with_kernels_dtypes`: statistics of norms, in the dtype that CPU kernels give them.

A norm of bfloat16 rows with float32 weights keeps its statistics in float32. torch's fake tensors
say bfloat16, so that formulas of derivatives would be traced for other dtypes than they meet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

NORMS = frozenset(
    {
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
        aten._batch_norm_with_update.default,
        aten._batch_norm_with_update_functional.default,
        aten._batch_norm_no_update.default,
    }
)
"""(input, ...) -> (output, means, deviations, ...)."""


def with_kernels_dtypes(func: Any, args: tuple[Any, ...], results: Any) -> Any:
    """The fake results of an operator, with statistics in the dtype of its weights."""
    if func not in NORMS or args[0].device.type != "cpu":
        return results
    weights = {x.dtype for x in args[1:] if isinstance(x, Tensor)} - {args[0].dtype}
    if not weights:
        return results
    output, *statistics = results
    (dtype,) = weights
    return (output, *(each.to(dtype) for each in statistics[:2]), *statistics[2:])
