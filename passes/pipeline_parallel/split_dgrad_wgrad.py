"""A backward in two: what other stages wait for first, what parameters need later."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.ir.graph import TrainingGraph
from autopar.ir.roles import InputRole, OutputRole, Saved, StageOutput


def split_dgrad_wgrad(backward: TrainingGraph) -> tuple[TrainingGraph, TrainingGraph]:
    """The part of a stage's backward that makes what it sends, and the rest.

    The first returns, beside what is sent, what the second takes from it under `Saved`; both take
    what they need of what the whole backward is given. Where nothing is sent the first is empty.
    (Zero Bubble, arXiv 2401.10241: B and W.)
    """
    table = dict(zip(backward.outputs, backward.results, strict=True))
    sent = {role: node for role, node in table.items() if isinstance(role, StageOutput)}
    rest = {role: node for role, node in table.items() if role not in sent}
    roles = dict(zip(backward.placeholders, backward.inputs, strict=True))
    first = _ancestors([node for node in sent.values() if node is not None])
    second = [n for n in backward.graph.nodes if _runs(n) and n not in first]
    crossing = dict.fromkeys(
        n
        for node in (*second, *(n for n in rest.values() if n is not None))
        for n in (node.all_input_nodes if node in second else (node,))
        if n in first and _runs(n)
    )
    saved: dict[OutputRole, fx.Node | None] = {Saved(n.name): n for n in crossing}
    inputs = _part(backward, [n for n in backward.graph.nodes if n in first], sent | saved, roles)
    given = {n: Saved(n.name) for n in crossing}
    return inputs, _part(backward, [*crossing, *second], rest, roles | given)


def _runs(node: fx.Node) -> bool:
    return node.op in ("call_function", "get_attr")


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    found, todo = set[fx.Node](), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _part(
    graph: TrainingGraph,
    nodes: list[fx.Node],
    outputs: dict[OutputRole, fx.Node | None],
    roles: dict[fx.Node, InputRole],
) -> TrainingGraph:
    """A graph of some operators; those with roles are given to it."""
    body = [n for n in nodes if n not in roles]
    ends = [n for n in outputs.values() if n is not None]
    read = {n for node in body for n in node.all_input_nodes} | set(ends)
    given = [n for n in roles if n in read]
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in given:
        copies[node] = new.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in body:
        copies[node] = new.node_copy(node, lambda n: copies[n])
    new.output([copies[n] if n is not None else None for n in outputs.values()])
    return replace(graph, graph=new, inputs=tuple(roles[n] for n in given), outputs=tuple(outputs))
