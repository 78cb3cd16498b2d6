"""`copies_of`, `summed_copies`: rows that are copies of tokens, or are summed to tokens.

Several experts of one token may be on one rank, or one node. Its copies need to be sent there once,
and the sum of what comes back suffices where nothing but this sum is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from autopar.core.ir.graph import tensors
from autopar.core.ir.placement import Shard
from autopar.passes.rules.routed_rows import Region

aten = torch.ops.aten

VIEWS = frozenset((aten.view.default, aten._unsafe_view.default, aten.reshape.default))
COPIES = frozenset((*VIEWS, aten.clone.default))


def copies_of(node: fx.Node) -> int:
    """Successive rows of a node that are equal, as copies of one token; 1 if none are."""
    rows = tensors(node)[0].shape
    while node.target in COPIES:
        (node,) = node.all_input_nodes
    if node.target is not aten.expand.default:
        return 1
    shape, before = tensors(node)[0].shape, tensors(node.all_input_nodes[0])[0].shape
    repeats = len(shape) == len(before) == len(rows) + 1 and before[1] == 1
    is_only_dim = shape[:1] == before[:1] and shape[2:] == before[2:] == rows[1:]
    return int(shape[1]) if repeats and is_only_dim else 1


def summed_copies(node: fx.Node) -> int:
    """Successive rows of a node of which only sums are read; 1 if others are, too."""
    rows, found = tensors(node)[0].shape, set[int]()
    for user in node.users:
        shape = tensors(user)[0].shape if user.target in VIEWS else ()
        sums = bool(user.users) and all(_sums_copies(reader) for reader in user.users)
        found.add(int(shape[1]) if sums and shape[2:] == rows[1:] and len(shape) > 2 else 1)
    return found.pop() if len(found) == 1 else 1


def _sums_copies(node: fx.Node) -> bool:
    return node.target is aten.sum.dim_IntList and list(node.args[1]) == [1]  # type: ignore[arg-type]


def whole_tokens(rows: int, ranks: int, shard: Shard, copies: int) -> bool:
    """Whether no two ranks hold copies of one token."""
    piece, rest = divmod(rows, shard.interleave)
    is_even = piece % ranks == 0 and not rest
    return -(-piece // ranks) % copies == 0 and (is_even or shard.interleave == 1)


def tokens_sent(regions: Mapping[fx.Node, Region]) -> dict[fx.Node, tuple[int, Region]]:
    """Copies and region of each value that goes to experts, or comes from them, as tokens."""
    found = dict[fx.Node, tuple[int, Region]]()
    for node, region in regions.items():
        rows = tensors(region.experts)[0].shape[:1]
        for value in _tensors_of((node, *node.all_input_nodes), rows):
            copies = summed_copies(value) if value is node else copies_of(value)
            if copies > 1:
                found[value] = copies, region
    return found


def _tensors_of(nodes: Iterable[fx.Node], rows: tuple[int, ...]) -> list[fx.Node]:
    """Nodes that are one tensor of some rows."""
    values = ((node, node.meta.get("val")) for node in nodes)
    return [n for n, own in values if isinstance(own, torch.Tensor) and own.shape[:1] == rows]
