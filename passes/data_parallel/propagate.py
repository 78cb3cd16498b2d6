"""`BatchPlacements`: placements along the batch axis, from sharded inputs to every operator.

Inputs with a batch dim are `Shard(0)` and parameters are `Replicate`. In execution order, every
operator takes the cheapest strategy that the rules of `passes/rules` prove. A reduction over rows
is `Partial`. Operands of an operator that couples rows are redistributed. Operators without a rule
run on replicated operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.core.ir.batch_slicing import BatchSlices
from autopar.core.ir.graph import TrainingGraph, Value, elements, operands, tensor_bytes
from autopar.core.ir.placement import OpStrategy, Partial, Placement, Replicate, Shard
from autopar.core.ir.roles import Buffer, Gradient, Input, Output, Parameter, Tangent, Update
from autopar.passes.core.collective_ops import is_name, value_of
from autopar.passes.data_parallel.redistribute import moves
from autopar.passes.data_parallel.strategy_choice import OperatorReads, StrategyChooser
from autopar.passes.rules.batch_loops import draws_random, is_cast
from autopar.passes.rules.loops import Operator, replicated
from autopar.passes.rules.operators.partial_linear import JOINTLY_LINEAR, LINEAR_IN_EACH

WHOLE = Replicate()

_ALIKE_FOR_ALL_ROWS = frozenset(
    {"batch_norm", "nll_loss", "nll_loss_rows", "mean_loss"}
    | {"draw", "draw_like", "draw_of", "dropout"}
)
"""Lowerings that treat all rows alike, whichever dims they are."""


class BatchPlacements:
    """Placements of a graph of the whole batch; arguments are as in `PartitionBatch`.

    Attributes:
        op_strategies: strategy of every operator that is not replicated, by node name.
        inputs: placement of every placeholder, by node name.
        outputs: placement of every output of the model, by its index.
        gathered_bytes: bytes that each operator gathers from other slices, by node name.
        local_random: names of operators that draw random numbers for their own rows.
        returned_bytes: bytes of outputs that are gathered since the loop reads them.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        slices: BatchSlices,
        row_dims: Sequence[int | None],
        whole_outputs: Sequence[int] = (),
        gathers_rows: bool = False,
        output_dims: Sequence[int | None] | None = None,
    ) -> None:
        self.graph, self.slices, self.whole_outputs = graph, slices, whole_outputs
        self.gathers_rows, self.returned_bytes, self.output_dims = gathers_rows, 0, output_dims
        self.chooser = StrategyChooser(slices)
        self.roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
        self.placements: dict[Value, Placement] = {
            Value(node): WHOLE if dim is None else Shard(dim)
            for node, role in self.roles.items()
            for dim in [row_dims[role.index] if isinstance(role, Input) else None]
        }
        self.available: dict[Value, set[Placement]] = {}
        self.op_strategies: dict[str, OpStrategy] = {}
        self.gathered_bytes: dict[str, int] = {}
        self.local_random: set[str] = set()
        self.stay_partial = _gradient_values(graph)
        backward = graph.backward_start  # the output node if there is none
        for node in graph.graph.nodes:
            if node is backward:
                self.outputs = self.place_outputs()
                for tangent, role in self.roles.items():
                    if isinstance(role, Tangent):
                        self.placements[Value(tangent)] = self.outputs.get(role.index, WHOLE)
            if node.op == "get_attr":
                self.placements[Value(node)] = WHOLE
            elif node.op == "call_function" and not is_name(node):
                self.visit(node)
        self.shard_unread_wholes()
        self.inputs = {node.name: self.placements[Value(node)] for node in self.roles}

    def place_outputs(self) -> dict[int, Placement]:
        """Placements of the model's outputs: sharded if computed so, otherwise replicated."""
        found: dict[int, Placement] = {}
        for role, node in zip(self.graph.outputs, self.graph.results, strict=True):
            if isinstance(role, Output) and node is not None:
                if self.output_dims is not None:
                    dim = self.output_dims[role.index]
                    found[role.index] = WHOLE if dim is None else Shard(dim)
                    continue
                placement = self.placements[value_of(node)]
                is_shard, keeps = isinstance(placement, Shard), role.index in self.whole_outputs
                if is_shard and self.gathers_rows and not keeps:
                    self.returned_bytes += tensor_bytes(value_of(node).tensor)
                stays = is_shard and not keeps and not self.gathers_rows
                found[role.index] = placement if stays else WHOLE
            elif isinstance(role, Update) and node and value_of(node) in self.placements:
                # New buffers are returned whole, so the backward reads them at no further cost.
                self.available.setdefault(value_of(node), set()).add(WHOLE)
        return found

    def visit(self, node: fx.Node) -> None:
        values = tuple(value_of(source) for source in operands(node))
        results = [Value(node, index) for index in range(len(elements(node)))]
        if not all(isinstance(value.tensor, torch.Tensor) for value in values):
            self.placements |= dict.fromkeys(results, WHOLE)
            return
        reads = OperatorReads(
            node,
            values,
            tuple(self.placements[value] for value in values),
            tuple(frozenset(self.available.get(value, ())) for value in values),
            any(result in self.stay_partial for result in results),
        )
        # Greedy choices are the same on all ranks without a message. A solver takes seconds, and
        # ranks may find different optima.
        strategy = self.chooser.choose(reads)
        for value, wanted in zip(values, strategy.operands, strict=True):
            path = moves(self.placements[value], wanted, self.slices)
            assert path is not None, f"{value.node} cannot be moved to {wanted}"
            available = self.available.setdefault(value, set())
            for move in path:
                gathers = isinstance(move.before, Shard) and not isinstance(move.after, Partial)
                if gathers and move.after not in available:
                    gathered = self.gathered_bytes.get(node.name, 0)
                    self.gathered_bytes[node.name] = gathered + tensor_bytes(value.tensor)
                available.add(move.after)
        operator = Operator.of(node)
        if strategy != replicated(operator):
            self.op_strategies[node.name] = strategy
        if draws_random(operator) and any(isinstance(p, Shard) for p in strategy.results):
            self.local_random.add(node.name)
        self.placements |= zip(results, strategy.results, strict=True)

    def couplings(self) -> list[fx.Node]:
        """Forward operators whose results differ if other dims than these are rows.

        They read rows of other slices, the sum of all rows as more than one number, or a value
        that depends on where a row stands. Batch norm, which sums over all dims but one of the
        model's, and what ends in one number do not.
        """
        found = []
        for node in self.graph.calls():
            if node.meta["phase"] != "forward" or is_name(node):
                continue
            strategy = self.op_strategies.get(node.name) or replicated(Operator.of(node))
            values = [value_of(source) for source in operands(node)]
            if not all(isinstance(value.tensor, torch.Tensor) for value in values):
                continue
            pairs = zip(values, strategy.operands, strict=True)
            if any(self._couples(value, wanted) for value, wanted in pairs) or (
                strategy.lowering
                and strategy.lowering not in _ALIKE_FOR_ALL_ROWS
                and any(isinstance(p, Shard) for p in strategy.operands)
                and any(t is not None and t.numel() > 1 for t in elements(node))
            ):
                found.append(node)
        return found

    def _couples(self, value: Value, wanted: Placement) -> bool:
        kinds = {move.kind for move in moves(self.placements[value], wanted, self.slices) or ()}
        kinds -= {"share", "spread"}
        return bool(kinds) and (kinds != {"reduce"} or value.tensor.numel() > 1)

    def shard_unread_wholes(self) -> None:
        """Shards replicated operators whose readers, visited later, all want the same shard."""
        wanted: dict[Value, set[Placement]] = {}
        for role, node in zip(self.graph.outputs, self.graph.results, strict=True):
            if node is not None:
                index = role.index if isinstance(role, Output) else -1
                wanted.setdefault(value_of(node), set()).add(self.outputs.get(index, WHOLE))
        for node in reversed([node for node in self.graph.calls() if not is_name(node)]):
            values = [value_of(source) for source in operands(node)]
            readers = wanted.get(Value(node), set())
            whole = (
                node.name not in self.op_strategies
                and len(elements(node)) == 1
                and all(isinstance(value.tensor, torch.Tensor) for value in values)
                and all(self.placements[value] == WHOLE for value in values)
            )
            if len(readers) == 1 and whole and not draws_random(Operator.of(node)):
                (shard,) = readers
                if strategy := self.chooser.strategy_for_result(node, shard):
                    self.op_strategies[node.name] = strategy
                    self.placements[Value(node)] = shard
            chosen = self.op_strategies.get(node.name)
            for index, value in enumerate(values):
                wanted.setdefault(value, set()).add(chosen.operands[index] if chosen else WHOLE)


