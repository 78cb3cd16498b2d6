"""Sums the gradients of parameters over the ranks, once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from autopar.ir.graph import GraphProperty, TrainingGraph
from autopar.ir.mesh_levels import INTER_NODE, coordinate_on, level
from autopar.ir.placement import Partial, Placement, Replicate, Shard, chunk_rows
from autopar.ir.roles import Accumulated, Gradient, Parameter, UnreducedGrad
from autopar.passes.core.collective_ops import collective, start_all_reduce, start_reduce_scatter
from autopar.passes.core.node_builder import add_input, aten, call, fake_like
from autopar.passes.core.pass_base import Pass, PassResult


@dataclass(frozen=True)
class SynchronizeGradients(Pass):
    """Turns Partial gradients of parameters into gradients of the parameters' own layout.

    Before: gradients of parameters are Partial over the axis. After: those of whole parameters
    are all-reduced, those of sharded ones reduce-scattered, as soon as each is there; or, with
    `hold`, they are returned as they are for the runtime to keep (`no_sync`). Where parameters are
    sharded over neighbours only, each shard is then summed over its copies. Tier: exact.

    Attributes:
        axis: the axis over which gradients are Partial.
        rank: this rank's place on it.
        hold: parameters whose local gradients are returned, not reduced.
        held: parameters with local gradients of earlier calls, which are added before reducing.
        shard_axis: the axis, or the level of it, that parameters are sharded over.
    """

    axis: str
    rank: int
    unreduced: tuple[str, ...] = ()
    accumulated: tuple[str, ...] = ()
    shard_axis: str = ""
    requires = frozenset({GraphProperty.BATCH_SHARDED})
    ensures = frozenset({GraphProperty.GRADIENTS_SYNCHRONIZED})

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`."""
        graph = graph.copy()
        names = [r.of.name for r in graph.outputs if _is_parameter(r)]  # type: ignore[union-attr]
        if not names and not self.accumulated:
            return PassResult(graph, "no parameter has a gradient")
        if self.unreduced:
            graph = self.hold_gradients(graph)
        for name in self.accumulated:
            graph = self.add_held(graph, name)
        changed = {}
        for role, node in zip(graph.outputs, graph.results, strict=True):
            if _is_parameter(role) and node is not None:
                changed[role] = self.reduce(graph, role.of.name, node)  # type: ignore[union-attr]
        return PassResult(graph.with_results(changed))

    def hold_gradients(self, graph: TrainingGraph) -> TrainingGraph:
        """Returns local gradients under the role `UnreducedGrad`."""
        roles = tuple(
            UnreducedGrad(r.of.name) if _is_parameter(r) and r.of.name in self.unreduced else r  # type: ignore[union-attr]
            for r in graph.outputs
        )
        return replace(graph, outputs=roles)

    def add_held(self, graph: TrainingGraph, name: str) -> TrainingGraph:
        """Adds what was held back in earlier calls to the gradient of `name`."""
        info = graph.parameters[name]
        fake = fake_like(graph, info.shape, info.dtype)
        graph, held = add_input(graph, Accumulated(name), f"held_{len(graph.inputs)}", fake)
        held.meta |= {"placement": Partial(), "phase": "backward"}
        role = Gradient(Parameter(name))
        gradient = graph.result(role)
        if gradient is None:
            return graph.with_results({role: held})
        graph.graph.inserting_before(gradient.next)
        total = call(graph.graph, gradient, aten.add.Tensor, held, gradient)
        total.meta["placement"] = Partial()
        return graph.with_results({role: total})

    def reduce(self, graph: TrainingGraph, name: str, node: fx.Node) -> fx.Node:
        """Writes the reduction of one gradient right behind it."""
        info = graph.parameters[name]
        first = graph.backward_start if node.op == "placeholder" else node.next
        graph.graph.inserting_before(first)
        like = node if node.op != "placeholder" else first
        layout = graph.layouts.get(name, Replicate())

        def sent(start: object, tensor: fx.Node, placement: Placement, *options: object) -> fx.Node:
            (result,) = collective(graph.graph, like, start, [tensor], *options)
            for item in (result.args[0].args[0], result.args[0], result):  # type: ignore[union-attr]
                item.meta |= {"placement": placement, "phase": "backward", "gradient": name}  # type: ignore[union-attr]
            return result

        if not isinstance(layout, Shard):
            return sent(start_all_reduce, node, layout, self.axis)
        axis = self.shard_axis or self.axis
        place = coordinate_on(axis, self.rank, graph.axes)
        rows = chunk_rows(info.shape[0], graph.axes[axis])[place]
        if axis == self.axis:
            return sent(start_reduce_scatter, node, layout, [rows], axis)
        part = sent(start_reduce_scatter, node, Partial(), [rows], axis)
        return sent(start_all_reduce, part, layout, level(self.axis, INTER_NODE))


def _is_parameter(role: object) -> bool:
    return isinstance(role, Gradient) and isinstance(role.of, Parameter)
