"""`Kernels`: the operators that compute `autopar::attention` and its gradients on a device.

torch's own `scaled_dot_product_attention` is traced on fake tensors, so a device runs the kernel
that torch would choose there. Without CUDA in this torch, `cuda_attention` makes CUDA's choice.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar._torch import enable_python_dispatcher, fake_result_cache
from autopar.core.operators.attention import SDPA, attention, attention_backward
from autopar.core.operators.random_streams import ON_STREAM

aten = torch.ops.aten

Target = Literal["cpu", "cuda"]
_DETACHES = (aten.detach.default, aten.alias.default)
"""Operators that a trace writes for `detach`, before torch 2.14 and since."""

TENSORS = 4  # query, key, value, mask
_WIDEST = 256  # greatest width of a head in flash attention
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kernels:
    """The traced operators of one call.

    Attributes:
        inputs: placeholders of query, key, value, mask and the gradient of the result.
        forward: operators of the forward, in order.
        backward: operators of the backward, in order; none without a gradient.
        out: the result.
        gradients: gradients of query, key, value, and of the mask if it has one.
    """

    inputs: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    out: fx.Node
    gradients: tuple[fx.Node, ...]


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of `autopar::attention` beside its tensors."""

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    window: tuple[int, ...] = ()

    @staticmethod
    def of(node: fx.Node) -> AttentionCall:
        """The arguments of a node of the operator or of its backward."""
        p, causal, scale, window = attention_arguments(node)[-4:]
        return AttentionCall(p, causal, scale, tuple(window))


def is_canonical(node: fx.Node) -> bool:
    """Whether a node is attention before its kernels are chosen."""
    return node.target in (attention, attention_backward)


def tensor_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Nodes of query, key, value and mask, of the operator or of its backward."""
    first = 1 if node.target is attention_backward else 0
    return tuple(attention_arguments(node)[first : first + TENSORS])


def attention_arguments(node: fx.Node) -> list[Any]:
    """All arguments of a node of attention or of its backward, in the order of the schema."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = node.args
    return [
        given[i] if i < len(given) else node.kwargs.get(a.name, a.default_value)
        for i, a in enumerate(schema)
    ]


def kernels_of(forward: fx.Node | None, backward: fx.Node | None, target: Target) -> Kernels:
    """The kernels of attention in a graph, of its backward, or of both."""
    node = forward or backward
    assert node is not None
    fakes = [None if n is None else n.meta["val"] for n in tensor_arguments(node)]
    grad = None if backward is None else attention_arguments(backward)[0].meta["val"]
    mask_grad = backward is not None and bool(attention_arguments(backward)[8])
    return trace_kernels((*fakes, grad), AttentionCall.of(node), mask_grad, target)


def own_kernels(node: fx.Node, target: Target) -> tuple[fx.Node, ...]:
    """The operators that run for one node of attention."""
    if node.target is attention:
        return kernels_of(node, None, target).forward
    return kernels_of(None, node, target).backward


def trace_kernels(
    fakes: tuple[Tensor | None, ...], call: AttentionCall, mask_grad: bool, target: Target
) -> Kernels:
    """The kernels for fake tensors of query, key, value, mask and gradient, traced once."""
    mode = fakes[0].fake_mode  # type: ignore[union-attr]
    key = (attention, target, call, mask_grad, *map(_key, fakes))
    known = fake_result_cache(mode)
    if key not in known:
        with mode:
            known[key] = _traced(fakes, call, mask_grad, target)
    found: Kernels = known[key]
    return found


def _key(fake: Tensor | None) -> Any:
    return fake if fake is None else (fake.shape, fake.stride(), fake.dtype, fake.device)