def _gradient_values(graph: TrainingGraph) -> frozenset[Value]:
    """Gradients of parameters, and values that only they depend on, linearly; all stay Partial."""
    found = {
        value_of(node)
        for role, node in zip(graph.outputs, graph.results, strict=True)
        if isinstance(role, Gradient) and isinstance(role.of, Parameter) and node is not None
    }
    constants = _batch_independent(graph)
    for node in reversed(list(graph.calls())):
        readers = [user for user in node.users if user.op != "output"]
        if readers and all(Value(r) in found and _is_linear(r, node, constants) for r in readers):
            found.add(Value(node))
    return frozenset(found)


def _batch_independent(graph: TrainingGraph) -> frozenset[fx.Node]:
    roles = zip(graph.placeholders, graph.inputs, strict=True)
    found = {node for node, role in roles if isinstance(role, (Parameter, Buffer))}
    for node in graph.graph.nodes:
        if node.op != "placeholder" and found.issuperset(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _is_linear(reader: fx.Node, node: fx.Node, constants: frozenset[fx.Node]) -> bool:
    """Whether partial values of a node pass through a reader whose other operands are constant."""
    if reader.target in JOINTLY_LINEAR or is_cast(Operator.of(reader)):
        return True
    places = [index for index, source in enumerate(operands(reader)) if source is node]
    each = len(places) == 1 and places[0] in dict[Any, Any](LINEAR_IN_EACH).get(reader.target, ())
    return each and constants.issuperset(n for n in operands(reader) if n is not node)
