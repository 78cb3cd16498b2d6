"""`SynchronizeGradients`: gradients of parameters summed over the ranks.

The partition of the batch leaves each rank with its part of every gradient. The sums wait until
here, so that `no_sync` and micro-batches reduce once a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.core.common.notices import NumericsNote
from autopar.core.ir.graph import GraphProperty, TrainingGraph, tensors
from autopar.core.ir.mesh_levels import INTER_NODE, coordinate_on, level
from autopar.core.ir.placement import Partial, Placement, Replicate, Shard, chunk_of
from autopar.core.ir.roles import Accumulated, Gradient, Parameter, UnreducedGrad
from autopar.passes.core.collective_ops import (
    annotate,
    collective,
    start_all_reduce,
    start_reduce_scatter,
)
from autopar.passes.core.node_builder import add_input, aten, call, fake_like
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.data_parallel.shard_parameters import swapped

_ROUNDED = "gradients are reduced in {}: parts and sums are rounded, unlike on one device"
"""Note on a `dtype` that is given."""


@dataclass(frozen=True)
class SynchronizeGradients(Pass):
    """Reduces Partial gradients to the layout of their parameters.

    Before: gradients of parameters are Partial over the axis. After: gradients of replicated
    parameters are all-reduced, and gradients of sharded ones are reduce-scattered, each once it is
    computed. If parameters are sharded within nodes only, an all-reduce between nodes follows.
    Parameters in `unreduced` keep Partial gradients, as under `no_sync`. A `dtype` narrower than a
    gradient's rounds every part and every sum, and a note says so. Tier: exact without `dtype`.

    Attributes:
        axis: axis over which gradients are Partial.
        rank: this rank's coordinate on it.
        unreduced: parameters whose gradients are returned unreduced.
        accumulated: parameters with unreduced gradients of earlier calls, added before reducing.
        shard_axis: axis, or level of an axis, that parameters are sharded over.
        dtype: name of the dtype of the reductions; "" for that of the gradients.
    """

    axis: str
    rank: int
    unreduced: tuple[str, ...] = ()
    accumulated: tuple[str, ...] = ()
    shard_axis: str = ""
    dtype: str = ""
    requires = frozenset({GraphProperty.BATCH_SHARDED})
    ensures = frozenset({GraphProperty.GRADIENTS_SYNCHRONIZED})

    def __call__(self, graph: TrainingGraph) -> PassResult:
        graph = graph.copy()
        names = [r.of.name for r in graph.outputs if _is_parameter(r)]  # type: ignore[union-attr]
        if not names and not self.accumulated:
            return PassResult(graph, "no parameter has a gradient")
        roles = (  # gradients of `unreduced` are returned under another role
            UnreducedGrad(r.of.name) if _is_parameter(r) and r.of.name in self.unreduced else r  # type: ignore[union-attr]
            for r in graph.outputs
        )
        graph = replace(graph, outputs=tuple(roles))
        for name in self.accumulated:
            graph = add_accumulated(graph, name)
        changed = {}
        for role, node in zip(graph.outputs, graph.results, strict=True):
            if _is_parameter(role) and node is not None:
                changed[role] = self.reduce_in_dtype(graph, role.of.name, node)  # type: ignore[union-attr]
        notes = (*graph.notes, *([NumericsNote(_ROUNDED.format(self.dtype))] if self.dtype else []))
        whole = dict(zip(graph.outputs, graph.results, strict=True))
        graph = graph.with_results(changed, notes=notes)
        for cast in {whole[role] for role in changed}:
            if cast is not None and cast.op == "call_function" and not cast.users:
                graph.graph.erase_node(cast)
        return PassResult(graph)

    def reduce_in_dtype(self, graph: TrainingGraph, name: str, node: fx.Node) -> fx.Node:
        """Writes the reduction of a gradient, between casts if `dtype` is narrower."""
        wide = tensors(node)[0].dtype
        dtype = getattr(torch, self.dtype) if self.dtype else wide
        if dtype.itemsize >= wide.itemsize:
            return self.reduce(graph, name, node)
        narrow = self.cast(graph, node, dtype)
        return self.cast(graph, self.reduce(graph, name, narrow), wide)

    def cast(self, graph: TrainingGraph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Writes the cast of a gradient right after it, or returns what it was cast from."""
        if node.target is aten._to_copy.default:
            (source,) = node.all_input_nodes
            before, after = tensors(source)[0], tensors(node)[0]
            if before.dtype == dtype and before.stride() == after.stride():
                return source
        is_input = node.op == "placeholder"
        graph.graph.inserting_before(graph.backward_start if is_input else node.next)
        like = graph.backward_start if is_input else node
        made = call(graph.graph, like, aten._to_copy.default, node, dtype=dtype)
        made.meta["placement"] = node.meta["placement"]
        return made

    def reduce(self, graph: TrainingGraph, name: str, node: fx.Node) -> fx.Node:
        """Writes the reduction of a gradient right after it."""
        info = graph.parameters[name]
        is_input = node.op == "placeholder"
        graph.graph.inserting_before(graph.backward_start if is_input else node.next)
        like = graph.backward_start if is_input else node
        layout = graph.layouts.get(name, Replicate())

        def reduced(
            start: object, tensor: fx.Node, placement: Placement, *options: object
        ) -> fx.Node:
            (result,) = collective(graph.graph, like, start, [tensor], *options)
            annotate([result], placement=placement, phase="backward", gradient=name)
            return result

        if not isinstance(layout, Shard):
            return reduced(start_all_reduce, node, layout, self.axis)
        axis = self.shard_axis or self.axis
        coordinate = coordinate_on(axis, self.rank, graph.axes)
        rows = chunk_of(info.shape[layout.dim], graph.axes[axis], coordinate)[1]
        front = swapped(graph.graph, like, node, layout.dim)
        if axis == self.axis:
            part = reduced(start_reduce_scatter, front, Shard(0), [rows], axis)
        else:
            part = reduced(start_reduce_scatter, front, Partial(), [rows], axis)
            part = reduced(start_all_reduce, part, Shard(0), level(self.axis, INTER_NODE))
        part = swapped(graph.graph, part, part, layout.dim)
        part.meta["placement"] = layout
        return part


def add_accumulated(graph: TrainingGraph, name: str) -> TrainingGraph:
    """Adds the unreduced gradients of earlier calls to the gradient of a parameter."""
    info = graph.parameters[name]
    fake = fake_like(graph, info.shape, info.dtype)
    graph, earlier = add_input(graph, Accumulated(name), f"held_{len(graph.inputs)}", fake)
    earlier.meta |= {"placement": Partial(), "phase": "backward"}
    role = Gradient(Parameter(name))
    gradient = graph.result(role)
    if gradient is None:
        return graph.with_results({role: earlier})
    graph.graph.inserting_before(gradient.next)
    total = call(graph.graph, gradient, aten.add.Tensor, earlier, gradient)
    total.meta["placement"] = Partial()
    return graph.with_results({role: total})


def _is_parameter(role: object) -> bool:
    return isinstance(role, Gradient) and isinstance(role.of, Parameter)
