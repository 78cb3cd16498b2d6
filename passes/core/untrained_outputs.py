"""`untrained_outputs`: outputs beside the loss that training is by, such as logits.

Most loops never look at them. So ranks keep their parts, and gather them where a loop does.
"""

from __future__ import annotations

from torch import fx

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.placement import Placement, Replicate, Shard
from autopar.core.ir.roles import Gradient, Output, OutputRole, Tangent
from autopar.passes.core.node_builder import storage_owner


def untrained_outputs(graph: TrainingGraph) -> frozenset[Output]:
    """Outputs of a training call without a gradient, beside a number that has one.

    Those in the memory of an input are left out: it may change before they are read.
    """
    if graph.axes.get("pp", 1) > 1:
        return frozenset()  # its results are those of all micro-batches
    beside = outputs_beside_a_loss(graph).items()
    return frozenset(role for role, node in beside if storage_owner(node).op == "call_function")


def outputs_beside_a_loss(graph: TrainingGraph) -> dict[Output, fx.Node]:
    """Outputs without a gradient, beside a number that has one; none without such a number."""
    trained = {role.index for role in graph.inputs if isinstance(role, Tangent)}
    pairs = zip(graph.outputs, graph.results, strict=True)
    outputs = {role: node for role, node in pairs if isinstance(role, Output) and node is not None}
    losses = (tensors(node)[0] for role, node in outputs.items() if role.index in trained)
    if not any(loss.numel() == 1 for loss in losses):
        return {}
    return {role: node for role, node in outputs.items() if role.index not in trained}


def returned_as(placement: Placement) -> Placement:
    """The placement in which an untrained output is returned, if it is computed in this one."""
    return placement if type(placement) is Shard else Replicate()


def is_returned_by(phase: str, role: OutputRole, node: fx.Node | None) -> bool:
    """Whether a phase returns an output."""
    late = isinstance(role, Gradient) or (node is not None and node.meta.get("phase") == "backward")
    return late == (phase == "backward")
