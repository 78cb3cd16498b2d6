"""`PlacementCosts`: costs of redistributions and operators along an axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar._torch import OpOverload, pytree
from autopar.core.ir.aliases import is_view
from autopar.core.ir.graph import Value, dense_strides, elements, tensor_bytes, tensors
from autopar.core.ir.placement import OpStrategy, Placement, Shard
from autopar.core.ir.signature import moved_bytes, signature
from autopar.core.operators.attention_blocks import BLOCKS
from autopar.core.plan.buckets import BUCKET_BYTES
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import permutation
from autopar.cost_model.cost import ZERO_COST, Cost
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.kernels.timing import flops_of
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.optimizer_step import UpdateCost
from autopar.passes.core.collective_ops import STARTS, axis_of, kind_of, message_bytes, wait
from autopar.passes.rules.local_args import local_arguments, local_bytes, local_shape
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.lowerings.registry import CUSTOM_LOWERINGS, program
from autopar.passes.rules.redistribute import RedistributeStep, redistribute_steps
from autopar.planner.placement.dispatch import Dispatch, sending

_LEAST_BYTES = 2**20
"""Minimum bytes moved by an operator without FLOPs for it to be timed on shards."""


@dataclass(frozen=True)
class PlacementCosts:
    """Costs of redistributions, operators and the optimizer's step along one axis.

    Attributes:
        shape: process groups along the axis.
        update: time of the optimizer's step; None for no optimizer.
        others: process groups of the axes that the graph is already partitioned along, and of the
            levels of this axis.
        dispatch: values that go to experts, or come back, once for each token.
    """

    shape: GroupShape
    cluster: Cluster
    operators: OperatorTimes
    update: UpdateCost | None = None
    others: Mapping[str, GroupShape] = field(default_factory=dict)
    dispatch: Dispatch = field(default_factory=Dispatch)
    seen: dict[object, Cost] = field(default_factory=dict, compare=False, repr=False)

    def redistribution(self, value: Value, before: Placement, after: Placement) -> Cost:
        """Cost of a redistribution: collectives, and the copies around them."""
        tensor, line = value.tensor, self.operators.roofline
        shape, item, ranks = tuple(tensor.shape), tensor.element_size(), self.shape.ranks
        tokens = self.dispatch.tokens.get(value.node)
        how = tokens and (tokens.copies, tokens.experts)
        key = (shape, tensor.dtype, before, after, how)
        if key not in self.seen:
            made = redistribute_steps(before, after)
            assert made is not None, f"there is no way from {before} to {after}"
            costs = []
            for step in made:
                if (tokens := self.dispatch.of(step, value, ranks)) is not None:
                    nbytes = tensor_bytes(tensor) // ranks
                    costs.append(sending(self, self.dispatch.once, nbytes, tokens, tensor.dtype))
                    continue
                if step.collective is not None:
                    size = step.message_bytes(tensor.shape, item, ranks)
                    costs.append(self.sent(step.collective, size, tensor.dtype))
                copy_s = line.seconds(0.0, step.copied_elements(shape, ranks) * item, item)
                costs.append(Cost(copy_s, f"modelled by {line.source}"))
            self.seen[key] = _sum(costs)
        return self.seen[key]

    def message_bytes(self, step: RedistributeStep, value: Value) -> int:
        """Bytes of the messages of a step of a redistribution."""
        tensor, ranks = value.tensor, self.shape.ranks
        nbytes = step.message_bytes(tensor.shape, tensor.element_size(), ranks)
        if (tokens := self.dispatch.of(step, value, ranks)) is None:
            return nbytes
        return round(nbytes * sum(share for _, share in tokens.hops(self.dispatch.once, ranks)))

    def sum(self, value: Value, before: Placement, after: Placement) -> Cost:
        """Cost of a gradient reduction that is awaited only at the end of the step.

        The gradient is part of a bucket that overlaps with compute, so its cost is the slowdown of
        compute (`Slowdown`).
        """
        tensor, slowdown = value.tensor, self.cluster.slowdown
        key = ("sum", tuple(tensor.shape), tensor.dtype, before, after)
        if key not in self.seen:
            plain = self.redistribution(value, before, after)
            bucket = self.sent("all_reduce", BUCKET_BYTES, tensor.dtype).seconds
            alone = min(plain.seconds, bucket * tensor_bytes(tensor) / BUCKET_BYTES)
            lost = 1.0 - 1.0 / slowdown.of_compute(BUCKET_BYTES)
            beside = alone * slowdown.of_communication(BUCKET_BYTES) * lost
            self.seen[key] = replace(plain, seconds=min(plain.seconds, beside))
        return self.seen[key]

    def sent(self, collective: str, nbytes: int, dtype: torch.dtype) -> Cost:
        """Cost of one collective along the axis; bytes as defined in `cost_model.collectives`."""
        return self._sent(collective, nbytes, self.shape, dtype)

    def along(self, name: str, collective: str, nbytes: int, dtype: torch.dtype) -> Cost:
        """Cost of one collective along another axis, or a level of this one."""
        return self._sent(collective, nbytes, self.others[name], dtype)

    def _sent(self, kind: str, nbytes: int, shape: GroupShape, dtype: torch.dtype) -> Cost:
        if kind == "permute":
            kind, nbytes, shape = permutation(nbytes, shape)
        return self.cluster.seconds(kind, nbytes, shape, str(dtype).removeprefix("torch."))

    def operator(self, node: fx.Node, op_strategy: OpStrategy) -> Cost:
        """Cost of an operator on one rank's shards, or of its custom lowering."""
        places = (*op_strategy.operands, *op_strategy.results)
        shards = tuple(
            None if tensor is None else tuple(local_shape(tensor.shape, place, self.shape.ranks))
            for tensor, place in zip(
                (*Operator.of(node).operands, *elements(node)), places, strict=False
            )
        )
        key = (node, op_strategy.lowering, shards)
        if key not in self.seen:
            how = self._own if op_strategy.lowering else self._on_shards
            # Collectives of an axis that was partitioned earlier are operators of this graph.
            how = self._exchange if node.target in STARTS else how
            self.seen[key] = how(node, op_strategy)
        return self.seen[key]

    def _exchange(self, node: fx.Node, op_strategy: OpStrategy) -> Cost:
        nbytes = message_bytes(node)
        if any(isinstance(placement, Shard) for placement in op_strategy.operands):
            nbytes //= self.shape.ranks
        shape, dtype = self.others[axis_of(node)], tensors(node)[0].dtype
        return self._sent(kind_of(node), nbytes, shape, dtype)

    def _on_shards(self, node: fx.Node, op_strategy: OpStrategy) -> Cost:
        """Cost of the unsharded operator, scaled by the ratio of its time on shards."""
        whole = self.operators.seconds(node)
        if is_view(node):
            return whole
        # Strategies of an operator all scale its whole time. Mixing measured and modelled ones let
        # the model's error choose: a GPT's matrix products came out whole on every rank.
        share = self.operators.share(local_node(node, op_strategy, self.shape.ranks), node)
        return Cost(whole.seconds * share, whole.provenance, whole.error)

    def _own(self, node: fx.Node, op_strategy: OpStrategy) -> Cost:
        """Cost of the operators and collectives of a lowering, which may overlap."""
        costs: list[Cost] = []
        clock = idle = 0.0  # when the rank, and the axis, is done
        arrives: dict[fx.Node, float] = {}
        for n in program(Operator.of(node), op_strategy, self.shape.ranks, 0).nodes:
            if n.target in STARTS:
                costs.append(self.sent(kind_of(n), message_bytes(n), tensors(n)[0].dtype))
                arrives[n] = idle = max(clock, idle) + costs[-1].seconds
            elif n.target is wait:
                clock = max(clock, arrives[n.all_input_nodes[0]])
            elif isinstance(n.target, OpOverload):
                costs.append(self._block(node) if n.target in BLOCKS else self.operators.seconds(n))
                clock += costs[-1].seconds
        return replace(_sum(costs), seconds=clock)

    def _block(self, node: fx.Node) -> Cost:
        """Cost of a block of attention: all blocks of a ring do a rank's share of the whole."""
        whole, launch_s = self.operators.seconds(node), self.operators.roofline.launch_s
        return replace(whole, seconds=max(launch_s, whole.seconds / self.shape.ranks**2))

    def traffic(self, node: fx.Node, op_strategy: OpStrategy) -> tuple[tuple[str, int], ...]:
        """Collectives of a custom lowering, and their message sizes in bytes."""
        lowering = CUSTOM_LOWERINGS[op_strategy.lowering]
        return lowering.traffic(Operator.of(node), op_strategy, self.shape.ranks)

    def step(self, node: fx.Node, op_strategy: OpStrategy) -> Cost:
        """Cost of the optimizer's step over a rank's shard of a parameter."""
        if self.update is None:
            return ZERO_COST
        size = local_bytes(tensors(node)[0], op_strategy.results[0], self.shape.ranks)
        return self.update.seconds([size], dtensors=False)

    def wrapping(self, count: int) -> float:
        """Extra seconds of a step if `count` parameters are DTensors."""
        return count * self.update.per_dtensor if self.update is not None else 0.0


