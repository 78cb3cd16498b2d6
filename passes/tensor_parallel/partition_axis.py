"""Partitions a graph along a mesh axis: what every rank computes of it, and what moves between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from operator import getitem
from typing import Any

import torch
from torch import fx

from autopar.cost_model.kernels.signature import describe_argument
from autopar.ir.graph import (
    GraphProperty,
    TrainingGraph,
    Value,
    dense_strides,
    elements,
    operands,
    tensors,
)
from autopar.ir.op_strategy import OpStrategy
from autopar.ir.placement import Placement, Replicate
from autopar.ir.roles import Gradient, OutputRole, Parameter
from autopar.passes.core.collective_ops import (
    is_name,
    start_all_reduce,
    start_reduce_scatter,
    value_of,
    wait,
)
from autopar.passes.core.node_builder import aten, call
from autopar.passes.core.node_builder import value as fakes
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.rules.emit_redistribute import RedistributeEmitter, can_view
from autopar.passes.rules.indivisible_notes import indivisible_notes
from autopar.passes.rules.local_args import local_arguments, local_shape
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.lowerings.registry import CUSTOM_LOWERINGS
from autopar.passes.rules.proof.infer_batch_dims import (
    double_operator,
    double_placement,
    record_batch_dims,
)
from autopar.passes.rules.redistribute import RedistributeStep, redistribute_steps
from autopar.passes.rules.unsupported_notes import unsupported_notes

WHOLE = Replicate()


@dataclass(frozen=True)
class PartitionAxis(Pass):
    """Turns a graph on whole tensors into that of one rank of an axis.

    Before: a graph as captured, or as partitioned along another axis. After: parameters are this
    rank's shards, and so are their gradients; every operator runs on what its way says this rank
    holds; between them stand conversions, each value converted once to each placement, at its
    first reader. Other inputs and outputs are whole on every rank. Tier: exact.

    Attributes:
        axis: the mesh axis.
        rank: this rank's place on it.
        op_strategies: strategies of operators and parameters, by node name; the others are
            replicated.
    """

    axis: str
    rank: int
    op_strategies: tuple[tuple[str, OpStrategy], ...]
    ensures = frozenset({GraphProperty.AXES_PARTITIONED})

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to `graph`, which stays as it is."""
        if not self.op_strategies:
            return PassResult(graph, "everything is whole on every rank")
        ranks = graph.axes[self.axis]
        return PassResult(
            Partitioner(graph, self.axis, ranks, self.rank, dict(self.op_strategies)).run()
        )


