"""`run_spmd`: the graphs of all ranks, run in lockstep in one process on real tensors.

Collectives are abstract. Each rank has its own random generator, in the state of torch's.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.core.ir.placement import chunk_rows
from autopar.errors import PassError
from autopar.passes.core.collective_ops import (
    STARTS,
    axis_of,
    kind_of,
    op_of,
    start_reduce_scatter,
    wait,
)

Program = Generator[tuple[fx.Node, list[Tensor]], list[Tensor], list[Any]]


def run_spmd(
    graphs: Sequence[fx.Graph | fx.GraphModule],
    arguments: Sequence[Sequence[Any]],
    axes: Mapping[str, int] | None = None,
) -> list[list[Any]]:
    """The results of each rank's graph.

    Args:
        graphs: graph of each rank, in order.
        arguments: values of the placeholders of each rank, in order.
        axes: size of each mesh axis, outermost first; None for one axis of any name.

    Raises:
        PassError: ranks wait for different collectives.
    """
    groups = _groups(axes or {"": len(graphs)})
    programs = [_interpret(g, list(a)) for g, a in zip(graphs, arguments, strict=True)]
    random = [torch.get_rng_state() for _ in programs]
    ready: dict[int, Any] = dict.fromkeys(range(len(programs)))
    waiting: dict[int, tuple[fx.Node, list[Tensor]]] = {}
    ended: dict[int, list[Any]] = {}
    with torch.no_grad():
        while ready:
            for rank, answer in ready.items():
                torch.set_rng_state(random[rank])
                try:
                    waiting[rank] = programs[rank].send(answer)
                except StopIteration as stop:
                    ended[rank] = stop.value
                random[rank] = torch.get_rng_state()
            ready = {}
            for axis, group in groups:
                if all(r in waiting and axis in ("", axis_of(waiting[r][0])) for r in group):
                    ready |= zip(group, _combined([waiting.pop(r) for r in group]), strict=True)
    if waiting:
        raise PassError(f"ranks wait for different collectives: {waiting}, {len(ended)} ended")
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
    """Runs a graph; yields the operands of each collective and receives its results."""
    module, graph = (graph, graph.graph) if isinstance(graph, fx.GraphModule) else (None, graph)
    operands = iter(arguments)
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(operands)
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


def _combined(waiting: list[tuple[fx.Node, list[Tensor]]]) -> list[list[Tensor]]:
    """The results of one collective, by rank."""
    nodes, operands = zip(*waiting, strict=True)
    kinds = {(node.target, axis_of(node), op_of(node)) for node in nodes}
    if len(kinds) > 1 or len({len(tensors) for tensors in operands}) > 1:
        raise PassError(f"ranks wait for different collectives: {nodes}")
    results = [_combine(nodes[0], parts) for parts in zip(*operands, strict=True)]
    return [list(group) for group in zip(*results, strict=True)]


def _combine(start: fx.Node, parts: Sequence[Tensor]) -> list[Tensor]:
    """The result of each rank for one tensor of a collective, from the operand of each."""
    match kind_of(start):
        case "all_gather":
            return [torch.cat(list(parts)) for _ in parts]
        case "all_to_all":
            pieces = [part.chunk(len(parts)) for part in parts]
            return [torch.cat(column) for column in zip(*pieces, strict=True)]
        case "permute":
            targets: list[int] = list(start.args[1])  # type: ignore[arg-type]
            return [parts[targets.index(rank)].clone() for rank in range(len(parts))]
    stacked = torch.stack(list(parts))
    total = stacked.amax(0) if op_of(start) == "max" else stacked.sum(0)
    if start.target is start_reduce_scatter:
        return [t.clone() for t in total.split(chunk_rows(total.shape[0], len(parts)))]
    return [total.clone() for _ in parts]
