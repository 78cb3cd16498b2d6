"""`PartitionAxis`: the program of one rank of a mesh axis, with the redistributions it needs.

Column, row, sequence and expert parallelism are usually written into a model by hand. Here they are
placements that the planner chooses, and this pass writes the collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import getitem
from typing import Any

import torch
from torch import fx

from autopar.core.common.deadline import check_time
from autopar.core.ir.graph import (
    GraphProperty,
    ParameterInfo,
    TrainingGraph,
    Value,
    elements,
    operands,
)
from autopar.core.ir.placement import (
    AxisShard,
    OpStrategy,
    Placement,
    Replicate,
    Routed,
    Shard,
    is_even,
)
from autopar.core.ir.roles import Gradient, InputRole, Output, OutputRole, Parameter
from autopar.core.plan.partition import NodeStrategies
from autopar.passes.core.collective_ops import (
    is_name,
    start_all_reduce,
    start_reduce_scatter,
    value_of,
    wait,
)
from autopar.passes.core.node_builder import aten, result_of
from autopar.passes.core.node_builder import value as fakes
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.core.untrained_outputs import is_returned_by, returned_as, untrained_outputs
from autopar.passes.rules.emit_redistribute import RedistributeEmitter
from autopar.passes.rules.local_args import local_arguments, local_shape
from autopar.passes.rules.loops import Operator, replicated
from autopar.passes.rules.lowerings.context import LoweringContext
from autopar.passes.rules.lowerings.registry import lower
from autopar.passes.rules.notes import indivisible_notes, unsupported_notes
from autopar.passes.rules.proof.infer_batch_dims import (
    double_operator,
    double_placement,
    infer_batch_dims,
)
from autopar.passes.rules.redistribute import RedistributeStep
from autopar.passes.rules.routed_rows import Region, is_routed, regions_of
from autopar.passes.tensor_parallel.memory_formats import (
    inherited,
    make_viewable,
    with_strides_of,
)
from autopar.passes.tensor_parallel.row_router import RowRouter

WHOLE = Replicate()
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})


@dataclass(frozen=True)
class PartitionAxis(Pass):
    """Partitions a graph along an axis and returns the program of one rank.

    Before: a captured graph, or one partitioned along other axes. After: parameters and their
    gradients are this rank's shards, and every operator runs on the shards of its strategy. Each
    value is redistributed at most once to each placement, before its first reader. Outputs beside a
    loss may stay in parts (`TrainingGraph.output_shards`). Other inputs and outputs, and operators
    without a strategy, are replicated. Tier: exact.

    `once` is as in `Partition`.
    """

    axis: str
    rank: int
    op_strategies: NodeStrategies
    once: int = 0
    ensures = frozenset({GraphProperty.AXES_PARTITIONED})

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass and leaves `graph` unchanged."""
        if not self.op_strategies:
            return PassResult(graph, "everything is whole on every rank")
        ranks, strategies = graph.axes[self.axis], dict(self.op_strategies)
        partitioner = Partitioner(graph, self.axis, ranks, self.rank, strategies, self.once)
        return PassResult(partitioner.run())


