"""CUDA's attention operators on machines without CUDA: captured as a GPU would, computed by math.

with cuda_attention("flash"):      # or "cudnn", "efficient"
    plan = autopar.plan(model_on_meta, 8, example_inputs=..., cluster=...)
with MathAttention():
    run(graph)
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.verification.draws import ConstantDraws

aten = torch.ops.aten
KINDS = ("flash", "cudnn", "efficient")
CUDA = tuple(f"_scaled_dot_product_{kind}_attention" for kind in KINDS)


@contextlib.contextmanager
def cuda_attention(kind: str = "flash") -> Iterator[None]:
    """Replaces `scaled_dot_product_attention` by the operator that CUDA would dispatch to."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                bias = torch.zeros_like(attn_mask, dtype=query.dtype)
                attn_mask = bias.masked_fill(attn_mask.logical_not(), float("-inf"))
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        if kind == "flash" and attn_mask is None:
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        if kind == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, attn_mask, True, dropout_p, is_causal, False, scale=scale
            )[0]
        key, value = (_repeated(x, query) for x in (key, value))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]

    before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


class MathAttention(ConstantDraws):
    """Computes CUDA's attention by its formula, and makes random numbers constant.

    Dropout keeps and scales every probability. Backwards check the statistics that they are given.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2].removesuffix("_backward")
        kwargs = dict(kwargs or {})
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_real = all(type(x) is Tensor and not x.is_meta for x in tensors)
        if not is_real or name not in CUDA:
            return super().__torch_dispatch__(func, types, args, kwargs)
        given = {a.name: a.default_value for a in func._schema.arguments}
        given |= {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | kwargs
        made = pytree.tree_map(_on_cpu, func(*_on_meta(args), **_on_meta(kwargs)))
        if func._schema.name.endswith("_backward"):
            for result, value in zip(made, _backward(given), strict=False):
                if value is not None:
                    result.copy_(value)
            return made
        out, lse = _attend(given)
        rows = made[1]
        rows[..., : lse.shape[-1]] = lse.view(*lse.shape, 1) if rows.dim() > lse.dim() else lse
        return (made[0].copy_(out), rows, *made[2:])


def _on_meta(values: Any) -> Any:
    return pytree.tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, values)


def _on_cpu(value: Any) -> Any:
    return torch.zeros_like(value, device="cpu") if isinstance(value, Tensor) else value


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    groups = query.shape[1] // x.shape[1]
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def _attend(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The output and the logarithm of the sum of exponentials of the scores."""
    scores = _scores(given)
    weights = scores.softmax(-1) / (1.0 - given["dropout_p"])
    return weights @ _repeated(given["value"], given["query"]), scores.logsumexp(-1)


def _scores(given: Mapping[str, Any]) -> Tensor:
    query, key = given["query"], given["key"]
    scores = query @ _repeated(key, query).transpose(-2, -1) * _scale(given)
    if given.get("attn_bias") is not None:
        scores = scores + given["attn_bias"]
    if given["is_causal"]:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    return scores


def _scale(given: Mapping[str, Any]) -> float:
    scale: float | None = given.get("scale")
    return given["query"].shape[-1] ** -0.5 if scale is None else scale


def _backward(given: Mapping[str, Any]) -> tuple[Tensor | None, ...]:
    query, key, value = (given[name] for name in ("query", "key", "value"))
    gradient = given.get("grad_out", given.get("grad_out_"))
    out, lse = _attend(given)
    rows = given["logsumexp"].reshape(*lse.shape[:2], -1)[..., : lse.shape[-1]]
    assert torch.allclose(rows.double(), lse.double(), atol=1e-4), "the backward got other rows"
    assert torch.allclose(given["out"], out), "the backward got another output"
    weights = _scores(given).softmax(-1)
    kept = weights / (1.0 - given["dropout_p"])
    of_values = kept.transpose(-2, -1) @ gradient
    of_kept = gradient @ _repeated(value, query).transpose(-2, -1) / (1.0 - given["dropout_p"])
    of_scores = weights * (of_kept - (of_kept * weights).sum(-1, keepdim=True))
    of_query = of_scores @ _repeated(key, query) * _scale(given)
    of_keys = of_scores.transpose(-2, -1) @ query * _scale(given)
    of_bias = of_scores if given.get("grad_input_mask", [False])[-1] else None
    return of_query, _grouped(of_keys, key), _grouped(of_values, value), of_bias


def _grouped(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of heads that several query heads share."""
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)
