"""`autopar::attention`: scaled dot product attention as one operator, the same on every device.

Captured graphs contain this operator and its backward. `LowerAttention` replaces them by the
kernels of the device. The implementations here serve proofs, simulations and tests: they run the
CPU's fused kernel, or the dense formula.

Shapes are those of `torch.nn.functional.scaled_dot_product_attention` in four dims:
queries [batch, heads, queries, width], keys and values [batch, key heads, keys, width]. Equal
numbers of consecutive heads share a key head. Results lie in memory as [batch, queries, heads,
width], as fused kernels write them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from autopar._torch import FUSED_ATTENTION, fused_attention_choice

aten = torch.ops.aten

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_CALL = "float dropout_p=0.0, bool is_causal=False, float? scale=None, int[] window=[]"
_LIBRARY.define(
    f"attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, {_CALL}) "
    "-> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask, Tensor out, Tensor logsumexp, Tensor rng_state, "
    f"bool mask_grad, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)"
)
attention = torch.ops.autopar.attention.default
"""(query, key, value, mask, dropout, causal, scale, window) -> (out, logsumexp, rng_state).

`rng_state` is the generator's state before dropout is drawn. `window` is empty, or, for a shard of
a larger call, six numbers: the whole batch and its first row here, then heads, then queries. The
shard then applies its part of the numbers drawn for the whole call.
"""

attention_backward = torch.ops.autopar.attention_backward.default
"""The gradients of query, key, value and mask; that of the mask is empty unless `mask_grad`."""


def attention_like(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, by `autopar::attention` where it fits."""
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    found = canonical_call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, grouped=enable_gqa
    )
    if found is not None:
        return found()
    options: Any = {"scale": scale, "enable_gqa": enable_gqa}
    return SDPA(query, key, value, attn_mask, dropout_p, is_causal, **options)


def canonical_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    *,
    grouped: bool,
) -> Callable[[], Tensor] | None:
    """A call of `autopar::attention`; None for arguments that it does not take."""
    operands = (query, key, value, attn_mask)
    if not _fits(*operands, grouped) or (is_causal and attn_mask is not None):
        return None
    return lambda: attention(*operands, float(dropout_p), is_causal, scale)[0]


SDPA = torch.nn.functional.scaled_dot_product_attention
"""torch's function, also while tests replace it."""


def _autocast(*tensors: Tensor | None) -> list[Any]:
    """Operands as autocast hands them to torch's function."""
    query = tensors[0]
    assert query is not None
    device = query.device.type
    device = "cpu" if device == "meta" else device
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor | None) -> Tensor | None:
        fits = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if fits else tensor  # type: ignore[union-attr]

    return [cast(tensor) for tensor in tensors]


def _fits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grouped: bool) -> bool:
    """Whether a call has the shapes and dtypes of the operator; others are traced as torch does."""
    if not (q.dim() == k.dim() == v.dim() == 4) or not q.is_floating_point():
        return False
    shapes = q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]
    heads = q.shape[1] == k.shape[1] or (grouped and k.shape[1] and q.shape[1] % k.shape[1] == 0)
    has_elements = all(size > 0 for size in q.shape)
    if not (shapes and heads and q.dtype == k.dtype == v.dtype and has_elements):
        return False
    if mask is None:
        return True
    scores = (*q.shape[:3], k.shape[2])
    own = scores[len(scores) - mask.dim() :] if mask.dim() <= 4 else ()
    fits = len(own) == mask.dim() and all(n in (1, m) for n, m in zip(mask.shape, own, strict=True))
    return mask.dim() >= 2 and fits and mask.dtype in (torch.bool, q.dtype)


# -- results -----------------------------------------------------------------------------------


def heads_last(like: Tensor, width: int) -> Tensor:
    """An empty tensor of the shape of `like`, stored as [batch, rows, heads, width]."""
    batch, heads, rows, _ = like.shape
    return like.new_empty((batch, rows, heads, width)).transpose(1, 2)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exps, and of the dense formula."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.register_fake("autopar::attention", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = query.new_empty(query.shape[:3], dtype=statistics_dtype(query.dtype))
    size = _STATE_BYTES["cuda" if query.device.type == "cuda" else "cpu"] if dropout_p else 0
    state = torch.empty(size, dtype=torch.uint8, device=query.device)
    return heads_last(query, value.shape[3]), statistics, state


_STATE_BYTES = {"cpu": 5056, "cuda": 16}
"""Bytes of a generator's state."""


