"""`split_dgrad_wgrad`: a backward split into input gradients and weight gradients.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241 (B and W).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import fx

from autopar.ir.graph import TrainingGraph
from autopar.ir.roles import InputRole, OutputRole, Saved, StageOutput
from autopar.passes.core.node_builder import ancestors

Results = Mapping[OutputRole, fx.Node | None]


def split_dgrad_wgrad(backward: TrainingGraph) -> tuple[TrainingGraph, TrainingGraph]:
    """The graph of the gradients that a stage sends, and the graph of all other gradients.

    The first graph also returns `Saved` values for the second. It is empty if the stage sends
    nothing.
    """
    results = dict(zip(backward.outputs, backward.results, strict=True))
    sent: dict[OutputRole, fx.Node | None]
    sent = {role: node for role, node in results.items() if isinstance(role, StageOutput)}
    rest = {role: node for role, node in results.items() if role not in sent}
    ends = [node for node in sent.values() if node is not None]
    in_first = {*ends, *ancestors(ends)}
    first = [n for n in backward.graph.nodes if n in in_first]
    second = [n for n in backward.graph.nodes if _is_computed(n) and n not in in_first]
    read = [n for node in second for n in node.all_input_nodes]
    read += [n for n in rest.values() if n is not None]
    crossing = [n for n in dict.fromkeys(read) if n in in_first and _is_computed(n)]
    roles = dict(zip(backward.placeholders, backward.inputs, strict=True))
    saved: dict[OutputRole, fx.Node | None] = {Saved(n.name): n for n in crossing}
    loaded: dict[fx.Node, InputRole] = {n: Saved(n.name) for n in crossing}
    return (
        _subgraph(backward, first, {**sent, **saved}, roles),
        _subgraph(backward, second, rest, {**roles, **loaded}),
    )


def _is_computed(node: fx.Node) -> bool:
    return node.op in ("call_function", "get_attr")


def _subgraph(
    graph: TrainingGraph,
    nodes: Iterable[fx.Node],
    outputs: Results,
    roles: Mapping[fx.Node, InputRole],
) -> TrainingGraph:
    """The graph of some nodes; nodes with roles become inputs if they are read."""
    body = [n for n in nodes if n not in roles]
    read = {n for node in body for n in node.all_input_nodes}
    read |= {n for n in outputs.values() if n is not None}
    inputs = [n for n in roles if n in read]
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = new.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in body:
        copies[node] = new.node_copy(node, copies.__getitem__)
    new.output([copies[n] if n is not None else None for n in outputs.values()])
    return replace(graph, graph=new, inputs=tuple(roles[n] for n in inputs), outputs=tuple(outputs))
