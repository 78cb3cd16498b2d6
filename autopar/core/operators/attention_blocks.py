"""`autopar::attention_block`: attention of some rows to some keys, as a part of a larger call.

A ring of ranks computes attention in blocks, one for each shard of the keys. The results are merged
by their log-sum-exp. The backward of a block reads the merged result and log-sum-exp.

The kernel is chosen when the operator runs: torch's fused ones where torch would choose them, or
the dense formula. Shapes, and layouts of results, are those of `autopar::attention`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import register_flop_formula

from autopar._torch import FUSED_ATTENTION, fused_attention_choice
from autopar.core.operators.attention import (
    each_head,
    each_key_head,
    heads_last,
    is_fused,
    products,
    scale_of,
    scores_of,
    statistics_dtype,
)
from autopar.core.operators.registration import register

aten = torch.ops.aten

Part = Literal["whole", "early", "late"]
"""Part that a block computes: all of it, all queries on the first half of the keys, or the second
half of the queries on all keys."""

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_CALL = "bool is_causal=False, str part='whole', float? scale=None"
_LIBRARY.define(
    f"attention_block(Tensor query, Tensor key, Tensor value, {_CALL}) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_block_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    f"Tensor out, Tensor logsumexp, {_CALL}) -> (Tensor, Tensor, Tensor)"
)
attention_block = torch.ops.autopar.attention_block.default
"""(query, key, value, causal, part, scale) -> (out, logsumexp).