def _traced(
    fakes: tuple[Tensor | None, ...], call: AttentionCall, mask_grad: bool, target: Target
) -> Kernels:
    def program(*given: Tensor | None) -> tuple[Tensor, ...]:
        *operands, grad = (None if t is None else t.detach() for t in given)
        wanted = [t for t in operands[: 4 if mask_grad else 3] if t is not None]
        with torch.set_grad_enabled(grad is not None):
            for tensor in wanted:
                tensor.requires_grad_(grad is not None)
            query, key, value, mask = operands
            result = attend(query, key, value, mask, call)  # type: ignore[arg-type]
        out = _heads_last(result.detach())
        if grad is None:
            return (out,)
        gradients = torch.autograd.grad(result, wanted, grad)
        return (out, *map(_heads_last, gradients[:3]), *gradients[3:])

    attend = _attention_for(target, fakes[0])  # type: ignore[arg-type]
    given = [None if t is None else t.detach() for t in fakes]  # nodes may share a fake tensor
    with enable_python_dispatcher(), _no_autocast():
        graph = make_fx(program)(*given).graph
    for node in list(graph.nodes):
        if node.target in _DETACHES:
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
    nodes = list(graph.nodes)
    inputs = tuple(node for node in nodes if node.op == "placeholder")
    results = tuple(nodes[-1].args[0])
    calls = [node for node in nodes if node.op == "call_function"]
    last = calls.index(results[0])
    # A trace may write operators on the gradient before the forward. Told apart by position, the
    # backward took the queries for the gradient.
    late = {inputs[-1]}  # what depends on the gradient
    for node in calls:
        late |= {node} if not late.isdisjoint(node.all_input_nodes) else set()
    early = set(calls[: last + 1]) - late
    early |= {n for n in calls if n.target is getitem and n.args[0] in early}
    forward = tuple(n for n in calls if n in early)
    if call.dropout_p and call.window:
        _draw_on_streams(forward, call)
    backward = tuple(n for n in calls if n not in early)
    return Kernels(inputs, forward, backward, results[0], results[1:])


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _heads_last(tensor: Tensor) -> Tensor:
    """A tensor stored as [batch, rows, heads, width], as `autopar::attention` promises."""
    moved = tensor.transpose(1, 2)
    return tensor if moved.is_contiguous() else moved.contiguous().transpose(1, 2)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, AttentionCall], Tensor]


def _attention_for(target: Target, query: Tensor) -> Attend:
    emulated = target == "cuda" and query.device.type != "cuda"
    return cuda_attention if emulated else torch_attention


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, call: AttentionCall) -> Tensor:
    """Attention as torch computes it on the device of its operands."""
    if call.dropout_p and call.window and q.device.type != "cuda":
        return _windowed(q, k, v, mask, call)
    grouped = q.shape[1] != k.shape[1]
    options: Any = {"scale": call.scale, "enable_gqa": grouped}
    return SDPA(q, k, v, mask, call.dropout_p, call.is_causal, **options)


def cuda_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, call: AttentionCall) -> Tensor:
    """Attention as torch computes it with CUDA, on a machine without."""
    p, causal, scale = call.dropout_p, call.is_causal, call.scale
    narrow = q.shape[3] == v.shape[3] <= _WIDEST
    if q.dtype in _HALVES and mask is None and narrow:
        found = aten._scaled_dot_product_flash_attention(q, k, v, p, causal, False, scale=scale)
        return found[0]
    if q.dtype != torch.float64 and q.shape[1] == k.shape[1]:
        mask = _full_mask(q, k, mask)
        found = aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, True, p, causal, scale=scale
        )
        return found[0]
    if p and call.window:
        return _windowed(q, k, v, mask, call)
    with sdpa_kernel(SDPBackend.MATH):
        return torch_attention(q, k, v, mask, call)


def _full_mask(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """A mask as an addend of all scores."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, q.new_zeros(()), q.new_full((), -math.inf))
    return mask.expand(*q.shape[:3], k.shape[2])


def _windowed(q: Tensor, k: Tensor, v: Tensor, mask: Any, call: AttentionCall) -> Tensor:
    """Torch's dense formula, with the dropout of a part of a larger call."""
    dtype = torch.float32 if q.dtype in _HALVES else q.dtype
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k, v))
    scale = math.sqrt(1.0 / math.sqrt(q.shape[3]) if call.scale is None else call.scale)
    scores = (q.to(dtype) * scale) @ (k.to(dtype).mT * scale)
    if call.is_causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, scores.new_zeros(()), scores.new_full((), -math.inf))
    weights = aten._safe_softmax(scores if mask is None else scores + mask, -1)
    whole = [*call.window[::2], weights.shape[3]]
    kept = aten.native_dropout(weights.new_ones(whole), call.dropout_p, True)[0]
    for dim, first in enumerate(call.window[1::2]):
        kept = kept.narrow(dim, first, weights.shape[dim])
    return ((weights * kept) @ v.to(dtype)).to(q.dtype)


def _draw_on_streams(forward: tuple[fx.Node, ...], call: AttentionCall) -> None:
    """Lets fused kernels of different shards draw different numbers."""
    sizes, firsts = call.window[::2], call.window[1::2]
    stream = (firsts[0] * sizes[1] + firsts[1]) * sizes[2] + firsts[2]
    for node in forward:
        if node.target in ON_STREAM:
            node.target = ON_STREAM[node.target]
            node.kwargs = {**node.kwargs, "stream": stream}
