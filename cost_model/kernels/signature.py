"""`signature`: what the time of an operator depends on, as a text that can be a key on disk.

`aten.mm.default(f32 cpu [4, 8]/(8, 1), f32 cpu [8, 2]/(2, 1))`: the operator, dtypes, devices,
shapes and strides of its tensors, and its other arguments. The text of each tensor is kept in its
node's `meta["cost_type"]` together with the fake tensor it was made from, so that a pass that
replaces the one cannot leave a wrong other behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar.cost_model.collectives import is_wait, issuer
from autopar.cost_model.kernels.aliases import is_view
from autopar.ir.graph import tensor_bytes, tensors

WAIT = "wait for"


def signature(node: fx.Node) -> str:
    """The key of an operator node."""
    parts = [_argument(a) for a in node.args]
    parts += [f"{name}={_argument(value)}" for name, value in node.kwargs.items()]
    return f"{_target(node.target)}({', '.join(parts)})"


def time_key(node: fx.Node) -> str:
    """What the time of a node is kept under: its signature, or what kind of view it is.

    A wait is kept under what it waits for.
    """
    if is_wait(node) and (source := issuer(node)) is not None:
        return f"{WAIT} {signature(source)}"
    return f"view {_target(node.target)}" if is_view(node) else signature(node)


def kind_of(key: str) -> str:
    """The operator of a key."""
    return key.partition("(")[0]


def moved_bytes(node: fx.Node) -> int:
    """Bytes that an operator reads and writes: all its tensors, once each."""
    return sum(tensor_bytes(t) for n in (*node.all_input_nodes, node) for t in tensors(n))


def describe_argument(value: Any) -> str:
    """An argument as signatures have it: types in the place of tensors."""
    return _argument(dict(value) if isinstance(value, Mapping) else value)


def _argument(value: Any) -> str:
    if isinstance(value, dict):
        return str({name: _argument(item) for name, item in value.items()})
    if isinstance(value, fx.Node):
        return type_text(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join([_argument(v) for v in value]) + "]"
    return repr(value)


def type_text(node: fx.Node) -> str:
    """What a node yields: dtypes, devices, shapes and strides of its tensors, as a text."""
    val = node.meta.get("val")
    kept = node.meta.get("cost_type")
    if kept is not None and kept[0] is val:
        return str(kept[1])
    text = _describe(val)
    node.meta["cost_type"] = (val, text)
    return text


def _describe(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        dtype = str(val.dtype).removeprefix("torch.")
        return f"{dtype} {val.device.type} {list(val.shape)}/{val.stride()}"
    if isinstance(val, (list, tuple)):
        return "[" + ", ".join([_describe(v) for v in val]) + "]"
    return repr(val)


@cache
def _target(target: Any) -> str:
    return str(target)