def shards_of(
    op_strategies: Mapping[fx.Node, Sequence[OpStrategy]], ranks: int
) -> dict[str, fx.Node]:
    """Operators worth timing, unsharded and on the shards of each strategy, by signature."""
    nodes: dict[str, fx.Node] = {}
    for node, several in op_strategies.items():
        if node.op != "call_function" or is_view(node) or node.target in STARTS:
            continue
        if flops_of(node) or moved_bytes(node) >= _LEAST_BYTES:
            for made in (node, *(local_node(node, w, ranks) for w in several if not w.lowering)):
                nodes.setdefault(signature(made), made)
    return nodes


def local_node(node: fx.Node, op_strategy: OpStrategy, ranks: int) -> fx.Node:
    """An operator on one rank's shards, as a node of a new graph."""
    graph = fx.Graph()
    operator = Operator.of(node)
    shards = []
    for tensor, placement in zip(operator.operands, op_strategy.operands, strict=True):
        shard = graph.placeholder("shard")
        shard.meta["val"] = _shard(tensor, placement, ranks)
        shards.append(shard)
    local = local_arguments(operator, op_strategy, shards, ranks)
    made = graph.call_function(local.target, local.args, local.kwargs)
    results = iter(op_strategy.results)
    made.meta["val"] = pytree.tree_map(
        lambda leaf: _shard(leaf, next(results), ranks), node.meta["val"]
    )
    return made


def _shard(tensor: Any, placement: Placement, ranks: int) -> Any:
    """One rank's shard of a tensor, with the same memory order of dims."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    shape = local_shape(tensor.shape, placement, ranks)
    if shape == list(tensor.shape):
        return tensor
    return tensor.new_empty_strided(shape, dense_strides(shape, tensor.stride()))


def _sum(costs: Sequence[Cost]) -> Cost:
    """Sum of costs, with the provenance and error of the largest."""
    longest = max(costs, key=lambda cost: cost.seconds, default=ZERO_COST)
    return Cost(sum(cost.seconds for cost in costs), longest.provenance, longest.error)
