"""`LocalBatch`: slices that compute independently and average gradients, as under DDP.

Exact batch statistics of a conv net take some 40 small collectives, and 1.6 times DDP's step. A
loop that wants DDP's semantics need not pay for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.core.common.notices import NumericsNote
from autopar.core.ir.batch_slicing import BATCH, BatchSlices
from autopar.core.ir.graph import TrainingGraph, elements, tensors
from autopar.core.ir.placement import Partial, Replicate, Varying
from autopar.core.ir.roles import (
    BatchFraction,
    Gradient,
    Input,
    Output,
    OutputRole,
    Parameter,
    Tangent,
    Update,
)
from autopar.passes.core.collective_ops import annotate, collective, start_all_reduce
from autopar.passes.core.node_builder import add_input, aten, call, fake_like
from autopar.passes.core.pass_base import Pass, PassResult

WHOLE, PARTIAL, VARYING = Replicate(), Partial(), Varying()

NOTE = (
    "each rank computes what it would of its own rows alone, and gradients are averaged, as under "
    "DistributedDataParallel (batch_semantics='local')"
)


@dataclass(frozen=True)
class LocalBatch(Pass):
    """Averages the results of slices, as DistributedDataParallel does.

    Before: the graph captured at the rows of one slice. After: gradients of parameters are Partial,
    each slice's weighted by its fraction of the rows. Returned scalars and new values of
    floating-point buffers are averaged alike. Operators that couple rows see one slice alone.
    Tier: exact, by this definition. `row_dims` has the batch dim of each flattened argument, None
    for those without.
    """

    slices: BatchSlices
    row_dims: tuple[int | None, ...]

    def __call__(self, graph: TrainingGraph) -> PassResult:
        graph = graph.copy()
        self._annotate(graph)
        like = fake_like(graph, (), torch.float64)
        graph, fraction = add_input(graph, BatchFraction(), "row_weight", like)
        fraction.meta |= {"placement": VARYING, "batch_dims": ((),)}
        _scale_tangents(graph, fraction)
        partitioned, notes = (*graph.partitioned, BATCH), (*graph.notes, NumericsNote(NOTE))
        graph = _average(graph, fraction)
        return PassResult(replace(graph, partitioned=partitioned, notes=notes))

    def _annotate(self, graph: TrainingGraph) -> None:
        """Records placements and batch dims: values that depend on the batch are Varying."""
        roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
        # what has no rows may be another value on every rank, too
        inputs = [node for node, role in roles.items() if isinstance(role, Input)]
        sizes = (
            tensors(node)[0].shape[dim]
            for node, role in roles.items()
            if isinstance(role, Input) and (dim := self.row_dims[role.index]) is not None
        )
        rows = next(sizes, 0)
        for node in graph.graph.nodes:
            role = roles.get(node)
            varies = node in inputs or isinstance(role, Tangent)
            varies = varies or any(n.meta["placement"] == VARYING for n in node.all_input_nodes)
            node.meta["placement"] = VARYING if varies else WHOLE
            node.meta["batch_dims"] = tuple(
                (0,) if varies and t is not None and t.shape[:1] == (rows,) else ()
                for t in elements(node)
            )
        for of, result in zip(graph.outputs, graph.results, strict=True):
            if isinstance(of, Gradient) and isinstance(of.of, Parameter) and result is not None:
                result.meta |= {"placement": PARTIAL, "batch_dims": ((),) * len(elements(result))}


def _scale_tangents(graph: TrainingGraph, fraction: fx.Node) -> None:
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        users = [user for user in node.users if user.op == "call_function"]
        if isinstance(role, Tangent) and users:
            graph.graph.inserting_before(min(users))
            scaled = _times(graph.graph, min(users), node, fraction)
            scaled.meta["batch_dims"] = node.meta["batch_dims"]
            for user in users:
                user.replace_input_with(node, scaled)


def _average(graph: TrainingGraph, fraction: fx.Node) -> TrainingGraph:
    """Averages returned scalars and new values of buffers in one message."""
    local: dict[OutputRole, fx.Node] = {}
    for role, node in zip(graph.outputs, graph.results, strict=True):
        if node is None or node.meta["placement"] != VARYING:
            continue
        is_buffer = isinstance(role, Update) and not isinstance(role.of, Input)
        is_scalar = isinstance(role, Output) and tensors(node)[0].dim() == 0
        if (is_buffer or is_scalar) and tensors(node)[0].is_floating_point():
            local[role] = node
    if not local:
        return graph
    graph.graph.inserting_before(graph.backward_start)
    like = next(iter(local.values()))
    terms = [
        _times(graph.graph, like, _cast(graph.graph, like, node, torch.float64), fraction)
        for node in local.values()
    ]
    sums = collective(graph.graph, like, start_all_reduce, terms, BATCH)
    annotate(sums, placement=WHOLE, batch_dims=((),) * len(sums))
    averages = {}
    for (role, node), total in zip(local.items(), sums, strict=True):
        total.meta["batch_dims"] = ((),)
        averages[role] = _cast(graph.graph, like, total, tensors(node)[0].dtype)
        averages[role].meta |= {"placement": WHOLE, "batch_dims": ((),)}
    return graph.with_results(averages)


def _times(graph: fx.Graph, like: fx.Node, node: fx.Node, fraction: fx.Node) -> fx.Node:
    factor = _cast(graph, like, fraction, tensors(node)[0].dtype)
    product = call(graph, like, aten.mul.Tensor, node, factor)
    product.meta |= {"placement": VARYING, "batch_dims": ((),)}
    return product


def _cast(graph: fx.Graph, like: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if tensors(node)[0].dtype == dtype:
        return node
    cast = call(graph, like, aten._to_copy.default, node, dtype=dtype)
    cast.meta |= {"placement": VARYING, "batch_dims": ((),)}
    return cast
