"""All ranks in one process: their graphs run in lockstep, collectives combined.

For proofs: what a pass or a lowering wrote for every rank is run on real tensors. Collectives are
those of `passes/core/collective_ops.py`, not lowered yet. Each rank has its own generator; all
start where torch's stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import PassError
from autopar.ir.placement import chunk_rows
from autopar.passes.core.collective_ops import (
    STARTS,
    axis_of,
    op_of,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
    wait,
)

Program = Generator[tuple[fx.Node, list[Tensor]], list[Tensor], list[Any]]


def run_spmd(
    graphs: Sequence[fx.Graph | fx.GraphModule],
    arguments: Sequence[Sequence[Any]],
    axes: Mapping[str, int] | None = None,
) -> list[list[Any]]:
    """What each rank's graph returns.

    Args:
        graphs: of every rank, in order.
        arguments: of every rank: the values of its placeholders, in order.
        axes: size of each axis of the mesh, outermost first; None for one, of any name.

    Raises:
        PassError: ranks stand before different collectives.
    """
    groups = _groups(axes or {"": len(graphs)})
    programs = [_interpret(g, list(a)) for g, a in zip(graphs, arguments, strict=True)]
    random = [torch.get_rng_state() for _ in programs]
    ready: dict[int, Any] = dict.fromkeys(range(len(programs)))
    asked: dict[int, tuple[fx.Node, list[Tensor]]] = {}
    ended: dict[int, list[Any]] = {}
    with torch.no_grad():
        while ready:
            for rank, answer in ready.items():
                torch.set_rng_state(random[rank])
                try:
                    asked[rank] = programs[rank].send(answer)
                except StopIteration as stop:
                    ended[rank] = stop.value
                random[rank] = torch.get_rng_state()
            ready = {}
            for axis, own in groups:
                if all(r in asked and axis in ("", axis_of(asked[r][0])) for r in own):
                    ready |= zip(own, _combined([asked.pop(r) for r in own]), strict=True)
    if asked:
        raise PassError(f"ranks stand before different collectives: {asked}, {len(ended)} ended")
    return [ended[rank] for rank in range(len(programs))]


def _groups(axes: Mapping[str, int]) -> list[tuple[str, list[int]]]:
    """The groups of ranks along each axis of a mesh."""
    ranks = torch.arange(math.prod(axes.values())).view(*axes.values())
    return [
        (axis, group)
        for dim, (axis, size) in enumerate(axes.items())
        for group in ranks.movedim(dim, -1).reshape(-1, size).tolist()
    ]


def _interpret(graph: fx.Graph | fx.GraphModule, arguments: list[Any]) -> Program:
    """Runs a graph; what it gives a collective is yielded, and the results are sent in."""
    module, graph = (graph, graph.graph) if isinstance(graph, fx.GraphModule) else (None, graph)
    given = iter(arguments)
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = getattr(module, str(node.target))
        elif node.op == "output":
            return list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
        elif node.target in STARTS:
            values[node] = yield node, list(args[0])
        elif node.target is wait:
            values[node] = args[0]
        else:
            values[node] = node.target(*args, **kwargs)
    return []


def _combined(asked: list[tuple[fx.Node, list[Tensor]]]) -> list[list[Tensor]]:
    """The results of one collective, by rank."""
    nodes, given = zip(*asked, strict=True)
    kinds = {(node.target, axis_of(node), op_of(node)) for node in nodes}
    if len(kinds) > 1 or len({len(tensors) for tensors in given}) > 1:
        raise PassError(f"ranks stand before different collectives: {nodes}")
    how = COMBINE[nodes[0].target]
    results = [how(list(parts), nodes[0]) for parts in zip(*given, strict=True)]
    return [list(own) for own in zip(*results, strict=True)]


def _all_reduce(parts: list[Tensor], node: fx.Node) -> list[Tensor]:
    stacked = torch.stack(parts)
    total = stacked.amax(0) if op_of(node) == "max" else stacked.sum(0)
    return [total.clone() for _ in parts]


def _reduce_scatter(parts: list[Tensor], node: fx.Node) -> list[Tensor]:
    total = torch.stack(parts).sum(0)
    return [t.clone() for t in total.split(chunk_rows(total.shape[0], len(parts)))]


def _all_gather(parts: list[Tensor], node: fx.Node) -> list[Tensor]:
    return [torch.cat(parts) for _ in parts]


def _all_to_all(parts: list[Tensor], node: fx.Node) -> list[Tensor]:
    pieces = [part.chunk(len(parts)) for part in parts]
    return [torch.cat(column) for column in zip(*pieces, strict=True)]


COMBINE: Mapping[Any, Callable[[list[Tensor], fx.Node], list[Tensor]]] = {
    start_all_reduce: _all_reduce,
    start_reduce_scatter: _reduce_scatter,
    start_all_gather: _all_gather,
    start_all_to_all: _all_to_all,
}
