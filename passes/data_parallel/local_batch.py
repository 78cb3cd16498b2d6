"""Local batch semantics: each slice computes what it would alone, and gradients are averaged."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.common.notices import NumericsNote
from autopar.ir.batch_slicing import BATCH, BatchSlices
from autopar.ir.graph import TrainingGraph, elements, tensors
from autopar.ir.placement import Partial, Replicate, Varying
from autopar.ir.roles import (
    BatchFraction,
    Gradient,
    Input,
    Output,
    OutputRole,
    Parameter,
    Tangent,
    Update,
)
from autopar.passes.core.collective_ops import collective, start_all_reduce
from autopar.passes.core.node_builder import add_input, aten, call, fake_like
from autopar.passes.core.pass_base import Pass, PassResult

WHOLE, PART, V = Replicate(), Partial(), Varying()


@dataclass(frozen=True)
class LocalBatch(Pass):
    """Averages over slices what each computes of its own rows, as DistributedDataParallel does.

    Before: the graph as captured at one slice's rows. After: gradients of parameters are Partial,
    each slice's times its share of the rows; returned scalars and new values of floating-point
    buffers are averaged alike. What couples rows couples those of a slice alone. Tier: exact, by
    this definition.

    Attributes:
        slices: of the batch, and which of them this is.
        has_rows: for each flattened argument, whether its dim 0 runs over the rows.
    """

    slices: BatchSlices
    has_rows: tuple[bool, ...]

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`."""
        graph = self._typed(graph.copy())
        weight_of = fake_like(graph, (), torch.float64)
        graph, weight = add_input(graph, BatchFraction(), "row_weight", weight_of)
        weight.meta |= {"placement": V, "batch_dims": ((),)}
        graph = self._weighed_tangents(graph, weight)
        return PassResult(
            replace(
                self._averaged(graph, weight),
                partitioned=(*graph.partitioned, BATCH),
                notes=(*graph.notes, NumericsNote(LOCAL)),
            )
        )

    def _typed(self, graph: TrainingGraph) -> TrainingGraph:
        """Types every node: what depends on the batch is this slice's own."""
        roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
        rows = next(
            (
                tensors(node)[0].shape[0]
                for node, role in roles.items()
                if isinstance(role, Input) and self.has_rows[role.index]
            ),
            0,
        )
        returned = {Gradient(Parameter(name)) for name in graph.parameters}
        for node in graph.graph.nodes:
            role = roles.get(node)
            own = isinstance(role, Input) and self.has_rows[role.index]
            own = own or isinstance(role, Tangent)
            own = own or any(n.meta["placement"] == V for n in node.all_input_nodes)
            node.meta["placement"] = V if own else WHOLE
            node.meta["batch_dims"] = tuple(
                (0,) if own and t is not None and t.shape[:1] == (rows,) else ()
                for t in elements(node)
            )
        for of, result in zip(graph.outputs, graph.results, strict=True):
            if of in returned and result is not None:
                result.meta |= {"placement": PART, "batch_dims": ((),) * len(elements(result))}
        return graph

    def _weighed_tangents(self, graph: TrainingGraph, weight: fx.Node) -> TrainingGraph:
        """Every gradient that enters is taken times the slice's share of the rows."""
        for role, node in zip(graph.inputs, graph.placeholders, strict=True):
            users = [user for user in node.users if user.op == "call_function"]
            if isinstance(role, Tangent) and users:
                graph.graph.inserting_before(min(users))
                made = _times(graph.graph, min(users), node, weight)
                made.meta["batch_dims"] = node.meta["batch_dims"]
                for user in users:
                    user.replace_input_with(node, made)
        return graph

    def _averaged(self, graph: TrainingGraph, weight: fx.Node) -> TrainingGraph:
        """Returned scalars and new values of buffers, averaged in one message."""
        own: dict[OutputRole, fx.Node] = {}
        for role, node in zip(graph.outputs, graph.results, strict=True):
            if node is None or node.meta["placement"] != V:
                continue
            is_buffer = isinstance(role, Update) and not isinstance(role.of, Input)
            is_scalar = isinstance(role, Output) and tensors(node)[0].dim() == 0
            if (is_buffer or is_scalar) and tensors(node)[0].is_floating_point():
                own[role] = node
        if not own:
            return graph
        graph.graph.inserting_before(graph.backward_start)
        like = next(iter(own.values()))
        wide = torch.float64
        parts = [
            _times(graph.graph, like, _cast(graph.graph, like, node, wide), weight)
            for node in own.values()
        ]
        sums = collective(graph.graph, like, start_all_reduce, parts, BATCH)
        done = sums[0].args[0]
        for item in (done.args[0], done, *sums):  # type: ignore[union-attr]
            item.meta |= {"placement": WHOLE, "batch_dims": ((),) * len(elements(item))}  # type: ignore
        made = {}
        for (role, node), total in zip(own.items(), sums, strict=True):
            made[role] = _cast(graph.graph, like, total, tensors(node)[0].dtype)
            made[role].meta |= {"placement": WHOLE, "batch_dims": ((),)}
        return graph.with_results(made)


LOCAL = (
    "each rank computes what it would of its own rows alone, and gradients are averaged, as under "
    "DistributedDataParallel (batch_semantics='local')"
)


def _times(graph: fx.Graph, like: fx.Node, node: fx.Node, weight: fx.Node) -> fx.Node:
    share = _cast(graph, like, weight, tensors(node)[0].dtype)
    made = call(graph, like, aten.mul.Tensor, node, share)
    made.meta |= {"placement": V, "batch_dims": ((),)}
    return made


def _cast(graph: fx.Graph, like: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if tensors(node)[0].dtype == dtype:
        return node
    made = call(graph, like, aten._to_copy.default, node, dtype=dtype)
    made.meta |= {"placement": V, "batch_dims": ((),)}
    return made
