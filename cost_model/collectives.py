"""Collectives: the definition of their message sizes, and their cost on a ring.

Sizes follow nccl-tests: `nbytes` is the size of the whole, unsharded tensor that one rank starts or
ends with.

| collective | nbytes |
|---|---|
| all_reduce | the tensor, the same on every rank |
| all_gather | the gathered output |
| reduce_scatter | the input, before it is scattered |
| all_to_all | the input (as large as the output) |
| broadcast | the tensor |
| send | the message that one rank sends another (point to point) |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.core.common.documents import Amount, Rate
from autopar.core.ir.graph import tensor_bytes, tensors
from autopar.core.ir.messages import COLLECTIVES, collective_of
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.group_shape import GroupShape


def permutation(nbytes: int, shape: GroupShape) -> tuple[str, int, GroupShape]:
    """The collective, bytes and groups that price a message of each rank to one other rank.

    Inside a node, that is an all-to-all in which a rank sends as many bytes. Between nodes it is
    an exchange of two ranks on two nodes: of a ring, one link of each direction leaves a node.
    """
    if shape.nodes == 1:
        return "all_to_all", nbytes * shape.ranks // max(1, shape.ranks - 1), shape
    return "all_to_all", 2 * nbytes, GroupShape(2, 1, shape.groups)


@dataclass(frozen=True)
class Transfer:
    """One issued collective over the groups along a mesh axis.

    `nbytes` is the message size in bytes, as in the table above. `pieces` is the number of
    concurrent messages of which this is one (see `gloo_chunks`).
    """

    collective: str
    axis: str
    nbytes: int
    shape: GroupShape
    dtype: str
    pieces: int = 1

    @classmethod
    def of(cls, node: fx.Node, axes: Mapping[str, int], ranks_per_node: int) -> Transfer:
        """The transfer of a node of a lowered graph; `axes` has the sizes, outermost first."""
        collective = collective_of(node)
        axis: Any = node.kwargs.get("group_name", node.args[-1])
        if collective is None or axis not in axes:
            raise ClusterError(
                f"{node.name} communicates over {axis!r}, but the axes are {dict(axes)}"
            )
        inputs = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
        sources = [node] if collective == "all_gather" else inputs
        whole = [t for source in sources if isinstance(source, fx.Node) for t in tensors(source)]
        nbytes = sum(map(tensor_bytes, whole))
        shape = GroupShape.of_axis(axes, axis, ranks_per_node)
        splits: Any = node.args[1] if collective == "all_to_all" else None
        if isinstance(splits, (list, tuple)):  # others are known in a step, and even on average
            if len(splits) - splits.count(0) == 1:
                collective, nbytes, shape = permutation(nbytes, shape)
            elif 0 in splits:
                nbytes = nbytes * axes[axis] // (axes[axis] - 1)  # a rank's own part is not sent
        dtype = str(whole[0].dtype).removeprefix("torch.") if whole else "float32"
        return cls(collective, axis, nbytes, shape, dtype, node.meta.get("pieces", 1))


@dataclass(frozen=True)
class Link:
    """Round figures of a uniform fabric.

    Seconds before the first message and of latency of each, and bytes/s of a rank that sends and
    receives.
    """

    launch_s: Amount
    step_s: Amount
    bytes_per_s: Rate

    def seconds(self, collective: str, nbytes: float, ranks: int, backend: str) -> float:
        """The α-β time of a ring: launch + steps x latency + bytes on the wire / bandwidth."""
        steps, share = ring(collective, ranks, backend)
        return self.launch_s + steps * self.step_s + share * nbytes / self.bytes_per_s


def ring(collective: str, ranks: int, backend: str) -> tuple[int, float]:
    """Consecutive messages, and bytes that a rank sends as a multiple of the message size.

    Source: Thakur, Rabenseifner & Gropp 2005. Gloo differs, by its source and counted on the wire:
    its reduce-scatter is an all-reduce, its broadcast a binomial tree of whole messages.
    """
    check_collective(collective)
    n = ranks
    if n == 1:
        return 0, 0.0
    if collective == "send":
        return 1, 1.0
    if collective == "all_reduce" or (collective == "reduce_scatter" and backend == "gloo"):
        return 2 * (n - 1), 2 * (n - 1) / n
    if collective == "broadcast":
        depth = math.ceil(math.log2(n))
        return (depth, float(depth)) if backend == "gloo" else (n - 1, 1.0)
    return n - 1, (n - 1) / n


def check_collective(collective: str) -> None:
    """Raises unless `collective` is one of COLLECTIVES."""
    if collective not in COLLECTIVES:
        raise ClusterError(f"{collective!r} is no collective: use one of {', '.join(COLLECTIVES)}")