class Partitioner:
    """Writes the graph of one rank of an axis in one walk over a graph on whole tensors."""

    def __init__(
        self,
        source: TrainingGraph,
        axis: str,
        ranks: int,
        rank: int,
        op_strategies: Mapping[str, OpStrategy],
        once: int = 0,
    ) -> None:
        self.source, self.graph = source, fx.Graph()
        self.axis, self.ranks, self.rank, self.op_strategies = axis, ranks, rank, op_strategies
        self.local: dict[Value, tuple[fx.Node, Placement]] = {}
        self.redistributed: dict[tuple[Value, Placement], fx.Node] = {}
        routes = any(map(is_routed, op_strategies.values()))
        regions = regions_of(source) if routes else {}
        self.router = RowRouter(self.graph, ranks, rank, axis, regions, once)
        self.local_tuples: dict[fx.Node, fx.Node] = {}
        self.parameter_placements: dict[str, Placement] = {}
        self.untrained = untrained_outputs(source)
        self.output_shards = dict(source.output_shards)
        self.gradient_names: dict[fx.Node, list[str]] = {}
        for role, node in zip(source.outputs, source.results, strict=True):
            if isinstance(role, Gradient) and isinstance(role.of, Parameter) and node is not None:
                self.gradient_names.setdefault(node, []).append(role.of.name)

    def run(self) -> TrainingGraph:
        """The program of this rank: the local operators of each node in turn."""
        roles = dict(zip(self.source.placeholders, self.source.inputs, strict=True))
        results: dict[OutputRole, fx.Node | None] = {}
        backward = self.source.backward_start
        with self.source.fake_mode:
            for node in self.source.graph.nodes:
                check_time()
                if node is backward:
                    # Redistributed later, outputs would stand behind the backward's start.
                    results |= self.results("forward")
                    self.begin_backward()
                if node.op == "placeholder":
                    self.placeholder(node, roles[node])
                elif node.op == "get_attr":
                    self.copy(node, WHOLE)
                elif node.op == "call_function":
                    self.operator(node)
                    self.reduce_gradient(node)
            results |= self.results("backward")
            output = self.graph.output([results[role] for role in self.source.outputs])
            output.meta = dict(self.source.output_node.meta)
            return self.result()

    def result(self) -> TrainingGraph:
        """The partitioned graph with its parameters and notes."""

        def local(info: ParameterInfo) -> ParameterInfo:
            placement = self.parameter_placements.get(info.name, WHOLE)
            shape = local_shape(info.shape, placement, self.ranks, self.rank)
            return replace(info, shape=tuple(shape))

        places = ((elements(v.node)[v.index], place) for v, (_, place) in self.local.items())
        even = all(t is None or is_even(t.shape, place, self.ranks) for t, place in places)
        notes = unsupported_notes(self.source, self.axis)
        if self.parameter_placements:
            notes += indivisible_notes(self.source, self.op_strategies, self.axis)
        return replace(
            self.source,
            graph=self.graph,
            parameters={name: local(info) for name, info in self.source.parameters.items()},
            partitioned=(*self.source.partitioned, self.axis),
            notes=(*self.source.notes, *notes),
            output_shards=self.output_shards,
            is_uneven=self.source.is_uneven or not even,
        )

    # Nodes.

    def placeholder(self, node: fx.Node, role: InputRole) -> None:
        """Writes an input: this rank's shard of a parameter; other inputs are replicated."""
        op_strategy = self.op_strategies.get(node.name)
        placement = op_strategy.results[0] if op_strategy else WHOLE
        copy = self.copy(node, placement)
        if placement != WHOLE:
            assert isinstance(role, Parameter)
            whole = node.meta["val"]
            shape = local_shape(whole.shape, placement, self.ranks, self.rank)
            copy.meta["val"] = whole.new_empty(shape)
            self.parameter_placements[role.name] = placement

    def begin_backward(self) -> None:
        """Hook between forward and backward."""

    def operator(self, node: fx.Node) -> None:
        """Writes an operator on this rank's shards."""
        if is_name(node):
            return self.wait(node) if node.target is wait else self.tuple_element(node)
        sources = operands(node)
        if not all(isinstance(n.meta["val"], torch.Tensor) for n in sources):
            return self.replicate_tuples(node)
        operator = Operator.of(node)
        op_strategy = self.op_strategies.get(node.name) or replicated(operator)
        shards = [
            self.operand(value_of(n), wanted, node)
            for n, wanted in zip(sources, op_strategy.operands, strict=True)
        ]
        if op_strategy.lowering:
            return self.lower(node, operator, op_strategy, shards)
        local = local_arguments(operator, op_strategy, shards, self.ranks, self.rank)
        if local.target in VIEWS:
            local = make_viewable(self.graph, local, node)
        return self.write(node, local.target, local.args, local.kwargs, op_strategy.results)

    def reduce_gradient(self, node: fx.Node) -> None:
        """Redistributes a gradient to the placement of its parameter once it is computed."""
        if node.meta["phase"] != "backward":
            return
        for name in self.gradient_names.get(node, ()):
            last = self.last
            self.operand(value_of(node), self.parameter_placements.get(name, WHOLE), node)
            for new in self.nodes_after(last):
                if new.target in (start_all_reduce, start_reduce_scatter):
                    new.meta["summed"] = name

    def lower(
        self, node: fx.Node, operator: Operator, op_strategy: OpStrategy, shards: list[fx.Node]
    ) -> None:
        """Writes the operators of a custom lowering."""
        last = self.last
        ctx = self.lowering_context(node, operator, op_strategy, shards)
        results = lower(ctx)
        if "batch_dims" in node.meta:
            # Written again for twice the rows, the operators show which of their dims run over
            # rows. Otherwise each lowering would need a rule for that.
            read = [n.meta["batch_dims"][0] for n in operands(node)]
            twice, strategy = double_operator(operator, op_strategy, read, node.meta["batch_dims"])
            doubled = replace(ctx, operator=twice, op_strategy=strategy)
            infer_batch_dims(
                self.nodes_after(last),
                shards,
                lambda graph, x: lower(replace(doubled, graph=graph, shards=tuple(x))),
            )
        self.inherit_placement(last, node)
        items = {item.args[1]: item for item in node.users if item.target is getitem}
        for index, result in enumerate(results):
            if result is not None:
                if index in items:
                    result.meta |= inherited(items[index], "placement")
                self.local[Value(node, index)] = (result, op_strategy.results[index])

    def lowering_context(
        self, node: fx.Node, operator: Operator, op_strategy: OpStrategy, shards: list[fx.Node]
    ) -> LoweringContext:
        """The context in which a custom lowering writes the operator of a node."""
        given = (self.graph, node, operator, op_strategy, tuple(shards))
        return LoweringContext(*given, self.ranks, self.rank, self.axis)

    def write(
        self, node: fx.Node, target: Any, args: Any, kwargs: Any, placements: Sequence[Placement]
    ) -> None:
        """Writes the local operator of a node under the same name."""
        copy = self.graph.create_node("call_function", target, tuple(args), kwargs, node.name)
        copy.meta = {**node.meta, "val": result_of(target, fakes(args), fakes(kwargs))}
        if isinstance(node.meta.get("val"), (tuple, list)):
            self.local_tuples[node] = copy
        for index, placement in enumerate(placements):
            self.local[Value(node, index)] = (copy, placement)
        self.annotate(copy, *placements)

    def tuple_element(self, node: fx.Node) -> None:
        """Writes an element of a tuple at the same position as in the source."""
        value = value_of(node)
        source, placement = self.local[value]
        if source is self.local_tuples.get(value.node):
            args = (source, value.index)
            copy = self.graph.create_node("call_function", getitem, args, name=node.name)
            copy.meta = {**node.meta, "val": elements(source)[value.index]}
            self.local[value] = (copy, placement)
            self.annotate(copy, placement)

    def wait(self, node: fx.Node) -> None:
        """Writes the wait for a collective of another axis, with the placements of its start."""
        (start,) = node.all_input_nodes
        pending = self.local_tuples[start]
        copy = self.graph.create_node("call_function", wait, (pending,), name=node.name)
        copy.meta = {**node.meta, "val": list(elements(pending))}
        self.local_tuples[start] = copy
        for index in range(len(elements(node))):
            self.local[Value(start, index)] = (copy, self.local[Value(start, index)][1])

    def replicate_tuples(self, node: fx.Node) -> None:
        """Writes an operator that reads tuples, on replicated operands."""

        def whole(operand: fx.Node) -> fx.Node:
            if isinstance(operand.meta["val"], torch.Tensor):
                return self.operand(value_of(operand), WHOLE, node)
            return self.local_tuples[operand]

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), whole)
        self.write(node, node.target, args, kwargs, [WHOLE] * len(elements(node)))

    # Redistribution.

    def operand(self, value: Value, wanted: Placement, reader: fx.Node) -> fx.Node:
        """A value in the wanted placement, redistributed at most once; ValueError if impossible."""
        node, placement = self.local[value]
        steps = self.router.steps(placement, wanted, node, reader)
        if steps is None:
            raise ValueError(f"{reader} wants {value.node} as {wanted}, which is {placement}")
        for step in steps:
            key = (value, step.after)
            if (region := self.router.region(step, value, reader)) is not None:
                node = self.route(step, value, node, region, reader)
                continue
            if key not in self.redistributed:
                self.redistributed[key] = self.redistribute(step, node, value.tensor.shape, reader)
            node = self.redistributed[key]
        if steps and not isinstance(wanted, Routed):  # rows are routed once for each layer
            node = with_strides_of(self.graph, value.tensor, node, reader)
            self.redistributed[value, wanted] = node
        return node

    def route(
        self, step: RedistributeStep, value: Value, node: fx.Node, region: Region, reader: fx.Node
    ) -> fx.Node:
        """Sends rows of a value to the ranks of their experts, or back from there, once."""
        stage = (reader if step.kind == "route" else node).meta.get("stage")
        key = (value, step.after, region, stage)
        if key not in self.router.routed:
            shard = Shard(0, step.shards[0].interleave)
            experts = self.operand(value_of(region.experts), shard, reader)
            last = self.last
            self.router.routed[key] = self.router.write(
                step, node, region, experts, value.node, reader, stage
            )
            self.inherit_placement(last, node)
            for new in self.nodes_after(last):
                new.meta["stage"] = stage
        return self.router.routed[key]

    def redistribute(
        self, step: RedistributeStep, node: fx.Node, shape: Sequence[int], reader: fx.Node
    ) -> fx.Node:
        """Writes one redistribution step of a tensor of unsharded shape `shape`."""

        def emit(graph: fx.Graph, step: RedistributeStep, x: fx.Node, s: Sequence[int]) -> fx.Node:
            emitter = RedistributeEmitter(graph, reader, self.ranks, self.rank, self.axis)
            return emitter.emit(step, x, s)

        last = self.last
        result = emit(self.graph, step, node, shape)
        self.inherit_placement(last, node)
        if "batch_dims" in reader.meta:
            (rows,) = node.meta["batch_dims"]
            before, after = (double_placement(p, rows) for p in (step.before, step.after))
            twice = replace(step, before=before, after=after)
            doubled = [n * 2 if d in rows else n for d, n in enumerate(shape)]
            written = self.nodes_after(last)
            infer_batch_dims(written, [node], lambda graph, x: emit(graph, twice, x[0], doubled))
        return result

    # Outputs.

    def results(self, phase: str) -> dict[OutputRole, fx.Node | None]:
        """The results of a phase, in their output placements."""
        last, found = self.last, dict[OutputRole, fx.Node | None]()
        for role, node in zip(self.source.outputs, self.source.results, strict=True):
            if is_returned_by(phase, role, node):
                placement = self.result_placement(role)
                found[role] = node and self.operand(value_of(node), placement, node)
                if isinstance(role, Output) and isinstance(placement, Shard):
                    self.keep_shard(role, placement)
        for new in self.nodes_after(last):
            new.meta["phase"] = phase
        return found

    def result_placement(self, role: OutputRole) -> Placement:
        """The placement of an output: a gradient has its parameter's, others are replicated.

        Untrained outputs of divided operators stay as they are.
        """
        if isinstance(role, Gradient) and isinstance(role.of, Parameter):
            return self.parameter_placements.get(role.of.name, WHOLE)
        if isinstance(role, Output) and role in self.untrained:
            node = self.source.result(role)
            assert node is not None
            return returned_as(self.local[value_of(node)][1])
        return WHOLE

    def keep_shard(self, role: Output, placement: Shard) -> None:
        """Takes down that an output is returned in parts."""
        node = self.source.result(role)
        assert node is not None
        size = value_of(node).tensor.shape[placement.dim]
        before = self.output_shards.get(role.index, ())
        self.output_shards[role.index] = (*before, AxisShard(self.axis, placement, size))

    # New nodes.

    @property
    def last(self) -> fx.Node:
        """The last node written."""
        return next(iter(reversed(self.graph.nodes)))

    def nodes_after(self, last: fx.Node) -> list[fx.Node]:
        """The nodes written after a node."""
        return list(takewhile(lambda node: node is not last, reversed(self.graph.nodes)))[::-1]

    def copy(self, node: fx.Node, placement: Placement) -> fx.Node:
        """Copies a node without operands and records its placement."""
        copy = self.graph.node_copy(node)
        copy.meta = dict(node.meta)
        self.local[Value(node)] = (copy, placement)
        self.annotate(copy, placement)
        return copy

    def annotate(self, node: fx.Node, *placements: Placement) -> None:
        """Hook that records the placements of a new node's results along the batch axis."""

    def inherit_placement(self, last: fx.Node, source: fx.Node) -> None:
        """Gives the nodes after `last` the placement of a node along the data axis."""
        if "placement" in source.meta:
            for node in self.nodes_after(last):
                node.meta.setdefault("placement", source.meta["placement"])