class Partitioner:
    """One walk over a graph on whole tensors, which writes that of one rank of an axis.

    Args:
        graph: the graph.
        axis: name of the axis.
        ranks: size of the axis.
        rank: place on the axis.
        op_strategies: strategy of every operator and parameter that is not whole, by node name.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        axis: str,
        ranks: int,
        rank: int,
        op_strategies: Mapping[str, OpStrategy],
    ) -> None:
        self.old, self.new = graph, fx.Graph()
        self.axis, self.rank, self.ranks, self.op_strategies = axis, rank, ranks, op_strategies
        self.made: dict[Value, tuple[fx.Node, Placement]] = {}
        self.converted: dict[tuple[Value, Placement], fx.Node] = {}
        self.tuples: dict[fx.Node, fx.Node] = {}
        self.values: dict[object, Any] = {}  # what operators yield: repeated blocks do the same
        self.placed: dict[str, Placement] = {}
        self.gradients: dict[fx.Node, list[str]] = {}
        for role, node in zip(graph.outputs, graph.results, strict=True):
            if isinstance(role, Gradient) and isinstance(role.of, Parameter) and node is not None:
                self.gradients.setdefault(node, []).append(role.of.name)

    def run(self) -> TrainingGraph:
        """The graph of this rank."""
        with self.old.fake_mode:
            return self.walk()

    def walk(self) -> TrainingGraph:
        """Writes what this rank runs for every node in turn."""
        roles = dict(zip(self.old.placeholders, self.old.inputs, strict=True))
        results: dict[OutputRole, fx.Node | None] = {}
        backward = self.old.backward_start
        for node in self.old.graph.nodes:
            if node is backward:
                results |= self.returned("forward")
                self.begin_backward()
            if node.op == "placeholder":
                self.input(node, roles[node])
            elif node.op == "get_attr":
                self.constant(node)
            elif node.op == "call_function":
                self.operator(node)
                self.reduce(node)
        results |= self.returned("backward")
        output = self.new.output([results[role] for role in self.old.outputs])
        output.meta = dict(self.old.output_node.meta)
        return self.finished()

    def finished(self) -> TrainingGraph:
        """The graph that was written, with its roles and notes."""
        return replace(
            self.old,
            graph=self.new,
            parameters={n: self.local(info) for n, info in self.old.parameters.items()},
            partitioned=(*self.old.partitioned, self.axis),
            notes=(
                *self.old.notes,
                *unsupported_notes(self.old, self.axis),
                *(
                    indivisible_notes(self.old, self.op_strategies, self.axis)
                    if self.placed
                    else ()
                ),
            ),
        )

    def input(self, node: fx.Node, role: object) -> None:
        """A placeholder: a parameter lies as its way says."""
        op_strategy = self.op_strategies.get(node.name)
        placement = op_strategy.results[0] if op_strategy else WHOLE
        copy = self.copied(node)
        if placement != WHOLE:
            whole = node.meta["val"]
            shape = local_shape(whole.shape, placement, self.ranks, self.rank)
            copy.meta["val"] = whole.new_empty(shape)
            assert isinstance(role, Parameter)
            self.placed[role.name] = placement
        self.keep(node, placement, copy)

    def constant(self, node: fx.Node) -> None:
        """A tensor that the model made in its code."""
        self.keep(node, WHOLE, self.copied(node))

    def begin_backward(self) -> None:
        """Called between the forward and the backward."""

    def operator(self, node: fx.Node) -> None:
        """One operator on what this rank holds."""
        if is_name(node):
            return self.waited(node) if node.target is wait else self.element(node)
        given = operands(node)
        if not all(isinstance(n.meta["val"], torch.Tensor) for n in given):
            return self.whole_tuples(node)
        operator = Operator.of(node)
        op_strategy = self.op_strategies.get(node.name) or _whole(operator)
        shards = [
            self.operand(value_of(n), wanted, node)
            for n, wanted in zip(given, op_strategy.operands, strict=True)
        ]
        if op_strategy.lowering:
            return self.own(node, operator, op_strategy, shards)
        local = local_arguments(operator, op_strategy, shards, self.ranks, self.rank)
        if local.target in VIEWS:
            local = self.viewable(local, node)
        self.write(node, local.target, local.args, local.kwargs, op_strategy.results)
        return None

    def reduce(self, node: fx.Node) -> None:
        """Brings a gradient to where its parameter lies as soon as it is there."""
        for name in self.gradients.get(node, ()) if node.meta["phase"] == "backward" else ():
            end = self.last
            self.operand(value_of(node), self.placed.get(name, WHOLE), node)
            for made in self.since(end):
                if made.target in (start_all_reduce, start_reduce_scatter):
                    made.meta["summed"] = name

    def own(
        self, node: fx.Node, operator: Operator, op_strategy: OpStrategy, shards: list[fx.Node]
    ) -> None:
        """What a lowering of its own writes for an operator."""
        emit = partial(
            CUSTOM_LOWERINGS[op_strategy.lowering].emit,
            ranks=self.ranks,
            rank=self.rank,
            axis=self.axis,
        )
        end = self.last
        made = emit(self.new, node, operator, op_strategy, shards)
        if "batch_dims" in node.meta:
            read = [n.meta["batch_dims"][0] for n in operands(node)]
            twice = double_operator(operator, op_strategy, read, node.meta["batch_dims"])
            record_batch_dims(self.since(end), shards, lambda g, x: emit(g, node, *twice, x))
        self.inherit(end, node)
        items = {item.args[1]: item for item in node.users if item.target is getitem}
        for index, result in enumerate(made):
            if result is not None:
                if index in items and "placement" in items[index].meta:
                    result.meta["placement"] = items[index].meta["placement"]
                self.made[Value(node, index)] = (result, op_strategy.results[index])

    def inherit(self, end: fx.Node, source: fx.Node) -> None:
        """Types what was written since a node: along the data axis it lies as its source does."""
        if "placement" in source.meta:
            for node in self.since(end):
                node.meta.setdefault("placement", source.meta["placement"])

    @property
    def last(self) -> fx.Node:
        """The node that was written last."""
        return next(iter(reversed(self.new.nodes)))

    def since(self, end: fx.Node) -> list[fx.Node]:
        """The nodes that were written since."""
        return list(takewhile(lambda node: node is not end, reversed(self.new.nodes)))[::-1]

    def write(
        self, node: fx.Node, target: Any, args: Any, kwargs: Any, placements: Sequence[Placement]
    ) -> None:
        """The operator that stands for a node, by the same name."""
        copy = self.new.create_node("call_function", target, tuple(args), kwargs, node.name)
        key = (target, describe_argument(args), describe_argument(kwargs))
        if key not in self.values:
            self.values[key] = target(*fakes(args), **fakes(kwargs))
        copy.meta = {**node.meta, "val": self.values[key]}
        if isinstance(node.meta.get("val"), (tuple, list)):
            self.tuples[node] = copy
            for place, placement in enumerate(placements):
                self.made[Value(node, place)] = (copy, placement)
        else:
            self.keep(node, placements[0], copy)

    def element(self, node: fx.Node) -> None:
        """An element of a tuple, taken where it was taken."""
        value = value_of(node)
        source, placement = self.made[value]
        if source is self.tuples.get(value.node):
            copy = self.new.create_node(
                "call_function", getitem, (source, value.index), name=node.name
            )
            copy.meta = {**node.meta, "val": elements(source)[value.index]}
            self.made[value] = (copy, placement)

    def waited(self, node: fx.Node) -> None:
        """The wait for a collective of another axis: its results lie as those that it started."""
        (start,) = node.all_input_nodes
        copy = self.new.create_node("call_function", wait, (self.tuples[start],), name=node.name)
        copy.meta = {**node.meta, "val": list(elements(self.tuples[start]))}
        self.tuples[start] = copy
        for place in range(len(elements(node))):
            _, placement = self.made[Value(start, place)]
            self.made[Value(start, place)] = (copy, placement)

    def whole_tuples(self, node: fx.Node) -> None:
        """An operator that is given tuples, on whole values."""

        def whole(operand: fx.Node) -> fx.Node:
            if isinstance(operand.meta["val"], torch.Tensor):
                return self.operand(value_of(operand), WHOLE, node)
            return self.tuples[operand]

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), whole)
        self.write(node, node.target, args, kwargs, [WHOLE] * len(elements(node)))

    def viewable(self, local: Operator, node: fx.Node) -> Operator:
        """A view of a shard, copied if its strides do not allow what those of the whole did."""
        source, shape, *rest = local.args
        if can_view(tensors(source)[0], shape):
            return local
        contiguous = torch.contiguous_format
        copy = call(self.new, node, aten.clone.default, source, memory_format=contiguous)
        copy.meta |= {k: source.meta[k] for k in ("batch_dims", "placement") if k in source.meta}
        return replace(local, args=(copy, shape, *rest))

    def operand(self, value: Value, wanted: Placement, reader: fx.Node) -> fx.Node:
        """A value as its reader wants it, converted where nobody wanted it so before."""
        node, placement = self.made[value]
        conversion = redistribute_steps(placement, wanted)
        if conversion is None:
            raise ValueError(f"{reader} wants {value.node} as {wanted}, which is {placement}")
        for step in conversion:
            key = (value, step.after)
            if key not in self.converted:
                self.converted[key] = self.convert(step, node, value.tensor.shape, reader)
            node = self.converted[key]
        if conversion:
            node = self.converted[value, wanted] = self.dtensor_like(node, value.tensor, reader)
        return node

    def dtensor_like(self, node: fx.Node, whole: torch.Tensor, reader: fx.Node) -> fx.Node:
        """What was redistributed, its dims in memory in the order of those of the whole.

        Some kernels read wrong numbers where operands differ in memory format.
        """
        own = tensors(node)[0]
        wanted = dense_strides(own.shape, whole.stride())
        if same_layout(own, wanted):
            return node
        order = sorted(range(own.dim()), key=lambda dim: (-wanted[dim], dim))
        back = [order.index(dim) for dim in range(own.dim())]
        made = call(self.new, reader, aten.permute.default, node, order)
        made = call(self.new, reader, aten.clone.default, made, memory_format=_CONTIGUOUS)
        made = call(self.new, reader, aten.permute.default, made, back)
        if "batch_dims" in node.meta:
            (rows,) = node.meta["batch_dims"]
            moved = tuple(order.index(dim) for dim in rows)
            for copy in (made.args[0], made.args[0].args[0]):  # type: ignore[union-attr]
                copy.meta["batch_dims"] = (moved,)  # type: ignore[union-attr]
            made.meta["batch_dims"] = (rows,)
        if "placement" in node.meta:
            for copy in (made.args[0], made.args[0].args[0], made):  # type: ignore[union-attr]
                copy.meta["placement"] = node.meta["placement"]  # type: ignore[union-attr]
        return made

    def convert(
        self, step: RedistributeStep, node: fx.Node, whole: Sequence[int], reader: fx.Node
    ) -> fx.Node:
        """Writes one step of a conversion of a tensor of some shape for a reader."""
        place = (self.ranks, self.rank, self.axis)
        end = self.last
        result = RedistributeEmitter(self.new, reader, *place).emit(step, node, whole)
        self.inherit(end, node)
        if "batch_dims" in reader.meta:
            (rows,) = node.meta["batch_dims"]
            twice = replace(
                step,
                before=double_placement(step.before, rows),
                after=double_placement(step.after, rows),
            )
            size = [n * 2 if d in rows else n for d, n in enumerate(whole)]
            record_batch_dims(
                self.since(end),
                [node],
                lambda g, x: RedistributeEmitter(g, reader, *place).emit(twice, x[0], size),
            )
        return result

    def returned(self, phase: str) -> dict[OutputRole, fx.Node | None]:
        """What a phase returns: whole, but gradients as their parameters."""
        end, found = self.last, dict[OutputRole, fx.Node | None]()
        for role, node in zip(self.old.outputs, self.old.results, strict=True):
            late = isinstance(role, Gradient) or (
                node is not None and node.meta.get("phase") == "backward"
            )
            if late != (phase == "backward"):
                continue
            wanted: Placement = WHOLE
            if isinstance(role, Gradient) and isinstance(role.of, Parameter):
                wanted = self.placed.get(role.of.name, WHOLE)
            found[role] = None if node is None else self.operand(value_of(node), wanted, node)
        for node in self.since(end):
            node.meta["phase"] = phase
        return found

    def local(self, info: Any) -> Any:
        """What is known of this rank's part of a parameter."""
        placement = self.placed.get(info.name, WHOLE)
        return replace(info, shape=tuple(local_shape(info.shape, placement, self.ranks, self.rank)))

    def copied(self, node: fx.Node) -> fx.Node:
        copy = self.new.node_copy(node)
        copy.meta = dict(node.meta)
        return copy

    def keep(self, node: fx.Node, placement: Placement, copy: fx.Node) -> None:
        self.made[Value(node)] = (copy, placement)


_CONTIGUOUS = torch.contiguous_format


def same_layout(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides where they matter; those of expanded dims never do."""
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return tensor.numel() == 0 or all(n < 2 or not s or have == s for n, have, s in pairs)


VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})


def _whole(operator: Operator) -> OpStrategy:
    return OpStrategy((WHOLE,) * len(operator.operands), (WHOLE,) * len(operator.results))
