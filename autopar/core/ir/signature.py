"""`signature`: the conditions of an operator's time, as text for keys on disk.

`aten.mm.default(f32 cpu [4, 8]/(8, 1), f32 cpu [8, 2]/(2, 1))` has the operator, the dtypes,
devices, shapes and strides of its tensors, and its other arguments. The text of each tensor is
cached in its node's `meta["cost_type"]` together with its fake tensor, so that it expires when a
pass replaces that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar.core.ir.aliases import is_view
from autopar.core.ir.graph import tensor_bytes, tensors
from autopar.core.ir.messages import is_wait, issuer

WAIT = "wait for"


def signature(node: fx.Node) -> str:
    """The key of an operator node."""
    parts = [_argument(a) for a in node.args]
    parts += [f"{name}={_argument(value)}" for name, value in node.kwargs.items()]
    return f"{_target(node.target)}({', '.join(parts)})"


def time_key(node: fx.Node) -> str:
    """The key of a node's time: its signature, or its kind of view.

    A wait has the key of its collective.
    """
    if is_wait(node) and (source := issuer(node)) is not None:
        return f"{WAIT} {signature(source)}"
    return f"view {_target(node.target)}" if is_view(node) else signature(node)


def kind_of(key: str) -> str:
    """The operator of a key."""
    return key.partition("(")[0]


def moved_bytes(node: fx.Node) -> int:
    """Bytes that an operator reads and writes: each of its tensors once."""
    return sum(tensor_bytes(t) for n in (*node.all_input_nodes, node) for t in tensors(n))


def describe_argument(value: Any) -> str:
    """The text of an argument in signatures, with types for tensors."""
    return _argument(dict(value) if isinstance(value, Mapping) else value)


def _argument(value: Any) -> str:
    if isinstance(value, dict):
        return str({name: _argument(item) for name, item in value.items()})
    if isinstance(value, fx.Node):
        return type_text(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join([_argument(v) for v in value]) + "]"
    if isinstance(value, torch.device):
        return repr(torch.device(value.type))  # every rank has a GPU of another number
    return repr(value)


def type_text(node: fx.Node) -> str:
    """Dtypes, devices, shapes and strides of a node's tensors, as text."""
    val = node.meta.get("val")
    cached = node.meta.get("cost_type")
    if cached is not None and cached[0] is val:
        return str(cached[1])
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