@torch.library.register_fake("autopar::attention_backward", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _backward_fake(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    rng_state: Tensor,
    mask_grad: bool,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = query.new_empty(attn_mask.shape if mask_grad and attn_mask is not None else 0)
    q, k, v = (heads_last(t, t.shape[3]) for t in (query, key, value))
    return q, k, v, mask


# -- autograd ----------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.dropout_p, ctx.is_causal, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    count = len(ctx.needs_input_grad)  # the dispatcher drops defaults at the end
    if grad is None:
        return (None,) * count
    wanted = count > 3 and ctx.needs_input_grad[3]
    call = (ctx.dropout_p, ctx.is_causal, ctx.scale, ctx.window)
    *gradients, of_mask = attention_backward(grad, *ctx.saved_tensors, wanted, *call)
    return (*gradients, of_mask if wanted else None, None, None, None, None)[:count]


torch.library.register_autograd("autopar::attention", _backward, setup_context=_keep, lib=_LIBRARY)


# -- work --------------------------------------------------------------------------------------


def products(query: Any, key: Any, value: Any) -> tuple[int, int]:
    """Floating-point operations of a product over the width of queries, and over that of values."""
    batch, heads, rows, width = query
    scores = 2 * batch * heads * rows * key[2]
    return scores * width, scores * value[3]


@register_flop_formula(torch.ops.autopar.attention)
def _flops(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    return sum(products(query, key, value))


@register_flop_formula(torch.ops.autopar.attention_backward)
def _backward_flops(grad: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    """Scores again, gradients of scores and values, then of queries and keys."""
    wide, deep = products(query, key, value)
    return 3 * wide + 2 * deep


# -- implementations ---------------------------------------------------------------------------


@torch.library.impl(_LIBRARY, "attention", "CompositeExplicitAutograd")
def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    window: Any = (),
) -> tuple[Tensor, Tensor, Tensor]:
    state = query.new_empty(0, dtype=torch.uint8)
    if is_fused(query, key, value, attn_mask, dropout_p, is_causal, scale):
        mask = _additive(attn_mask, query.dtype)
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return found[0], found[1].contiguous(), state
    scores = scores_of(query, key, attn_mask, is_causal, scale)
    logsumexp = scores.logsumexp(-1)
    weights = _weights(scores, logsumexp)
    if dropout_p:
        state = _generator_state(query.device)
        weights = weights * _kept(weights, dropout_p, window)
    out = heads_last(query, value.shape[3])
    out.copy_(weights @ each_head(value, query).to(weights.dtype))
    return out, logsumexp, state


@torch.library.impl(_LIBRARY, "attention_backward", "CompositeExplicitAutograd")
def _run_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    rng_state: Tensor,
    mask_grad: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    window: Any = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    fused = not mask_grad and is_fused(query, key, value, attn_mask, dropout_p, is_causal, scale)
    none = query.new_empty(0)
    if fused:
        mask = _additive(attn_mask, query.dtype)
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, logsumexp, 0.0, is_causal,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
        return *found, none
    weights = _weights(scores_of(query, key, attn_mask, is_causal, scale), logsumexp)
    grad = grad_out.to(weights.dtype)
    kept = None
    if dropout_p:
        with _generator_in(rng_state):
            kept = _kept(weights, dropout_p, window)
    of_value = (weights if kept is None else weights * kept).mT @ grad
    of_weights = grad @ each_head(value, query).to(weights.dtype).mT
    if kept is not None:
        of_weights = of_weights * kept
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    factor = scale_of(query, scale)
    of_query = of_scores @ each_head(key, query).to(weights.dtype) * factor
    of_key = of_scores.mT @ query.to(weights.dtype) * factor
    mask_shape = attn_mask.shape if mask_grad and attn_mask is not None else None
    return (
        heads_last(query, query.shape[3]).copy_(of_query),
        heads_last(key, key.shape[3]).copy_(each_key_head(of_key, key)),
        heads_last(value, value.shape[3]).copy_(each_key_head(of_value, value)),
        none if mask_shape is None else of_scores.sum_to_size(mask_shape).to(query.dtype),
    )


def _generator_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device).to(device)
    return torch.get_rng_state()


@contextlib.contextmanager
def _generator_in(state: Tensor) -> Iterator[None]:
    """Sets the generator of a state's device to it inside."""
    on_gpu = state.device.type == "cuda"
    with torch.random.fork_rng([state.device] if on_gpu else []):
        if on_gpu:
            torch.cuda.set_rng_state(state.cpu(), state.device)
        else:
            torch.set_rng_state(state)
        yield


def is_fused(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, *call: Any) -> bool:
    """Whether a CPU's fused kernel runs for a call."""
    if q.device.type != "cpu" or p:
        return False
    is_causal, scale = call
    options = (v, _additive(mask, q.dtype), p, is_causal)
    return fused_attention_choice(q, k, *options, scale=scale) == FUSED_ATTENTION


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask that is added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def scale_of(query: Tensor, scale: float | None) -> float:
    """The factor of scores."""
    return 1.0 / math.sqrt(query.shape[3]) if scale is None else scale


def each_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values of every query head."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def each_key_head(gradient: Tensor, like: Tensor) -> Tensor:
    """Sums of gradients over the query heads that share a key head."""
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)


def scores_of(q: Tensor, k: Tensor, mask: Any, is_causal: bool, scale: float | None) -> Tensor:
    """Scores of the dense formula, -inf where masked."""
    dtype = statistics_dtype(q.dtype)
    scores = q.to(dtype) @ each_head(k, q).to(dtype).mT * scale_of(q, scale)
    if is_causal:
        rows, columns = scores.shape[2:]
        later = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril().logical_not()
        scores = scores.masked_fill(later, -math.inf)
    added = _additive(mask, dtype)
    return scores if added is None else scores + added


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """Softmax; a row without any key is zero."""
    weights = torch.exp(scores - logsumexp[..., None])
    return weights.masked_fill(logsumexp[..., None] == -math.inf, 0.0)


def _kept(weights: Tensor, p: float, window: Any) -> Tensor:
    """Factors of dropout, drawn for the whole call."""
    shape = list(weights.shape)
    whole = [*window[::2], shape[3]] if window else shape
    drawn = torch.empty(whole, dtype=weights.dtype, device=weights.device).bernoulli_(1 - p)
    for dim, first in enumerate(window[1::2] if window else ()):
        drawn = drawn.narrow(dim, first, shape[dim])
    return drawn / (1 - p) if p < 1 else drawn
