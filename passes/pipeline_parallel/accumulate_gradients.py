"""Gradients of a micro-batch are added, each as soon as it is there, to those before."""

from __future__ import annotations

from torch import fx

from autopar.ir.graph import TrainingGraph, tensors
from autopar.ir.roles import Accumulated, Gradient, OutputRole, Parameter, UnreducedGrad
from autopar.passes.core.node_builder import add_input, aten, call


def accumulate_gradients(backward: TrainingGraph) -> TrainingGraph:
    """A lowered backward that takes what was accumulated before, and adds to it in place.

    So a new gradient is freed before the next is computed. One that already takes what was
    accumulated, to reduce it, is left as it is.
    """
    graph = backward.copy()
    known = {role.name for role in graph.inputs if isinstance(role, Accumulated)}
    changed: dict[OutputRole, fx.Node | None] = {}
    for role, node in zip(graph.outputs, graph.results, strict=True):
        match role:
            case Gradient(Parameter(name)) | UnreducedGrad(name) if name not in known:
                if node is None or node.op != "call_function":
                    continue
                place = f"accumulated_{len(graph.inputs)}"
                known_as = Accumulated(name, reduced=isinstance(role, Gradient))
                graph, before = add_input(graph, known_as, place, tensors(node)[0])
                before.meta["phase"] = "backward"
                graph.graph.inserting_before(node.next)
                changed[role] = call(graph.graph, node, aten.add_.Tensor, before, node)
    return graph.with_results(changed)
