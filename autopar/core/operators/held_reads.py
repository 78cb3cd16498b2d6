"""`without_aliases`: reads from lower levels of memory in a form that compilers accept.

`prefetched` and `fetched` return their argument. A compiler takes their result for other memory,
and the argument's memory for free once they have run. In code for compilers a number stands for
memory that is being filled, and the wait returns that memory:

| operator | |
|---|---|
| `begin_prefetch(ticket, folder, size, stride, dtype, device)` | `prefetch`, returns a number |
| `end_prefetch(number, ticket, size, stride, dtype, device)` | `prefetched`, returns the memory |
| `begin_fetch(parameter, folder)` | `fetch`, returns a number |
| `end_fetch(number, size, stride, dtype, device)` | `fetched`, returns the memory |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autopar.core.operators import offload, parameters
from autopar.core.operators.numbers import Numbered, number_like
from autopar.core.operators.registration import register

_LAYOUT = "int[] size, int[] stride, ScalarType dtype, Device device"
_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define(f"begin_prefetch(Tensor ticket, str folder, {_LAYOUT}) -> Tensor")
_LIBRARY.define(f"end_prefetch(Tensor number, Tensor ticket, {_LAYOUT}) -> Tensor")
_LIBRARY.define("begin_fetch(Tensor parameter, str folder) -> Tensor")
_LIBRARY.define(f"end_fetch(Tensor number, {_LAYOUT}) -> Tensor")

begin_prefetch = torch.ops.autopar.begin_prefetch.default
end_prefetch = torch.ops.autopar.end_prefetch.default
begin_fetch = torch.ops.autopar.begin_fetch.default
end_fetch = torch.ops.autopar.end_fetch.default

_BEGINS = {offload.prefetch: begin_prefetch, parameters.fetch: begin_fetch}
_ENDS = {offload.prefetched: end_prefetch, parameters.fetched: end_fetch}


def without_aliases(graph: fx.Graph) -> None:
    """Replaces reads of a graph in place. Their nodes have fake tensors as `meta["val"]`."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if (end := _ENDS.get(node.target)) is not None:
            value = node.meta["val"]
            layout = [*value.shape], [*value.stride()], value.dtype, value.device
            node.target, node.args = end, (*node.args, *layout)
        elif (begin := _BEGINS.get(node.target)) is not None:
            node.target = begin


_held: Numbered[Tensor] = Numbered()
"""Memory that is being filled."""


def _begin_prefetch(ticket: Tensor, folder: str, *layout: Any) -> Tensor:
    return _held.add(offload.prefetch(ticket, folder, *layout))


def _end_prefetch(number: Tensor, ticket: Tensor, *layout: Any) -> Tensor:
    return offload.prefetched(_held.pop(number), ticket)


def _begin_fetch(parameter: Tensor, folder: str) -> Tensor:
    return _held.add(parameters.fetch(parameter, folder))


def _end_fetch(number: Tensor, *layout: Any) -> Tensor:
    return parameters.fetched(_held.pop(number))


def _memory(*arguments: Any) -> Tensor:
    return offload.new_memory(*arguments[-4:])


register(
    _LIBRARY,
    {
        "begin_prefetch": (_begin_prefetch, number_like),
        "end_prefetch": (_end_prefetch, _memory),
        "begin_fetch": (_begin_fetch, number_like),
        "end_fetch": (_end_fetch, _memory),
    },
)
