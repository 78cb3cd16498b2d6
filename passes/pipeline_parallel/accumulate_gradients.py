"""`accumulate_gradients`: a backward that adds to the gradients of earlier micro-batches."""

from __future__ import annotations

from torch import fx

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.roles import Accumulated, Gradient, OutputRole, Parameter, UnreducedGrad
from autopar.passes.core.node_builder import add_input, aten, call


def accumulate_gradients(backward: TrainingGraph) -> TrainingGraph:
    """A lowered backward that adds each computed gradient to an `Accumulated` input in place.

    Parameters that already have an `Accumulated` input are left unchanged.
    """
    graph = backward.copy()
    known = {role.name for role in graph.inputs if isinstance(role, Accumulated)}
    changed: dict[OutputRole, fx.Node | None] = {}
    for role, node in zip(graph.outputs, graph.results, strict=True):
        match role:
            case Gradient(Parameter(name)) | UnreducedGrad(name) if name not in known:
                if node is None or node.op != "call_function":
                    continue
                accumulated = Accumulated(name, reduced=isinstance(role, Gradient))
                label = f"accumulated_{len(graph.inputs)}"
                graph, before = add_input(graph, accumulated, label, tensors(node)[0])
                before.meta["phase"] = "backward"
                graph.graph.inserting_before(node.next)
                # In place, so that a stage holds one set of gradients for all micro-batches.
                changed[role] = call(graph.graph, node, aten.add_.Tensor, before, node)
    return graph.with_results(changed)
