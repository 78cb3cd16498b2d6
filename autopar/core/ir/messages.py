"""`collective_of`, `transfer_of`: messages that nodes of a graph begin, and waits for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")

WRITE, READ = "storage write", "storage read"
TO_HOST, FROM_HOST = "copy to host", "copy from host"

_TRANSFERS = {
    "offload": (WRITE, TO_HOST),
    "prefetch": (READ, FROM_HOST),
    "fetch": (READ, FROM_HOST),
}
_WAITS = ("offloaded", "prefetched", "fetched")


def collective_of(node: fx.Node) -> str | None:
    """The collective that a node issues, or None."""
    target: Any = node.target
    if getattr(target, "namespace", None) != "_c10d_functional":
        return None
    name = target.name().partition("::")[2]
    return next((c for c in COLLECTIVES[:-1] if name.startswith(c)), None)


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def issuer(wait: fx.Node) -> fx.Node | None:
    """The collective of a wait, found through views and elements of tuples."""
    source = wait.args[0]
    while isinstance(source, fx.Node) and collective_of(source) is None:
        source = source.args[0] if source.args else None
    return source if isinstance(source, fx.Node) else None


def transfer_of(node: fx.Node) -> str | None:
    """The kind of transfer that a node begins; None for other nodes.

    The second argument is a folder on storage, or "" for host memory.
    """
    in_files, on_host = _TRANSFERS.get(_own_name(node), (None, None))
    return in_files if in_files is None or node.args[1] else on_host


def is_storage_wait(node: fx.Node) -> bool:
    """Whether a node waits for a transfer, which its first argument began."""
    return _own_name(node) in _WAITS


def is_stored(node: fx.Node) -> bool:
    """Whether a node is a parameter that lies on a lower level: it is read from there."""
    reads = (transfer_of(user) in (READ, FROM_HOST) for user in node.users)
    return node.op == "placeholder" and any(reads)


def _own_name(node: fx.Node) -> str:
    target: Any = node.target
    is_ours = getattr(target, "namespace", None) == "autopar"
    return target.name().partition("::")[2] if is_ours else ""
