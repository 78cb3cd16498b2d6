"""Random inputs of an operator that runs by itself, and whether it may run on them.

Floats, complex numbers and booleans may have any value. Integers may be indices, lengths or the
opaque bytes of a workspace, and a kernel that trusts wrong ones reads foreign memory: torch's LSTM
on a CPU then ends the process. An operator gets integers only if any values do, or if a rule here
bounds them. All others are modelled and never run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from autopar._torch import OpOverload
from autopar.core.ir.aliases import extent_bytes
from autopar.core.ir.graph import tensors
from autopar.core.operators.attention import attention_backward
from autopar.core.operators.experts import expert_mm, expert_outer

aten = torch.ops.aten

Bound = Callable[[fx.Node], int]


def integer_ranges(node: fx.Node) -> tuple[tuple[int, int], ...]:
    """Ranges to try for the integers of an operator; none if it must not run."""
    if _packet(node.target) in _BOUNDS:
        return ((0, index_bound(node)),)
    inputs = [t for source in node.all_input_nodes for t in tensors(source)]
    return ((0, 1), (1, 2)) if takes_any(node.target, inputs) else ()


def takes_any(target: Any, inputs: Iterable[torch.Tensor]) -> bool:
    """Whether an operator accepts tensors of these dtypes with any values.

    Integers are plain numbers to a pointwise operator, and to one without other tensors whose
    result has a known shape.
    """
    inputs = list(inputs)
    if not any(_is_integral(tensor) for tensor in inputs):
        return True
    if not isinstance(target, OpOverload):
        return False
    alone = len(inputs) == 1 and not any(tag in target.tags for tag in _BY_VALUE)
    return alone or torch.Tag.pointwise in target.tags or _packet(target) in _MOVES


def index_bound(node: fx.Node) -> int:
    """Exclusive upper bound of an operator's integers; 1 without a rule."""
    rule = _BOUNDS.get(_packet(node.target))
    return 1 if rule is None else rule(node)


def random_like(val: Any, low: int, high: int) -> Any:
    """Random tensors like `val`: floats in [0, 1), integers in [low, high)."""
    if isinstance(val, (list, tuple)):
        return type(val)(random_like(v, low, high) for v in val)
    if not isinstance(val, torch.Tensor):
        return val
    count = extent_bytes(val) // val.element_size()
    if val.dtype == torch.bool:
        flat = torch.randint(0, 2, (count,), device=val.device).bool()
    elif _is_integral(val):
        flat = torch.randint(low, high, (count,), device=val.device).to(val.dtype)
    else:
        flat = torch.rand(count, device=val.device).to(val.dtype)
    return flat.as_strided(val.shape, val.stride())


def _is_integral(tensor: torch.Tensor) -> bool:
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _packet(target: Any) -> Any:
    return getattr(target, "overloadpacket", None)


def _size(argument: int, dim: int) -> Bound:
    """The size of one dim of an argument, which may have fewer dims."""
    return lambda node: (_shape(node, argument) or (1, 1))[dim]


def _size_of_named_dim(node: fx.Node) -> int:
    """The size of the dim that the second argument names."""
    shape = _shape(node, 0)
    return shape[node.args[1]] if shape else 1  # type: ignore[index]


def _plane(dims: int) -> Bound:
    """The number of elements in the last dims of the second argument, which was pooled."""
    return lambda node: math.prod(_shape(node, 1)[-dims:])


def _smallest_indexed(node: fx.Node) -> int:
    """The smallest size of the dims that a list of tensors indexes."""
    indices: Any = node.args[1]
    sizes = zip(_shape(node, 0), indices, strict=False)
    return min((size for size, index in sizes if index is not None), default=1)


def _shape(node: fx.Node, argument: int) -> tuple[int, ...]:
    value: Any = node.args[argument]
    return tuple(tensors(value)[0].shape)


def _experts(node: fx.Node) -> int:
    """The number of experts in all; those of a rank start at any."""
    is_product = node.target is expert_mm
    count: Any = _shape(node, 1)[0] if is_product else node.args[3]
    total: Any = [*node.args, 0, 0][4 if is_product else 5]
    return int(total or count)


_BOUNDS: Mapping[Any, Bound] = {
    **dict.fromkeys((expert_mm.overloadpacket, expert_outer.overloadpacket), _experts),
    aten.embedding: _size(0, 0),
    aten.embedding_dense_backward: lambda node: int(node.args[2]),  # type: ignore[arg-type]
    aten.nll_loss_forward: _size(0, -1),
    aten.nll_loss_backward: _size(1, -1),
    aten.nll_loss2d_forward: _size(0, 1),
    aten.nll_loss2d_backward: _size(1, 1),
    **dict.fromkeys(
        (
            aten.gather,
            aten.scatter,
            aten.scatter_,
            aten.scatter_add,
            aten.scatter_add_,
            aten.scatter_reduce,
            aten.index_select,
            aten.index_add,
            aten.index_add_,
            aten.index_copy,
            aten.index_fill,
        ),
        _size_of_named_dim,
    ),
    **dict.fromkeys(
        (aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._unsafe_index_put),
        _smallest_indexed,
    ),
    **dict.fromkeys(
        (aten.max_pool2d_with_indices_backward, aten.adaptive_max_pool2d_backward), _plane(2)
    ),
    **dict.fromkeys(
        (aten.max_pool3d_with_indices_backward, aten.adaptive_max_pool3d_backward), _plane(3)
    ),
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention_backward,
            aten._scaled_dot_product_efficient_attention_backward,
            aten._scaled_dot_product_cudnn_attention_backward,
            attention_backward.overloadpacket,
        ),
        lambda node: 2,  # seeds and offsets of a random stream are the only integers
    ),
}
"""Exclusive upper bounds of operators whose integers are all indices, or seeds."""

_MOVES = frozenset(
    {aten.cat, aten.stack, aten.copy, aten.copy_, aten.slice_scatter, aten.select_scatter}
)
"""Operators that copy integers without using their values."""

_BY_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