Queries that a block leaves out have the result 0 and the log-sum-exp -inf.
"""

attention_block_backward = torch.ops.autopar.attention_block_backward.default
"""The gradients of query, key and value; 0 for those that the block leaves out."""

BLOCKS = (attention_block, attention_block_backward)

_WIDEST, _ALIGNED = 256, 8  # of heads in CUDA's fused kernels
_LSE_ROWS = 32  # the memory-efficient kernel pads its statistics to a multiple


def _halved(query: Tensor, key: Tensor, part: str) -> tuple[slice, slice]:
    """The rows of queries and keys that a block computes."""
    rows, keys = query.shape[2], key.shape[2]
    return (
        slice(rows // 2 if part == "late" else 0, rows),
        slice(0, keys // 2 if part == "early" else keys),
    )


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    part: str = "whole",
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    rows, keys = _halved(query, key, part)
    inside = query[:, :, rows], key[:, :, keys], value[:, :, keys]
    result, statistics = _forward(*inside, is_causal, scale)
    out = _placed(result, query, rows)
    if not rows.start:
        return out, statistics.contiguous()
    logsumexp = statistics.new_full(query.shape[:3], -math.inf)
    logsumexp[:, :, rows] = statistics
    return out, logsumexp


def _run_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool = False,
    part: str = "whole",
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, keys = _halved(query, key, part)
    grad_out, out, logsumexp = (t[:, :, rows] for t in (grad_out, out, logsumexp))
    inside = query[:, :, rows], key[:, :, keys], value[:, :, keys]
    gradients = _backward(grad_out, *inside, out, logsumexp, is_causal, scale)
    of_query, of_key, of_value = gradients
    return (
        _placed(of_query, query, rows),
        _placed(of_key, key, keys),
        _placed(of_value, value, keys),
    )


def _placed(part: Tensor, like: Tensor, rows: slice) -> Tensor:
    """Rows of a tensor that is 0 elsewhere, of the dtype and the number of rows of another."""
    is_whole = rows.stop - rows.start == like.shape[2] and part.dtype == like.dtype
    if is_whole and part.transpose(1, 2).is_contiguous():
        return part
    padded = heads_last(like, part.shape[3])
    padded[:, :, : rows.start] = 0
    padded[:, :, rows.stop :] = 0
    padded[:, :, rows] = part
    return padded


def _fake(query: Tensor, key: Tensor, value: Tensor, *call: Any, **options: Any) -> Any:
    statistics = query.new_empty(query.shape[:3], dtype=statistics_dtype(query.dtype))
    return heads_last(query, value.shape[3]), statistics


def _fake_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *call: Any, **options: Any
) -> Any:
    return tuple(heads_last(t, t.shape[3]) for t in (query, key, value))


register(
    _LIBRARY,
    {
        "attention_block": (_run, _fake),
        "attention_block_backward": (_run_backward, _fake_backward),
    },
)


# -- kernels -----------------------------------------------------------------------------------


def _forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The result of a block and its log-sum-exp."""
    if key.shape[1] != query.shape[1]:
        key, value = each_head(key, query), each_head(value, query)
    call: Any = (query, key, value)
    match _kernel(query, key, value, is_causal, scale):
        case "cpu":
            cpu = aten._scaled_dot_product_flash_attention_for_cpu
            out, logsumexp = cpu(*call, 0.0, is_causal, scale=scale)
            return out, logsumexp
        case "flash":
            flash = aten._scaled_dot_product_flash_attention
            out, logsumexp, *_ = flash(*call, 0.0, is_causal, False, scale=scale)
            return out, logsumexp
        case "efficient":
            efficient = aten._scaled_dot_product_efficient_attention
            out, logsumexp, *_ = efficient(*call, None, True, 0.0, is_causal, scale=scale)
            return out, logsumexp[:, :, : query.shape[2]]
    scores = scores_of(query, key, None, is_causal, scale)
    logsumexp = scores.logsumexp(-1)
    weights = torch.exp(scores - logsumexp[..., None])
    return weights @ value.to(weights.dtype), logsumexp


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a block, from the result and the log-sum-exp over all keys."""
    grouped = key.shape[1] != query.shape[1]
    keys, values = (each_head(t, query) if grouped else t for t in (key, value))
    kernel = _kernel(query, keys, values, is_causal, scale)
    call: Any = (grad_out, query, keys, values)
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which is off
    offset = torch.zeros((), dtype=torch.int64, device=query.device)
    statistics = logsumexp.contiguous()
    match kernel:
        case "cpu":
            cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward
            grads = cpu(*call, out, statistics, 0.0, is_causal, scale=scale)
        case "flash":
            flash = aten._scaled_dot_product_flash_attention_backward
            sizes = (None, None, query.shape[2], keys.shape[2])
            state = (seed, offset)
            grads = flash(*call, out, statistics, *sizes, 0.0, is_causal, *state, scale=scale)
        case "efficient":
            efficient = aten._scaled_dot_product_efficient_attention_backward
            missing = -query.shape[2] % _LSE_ROWS
            padded = torch.nn.functional.pad(statistics, (0, missing), value=math.inf)
            state, mask = (offset, offset), [True, True, True, False]
            grads = efficient(*call, None, out, padded, *state, 0.0, mask, is_causal, scale=scale)
        case _:
            saved = (out, logsumexp)
            grads = _dense_backward(grad_out, query, keys, values, *saved, is_causal, scale)
    of_query, of_key, of_value = grads[:3]
    if grouped:
        of_key, of_value = each_key_head(of_key, key), each_key_head(of_value, value)
    return of_query, of_key, of_value


def _dense_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = torch.exp(scores_of(query, key, None, is_causal, scale) - logsumexp[..., None])
    grad = grad_out.to(weights.dtype)
    # Over all keys, not only those of the block, weights times their gradients sum to this.
    total = (grad * out.to(weights.dtype)).sum(-1, keepdim=True)
    of_scores = weights * (grad @ value.to(weights.dtype).mT - total) * scale_of(query, scale)
    return (
        of_scores @ key.to(weights.dtype),
        of_scores.mT @ query.to(weights.dtype),
        weights.mT @ grad,
    )


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> Literal["cpu", "flash", "efficient", "dense"]:
    """The kernel of a block, whose keys have as many heads as its queries."""
    if query.device.type != "cuda":
        fused = is_fused(query, key, value, None, 0.0, is_causal, scale)
        return "cpu" if fused else "dense"
    width, others = query.shape[3], value.shape[3]
    if width % _ALIGNED or others % _ALIGNED:  # torch pads such heads around its kernels
        return "dense"
    choice = fused_attention_choice(query, key, value, None, 0.0, is_causal, scale=scale)
    # cuDNN's kernels, which torch 2.11 prefers on Hopper, take what the flash kernels take.
    flash = (FUSED_ATTENTION, SDPBackend.CUDNN_ATTENTION.value)
    if choice in flash and width == others <= _WIDEST:
        return "flash"
    return "efficient" if choice == SDPBackend.EFFICIENT_ATTENTION.value else "dense"


# -- work --------------------------------------------------------------------------------------


def _work(query: Any, key: Any, value: Any, part: str) -> tuple[float, float]:
    wide, deep = products(query, key, value)
    share = 1 if part == "whole" else 2
    return wide / share, deep / share


@register_flop_formula(torch.ops.autopar.attention_block)
def _flops(
    query: Any,
    key: Any,
    value: Any,
    is_causal: bool = False,
    part: str = "whole",
    *call: Any,
    **options: Any,
) -> int:
    return int(sum(_work(query, key, value, part)))


@register_flop_formula(torch.ops.autopar.attention_block_backward)
def _backward_flops(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    is_causal: bool = False,
    part: str = "whole",
    *call: Any,
    **options: Any,
) -> int:
    wide, deep = _work(query, key, value, part)
    return int(3 * wide + 2 * deep)
