"""`split_forward_backward`: a joint graph as a forward and a backward graph."""

from __future__ import annotations

from typing import NamedTuple

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import (
    Gradient,
    OutputRole,
    Saved,
    StageInput,
    StageOutput,
    State,
    UnreducedGrad,
    Update,
)
from autopar.passes.core.node_builder import extract
from autopar.passes.own_gradients import own_gradients


class Split(NamedTuple):
    """Forward and backward of a training step, connected by `Saved` values."""

    forward: TrainingGraph
    backward: TrainingGraph | None


def split_forward_backward(graph: TrainingGraph) -> Split:
    """Cuts a joint graph at the start of its backward.

    Before: forward nodes come first and read no backward node. After: the backward reads forward
    values, including parameters, from `Saved` inputs, and its gradients have memory of their own.
    """
    start = graph.backward_start
    table = dict(zip(graph.outputs, graph.results, strict=True))
    late_results = {r: n for r, n in table.items() if _is_late(r)}
    if start.op == "output" and not late_results:  # a gradient may be a tangent as it is
        return Split(graph, None)
    nodes = [n for n in graph.graph.nodes if n.op in ("call_function", "get_attr")]
    at = len(nodes) if start.op == "output" else nodes.index(start)
    late = set(nodes[at:])
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    read = [n for node in nodes[at:] for n in node.all_input_nodes]
    read += [n for n in late_results.values() if n is not None]  # the forward may compute some
    needed = dict.fromkeys(n for n in read if n not in late)
    own = {n: roles[n] for n in needed if n.op == "placeholder" and n.meta["phase"] == "backward"}
    for node, role in roles.items():
        if isinstance(role, StageInput) and role.phase == "backward":
            own[node] = role
    # Parameters are saved, too: the optimizer may change one between forward and backward.
    saved = [n for n in needed if n not in own]
    forward = extract(
        graph,
        {n: role for n, role in roles.items() if n not in own},
        nodes[:at],
        {r: n for r, n in table.items() if r not in late_results}
        | {Saved(n.name): n for n in saved},
    )
    backward = extract(graph, {n: Saved(n.name) for n in saved} | own, nodes[at:], late_results)
    for half in (forward, backward):
        # A collective stays even if its result is unused here: the other ranks would hang in it.
        half.graph.eliminate_dead_code(
            lambda n: n.op in ("placeholder", "output") or "_c10d_functional" in str(n.target)
        )
    return Split(forward, own_gradients(backward))


def _is_late(role: OutputRole) -> bool:
    match role:
        case Gradient() | UnreducedGrad() | Update(State()):
            return True
        case StageOutput(_, phase):
            return phase == "backward"
    return False
