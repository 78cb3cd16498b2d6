"""CUDA's attention kernels on machines without CUDA: graphs have them, and math computes them.

with cuda_kernels("flash"):      # or "cudnn", "efficient"
    graph = run_passes(captured, build_pass_pipeline(plan, rank, "nccl"))
with MathAttention():
    run(graph)
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from autopar.core.common.constant_draws import ConstantDraws
from autopar.core.operators import kernels

aten = torch.ops.aten
KINDS = ("flash", "cudnn", "efficient")
FORWARDS = tuple(
    name
    for kind in KINDS
    for name in (f"_scaled_dot_product_{kind}_attention", f"{kind}_attention_on_stream")
)
BACKWARDS = tuple(f"_scaled_dot_product_{kind}_attention_backward" for kind in KINDS)


@contextlib.contextmanager
def cuda_kernels(kind: str = "flash") -> Iterator[None]:
    """Lowers attention for NCCL to one kernel of CUDA, whatever the dtype; flash takes no mask."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Any) -> Tensor:
        p, causal, scale = call.dropout_p, call.is_causal, call.scale
        bias = kernels._full_mask(q, k, mask)
        if kind == "flash" and mask is None:
            return aten._scaled_dot_product_flash_attention(q, k, v, p, causal, False, scale=scale)[
                0
            ]
        if kind == "cudnn" and not (bias is not None and bias.requires_grad):
            return aten._scaled_dot_product_cudnn_attention(
                q, k, v, bias, True, p, causal, False, scale=scale
            )[0]
        return aten._scaled_dot_product_efficient_attention(
            q, _repeated(k, q), _repeated(v, q), bias, True, p, causal, scale=scale
        )[0]

    known: dict[int, dict[Any, Any]] = {}  # other kernels of the same graphs may be traced already
    with (
        patch.object(kernels, "cuda_attention", attention),
        patch.object(kernels, "fake_result_cache", lambda mode: known.setdefault(id(mode), {})),
    ):
        yield


@contextlib.contextmanager
def called_by_models(kind: str) -> Iterator[None]:
    """Replaces torch's attention by a call of CUDA's kernel, as torch dispatches to it on a GPU."""

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
        given, call = (query, key, value), (dropout_p, is_causal)
        if kind == "flash" and attn_mask is None:
            return aten._scaled_dot_product_flash_attention(*given, *call, scale=scale)[0]
        taken = "cudnn" if kind == "cudnn" else "efficient"
        kernel = getattr(aten, f"_scaled_dot_product_{taken}_attention")
        return kernel(*given, attn_mask, True, *call, scale=scale)[0]

    code = attention.__code__.replace(co_filename=torch.__file__)  # sources name the user's line
    attention.__code__ = code
    with patch.object(F, "scaled_dot_product_attention", attention):
        yield


class MathAttention(ConstantDraws):
    """Computes CUDA's attention by its formula, and makes random numbers constant.

    Dropout keeps and scales every probability. Backwards check the statistics that they are given.

    Attributes:
        blocks: whether backwards are of blocks, whose statistics are over other keys as well.
        kernels: names of the kernels that ran.
    """

    def __init__(self, *, blocks: bool = False) -> None:
        super().__init__()
        self.blocks, self.kernels = blocks, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        kwargs = dict(kwargs or {})
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_real = all(type(x) is Tensor and not x.is_meta for x in tensors)
        if not is_real or name not in (*FORWARDS, *BACKWARDS):
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.kernels.add(name)
        given = {a.name: a.default_value for a in func._schema.arguments}
        given |= {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | kwargs
        made = pytree.tree_map(_on_cpu, func(*_on_meta(args), **_on_meta(kwargs)))
        if name in BACKWARDS:
            for result, value in zip(made, _backward(given, self.blocks), strict=False):
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


def _backward(given: Mapping[str, Any], blocks: bool) -> tuple[Tensor | None, ...]:
    query, key, value = (given[name] for name in ("query", "key", "value"))
    gradient = given.get("grad_out", given.get("grad_out_"))
    out, lse = _attend(given)
    rows = given["logsumexp"].reshape(*lse.shape[:2], -1)[..., : lse.shape[-1]]
    if not blocks:
        assert torch.allclose(rows.double(), lse.double(), atol=1e-4), "the backward got other rows"
        assert torch.allclose(given["out"], out), "the backward got another output"
        rows = lse  # kernels keep rows in float32, which parity in float64 does not allow
    weights = (_scores(given) - rows.unsqueeze(-1)).exp()
    kept = weights / (1.0 - given["dropout_p"])
    of_values = kept.transpose(-2, -1) @ gradient
    of_kept = gradient @ _repeated(value, query).transpose(-2, -1) / (1.0 - given["dropout_p"])
    of_scores = weights * (of_kept - (gradient * given["out"]).sum(-1, keepdim=True))
    of_query = of_scores @ _repeated(key, query) * _scale(given)
    of_keys = of_scores.transpose(-2, -1) @ query * _scale(given)
    of_bias = of_scores if given.get("grad_input_mask", [False])[-1] else None
    return of_query, _grouped(of_keys, key), _grouped(of_values, value), of_bias


def _grouped(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of heads that several query heads share."""
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)
