"""Rules that every graph satisfies between passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from autopar.core.ir.batch_slicing import BATCH
from autopar.core.ir.graph import (
    GraphProperty,
    TrainingGraph,
    has_batch_dim,
    render_node,
    source_line,
    tensors,
)
from autopar.core.ir.mesh_levels import axis_of_level
from autopar.core.ir.placement import Partial, Replicate, Shard, Varying
from autopar.core.ir.roles import Gradient, Output, Parameter
from autopar.errors import PassError
from autopar.passes.core.collective_ops import (
    WAIT_LOWERED,
    axis_of,
    is_lowered_start,
    kind_of,
    op_of,
    starts,
)

TAKES: Mapping[str, tuple[type, ...]] = {
    "all_reduce": (Partial, Varying),
    "reduce_scatter": (Partial,),
    "all_gather": (Shard, Varying, Replicate),
    "all_to_all": (Shard, Varying),
    "permute": (Shard, Varying),
}
"""Placements that each collective accepts; all-reduced `Varying` statistics are pre-weighted."""


def check(graph: TrainingGraph) -> None:
    """Checks all rules on a graph.

    Raises:
        PassError: The graph violates a rule. The error shows the nodes around the violation.
    """
    for rule in RULES:
        rule(graph)


def roles_match(graph: TrainingGraph) -> None:
    """Every placeholder and every output has exactly one role."""
    for kind, roles, nodes in (
        ("input", graph.inputs, graph.placeholders),
        ("output", graph.outputs, graph.results),
    ):
        if len(roles) != len(nodes) or len(set(roles)) != len(roles):
            raise PassError(f"{len(nodes)} {kind}s have {len(set(roles))} distinct roles")


def well_formed(graph: TrainingGraph) -> None:
    """Nodes precede their uses and have values; forward nodes precede backward nodes."""
    graph.graph.lint()
    late = False
    for node in graph.calls():
        if node.meta.get("val") is None and node.users:
            raise _error(graph, node, "has no value (meta['val'])")
        backward = node.meta.get("phase") == "backward"
        if late and not backward:
            raise _error(graph, node, "is of the forward, but stands behind the backward's start")
        late = backward


def collectives_are_fed(graph: TrainingGraph) -> None:
    """Each collective has one wait, operands of a placement in `TAKES`, and their reduction."""
    for start in starts(graph):
        if len(start.users) != 1:
            raise _error(graph, start, f"has {len(start.users)} waits instead of one")
        if axis_of_level(axis_of(start)) in graph.partitioned:
            continue  # placements describe the data axis only
        for operand in start.args[0]:  # type: ignore[union-attr]
            placement = operand.meta.get("placement")  # type: ignore[union-attr]
            if placement is not None and not isinstance(placement, TAKES[kind_of(start)]):
                raise _error(graph, start, f"is given {operand}, which is {placement}")
            if isinstance(placement, Partial) and placement.op != op_of(start):
                what = f"reduces {operand} by {op_of(start)!r}, but it is {placement}"
                raise _error(graph, start, what)


def lowered_are_waited(graph: TrainingGraph) -> None:
    """Each functional collective has one user, its wait."""
    for node in graph.calls():
        waited = [user.target for user in node.users] == [WAIT_LOWERED]
        if is_lowered_start(node) and not waited:
            raise _error(graph, node, f"has {len(node.users)} users instead of one wait")


def gradients_fit(graph: TrainingGraph) -> None:
    """Each synchronized gradient has the placement of its parameter, so no sum is missing."""
    if GraphProperty.GRADIENTS_SYNCHRONIZED not in graph.properties:
        return
    for role, node in zip(graph.outputs, graph.results, strict=True):
        match role:
            case Gradient(Parameter(name)) if node is not None:
                wanted, have = graph.layouts.get(name, Replicate()), node.meta.get("placement")
                if have != wanted:
                    what = f"is the gradient of {name}, {have} instead of {wanted}"
                    raise _error(graph, node, what)


def gradients_have_shapes(graph: TrainingGraph) -> None:
    """Each gradient has the shape and dtype of its input."""
    # Between sharding and synchronization, parameters are chunks but gradients still whole.
    if GraphProperty.GRADIENTS_SYNCHRONIZED not in graph.properties and graph.layouts:
        return
    inputs = dict(zip(graph.inputs, graph.placeholders, strict=True))
    for role, node in zip(graph.outputs, graph.results, strict=True):
        if isinstance(role, Gradient) and node is not None and role.of in inputs:
            (want,), (have,) = tensors(inputs[role.of]), tensors(node)
            if want.shape != have.shape or want.dtype != have.dtype:
                raise _error(graph, node, f"has shape {list(have.shape)}, not {list(want.shape)}")


def returned_values_agree(graph: TrainingGraph) -> None:
    """Returned floating tensors without batch dims are equal on all ranks; none is partial."""
    if BATCH not in graph.partitioned:
        return
    for role, node in zip(graph.outputs, graph.results, strict=True):
        if not isinstance(role, Output) or node is None:
            continue
        placement = node.meta.get("placement")
        if isinstance(placement, Partial):
            raise _error(graph, node, "is returned, but holds only this rank's part of a sum")
        own = isinstance(placement, Varying) and not has_batch_dim(node)
        if own and tensors(node)[0].is_floating_point():
            raise _error(graph, node, "is returned without rows, but differs between ranks")


RULES: tuple[Callable[[TrainingGraph], None], ...] = (
    roles_match,
    well_formed,
    collectives_are_fed,
    lowered_are_waited,
    gradients_fit,
    gradients_have_shapes,
    returned_values_agree,
)


def _error(graph: TrainingGraph, node: fx.Node, what: str) -> PassError:
    nodes = list(graph.graph.nodes)
    at = nodes.index(node)
    around = nodes[max(0, at - 4) : at + 5]
    lines = [("--> " if n is node else "    ") + render_node(n) for n in around]
    source = f", from {line}" if (line := source_line(node)) else ""
    return PassError("\n".join([f"{node.name} {what}{source}", *lines]))
