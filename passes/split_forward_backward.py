"""`split_forward_backward`: a joint graph as a forward and a backward graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from autopar.ir.graph import TrainingGraph
from autopar.ir.roles import (
    Gradient,
    InputRole,
    OutputRole,
    Saved,
    StageInput,
    StageOutput,
    State,
    UnreducedGrad,
    Update,
)


@dataclass(frozen=True)
class Split:
    """Forward and backward of a training step, connected by `Saved` values.

    Attributes:
        forward: graph that returns outputs, updates and saved values.
        backward: graph from saved values and tangents to gradients; None without a backward.
    """

    forward: TrainingGraph
    backward: TrainingGraph | None


def split_forward_backward(graph: TrainingGraph) -> Split:
    """Cuts a joint graph at the start of its backward.

    Before: forward nodes come first and read no backward node. After: the backward reads forward
    values, including parameters, from `Saved` inputs.
    """
    start = graph.backward_start
    if start.op == "output":
        return Split(graph, None)
    forward_nodes, backward_nodes = _halves(graph, start)
    late = set(backward_nodes)
    late_roles = {r for r in graph.outputs if _is_late(r)}
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    table = dict(zip(graph.outputs, graph.results, strict=True))
    needed = list(
        dict.fromkeys(n for node in backward_nodes for n in node.all_input_nodes if n not in late)
    )
    for role in late_roles:  # a gradient that the forward computes
        node = table[role]
        if node is not None and node not in late and node not in needed:
            needed.append(node)
    own = [n for n in needed if n.op == "placeholder" and n.meta["phase"] == "backward"]
    comes = (n for n, role in roles.items() if _comes_late(role))
    own = list(dict.fromkeys((*own, *comes)))
    saved = [n for n in needed if n not in own]
    forward = _extract(
        graph,
        [n for n in graph.placeholders if n not in own],
        forward_nodes,
        {r: n for r, n in table.items() if r not in late_roles} | {Saved(n.name): n for n in saved},
        roles,
    )
    backward = _extract(
        graph,
        [*saved, *own],
        backward_nodes,
        {r: n for r, n in table.items() if r in late_roles},
        {**{n: Saved(n.name) for n in saved}, **{n: roles[n] for n in own}},
    )
    return Split(forward, backward)


def _comes_late(role: InputRole) -> bool:
    """Whether another stage sends an input in the backward."""
    return isinstance(role, StageInput) and role.phase == "backward"


def _is_late(role: OutputRole) -> bool:
    match role:
        case Gradient() | UnreducedGrad() | Update(State()):
            return True
        case StageOutput(_, phase):
            return phase == "backward"
    return False


def _halves(graph: TrainingGraph, start: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    halves: tuple[list[fx.Node], list[fx.Node]] = ([], [])
    late = False
    for node in graph.graph.nodes:
        late = late or node is start
        if node.op in ("call_function", "get_attr"):
            halves[late].append(node)
    return halves


def _extract(
    graph: TrainingGraph,
    inputs: list[fx.Node],
    nodes: list[fx.Node],
    outputs: dict[OutputRole, fx.Node | None],
    roles: dict[fx.Node, InputRole],
) -> TrainingGraph:
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = new.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = new.node_copy(node, lambda n: copies[n])
    new.output([copies[n] if n is not None else None for n in outputs.values()])
    new.eliminate_dead_code(is_impure_node=lambda n: n.op == "placeholder" or _has_effect(n))
    return replace(graph, graph=new, inputs=tuple(roles[n] for n in inputs), outputs=tuple(outputs))


def _has_effect(node: fx.Node) -> bool:
    return node.op == "output" or "_c10d_functional" in str(node.target)
